"""Scaling the loss, so that small gradients are not lost where float16 is computed in.

The smallest gradients of float16 are cut off at about 6e-8. The loss is multiplied by a scale
before it is differentiated, and the gradient divided by it again in float32. A dynamic scale is as
large as just does not overflow. Source: Micikevicius et al. 2018, "Mixed Precision Training"
(arXiv:1710.03740). bfloat16 and float32 reach far enough, and are not scaled.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.errors import RuleTypeError, ShardingError
from penzai_shard.layers import compute_dtypes
from penzai_shard.rule_kinds import did_you_mean

SCALE = "loss_scale"
FINITE_STEPS = "finite_steps"


@dataclasses.dataclass(frozen=True)
class DynamicLossScaling:
    """A loss scale that finds its size: smaller after an overflow, larger after good steps.

    For ``loss_scaling=`` of ``TrainState.initial_state`` and ``build_train_step_fn``, in place of
    ``"dynamic"``, which takes these values. A step whose gradient overflowed is skipped.

    Attributes:
        initial: The scale of the first step.
        factor: What it is divided by after a step that overflowed, and multiplied by after
            ``growth_interval`` steps in a row that did not.
        growth_interval: That number of steps.
        smallest: It gets no smaller than this.

    Raises:
        RuleTypeError: A value is out of range.

    >>> DynamicLossScaling(initial=2.0**10).factor
    2.0
    """

    initial: float = 2.0**15
    factor: float = 2.0
    growth_interval: int = 2000
    smallest: float = 1.0

    def __post_init__(self) -> None:
        """Refuses values that no scale can have."""
        for name in ("initial", "smallest"):
            if not _is_number(getattr(self, name)) or not 0 < getattr(self, name) < math.inf:
                raise RuleTypeError(
                    f"{name} of a loss scale must be a positive number, not "
                    f"{getattr(self, name)!r}."
                )
        if not _is_number(self.factor) or not 1 < self.factor < math.inf:
            raise RuleTypeError(f"factor must be a number above 1, not {self.factor!r}.")
        if (
            not isinstance(self.growth_interval, int)
            or isinstance(self.growth_interval, bool)
            or self.growth_interval < 1
        ):
            raise RuleTypeError(
                f"growth_interval must be a positive number of steps, not {self.growth_interval!r}."
            )

    def start(self) -> dict[str, jax.Array]:
        """What a train state keeps of it."""
        return {
            SCALE: jnp.asarray(self.initial, jnp.float32),
            FINITE_STEPS: jnp.zeros((), jnp.int32),
        }

    def next(self, kept: Mapping[str, jax.Array], finite: jax.Array) -> dict[str, jax.Array]:
        """What is kept after a step.

        Args:
            kept: What was kept before it.
            finite: Whether its gradient was finite.
        """
        scale = kept[SCALE]
        good = jnp.where(finite, kept[FINITE_STEPS] + 1, 0)
        grows = good >= self.growth_interval
        larger = jnp.where(jnp.isfinite(scale * self.factor), scale * self.factor, scale)
        smaller = jnp.maximum(scale / self.factor, self.smallest)
        return {
            SCALE: jnp.where(finite, jnp.where(grows, larger, scale), smaller),
            FINITE_STEPS: jnp.where(grows, 0, good),
        }


LossScaling = str | float | DynamicLossScaling | None


def read_loss_scaling(declared: Any) -> LossScaling:
    """Reads an option.

    Args:
        declared: ``"auto"``, ``"dynamic"``, a ``DynamicLossScaling``, a number or None.

    Returns:
        The same, ``"dynamic"`` as the ``DynamicLossScaling`` that it stands for.

    Raises:
        RuleTypeError: It is something else.

    >>> read_loss_scaling("dynamic").initial
    32768.0
    """
    if declared is None or declared == "auto" or isinstance(declared, DynamicLossScaling):
        return declared
    if declared == "dynamic":
        return DynamicLossScaling()
    if _is_number(declared) and 0 < declared < math.inf:
        return float(declared)
    hint = did_you_mean(declared, {"auto", "dynamic"}) if isinstance(declared, str) else ""
    raise RuleTypeError(
        "loss_scaling must be 'auto', 'dynamic', a DynamicLossScaling, a positive number for a "
        f"scale that stays, or None, not {declared!r}.{hint}"
    )


def initial_scaling(
    declared: LossScaling, model: Any, trainable: Mapping[str, Any]
) -> DynamicLossScaling | None:
    """What a new train state keeps for its steps, None if the loss is not scaled dynamically.

    Args:
        declared: The option, as ``read_loss_scaling`` gives it.
        model: The model's layers.
        trainable: The parameters that are trained.
    """
    if declared == "auto":
        return DynamicLossScaling() if computes_in_float16(model, trainable) else None
    return declared if isinstance(declared, DynamicLossScaling) else None


def scaling_of_step(
    declared: LossScaling, guards: Mapping[str, Any], model: Any, trainable: Mapping[str, Any]
) -> DynamicLossScaling | float | None:
    """How a step scales the loss of a train state.

    Args:
        declared: The option of the step, as ``read_loss_scaling`` gives it.
        guards: What the state keeps.
        model: The model's layers.
        trainable: The parameters that are trained.

    Raises:
        ShardingError: The state keeps no scale and the step needs one.
    """
    wanted = declared
    if declared == "auto":
        wanted = DynamicLossScaling() if SCALE in guards else None
    if isinstance(wanted, DynamicLossScaling) and SCALE not in guards:
        raise ShardingError(
            "this step scales its loss dynamically, and the train state keeps no scale. Make "
            "the state with one: TrainState.initial_state(model, optimizer, key, "
            'loss_scaling="dynamic").'
        )
    if declared == "auto" and wanted is None and computes_in_float16(model, trainable):
        raise ShardingError(
            "this model computes in float16, and the train state keeps no loss scale, without "
            "which small gradients are lost. Make the state with one: "
            'TrainState.initial_state(model, optimizer, key, loss_scaling="dynamic"); or do '
            "without: build_train_step_fn(loss_fn, loss_scaling=None)."
        )
    assert not isinstance(wanted, str)
    return wanted


def computes_in_float16(model: Any, trainable: Mapping[str, Any]) -> bool:
    """Whether parameters are kept in float16, or an ``InPrecision`` layer computes in it."""
    dtypes = {jnp.result_type(leaf) for leaf in jax.tree.leaves(dict(trainable))}
    return jnp.dtype(jnp.float16) in dtypes | compute_dtypes(model)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
