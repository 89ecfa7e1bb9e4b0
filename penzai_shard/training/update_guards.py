"""What stands between a gradient and the parameters: loss scale, clipping, skipped steps.

Several things must be done in one order: the gradient of the scaled loss is divided by the scale,
looked at for numbers that are not finite, measured, clipped, and given to the optimizer. Then all
that the step would change is kept as it was if something was not finite.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from penzai_shard.errors import RuleTypeError, ShardingError, raise_all, require_extra
from penzai_shard.rule_kinds import nearest_name
from penzai_shard.training.loss_scaling import (
    SCALE,
    DynamicLossScaling,
    LossScaling,
    initial_scaling,
    read_loss_scaling,
    scaling_of_step,
)

SKIPPED = "skipped_steps"
IN_A_ROW = "skipped_in_a_row"
METRICS = ("loss", "gradient_norm", "skipped", SKIPPED, IN_A_ROW, SCALE)


def initial_guards(
    loss_scaling: Any, skip_nonfinite: Any, model: Any, trainable: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """What a new train state keeps to guard its steps; nothing if nothing is asked for.

    Args:
        loss_scaling: As for ``TrainState.initial_state``.
        skip_nonfinite: As for ``TrainState.initial_state``.
        model: The model's layers.
        trainable: The parameters that are trained.

    Raises:
        RuleTypeError: An option cannot be read.

    >>> initial_guards(None, True, {}, {})
    {'skipped_steps': Array(0, dtype=int32), 'skipped_in_a_row': Array(0, dtype=int32)}
    """
    _check_skipping(skip_nonfinite)
    scaling = initial_scaling(read_loss_scaling(loss_scaling), model, trainable)
    if scaling is None and not skip_nonfinite:
        return {}
    counts = {name: jnp.zeros((), jnp.int32) for name in (SKIPPED, IN_A_ROW)}
    return counts if scaling is None else scaling.start() | counts


@dataclasses.dataclass(frozen=True)
class GuardOptions:
    """The options of a step.

    Attributes:
        loss_scaling: How the loss is scaled, as ``read_loss_scaling`` gives it.
        skip_nonfinite: Whether a step that is not finite changes nothing.
        clip_global_norm: The largest norm of the gradient that an optimizer sees.
        metrics: What the step adds to the auxiliary outputs, of ``METRICS``.
    """

    loss_scaling: LossScaling
    skip_nonfinite: bool
    clip_global_norm: float | None
    metrics: tuple[str, ...]

    @classmethod
    def read(
        cls, loss_scaling: Any, skip_nonfinite: Any, clip_global_norm: Any, step_metrics: Any
    ) -> "GuardOptions":
        """Reads the options; see ``build_train_step_fn``.

        Raises:
            RuleTypeError: One cannot be read.
        """
        _check_skipping(skip_nonfinite)
        if clip_global_norm is not None and (
            not isinstance(clip_global_norm, int | float)
            or isinstance(clip_global_norm, bool)
            or not 0 < clip_global_norm < math.inf
        ):
            raise RuleTypeError(
                f"clip_global_norm must be a positive number or None, not {clip_global_norm!r}."
            )
        return cls(
            read_loss_scaling(loss_scaling),
            skip_nonfinite,
            clip_global_norm,
            _read_metrics(step_metrics),
        )

    def for_state(
        self, guards: Mapping[str, Any], model: Any, trainable: Mapping[str, Any]
    ) -> "UpdateGuard":
        """The guard of one step.

        Args:
            guards: What the state keeps.
            model: The model's layers.
            trainable: The parameters that are trained.

        Raises:
            ShardingError: The state does not keep what the options need.
        """
        scaling = scaling_of_step(self.loss_scaling, guards, model, trainable)
        if self.skip_nonfinite and SKIPPED not in guards:
            raise ShardingError(
                "this step counts the steps that it skips, and the train state keeps no count. "
                "Make the state with one: TrainState.initial_state(model, optimizer, key, "
                "skip_nonfinite=True)."
            )
        skips = self.skip_nonfinite or isinstance(scaling, DynamicLossScaling)
        missing = {
            SKIPPED: not skips,
            IN_A_ROW: not skips,
            "skipped": not skips,
            SCALE: scaling is None,
        }
        fixes = {True: "skip_nonfinite=True", False: 'loss_scaling="dynamic"'}
        raise_all(
            ShardingError,
            "step_metrics name what this step does not have:",
            [
                f"{name}: pass {fixes[name != SCALE]} to build_train_step_fn and to "
                "TrainState.initial_state, or leave it out."
                for name in self.metrics
                if missing.get(name)
            ],
        )
        return UpdateGuard(self, scaling, skips, guards)


@dataclasses.dataclass(frozen=True)
class UpdateGuard:
    """The guard of one step of one state.

    Attributes:
        options: The options of the step.
        scaling: How the loss is scaled.
        skips: Whether a step that is not finite changes nothing.
        kept: What the state keeps.
    """

    options: GuardOptions
    scaling: DynamicLossScaling | float | None
    skips: bool
    kept: Mapping[str, Any]

    @property
    def scale(self) -> Any:
        """What the loss is multiplied by before it is differentiated; None if it is not."""
        if isinstance(self.scaling, DynamicLossScaling):
            return self.kept[SCALE]
        return self.scaling

    def guarded_update(
        self,
        grads: Any,
        loss: jax.Array,
        old: Any,
        update: Callable[[Any], Any],
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """One update, done as the options say.

        Args:
            grads: The gradient of the loss, not scaled any more.
            loss: The loss.
            old: All that the step may change, but its number.
            update: Gives from the gradient what it becomes.

        Returns:
            What it becomes, what the state keeps from then on, and the metrics by name.
        """
        metrics: dict[str, Any] = {"loss": loss}
        clip = self.options.clip_global_norm
        finite = all_finite((loss, grads)) if self.skips else None
        if clip is not None or "gradient_norm" in self.options.metrics:
            metrics["gradient_norm"] = norm = global_norm(grads)
            if clip is not None:
                grads = clipped(grads, norm, clip)
                if finite is not None:
                    # Clipping by a norm that overflowed leaves nothing of a finite gradient.
                    finite &= jnp.isfinite(norm)
        new = update(grads)
        kept = dict(self.kept)
        if finite is not None:
            if self.options.skip_nonfinite:
                finite &= all_finite(new[0])
            new = jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, old)
            skipped = jnp.logical_not(finite)
            kept[SKIPPED] = kept[SKIPPED] + skipped
            kept[IN_A_ROW] = jnp.where(finite, 0, kept[IN_A_ROW] + 1)
            metrics |= {"skipped": skipped, SKIPPED: kept[SKIPPED], IN_A_ROW: kept[IN_A_ROW]}
            if isinstance(self.scaling, DynamicLossScaling):
                kept |= self.scaling.next(self.kept, finite)
        if self.scaling is not None:
            metrics[SCALE] = jnp.asarray(self.scale, jnp.float32)
        return new, kept, metrics

    def with_metrics(self, aux: Any, metrics: Mapping[str, Any]) -> Any:
        """The auxiliary outputs and the metrics that the options name.

        Raises:
            ShardingError: The outputs are not a dictionary, or have such a name already.
        """
        names = self.options.metrics
        if not names:
            return aux
        aux = {} if aux is None else aux
        if not isinstance(aux, dict):
            raise ShardingError(
                "step_metrics are added to auxiliary outputs that are a dictionary, and the loss "
                f"function returned a {type(aux).__name__}. Return (loss, state, "
                '{"name": value}).'
            )
        raise_all(
            ShardingError,
            "step_metrics have names of auxiliary outputs:",
            [f"{name}: leave one of the two out, or rename it." for name in names if name in aux],
        )
        return aux | {name: metrics[name] for name in names}


def all_finite(tree: Any) -> jax.Array:
    """Whether every element of every array is finite; one truth value for all devices.

    >>> bool(all_finite([jnp.ones(2), jnp.inf]))
    False
    """
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]).all()


def global_norm(grads: Any) -> jax.Array:
    """The Euclidean norm of a whole gradient, over all devices, computed in float32 at least.

    >>> float(global_norm({"a": jnp.full(4, 1.5), "b": jnp.full(4, 2.0)}))
    5.0
    """
    optax = require_extra("optax", "train")
    norm: jax.Array = optax.tree.norm(jax.tree.map(_at_least_single, grads))
    return norm


def clipped(grads: Any, norm: jax.Array, largest: float) -> Any:
    """A gradient, shortened if its norm is larger than allowed (Pascanu et al. 2012).

    Args:
        grads: The gradient.
        norm: Its norm.
        largest: The largest norm. As ``optax.clip_by_global_norm``, but measured in float32 also
            where the gradient is narrower.
    """
    factor = jnp.where(norm < largest, jnp.ones_like(norm), largest / norm)
    return jax.tree.map(lambda g: (_at_least_single(g) * factor).astype(g.dtype), grads)


def _at_least_single(leaf: Any) -> Any:
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _check_skipping(skip_nonfinite: Any) -> None:
    if not isinstance(skip_nonfinite, bool):
        raise RuleTypeError(f"skip_nonfinite must be True or False, not {skip_nonfinite!r}.")


def _read_metrics(names: Any) -> tuple[str, ...]:
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, Sequence):
        raise RuleTypeError(f"step_metrics must be names, not {names!r}: of {_quoted(METRICS)}.")
    problems = []
    for name in names:
        if name not in METRICS:
            near = nearest_name(name, set(METRICS)) if isinstance(name, str) else None
            hint = f"Did you mean {near!r}?" if near else f"They are {_quoted(METRICS)}."
            problems.append(f"{name!r}: is not a metric of a step. {hint}")
    raise_all(RuleTypeError, "step_metrics cannot be read:", problems)
    return tuple(dict.fromkeys(names))


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
