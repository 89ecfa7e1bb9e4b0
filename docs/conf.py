"""How the documentation site is built: ``python -m sphinx -W --keep-going docs site``.

The texts that README has already are included from there, the reference is made from the
docstrings, and the notebooks are shown as they are stored, without running them.
"""

import dataclasses
import inspect
import pathlib
import shutil
from typing import Any

import penzai_shard

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parent

project = "penzai_shard"
author = "The penzai_shard authors"
copyright = author
version = release = penzai_shard.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_templates"]
templates_path = ["_templates"]

html_theme = "furo"
html_title = f"penzai_shard {version}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["tables.css"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# The stored outputs are shown; a test of the suite runs the notebooks.
nb_execution_mode = "off"

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Fields are described once, in a list of that title.
napoleon_custom_sections = [("Attributes", "params_style")]


def _copy_notebooks() -> None:
    """Sphinx reads what lies in its own folder only."""
    target = _HERE / "notebooks"
    target.mkdir(exist_ok=True)
    for notebook in sorted((_ROOT / "notebooks").glob("*.ipynb")):
        shutil.copy(notebook, target)


_copy_notebooks()


def _signature_of_fields(
    _: Any, what: str, __: str, obj: Any, *rest: Any
) -> tuple[str, str] | None:
    """Penzai's layers are made through a metaclass, whose signature says nothing."""
    if what != "class" or not dataclasses.is_dataclass(obj):
        return None
    shown = inspect.signature(obj.__init__)
    own = [one for name, one in shown.parameters.items() if name != "self"]
    return str(inspect.Signature(own)), ""


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", _signature_of_fields)
