"""Builds the pages of ``docs/`` and the notebooks as a site; ``.ci/run`` has the command."""

import pathlib
import shutil

import penzai_shard

HERE = pathlib.Path(__file__).parent

project = "penzai_shard"
author = "The penzai_shard authors"
version = release = penzai_shard.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
# Fields of classes are lists, in which autodoc does not write them a second time.
napoleon_use_ivar = True
html_theme = "furo"
html_title = f"penzai_shard {release}"
html_static_path = ["_static"]
html_show_copyright = False
html_css_files = ["pages.css"]

# Notebooks that show trees of treescope store no outputs: they run here, some minutes in all. The
# outputs that the others store are those that a test has checked.
nb_execution_mode = "auto"
nb_execution_excludepatterns = ["*price_and_choose*", "*train_and_restore*"]
nb_execution_timeout = 600
myst_enable_extensions = ["colon_fence"]
# A link to a heading of a page, as GitHub writes it.
myst_heading_anchors = 3

# Sphinx reads nothing outside its folder, and the notebooks and benchmarks stand beside it.
(HERE / "notebooks").mkdir(exist_ok=True)
for notebook in (HERE.parent / "notebooks").glob("*.ipynb"):
    shutil.copy(notebook, HERE / "notebooks")
shutil.copy(HERE.parent / "benchmarks" / "README.md", HERE / "notebooks" / "benchmarks.md")

# Where what a page links to in the repository stands for Sphinx.
LINKS = {
    "../notebooks/": "notebooks/",
    "../benchmarks/README.md": "notebooks/benchmarks.md",
    "../docs/": "../",
}


def read_links_of_the_repository(app, name, source):
    """Leads the links between pages and notebooks, which hold in the repository, to the copies."""
    for in_repository, in_site in LINKS.items():
        source[0] = source[0].replace(f"]({in_repository}", f"]({in_site}")


def setup(app):
    """Is called by Sphinx."""
    app.connect("source-read", read_links_of_the_repository)
