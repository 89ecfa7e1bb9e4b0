"""Layouts: each parallelism in one line."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from penzai_shard.axis_rules import AxisRules
from penzai_shard.layouts.building import build_state_and_step
from penzai_shard.layouts.layout_edits import (
    are_gathered,
    constraining_edits,
    gathering_edits,
)
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import PlanRequest, ShardingPlan
from penzai_shard.rule_presets import TRANSFORMER_MODEL_AXES, data_parallel, fully_sharded
from penzai_shard.rule_presets import tensor_parallel as split_names
from penzai_shard.surgery import Recipe
from penzai_shard.training import LossFunction, TrainState, TrainStep, shard_batch

if TYPE_CHECKING:
    import optax

# Arrays with fewer elements, such as the scale of a norm, are not worth gathering.
MIN_SIZE = 2**14

MeshAxis = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is laid out over a mesh while it is stored and while it computes.

    In fully sharded training a parameter is stored split over the mesh axis that the batch is
    split over while it computes, so one table of rules cannot say both. A layout has a table for
    each, and what follows from them: the edits of the model, the placement of batches, the train
    state and its step.

    The presets are those of the literature. A layout is immutable, and is used with any model and
    mesh that has the axes which it names.

    Attributes:
        parameters: How parameters, and their gradients, are stored. Rules in any form that
            ``AxisRules`` reads.
        compute: How activations are laid out; the batch, above all.
        optimizer: How the arrays of the optimizer's state are stored; None as their parameters.
        between_blocks: How activations are laid out between blocks, if not as ``compute`` says.
        reshard_after_forward: Whether a gathered parameter is dropped after the forward pass and
            gathered again in the backward pass, instead of being kept where the compiler sees
            fit.
        blocks: Where the blocks of the model are, as a place of ``insert_after``; None finds
            those of Penzai's transformers.

    >>> import optax
    >>> from penzai_shard.meshes import make_mesh
    >>> layout = Layout.fully_sharded()
    >>> layout.compute
    AxisRules({'batch': 'data'})
    >>> layout == Layout(parameters=fully_sharded(min_size=2**14), compute={"batch": "data"})
    True
    """

    parameters: AxisRules
    compute: AxisRules
    optimizer: AxisRules | None = None
    between_blocks: AxisRules | None = None
    reshard_after_forward: bool = False
    blocks: Any = None

    def __post_init__(self) -> None:
        for name in ("parameters", "compute", "optimizer", "between_blocks"):
            rules = getattr(self, name)
            if rules is not None or name in ("parameters", "compute"):
                object.__setattr__(self, name, AxisRules.of(rules))

    @classmethod
    def data_parallel(cls, data: MeshAxis = "data") -> "Layout":
        """Every device holds the whole model and computes its part of the batch.

        Once per step the gradients are summed over the devices (all-reduce).

        Args:
            data: The mesh axis, or axes, that the batch is split over.

        >>> Layout.data_parallel().parameters
        AxisRules({})
        """
        return cls(parameters=AxisRules({}), compute=data_parallel(data))

    @classmethod
    def zero1(cls, data: MeshAxis = "data", *, min_size: int = MIN_SIZE) -> "Layout":
        """Data parallel, with the optimizer's state split: stage 1 of ZeRO.

        Each device updates its part of every parameter, and the parts are gathered.

        Source: Rajbhandari et al. 2020, arXiv:1910.02054.

        Args:
            data: The mesh axis, or axes, that batch and optimizer state are split over.
            min_size: What belongs to parameters with fewer elements than this stays whole.

        >>> Layout.zero1().optimizer
        fully_sharded('data', min_size=16384)
        """
        return dataclasses.replace(cls.data_parallel(data), optimizer=fully_sharded(data, min_size))

    @classmethod
    def fully_sharded(
        cls,
        data: MeshAxis = "data",
        *,
        min_size: int = MIN_SIZE,
        reshard_after_forward: bool = False,
    ) -> "Layout":
        """Parameters, gradients and optimizer state are split, and gathered when they are used.

        Source: stage 3 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054); PyTorch's FSDP (Zhao
        et al. 2023, arXiv:2304.11277).

        Args:
            data: The mesh axis, or axes, that batch and parameters are split over.
            min_size: Parameters with fewer elements than this stay whole.
            reshard_after_forward: Gather again in the backward pass: half as much again is moved,
                and no more than one block's parameters are ever whole. By default the compiler
                may keep them.

        >>> Layout.fully_sharded(min_size=1).parameters
        fully_sharded('data', min_size=1)
        """
        return cls(
            parameters=fully_sharded(data, min_size),
            compute=data_parallel(data),
            reshard_after_forward=reshard_after_forward,
        )

    @classmethod
    def tensor_parallel(cls, data: MeshAxis = "data", model: MeshAxis = "model") -> "Layout":
        """Each layer's heads and hidden neurons are split, in pairs that need one reduction.

        Source: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053).

        Args:
            data: The mesh axis, or axes, that the batch is split over.
            model: The mesh axis, or axes, that heads and neurons are split over.

        >>> layout = Layout.tensor_parallel()
        >>> layout.compute.spec(("batch", "neurons"), (8, 8), {"data": 4, "model": 2})
        P('data', 'model')
        """
        split = _split_over(model)
        return cls(parameters=split, compute=data_parallel(data) | split)

    @classmethod
    def two_dimensional(
        cls,
        data: MeshAxis = "data",
        model: MeshAxis = "model",
        *,
        min_size: int = MIN_SIZE,
        reshard_after_forward: bool = False,
    ) -> "Layout":
        """Fully sharded over one mesh axis, tensor parallel over the other.

        Args:
            data: The mesh axis, or axes, that batch and parameters are split over.
            model: The mesh axis, or axes, that heads and neurons are split over.
            min_size: Parameters with fewer elements than this are not split over ``data``.
            reshard_after_forward: As for ``fully_sharded``.

        >>> layout = Layout.two_dimensional(min_size=1)
        >>> layout.parameters.spec(("embedding", "neurons"), (8, 8), {"data": 4, "model": 2})
        P('data', 'model')
        """
        split = _split_over(model)
        return cls(
            parameters=split | fully_sharded(data, min_size),
            compute=data_parallel(data) | split,
            reshard_after_forward=reshard_after_forward,
        )

    @classmethod
    def hybrid(
        cls,
        replica: str = "replica",
        data: MeshAxis = "data",
        *,
        min_size: int = MIN_SIZE,
        reshard_after_forward: bool = False,
    ) -> "Layout":
        """Fully sharded within a node, copies across nodes.

        Parameters are gathered within a node alone; gradients are summed over all.

        Source: hybrid sharding of PyTorch's FSDP (Zhao et al. 2023, arXiv:2304.11277).

        Args:
            replica: The mesh axis of the copies, whose devices are far from each other.
            data: The mesh axis that parameters are split over, whose devices are near. The batch
                is split over both.
            min_size: Parameters with fewer elements than this stay whole.
            reshard_after_forward: As for ``fully_sharded``.

        >>> Layout.hybrid().compute
        AxisRules({'batch': ('replica', 'data')})
        """
        axes = (data,) if isinstance(data, str) else data
        return cls(
            parameters=fully_sharded(data, min_size), compute=data_parallel((replica, *axes))
        )

    def plan(self, tree: Any, mesh: AnyMesh) -> ShardingPlan:
        """How a model or a train state is stored under this layout, to look at before it is made.

        Args:
            tree: A model or a ``TrainState``, concrete or abstract.
            mesh: The mesh.

        Returns:
            The plan.

        Raises:
            ShardingError: As ``make_plan`` does.

        Warns:
            ShardingWarning: As ``make_plan`` does.
        """
        request = PlanRequest.read("Layout.plan", mesh, self.parameters)
        if isinstance(tree, TrainState):
            return request.plan_state(tree, self.optimizer)
        return request.plan(tree)

    def recipe(self, model: Any, mesh: AnyMesh) -> Recipe:
        """The edits that make a model compute in this layout.

        They change no value and no parameter's name, and ``strip`` takes them off.

        Args:
            model: The model, concrete or abstract, not yet edited so.
            mesh: The mesh.

        Returns:
            The recipe.

        Raises:
            ShardingError: A rule names a mesh axis that the mesh does not have, or the model has
                no blocks that are known.
        """
        for rules in (self.parameters, self.compute, self.optimizer, self.between_blocks):
            if rules is not None:
                rules.check_mesh(mesh)
        edits = constraining_edits(mesh, self.between_blocks or self.compute, self.blocks)
        if are_gathered(model, mesh, self.parameters, self.compute):
            edits += gathering_edits(mesh, self.compute, self.reshard_after_forward, self.blocks)
        return edits

    def shard_batch(self, batch: Any, mesh: AnyMesh | None = None, **options: Any) -> Any:
        """Places a batch: split along the logical axes of the batch, and along no other.

        Args:
            batch: A tree of named arrays.
            mesh: The mesh.
            **options: Further arguments of ``penzai_shard.shard_batch``.

        Returns:
            The batch on the mesh.

        Raises:
            ShardingError: As ``penzai_shard.shard_batch`` does.
        """
        return shard_batch(batch, mesh, self.batch_rules, **options)

    @property
    def batch_rules(self) -> AxisRules:
        """The rules of ``compute`` that inputs are placed by, which are those of the batch."""
        return AxisRules.from_rules(
            rule for rule in self.compute.rules if getattr(rule, "logical_axis", None) == "batch"
        )

    def build(
        self,
        initializer: Callable[..., Any],
        *args: Any,
        mesh: jax.sharding.Mesh,
        loss_fn: LossFunction | Callable[..., tuple[Any, Any, Any]],
        optimizer: "optax.GradientTransformation",
        rng: jax.Array,
        **step_options: Any,
    ) -> tuple[TrainState, TrainStep]:
        """Builds, edits and lays out a model, its train state and its step.

        Every array is made where it stays: each device makes its own part of the parameters, and
        of what the optimizer keeps.

        Args:
            initializer: As for ``sharded_init``.
            *args: Passed on to it; keywords by ``functools.partial``.
            mesh: The mesh. Explicit axes are treated as Auto ones.
            loss_fn: As for ``build_train_step_fn``.
            optimizer: An optax optimizer.
            rng: Random key of the whole run.
            **step_options: Further arguments of ``build_train_step_fn``, and ``loss_fn_state``,
                ``trainable`` and ``on_unnamed`` of ``TrainState.initial_state``. The step donates
                the state unless ``donate_params_and_state=False``.

        Returns:
            The state, whose ``model`` is the edited model, and the step.

        Raises:
            ShardingError: Some array has no valid layout, or an argument cannot be read.

        Warns:
            ShardingWarning: As ``make_plan`` does.
        """
        return build_state_and_step(
            initializer,
            args,
            mesh=mesh,
            parameters=self.parameters,
            optimizer_rules=self.optimizer,
            edited=functools.partial(_edited, self, mesh),
            loss_fn=loss_fn,
            optimizer=optimizer,
            rng=rng,
            step_options=step_options,
        )


def _edited(layout: Layout, mesh: AnyMesh, model: Any) -> Any:
    return layout.recipe(model, mesh).apply(model)


def _split_over(model: MeshAxis) -> AxisRules:
    axes = tuple(name for name in TRANSFORMER_MODEL_AXES if name != "vocabulary")
    return split_names(model, axes)
