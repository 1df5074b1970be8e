"use strict";
(function () {
  const plots = JSON.parse(document.getElementById("plots").textContent);
  const config = {
    displaylogo: false,
    responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
  };
  const drawn = [];
  for (const [name, plot] of Object.entries(plots)) {
    const place = document.getElementById(name);
    const image = { format: "svg", filename: name };
    Plotly.newPlot(place, plot.data, plot.layout, { ...config, toImageButtonOptions: image });
    drawn.push(place);
  }
  document.documentElement.dataset.drawn = String(drawn.length);
  function fit() {
    for (const place of drawn) {
      Plotly.Plots.resize(place);
    }
  }
  window.addEventListener("beforeprint", fit);
  window.addEventListener("afterprint", fit);
})();
