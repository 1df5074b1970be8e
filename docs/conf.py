"""Settings of the documentation site, which `sphinx-build -W -c docs . build/site` makes from the pages as they are.

Links between pages are the files' own, so that they also lead somewhere on GitHub: the site's source is the repository.
"""

from __future__ import annotations

import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

project = "checkpoints_zoo"
author = "The checkpoints_zoo authors"
copyright = f"{author}, Apache-2.0"
release = metadata.version("checkpoints-zoo")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/api/*.rst",
    "docs/tutorials/*.ipynb",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "manifests/README.md",
    "tests/simgpu/README.md",
    "training/README.md",
]
# Folders that the search for pages need not enter.
exclude_patterns = [
    ".*",
    "benchmarks",
    "build",
    "cards",
    "checkpoints_zoo",
    "dist",
    "out",
    "tests/hub",
    "tests/support",
]

smartquotes = False  # commands in sentences are copied
myst_heading_anchors = 4
nb_execution_mode = "off"  # `python -m docs.make --measure tutorials` has run them

templates_path = [str(Path(__file__).parent / "_templates")]  # autosummary would look beside the source
default_role = "code"  # docstrings have names between single backticks
napoleon_numpy_docstring = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Names of unions and of functions' types stay names in signatures.
autodoc_type_aliases = {name: name for name in ("Build", "Curve", "ImageInput", "Parameters", "Samples", "Say")}
add_module_names = False
maximum_signature_line_length = 80

html_theme = "pydata_sphinx_theme"
html_title = "checkpoints_zoo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_extra"]  # the page at the site's root leads to docs/index.html
html_show_sourcelink = False
html_sidebars = {"docs/concepts": []}  # it has no pages below it
html_theme_options = {
    "footer_start": ["copyright"],
    "footer_end": [],
    "header_links_before_dropdown": 7,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "show_nav_level": 1,
    "show_toc_level": 2,
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app: Any) -> None:
    """Remove the reference's pages of an earlier build, since names may be gone; register what writes signatures."""
    shutil.rmtree(Path(__file__).parent / "api", ignore_errors=True)
    app.connect("autodoc-process-signature", write_aliases)


def write_aliases(
    app: Any, what: str, name: str, documented: object, options: object, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Return a signature in which names of `autodoc_type_aliases`, which Sphinx wraps in unions, are bare."""
    return tuple(text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in (signature, result))  # type: ignore[return-value]
