"""Declarative model surgery and sharding by axis name, for Penzai models and JAX.

Rules say which logical axis goes to which mesh axis, a plan decides for every array, and placing,
initialising, constraining, training and restoring carry the plan out.
"""

from penzai_shard.axis_rules import AxisRules
from penzai_shard.checkpointing import (
    param_dict,
    restore_params,
    restore_structs,
    restore_train_state,
    save_params,
    save_train_state,
    with_params,
)
from penzai_shard.errors import ShardingError, ShardingWarning
from penzai_shard.layers import (
    Checkpointed,
    ConstrainSharding,
    ConstrainShardingByName,
    InPrecision,
    Jitted,
    RolledLayerStack,
    Scoped,
    ShardMapped,
)
from penzai_shard.meshes import make_mesh
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
)
from penzai_shard.rule_presets import data_parallel, fully_sharded, tensor_parallel
from penzai_shard.surgery import (
    ROOT,
    EquivalenceReport,
    Inserted,
    Recipe,
    Ref,
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
    TrainState,
    build_train_step_fn,
    shard_batch,
    train_state_sharding,
)

__version__ = "0.1.0"

__all__ = [
    "ROOT",
    "AxisRules",
    "Checkpointed",
    "ConstrainSharding",
    "ConstrainShardingByName",
    "EquivalenceReport",
    "InPrecision",
    "Inserted",
    "Jitted",
    "LeafPlan",
    "Recipe",
    "Ref",
    "RolledLayerStack",
    "Scoped",
    "ShardMapped",
    "ShardingError",
    "ShardingPlan",
    "ShardingWarning",
    "TrainState",
    "__version__",
    "abstract_model",
    "build_train_step_fn",
    "check_equivalent",
    "constrain_blocks",
    "data_parallel",
    "fully_sharded",
    "initialize_parameters_sharded",
    "insert_after",
    "insert_before",
    "jit_root",
    "make_mesh",
    "make_plan",
    "manual_fsdp",
    "mixed_precision",
    "name_axes",
    "name_to_name_device_put",
    "name_to_name_sharding",
    "param_dict",
    "place",
    "rematerialise_blocks",
    "replace",
    "restore_params",
    "restore_structs",
    "restore_train_state",
    "roll_layer_stacks",
    "save_params",
    "save_train_state",
    "scope_layers",
    "shard_batch",
    "sharded_init",
    "strip",
    "tensor_parallel",
    "train_state_sharding",
    "with_params",
    "wrap",
]
