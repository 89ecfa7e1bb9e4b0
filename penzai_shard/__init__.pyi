from penzai_shard.checkpoints.parameters import param_dict as param_dict
from penzai_shard.checkpoints.parameters import restore_params as restore_params
from penzai_shard.checkpoints.parameters import restore_structs as restore_structs
from penzai_shard.checkpoints.parameters import save_params as save_params
from penzai_shard.checkpoints.parameters import with_params as with_params
from penzai_shard.checkpoints.train_states import restore_train_state as restore_train_state
from penzai_shard.checkpoints.train_states import save_train_state as save_train_state
from penzai_shard.errors import CheckpointDamagedError as CheckpointDamagedError
from penzai_shard.errors import CheckpointMismatchError as CheckpointMismatchError
from penzai_shard.errors import CheckpointNotFoundError as CheckpointNotFoundError
from penzai_shard.errors import CheckpointWriteError as CheckpointWriteError
from penzai_shard.errors import MeshError as MeshError
from penzai_shard.errors import MissingExtraError as MissingExtraError
from penzai_shard.errors import PlanError as PlanError
from penzai_shard.errors import RuleTypeError as RuleTypeError
from penzai_shard.errors import SelectionError as SelectionError
from penzai_shard.errors import ShardingError as ShardingError
from penzai_shard.errors import ShardingWarning as ShardingWarning
from penzai_shard.layers.constraints import ConstrainActivations as ConstrainActivations
from penzai_shard.layers.constraints import ConstrainSharding as ConstrainSharding
from penzai_shard.layers.constraints import ConstrainShardingByName as ConstrainShardingByName
from penzai_shard.layers.jitted import Jitted as Jitted
from penzai_shard.layers.remat import Checkpointed as Checkpointed
from penzai_shard.layers.wrapper import Scoped as Scoped
from penzai_shard.meshes import make_mesh as make_mesh
from penzai_shard.placement.named_jit import named_jit as named_jit
from penzai_shard.placement.place import name_to_name_device_put as name_to_name_device_put
from penzai_shard.placement.place import place as place
from penzai_shard.placement.sharded_init import abstract_model as abstract_model
from penzai_shard.placement.sharded_init import (
    initialize_parameters_sharded as initialize_parameters_sharded,
)
from penzai_shard.placement.sharded_init import sharded_init as sharded_init
from penzai_shard.planning.name_axes import name_axes as name_axes
from penzai_shard.planning.name_axes import without_names as without_names
from penzai_shard.planning.planner import make_plan as make_plan
from penzai_shard.planning.sharding_trees import name_to_name_sharding as name_to_name_sharding
from penzai_shard.readers.reader import register_reader as register_reader
from penzai_shard.reports.report import Report as Report
from penzai_shard.rules import AxisRules as AxisRules
from penzai_shard.rules import data_parallel as data_parallel
from penzai_shard.rules import fully_sharded as fully_sharded
from penzai_shard.rules import tensor_parallel as tensor_parallel
from penzai_shard.training.batches import shard_batch as shard_batch
from penzai_shard.training.stateful_trainer import StatefulTrainer as StatefulTrainer
from penzai_shard.training.step import build_eval_step_fn as build_eval_step_fn
from penzai_shard.training.step import build_train_step_fn as build_train_step_fn
from penzai_shard.training.train_state import TrainState as TrainState
from penzai_shard.training.train_state import train_state_sharding as train_state_sharding

__version__: str
