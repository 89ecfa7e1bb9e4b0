"""Edits of models as values: declared once, applied to any model, counted, shown, taken back."""

import importlib
from typing import Any

_NAMES = {
    "edits": "Edit insert_after insert_before replace wrap",
    "equivalence.check": "check_equivalent",
    "inserted": "Inserted Original strip",
    "recipe": "Recipe",
    "references": "Ref",
    "standard_recipes": "constrain_blocks jit_root keep_axis_order manual_fsdp mixed_precision "
    "rematerialise_blocks roll_layer_stacks scope_layers",
    "where": "ROOT Where",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
