"""Keeps a train state and its step in one object, for notebooks."""

from collections.abc import Callable, Hashable
from typing import Any, cast

import jax
import jax.numpy as jnp

from penzai_shard.arrays.inputs import Lowerable, make_struct
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning.arguments import OnUnnamed
from penzai_shard.training.batches import shard_batch
from penzai_shard.training.step import build_train_step_fn
from penzai_shard.training.train_state import TrainState, train_state_sharding


class StatefulTrainer:
    """A train state and its step in one object, as ``penzai.toolshed.basic_training`` has it.

    Each step replaces the state and takes its memory. What goes in and out as ``state`` or
    ``model`` is copied, so that it stays usable.

    Args:
        train_state: The state to start from.
        loss_fn: As for ``build_train_step_fn``.
        mesh: The mesh to train on; without one everything stays where the state is.
        rules: As for ``make_plan``, for the state and for inputs.
        axis_name_to_mesh_name: The same under Penzai's name.
        optimizer_rules: As for ``train_state_sharding``.
        on_unnamed: As for ``make_plan``.
        first_axis: As for ``shard_batch``.
        donate_states: Whether a step may take the memory of the state before it.
        **step_options: As for ``build_train_step_fn``.

    Raises:
        PlanError, MeshError, RuleTypeError: As ``make_plan`` and ``build_train_step_fn``.

    >>> import optax
    >>> def loss_fn(model, rng, state, x):
    ...     loss = jnp.sum((model["w"] - x) ** 2)
    ...     return loss, state, {"loss": loss}
    >>> trainer = StatefulTrainer.build(
    ...     root_rng=jax.random.key(0),
    ...     model={"w": jnp.zeros(3)},
    ...     optimizer_def=optax.sgd(0.25),
    ...     loss_fn=loss_fn,
    ... )
    >>> [float(trainer.step(x=jnp.ones(3))["loss"]) for _ in range(3)]
    [3.0, 0.75, 0.1875]
    """

    def __init__(
        self,
        train_state: TrainState,
        loss_fn: Callable[..., Any],
        *,
        mesh: AnyMesh | None = None,
        rules: Any = None,
        axis_name_to_mesh_name: Any = None,
        optimizer_rules: Any = None,
        on_unnamed: OnUnnamed = "error",
        first_axis: Hashable | None = None,
        donate_states: bool = True,
        **step_options: Any,
    ) -> None:
        layout: dict[str, Any] = {"mesh": mesh, "rules": rules, "on_unnamed": on_unnamed}
        layout["axis_name_to_mesh_name"] = axis_name_to_mesh_name
        options = mesh, rules, axis_name_to_mesh_name, optimizer_rules, first_axis
        if any(option is not None for option in options):
            # Without a mesh it refuses the others.
            shardings = train_state_sharding(train_state, optimizer_rules=optimizer_rules, **layout)
            train_state = jax.device_put(train_state, shardings)
            step_options["train_state_shardings"] = shardings
        self._batch_options = layout | {"first_axis": first_axis}
        step_options["donate_params_and_state"] = donate_states
        self._step = build_train_step_fn(loss_fn, **step_options)
        self._state: TrainState = jax.tree.map(jnp.copy, train_state)

    @classmethod
    def build(
        cls,
        root_rng: jax.Array,
        model: Any,
        optimizer_def: Any,
        loss_fn: Callable[..., Any],
        initial_loss_fn_state: Any = None,
        **options: Any,
    ) -> "StatefulTrainer":
        """A trainer of a model.

        Args:
            root_rng: A random key.
            model: A model of any library; it stays usable.
            optimizer_def: An optimizer of optax.
            loss_fn: As for ``build_train_step_fn``.
            initial_loss_fn_state: What the loss function gets as ``state`` in the first step.
            **options: As for the class.
        """
        state = TrainState.initial_state(model, optimizer_def, root_rng, initial_loss_fn_state)
        return cls(state, loss_fn, **options)

    def step(self, **inputs: Any) -> Any:
        """Does one step of training.

        Args:
            **inputs: The inputs of the loss function; on a mesh they are put there by the rules.

        Returns:
            What the loss function reports.

        Raises:
            ShardingError: As a step of ``build_train_step_fn``; the state is as before then.
        """
        if self._batch_options["mesh"] is not None:
            inputs = shard_batch(inputs, **self._batch_options)
        self._state, aux = self._step(self._state, **inputs)
        return aux

    def lowerable(self, *, wrap: Any = None, **inputs: Any) -> Lowerable:
        """What ``step`` would call, as ``lowerable`` of a step gives it.

        Args:
            wrap: What the loss function gets in place of the model, as a function of it.
            **inputs: The inputs of the loss function, of arrays or of structs.
        """
        inputs = jax.tree.map(make_struct, inputs)
        if self._batch_options["mesh"] is not None:
            inputs = shard_batch(inputs, **self._batch_options)
        return cast(Lowerable, self._step.lowerable(self._state, wrap=wrap, **inputs))

    @property
    def state(self) -> TrainState:
        """A copy of the train state; it can be set, for instance to a restored one."""
        return cast(TrainState, jax.tree.map(jnp.copy, self._state))

    @state.setter
    def state(self, train_state: TrainState) -> None:
        self._state = jax.tree.map(jnp.copy, train_state)

    @property
    def model(self) -> Any:
        """The model with the current values, in new variables."""
        return self.state.model

    def __repr__(self) -> str:
        return f"StatefulTrainer({self._state}, {self._step})"
