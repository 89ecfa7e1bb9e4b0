"""A trainer that keeps its state, for notebooks: ``trainer.step(**batch)``."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from penzai_shard.errors import RuleTypeError, warn_caller
from penzai_shard.meshes import AnyMesh
from penzai_shard.model_variables import TrainablePredicate
from penzai_shard.named_leaves import leaves_of
from penzai_shard.placement import place, put
from penzai_shard.planning import PlacingRequest, PlanRequest, plan_before_padding
from penzai_shard.readers import foreign_nodes, without_bare_arrays
from penzai_shard.rule_kinds import LogicalAxis, OnIndivisible, OnUnnamed
from penzai_shard.text_tables import NotebookView
from penzai_shard.training.batches import (
    batch_planner,
    named_as_given,
    shard_batch,
    suggesting_first_axis,
    with_first_axis,
)
from penzai_shard.training.loss_scaling import DynamicLossScaling
from penzai_shard.training.state_table import StateTable
from penzai_shard.training.step_failures import refuse_inputs, refuse_positional
from penzai_shard.training.train_state import TrainState, with_own_buffers
from penzai_shard.training.train_step import LossFunction, TrainStep, build_train_step_fn

if TYPE_CHECKING:
    import optax


class StatefulTrainer(NotebookView):
    """A train state and its step in one object, as ``penzai.toolshed.basic_training`` has it.

    Each ``trainer.step(**batch)`` replaces the state. Memory is donated from step to step, and
    what was handed out stays usable: the step after a look at ``state`` or ``model`` works on a
    copy. Unlike Penzai's trainer it does not change the model that it was made of.

    Args:
        train_state: The state to start from.
        loss_fn: As for ``build_train_step_fn``.
        mesh: The mesh to train on; without one everything stays where the state is.
        rules: Which logical axis goes to which mesh axis, for the state and for the batches.
        axis_name_to_mesh_name: The same under Penzai's name; give one of the two.
        optimizer_rules: Other rules for the optimizer's state.
        on_indivisible: As for ``make_plan``. Batches are not padded: with ``"pad"``, examples that
            do not divide are an error, and other lengths of inputs stay whole.
        on_unnamed: As for ``make_plan``, of batches too.
        first_axis: As for ``shard_batch``: what the first dimension of plain inputs is.
        jit: Whether to compile.
        donate_states: Whether a step may reuse the memory of the state before it.
        accumulate_steps: As for ``build_train_step_fn``.
        batch_axis: As for ``build_train_step_fn``.
        aux_reduction: As for ``build_train_step_fn``.
        manual_axes: As for ``build_train_step_fn``.
        aux_output_shardings: As for ``build_train_step_fn``.
        loss_scaling: As for ``build_train_step_fn``.
        skip_nonfinite: As for ``build_train_step_fn``.
        clip_global_norm: As for ``build_train_step_fn``.
        step_metrics: As for ``build_train_step_fn``.

    Raises:
        ShardingError: Some array has no valid layout, or an argument cannot be read.

    >>> import jax.numpy as jnp, optax
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
    >>> trainer.model["w"].tolist(), trainer
    ([0.875, 0.875, 0.875], StatefulTrainer(step=3, 1 trainable, 0 frozen, 0 state variables))
    """

    def __init__(
        self,
        train_state: TrainState,
        loss_fn: LossFunction | Callable[..., tuple[Any, Any, Any]],
        *,
        mesh: AnyMesh | None = None,
        rules: Any = None,
        axis_name_to_mesh_name: Any = None,
        optimizer_rules: Any = None,
        on_indivisible: OnIndivisible = "error",
        on_unnamed: OnUnnamed = "error",
        first_axis: LogicalAxis | None = None,
        jit: bool = True,
        donate_states: bool = True,
        accumulate_steps: int = 1,
        batch_axis: str | int = "batch",
        aux_reduction: str | Mapping[str, Any] | None = None,
        aux_output_shardings: Any = None,
        loss_scaling: str | float | DynamicLossScaling | None = "auto",
        skip_nonfinite: bool = False,
        clip_global_norm: float | None = None,
        step_metrics: str | Sequence[str] = (),
        manual_axes: str | Sequence[str] | None = None,
    ) -> None:
        self._request: PlanRequest | None = None
        self.shardings: TrainState | None = None
        given = (rules, axis_name_to_mesh_name, optimizer_rules)
        if mesh is not None:
            self._request = PlacingRequest.read(
                "StatefulTrainer", mesh, rules, axis_name_to_mesh_name, on_indivisible, on_unnamed
            )
            plan = self._request.plan_state(_checked(train_state), optimizer_rules)
            self.shardings = plan.sharding_tree()
        elif any(rule is not None for rule in (*given, first_axis)):
            raise RuleTypeError("rules need a mesh: pass mesh=make_mesh({...}) too.")
        self._first_axis = first_axis
        self._batch_axis = batch_axis
        self.loss_fn = loss_fn
        self.step_fn: TrainStep = build_train_step_fn(
            loss_fn,
            jit=jit,
            donate_params_and_state=donate_states and jit,
            train_state_shardings=self.shardings,
            aux_output_shardings=aux_output_shardings,
            accumulate_steps=accumulate_steps,
            batch_axis=batch_axis,
            aux_reduction=aux_reduction,
            loss_scaling=loss_scaling,
            skip_nonfinite=skip_nonfinite,
            clip_global_norm=clip_global_norm,
            step_metrics=step_metrics,
            manual_axes=manual_axes,
        )
        self._donates = donate_states and jit
        self._looked_at_rules = False
        self._state: TrainState
        self._handed_out: bool
        self.state = train_state

    @classmethod
    def build(
        cls,
        root_rng: jax.Array,
        model: Any,
        optimizer_def: "optax.GradientTransformation",
        loss_fn: LossFunction | Callable[..., tuple[Any, Any, Any]],
        initial_loss_fn_state: Any = None,
        *,
        trainable: TrainablePredicate | None = None,
        mesh: AnyMesh | None = None,
        rules: Any = None,
        axis_name_to_mesh_name: Any = None,
        on_indivisible: OnIndivisible = "error",
        on_unnamed: OnUnnamed = "error",
        loss_scaling: str | float | DynamicLossScaling | None = "auto",
        skip_nonfinite: bool = False,
        plain_arrays: bool | None = None,
        **options: Any,
    ) -> "StatefulTrainer":
        """A trainer of a model, with the arguments of Penzai's ``StatefulTrainer.build``.

        Args:
            root_rng: Random key of the whole run.
            model: As for ``TrainState.initial_state``. It stays usable.
            optimizer_def: An optax optimizer.
            loss_fn: As for ``build_train_step_fn``.
            initial_loss_fn_state: What the loss function gets as ``state`` in the first step.
            trainable: As for ``TrainState.initial_state``.
            mesh: As for the class; the model's parameters are placed on it before the optimizer's
                state is made.
            rules: As for the class.
            axis_name_to_mesh_name: As for the class.
            on_indivisible: As for ``make_plan``.
            on_unnamed: As for ``make_plan``.
            loss_scaling: As for ``TrainState.initial_state`` and ``build_train_step_fn``.
            skip_nonfinite: As for ``TrainState.initial_state`` and ``build_train_step_fn``.
            plain_arrays: As for ``TrainState.initial_state``.
            **options: Further arguments of the class.
        """
        layout: dict[str, Any] = {
            "rules": rules,
            "axis_name_to_mesh_name": axis_name_to_mesh_name,
            "on_indivisible": on_indivisible,
            "on_unnamed": on_unnamed,
        }
        if mesh is not None:
            request = PlacingRequest.read("StatefulTrainer.build", mesh, **layout)
            pads = on_indivisible == "pad" and foreign_nodes(model)
            model = place(
                model,
                plan_before_padding(model, request.mesh, request.rules, on_unnamed)
                if pads
                else request.plan(model),
            )
        guards: dict[str, Any] = {"loss_scaling": loss_scaling, "skip_nonfinite": skip_nonfinite}
        train_state = TrainState.initial_state(
            model,
            optimizer_def,
            root_rng,
            initial_loss_fn_state,
            trainable=trainable,
            on_unnamed=on_unnamed,
            plain_arrays=plain_arrays,
            **guards,
        )
        return cls(train_state, loss_fn, mesh=mesh, **layout, **guards, **options)

    def step(self, *positional: Any, **inputs: Any) -> Any:
        """Does one step of training.

        Args:
            *positional: Refused: inputs go by keyword.
            **inputs: Inputs of the loss function. On a mesh, named arrays are placed by the rules,
                and plain ones by ``first_axis``.

        Returns:
            The loss function's auxiliary output.

        Raises:
            ShardingError: As a step of ``build_train_step_fn``. The state is as before then.
        """
        refuse_positional(positional, "trainer.step(")
        inputs = self.placed_inputs(inputs)
        state = self._state
        if self._donates and self._handed_out:
            state = with_own_buffers(state)
        self._state, aux = self.step_fn(state, **inputs)
        self._handed_out = False
        return aux

    def placed_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of a step as it places them; of structs, structs with the layouts.

        Rules are looked at once, for the state and the inputs together.
        """
        if self._request is None:
            return inputs
        refuse_inputs(without_bare_arrays(inputs, "a step"))
        if not self._looked_at_rules:
            self._looked_at_rules = True
            leaves = leaves_of((self._state, inputs))
            warn_caller(self._request.doubts({n for leaf in leaves for n in leaf.names or ()}))
        of_state = self._request.planner
        if self._first_axis is None:
            planner = batch_planner(of_state, inputs, self._batch_axis)
            with suggesting_first_axis(inputs, planner.on_unnamed):
                return dict(shard_batch(inputs, plan=planner.plan(inputs)))
        inputs = without_bare_arrays(inputs, "trainer.step")
        named = with_first_axis(inputs, self._first_axis)
        planner = batch_planner(of_state, named, self._first_axis)
        return dict(named_as_given(inputs, shard_batch(named, plan=planner.plan(named))))

    @property
    def state(self) -> TrainState:
        """The train state. It may be kept, and may be set, for instance to a restored one."""
        self._handed_out = True
        return self._state

    @state.setter
    def state(self, train_state: TrainState) -> None:
        state = _checked(train_state)
        if self.shardings is not None:
            state = put(state, self.shardings, "StatefulTrainer")
        self._state = state
        self._handed_out = True

    @property
    def current_state(self) -> TrainState:
        """The train state to look at, not to keep, so that the next step need not copy it."""
        return self._state

    @property
    def model(self) -> Any:
        """The model with the current values, in new variables."""
        return self.state.model

    @property
    def root_rng(self) -> Any:
        """Random key of the whole run."""
        return self._state.root_rng

    @property
    def optimizer_def(self) -> Any:
        """The optimizer."""
        return self._state.optimizer_def

    def notebook_table(self) -> StateTable:
        """The table of the state, which does not count as a look at it."""
        return self._state.notebook_table()

    def __repr__(self) -> str:
        return f"StatefulTrainer(step={int(self._state.step)}, {self._state.variables.counts()})"


def _checked(train_state: Any) -> TrainState:
    if not isinstance(train_state, TrainState):
        raise RuleTypeError(
            f"a StatefulTrainer takes a TrainState, not a {type(train_state).__name__}. For a "
            "model: StatefulTrainer.build(root_rng=..., model=..., optimizer_def=..., loss_fn=...)."
        )
    return train_state
