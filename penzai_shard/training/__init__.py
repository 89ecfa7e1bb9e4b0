"""Training: the state of a run, one step of it, and batches on a mesh. Needs optax."""

from penzai_shard.training.batches import refuse_uneven, shard_batch
from penzai_shard.training.cross_entropy import cross_entropy
from penzai_shard.training.eval_step import EvalStep, build_eval_step_fn
from penzai_shard.training.loss_scaling import DynamicLossScaling
from penzai_shard.training.state_sharding import train_state_sharding
from penzai_shard.training.stateful_trainer import StatefulTrainer
from penzai_shard.training.train_state import TrainState
from penzai_shard.training.train_step import LossFunction, TrainStep, build_train_step_fn

__all__ = [
    "DynamicLossScaling",
    "EvalStep",
    "LossFunction",
    "StatefulTrainer",
    "TrainState",
    "TrainStep",
    "build_eval_step_fn",
    "build_train_step_fn",
    "cross_entropy",
    "refuse_uneven",
    "shard_batch",
    "train_state_sharding",
]
