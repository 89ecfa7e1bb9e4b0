"""Declarative model surgery and sharding by axis name, for Penzai models and JAX.

Rules say which logical axis goes to which mesh axis, a plan decides for every array, and placing,
initialising, constraining, training and restoring carry the plan out.
"""

from penzai_shard.axis_rules import AxisRules
from penzai_shard.checkpoint_reports import (
    CheckpointComparison,
    CheckpointDescription,
    ModelComparison,
    RunDescription,
    compare_checkpoints,
    describe_checkpoint,
    describe_run,
    verify_checkpoint,
)
from penzai_shard.checkpointing import (
    CheckpointManager,
    CheckpointVerification,
    VerifiedArray,
    first_api_names,
    param_dict,
    restore_params,
    restore_structs,
    restore_train_state,
    save_params,
    save_train_state,
    stack_blocks,
    unstack_blocks,
    with_params,
)
from penzai_shard.choosing.choices import Choice, Choices, choose_layout
from penzai_shard.choosing.naming import DimensionName, InferredNames, Undecided, infer_names
from penzai_shard.errors import (
    CheckpointDamagedError,
    CheckpointExistsError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    ShardingError,
    ShardingWarning,
)
from penzai_shard.fitting import LogRecord, fit
from penzai_shard.fused_axes import FusedAxes
from penzai_shard.inspection.ahead.ahead_report import AheadReport
from penzai_shard.inspection.ahead.compile_ahead import compile_ahead
from penzai_shard.inspection.devices.hardware import Hardware
from penzai_shard.inspection.devices.mesh_networks import HostNetwork
from penzai_shard.inspection.devices.topologies import Topology
from penzai_shard.inspection.locks.lock_comparison import LockReport
from penzai_shard.inspection.locks.locks import ShardingLock
from penzai_shard.inspection.memory.memory_report import MemoryReport, device_memory
from penzai_shard.inspection.program_view import CompiledProgram, compile_step
from penzai_shard.inspection.sharding_causes import (
    ShardingCause,
    ShardingLoss,
    WhyReport,
    WhyRow,
    why,
)
from penzai_shard.inspection.traffic.collective_records import (
    Collective,
    CollectivePart,
    CollectiveTotal,
)
from penzai_shard.inspection.traffic.collective_report import CollectiveReport, collectives
from penzai_shard.layers import (
    AxesInPlace,
    Checkpointed,
    ConstrainActivations,
    ConstrainSharding,
    ConstrainShardingByName,
    GatherParameters,
    InPrecision,
    Jitted,
    LayerStackPolicy,
    RolledLayerStack,
    Scoped,
    ShardMapped,
    fold_rng_over_axis,
)
from penzai_shard.layouts import Layout
from penzai_shard.linting import Finding, LintReport, lint
from penzai_shard.meshes import make_mesh
from penzai_shard.padded_arrays import PaddedArray, Padding
from penzai_shard.placement import (
    abstract_model,
    initialize_parameters_sharded,
    name_to_name_device_put,
    place,
    sharded_init,
)
from penzai_shard.planning import (
    LeafPlan,
    ShardingPlan,
    make_plan,
    name_axes,
    name_to_name_sharding,
    without_names,
)
from penzai_shard.pretrained.loading import load_safetensors
from penzai_shard.pretrained.published_models import published_model
from penzai_shard.pretrained.saving import save_safetensors
from penzai_shard.processes import any_process, several_processes
from penzai_shard.report_trees import ReportTree, TreeFigure, TreeNode
from penzai_shard.rule_presets import data_parallel, fully_sharded, tensor_parallel
from penzai_shard.surgery import (
    ROOT,
    EquivalenceReport,
    Inserted,
    Recipe,
    Ref,
    axes_in_place,
    check_equivalent,
    constrain_blocks,
    insert_after,
    insert_before,
    jit_root,
    manual_fsdp,
    mixed_precision,
    rematerialise_blocks,
    replace,
    roll_layer_stacks,
    scope_layers,
    strip,
    wrap,
)
from penzai_shard.training import (
    DynamicLossScaling,
    StatefulTrainer,
    TrainState,
    build_eval_step_fn,
    build_train_step_fn,
    cross_entropy,
    shard_batch,
    train_state_sharding,
)
from penzai_shard.views.report_page import report
from penzai_shard.views.sharding_drawing import ShardingDrawing
from penzai_shard.views.showing_shardings import show_sharding

__version__ = "0.1.0"

__all__ = [
    "ROOT",
    "AheadReport",
    "AxesInPlace",
    "AxisRules",
    "CheckpointComparison",
    "CheckpointDamagedError",
    "CheckpointDescription",
    "CheckpointExistsError",
    "CheckpointManager",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointVerification",
    "CheckpointWriteError",
    "Checkpointed",
    "Choice",
    "Choices",
    "Collective",
    "CollectivePart",
    "CollectiveReport",
    "CollectiveTotal",
    "CompiledProgram",
    "ConstrainActivations",
    "ConstrainSharding",
    "ConstrainShardingByName",
    "DimensionName",
    "DynamicLossScaling",
    "EquivalenceReport",
    "Finding",
    "FusedAxes",
    "GatherParameters",
    "Hardware",
    "HostNetwork",
    "InPrecision",
    "InferredNames",
    "Inserted",
    "Jitted",
    "LayerStackPolicy",
    "Layout",
    "LeafPlan",
    "LintReport",
    "LockReport",
    "LogRecord",
    "MemoryReport",
    "ModelComparison",
    "PaddedArray",
    "Padding",
    "Recipe",
    "Ref",
    "ReportTree",
    "RolledLayerStack",
    "RunDescription",
    "Scoped",
    "ShardMapped",
    "ShardingCause",
    "ShardingDrawing",
    "ShardingError",
    "ShardingLock",
    "ShardingLoss",
    "ShardingPlan",
    "ShardingWarning",
    "StatefulTrainer",
    "Topology",
    "TrainState",
    "TreeFigure",
    "TreeNode",
    "Undecided",
    "VerifiedArray",
    "WhyReport",
    "WhyRow",
    "__version__",
    "abstract_model",
    "any_process",
    "axes_in_place",
    "build_eval_step_fn",
    "build_train_step_fn",
    "check_equivalent",
    "choose_layout",
    "collectives",
    "compare_checkpoints",
    "compile_ahead",
    "compile_step",
    "constrain_blocks",
    "cross_entropy",
    "data_parallel",
    "describe_checkpoint",
    "describe_run",
    "device_memory",
    "first_api_names",
    "fit",
    "fold_rng_over_axis",
    "fully_sharded",
    "infer_names",
    "initialize_parameters_sharded",
    "insert_after",
    "insert_before",
    "jit_root",
    "lint",
    "load_safetensors",
    "make_mesh",
    "make_plan",
    "manual_fsdp",
    "mixed_precision",
    "name_axes",
    "name_to_name_device_put",
    "name_to_name_sharding",
    "param_dict",
    "place",
    "published_model",
    "rematerialise_blocks",
    "replace",
    "report",
    "restore_params",
    "restore_structs",
    "restore_train_state",
    "roll_layer_stacks",
    "save_params",
    "save_safetensors",
    "save_train_state",
    "scope_layers",
    "several_processes",
    "shard_batch",
    "sharded_init",
    "show_sharding",
    "stack_blocks",
    "strip",
    "tensor_parallel",
    "train_state_sharding",
    "unstack_blocks",
    "verify_checkpoint",
    "why",
    "with_params",
    "without_names",
    "wrap",
]
