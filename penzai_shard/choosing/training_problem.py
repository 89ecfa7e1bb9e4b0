"""What a layout is looked for: a model, its loss, its optimizer and its batch, all abstract."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

import jax
from penzai import pz

from penzai_shard.axis_rules import AxisRules
from penzai_shard.layouts import Layout
from penzai_shard.meshes import AnyMesh
from penzai_shard.placement import described
from penzai_shard.planning import make_plan
from penzai_shard.rule_kinds import OnIndivisible
from penzai_shard.surgery import Recipe
from penzai_shard.training import TrainState, TrainStep, build_train_step_fn, train_state_sharding

if TYPE_CHECKING:
    import optax


class _Relaxed(TypedDict):
    on_indivisible: OnIndivisible


@dataclasses.dataclass(frozen=True)
class TrainingProblem:
    """A training step that a layout is looked for.

    Attributes:
        model: The model, its arrays ``jax.ShapeDtypeStruct``.
        loss_fn: As for ``build_train_step_fn``.
        optimizer: An optax optimizer.
        inputs: What the loss function gets beside model, key and state, by keyword: named arrays
            of structs, with the logical axes of the batch.
        batch_axis: The logical axis along which a batch is split into microbatches.
    """

    model: Any
    loss_fn: Callable[..., Any]
    optimizer: "optax.GradientTransformation"
    inputs: Mapping[str, Any]
    batch_axis: str = "batch"

    def built(
        self,
        layout: Layout,
        mesh: AnyMesh,
        microbatches: int = 1,
        on_indivisible: OnIndivisible = "error",
    ) -> tuple[TrainStep, TrainState, dict[str, Any]]:
        """The step in a layout, with its state and its inputs, in structs that are laid out.

        Args:
            layout: The layout.
            mesh: The mesh, which may be abstract.
            microbatches: In how many parts, one after the other, the batch is computed.
            on_indivisible: As for ``Layout.build``.

        Returns:
            The step, and what it is called with: ``step(state, **inputs)``.

        Raises:
            ShardingError: As ``Layout.build`` does.
        """
        relaxed: _Relaxed = {"on_indivisible": on_indivisible}
        laid_out = layout.for_model(self.model, mesh, **relaxed)
        edits = layout.recipe(self.model, mesh, **relaxed)
        loss_fn = layout.computing(self.loss_fn, mesh, **relaxed)
        tables = laid_out.parameters, laid_out.optimizer
        step, state = self.built_by(edits, *tables, mesh, loss_fn, microbatches, on_indivisible)
        return step, state, layout.shard_batch(dict(self.inputs), mesh)

    def built_by(
        self,
        edits: Recipe,
        parameters: AxisRules,
        optimizer: AxisRules | None,
        mesh: AnyMesh,
        loss_fn: Callable[..., Any],
        microbatches: int = 1,
        on_indivisible: OnIndivisible = "error",
    ) -> tuple[TrainStep, TrainState]:
        """The step with a model edited in some way and stored by some rules.

        Args:
            edits: How the model is edited.
            parameters: How parameters are stored, in the model's own names.
            optimizer: How the optimizer's state is stored; None as its parameters.
            mesh: The mesh, which may be abstract.
            loss_fn: The loss function, computing on the mesh.
            microbatches: As for ``built``.
            on_indivisible: As for ``built``.
        """
        edited = edits.apply(self.model)
        # The state can be stored padded whoever's arrays the model has, and is described last.
        whole: OnIndivisible = "replicate" if on_indivisible == "pad" else on_indivisible
        plan = make_plan(edited, mesh, parameters, on_indivisible=whole)
        model = described(pz.freeze_variables(edited), plan.sharding_tree(), "choose_layout")
        relaxed: _Relaxed = {"on_indivisible": on_indivisible}
        state = TrainState.initial_state(
            model, self.optimizer, jax.random.key(0), optimizer_rules=optimizer, **relaxed
        )
        shardings = train_state_sharding(state, mesh, parameters, optimizer, **relaxed)
        state = described(state, shardings, "choose_layout")
        step = build_train_step_fn(
            loss_fn,
            train_state_shardings=shardings,
            donate_params_and_state=True,
            accumulate_steps=microbatches,
            batch_axis=self.batch_axis,
        )
        return step, state
