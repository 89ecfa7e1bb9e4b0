"""Wrapper layers and constraint layers: they change how a model runs, not what it computes."""

from penzai_shard.layers.axes_in_place import AxesInPlace
from penzai_shard.layers.checkpointed import Checkpointed
from penzai_shard.layers.compiled_structure import clear_compiled_structures
from penzai_shard.layers.constrain_activations import ConstrainActivations, laid_out
from penzai_shard.layers.constrain_sharding import ConstrainSharding, ConstrainShardingByName
from penzai_shard.layers.gather_parameters import GatherParameters
from penzai_shard.layers.in_precision import InPrecision, compute_dtypes
from penzai_shard.layers.jitted import Jitted
from penzai_shard.layers.manual_region import fold_rng_over_axis
from penzai_shard.layers.remat_policies import (
    LayerStackPolicy,
    StackPolicyLike,
    resolve_policy,
    resolve_stack_policy,
)
from penzai_shard.layers.rolled_layer_stack import LayerStackError, RolledLayerStack
from penzai_shard.layers.scoped import Scoped
from penzai_shard.layers.shard_mapped import ManualRegionError, ShardMapped
from penzai_shard.layers.wrapper_layer import WrapperLayer

__all__ = [
    "AxesInPlace",
    "Checkpointed",
    "ConstrainActivations",
    "ConstrainSharding",
    "ConstrainShardingByName",
    "GatherParameters",
    "InPrecision",
    "Jitted",
    "LayerStackError",
    "LayerStackPolicy",
    "ManualRegionError",
    "RolledLayerStack",
    "Scoped",
    "ShardMapped",
    "StackPolicyLike",
    "WrapperLayer",
    "clear_compiled_structures",
    "compute_dtypes",
    "fold_rng_over_axis",
    "laid_out",
    "resolve_policy",
    "resolve_stack_policy",
]
