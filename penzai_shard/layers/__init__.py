"""Layers that change how a model runs, and not what it computes."""

import importlib
from typing import Any

_NAMES = {
    "axis_order": "KeepAxisOrder",
    "constraints": "ConstrainActivations ConstrainSharding ConstrainShardingByName",
    "gather_parameters": "GatherParameters",
    "in_precision": "InPrecision",
    "independence": "independent_axes",
    "jitted": "Jitted",
    "manual": "fold_rng_over_axis",
    "remat": "Checkpointed",
    "rolled_layer_stack": "RolledLayerStack",
    "shard_mapped": "ShardMapped",
    "wrapper": "Scoped WrapperLayer",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
