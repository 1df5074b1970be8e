"use strict";
(function () {
  const ends = { ascending: "descending", descending: "ascending" };
  function numberIn(text) {
    return parseFloat(text.replaceAll(",", "").replaceAll("−", "-").replace("≈ ", ""));
  }
  function sort(table, column, order) {
    const body = table.tBodies[0];
    const keyed = Array.from(body.rows, (row) => {
      const text = row.cells[column].textContent;
      return { row, text, number: numberIn(text) };
    });
    const numeric = keyed.every((key) => key.text === "–" || !Number.isNaN(key.number));
    const sign = order === "ascending" ? 1 : -1;
    keyed.sort((a, b) => {
      if (!numeric) return sign * a.text.localeCompare(b.text, "en", { numeric: true });
      if (Number.isNaN(a.number) || Number.isNaN(b.number)) return Number.isNaN(a.number) - Number.isNaN(b.number);
      return sign * (a.number - b.number);
    });
    body.append(...keyed.map((key) => key.row));
  }
  for (const table of document.querySelectorAll("table.sortable")) {
    const cells = Array.from(table.tHead.rows[0].cells);
    cells.forEach((cell, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...cell.childNodes);
      cell.append(button);
      button.addEventListener("click", () => {
        const order = ends[cell.getAttribute("aria-sort")] || "ascending";
        cells.forEach((other) => other.removeAttribute("aria-sort"));
        cell.setAttribute("aria-sort", order);
        sort(table, column, order);
      });
    });
  }
})();
