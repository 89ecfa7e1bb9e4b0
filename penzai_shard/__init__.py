"""Lay JAX models over a mesh by axis name, and read the layout before anything runs.

Rules say which logical axis goes to which mesh axis; a plan is a printable decision for every
array; everything that touches devices carries a plan out.
"""

import importlib
from typing import Any

__version__ = "0.2.0"

# The public names of each module, which is imported when one of them is first used.
_NAMES = {
    "causes.why": "why",
    "checkpoints.manager": "CheckpointManager",
    "checkpoints.moving": "move",
    "checkpoints.parameters": "param_dict restore_params restore_structs save_params with_params",
    "checkpoints.reports": "compare_checkpoints describe_checkpoint verify_checkpoint",
    "checkpoints.train_states": "restore_train_state save_train_state",
    "choosing.choose": "choose_layout",
    "errors": "CheckpointDamagedError CheckpointMismatchError PlanError ShardingError "
    "ShardingWarning",
    "findings.lint": "lint",
    "findings.set_up": "Finding",
    "fitting.fit": "fit",
    "inspection.compile_ahead": "compile_ahead",
    "inspection.compiling": "collectives compile_step device_memory",
    "inspection.locks": "ShardingLock",
    "inspection.topologies": "Topology",
    "layers.axis_order": "KeepAxisOrder",
    "layers.constraints": "ConstrainActivations ConstrainSharding ConstrainShardingByName",
    "layers.gather_parameters": "GatherParameters",
    "layers.in_precision": "InPrecision",
    "layers.independence": "independent_axes",
    "layers.jitted": "Jitted",
    "layers.manual": "fold_rng_over_axis",
    "layers.remat": "Checkpointed",
    "layers.rolled_layer_stack": "RolledLayerStack",
    "layers.shard_mapped": "ShardMapped",
    "layers.wrapper": "Scoped",
    "layouts.layout": "Layout",
    "meshes": "make_mesh",
    "naming.infer": "infer_names",
    "placement.named_jit": "named_jit",
    "placement.place": "name_to_name_device_put place",
    "placement.sharded_init": "abstract_model initialize_parameters_sharded sharded_init",
    "planning.name_axes": "name_axes without_names",
    "planning.planner": "make_plan",
    "planning.sharding_trees": "name_to_name_sharding",
    "pretrained.loading": "load_safetensors",
    "pretrained.saving": "save_safetensors",
    "processes.job": "several_processes",
    "readers.reader": "register_reader",
    "reports.report": "Report",
    "rules": "AxisRules data_parallel fully_sharded tensor_parallel",
    "surgery.edits": "insert_after insert_before replace wrap",
    "surgery.equivalence.check": "check_equivalent",
    "surgery.inserted": "strip",
    "surgery.recipe": "Recipe",
    "surgery.standard_recipes": "constrain_blocks jit_root keep_axis_order manual_fsdp "
    "mixed_precision rematerialise_blocks roll_layer_stacks scope_layers",
    "surgery.where": "ROOT",
    "training.batches": "shard_batch",
    "training.cross_entropy": "cross_entropy",
    "training.stateful_trainer": "StatefulTrainer",
    "training.step": "build_eval_step_fn build_train_step_fn",
    "training.train_state": "TrainState train_state_sharding",
    "views.page": "report",
    "views.sharding": "show_sharding",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    # Errors that few programs catch are listed in `errors` only.
    module = _MODULES.get(name) or ("errors" if name.endswith("Error") else None)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
