"""Layouts: each parallelism in one line."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import RuleTypeError
from penzai_shard.layers import resolve_policy
from penzai_shard.layouts.building import build_state_and_step, refuse_made_already
from penzai_shard.layouts.computing import computing_by, refusing_uneven_batches
from penzai_shard.layouts.layout_edits import EditRequest, layout_edits, with_whole_batch
from penzai_shard.layouts.layout_file import LayoutFiles
from penzai_shard.layouts.model_roles import (
    OF_LAYERS,
    Names,
    RolesOfModel,
    check_names,
    groups_of,
    mesh_axes_of,
    roles_of_model,
    speaks_of_parameters,
)
from penzai_shard.layouts.presets import LayoutPresets
from penzai_shard.meshes import AnyMesh, refuse_other_than_mesh
from penzai_shard.named_leaves import leaves_of
from penzai_shard.placement import abstract_model
from penzai_shard.planning import PlanRequest, ShardingPlan
from penzai_shard.rule_kinds import NameRule, OnIndivisible, OnUnnamed
from penzai_shard.surgery import Recipe
from penzai_shard.text_tables import NotebookView, PreparedTable
from penzai_shard.training import LossFunction, TrainState, TrainStep, shard_batch

if TYPE_CHECKING:
    import optax


class LayoutTable(PreparedTable):
    """What a layout says; ``print`` and notebooks show it."""

    headings = ("what", "rules")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Layout(LayoutPresets, LayoutFiles, NotebookView):
    """How a model is laid out over a mesh while it is stored and while it computes.

    In fully sharded training a parameter is stored split over the mesh axis that the batch is
    split over while it computes, so one table of rules cannot say both. A layout has a table for
    each, and what follows from them: the edits of the model, the placement of batches, the train
    state and its step.

    The presets are those of the literature. A layout is immutable, and is used with any model and
    mesh that has the axes which it names. Every preset also takes, beside ``names=`` and
    ``blocks=``, which are described below:

    - ``vocabulary="model"``: the mesh axis that the vocabulary is split over, in the embedding
      table, in the layer that gives logits, and in the logits, which are then whole on no device;
      see ``cross_entropy``. Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3.
    - ``experts="expert"``: the mesh axis that the experts of a mixture of experts are split over.
      Source: Lepikhin et al. 2020, "GShard" (arXiv:2006.16668).

    Attributes:
        parameters: How parameters, and their gradients, are stored. Rules in any form that
            ``AxisRules`` reads.
        compute: How activations are laid out; the batch, above all.
        optimizer: How the arrays of the optimizer's state are stored; None as their parameters.
        between_blocks: How activations are laid out between layers, if not as ``compute`` says.
        reshard_after_forward: Whether a gathered parameter is dropped after the forward pass and
            gathered again in the backward pass, instead of being kept where the compiler sees
            fit.
        manual: Whether blocks run per device with ``jax.shard_map``, as ``manual_fsdp`` has it:
            gathers and scatters are then written down instead of being left to the compiler. What
            a block does to split elements must be known to be independent, or it is refused.
        rematerialise: What a block keeps for its backward pass, the name of a policy of
            ``Checkpointed`` such as ``"dots"``; the rest is computed again, and parameters are
            gathered again. None keeps all.
        blocks: The layers that read activations and give what is added to them, as a place of
            ``wrap``: whole blocks, or attention and feed-forward, which is needed where those are
            split. None finds those of Penzai's transformers; ``()`` edits none, and
            leaves the layout of activations to the compiler, as in a model that has no layers.
        names: What the model calls the axes that rules speak of, where these are not the names
            of Penzai's transformers: ``{"neurons": "mlp"}``. Rules speak of ``batch``, ``seq``,
            ``embedding``, ``neurons``, ``heads``, ``vocabulary`` and ``experts``; in grouped-query
            attention ``heads`` means ``head_groups``, or ``query_heads`` where only these divide.
            None as a name leaves that axis whole.
        wanted: Of these, those that a preset splits and that a model must therefore have.

    >>> import optax
    >>> from penzai_shard import fully_sharded, make_mesh
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
    manual: bool = False
    rematerialise: str | None = None
    blocks: Any = None
    names: Names = dataclasses.field(default_factory=dict, hash=False)
    wanted: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        check_names(self.names)
        resolve_policy(self.rematerialise)
        if self.manual and (self.between_blocks is not None or self.reshard_after_forward):
            raise RuleTypeError(
                "manual=True goes with neither sequence parallelism nor reshard_after_forward: "
                "blocks that run per device gather by themselves, and what flows between them is "
                "split along the batch alone. Leave one of them out."
            )
        for name in ("parameters", "compute", "optimizer", "between_blocks"):
            rules = getattr(self, name)
            if rules is not None or name in ("parameters", "compute"):
                object.__setattr__(self, name, AxisRules.of(rules))

    def __repr__(self) -> str:
        """What is not as by default, as an expression."""
        said = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if field.repr and (value := getattr(self, field.name)) not in (None, False, {})
        ]
        return f"Layout({', '.join(said)})"

    def notebook_table(self) -> LayoutTable:
        """The tables of rules, one in a row."""
        stored = repr(self.parameters)
        rows = [
            ("parameters and gradients are stored by", stored),
            ("the optimizer's state is stored by", repr(self.optimizer or self.parameters)),
            ("layers compute by", repr(self.compute)),
        ]
        if self.between_blocks is not None:
            rows.append(("activations between layers by", repr(self.between_blocks)))
        notes = []
        if self.reshard_after_forward:
            notes.append("Parameters are gathered again in the backward pass.")
        if self.manual:
            notes.append("Blocks run per device, and gather by themselves.")
        if self.rematerialise is not None:
            notes.append(f"Blocks keep what the policy {self.rematerialise!r} says.")
        if self.names:
            notes.append(f"The model calls them: {dict(self.names)}.")
        return LayoutTable(tuple(rows), "Layout", tuple(notes))

    def plan(
        self,
        tree: Any,
        mesh: AnyMesh,
        *,
        on_indivisible: OnIndivisible = "error",
        on_unnamed: OnUnnamed = "error",
    ) -> ShardingPlan:
        """How a model or a train state is stored under this layout, to look at before it is made.

        Args:
            tree: A model or a ``TrainState``, concrete or abstract.
            mesh: The mesh.
            on_indivisible: As for ``make_plan``.
            on_unnamed: As for ``make_plan``.

        Returns:
            The plan.

        Raises:
            ShardingError: As ``make_plan`` does.

        Warns:
            ShardingWarning: As ``make_plan`` does.
        """
        layout = self.for_model(tree, mesh, on_indivisible=on_indivisible)
        request = PlanRequest.read(
            "Layout.plan",
            mesh,
            layout.parameters,
            on_indivisible=on_indivisible,
            on_unnamed=on_unnamed,
        )
        if isinstance(tree, TrainState):
            return request.plan_state(tree, layout.optimizer)
        return request.plan(tree)

    def recipe(
        self, model: Any, mesh: AnyMesh, *, on_indivisible: OnIndivisible = "error"
    ) -> Recipe:
        """The edits that make a model compute in this layout.

        They change no value and no parameter's name, and ``strip`` takes them off. The last one is
        ``axes_in_place()``, by which arrays are not moved around in memory.

        Args:
            model: The model, concrete or abstract, not yet edited so.
            mesh: The mesh.
            on_indivisible: ``"pad"`` for a model whose parameters are stored padded: activations
                are then split too where their lengths do not divide, as compiled programs can.

        Returns:
            The recipe.

        Raises:
            ShardingError: A rule names a mesh axis that the mesh does not have, or the model has
                no blocks that are known.
        """
        return layout_edits(model, mesh, self.edit_request(model, mesh, on_indivisible))

    def edit_request(
        self, model: Any, mesh: AnyMesh, on_indivisible: OnIndivisible = "error"
    ) -> EditRequest:
        """What the edits of a model follow from, in the model's own names.

        Args:
            model: The model, concrete or abstract, not yet edited.
            mesh: The mesh.
            on_indivisible: As for ``recipe``.

        Raises:
            ShardingError: As ``recipe`` does.
        """
        self._refuse_padded_regions(on_indivisible)
        found = self._roles(model, mesh, on_indivisible)
        compute, batch_axes = found.tables["compute"], mesh_axes_of("batch", [self.compute])
        if not batch_axes:
            batch = next(iter(groups_of("batch", self.names)), ("batch",))[0]
            compute = with_whole_batch(compute, model, batch)
        return EditRequest(
            parameters=found.tables["parameters"],
            compute=compute,
            between=found.tables.get("between_blocks"),
            manual=self.manual,
            rematerialise=self.rematerialise,
            gather_again=self.reshard_after_forward,
            blocks=self.blocks,
            batch_axes=batch_axes,
            split_in_layers=tuple(name for role in OF_LAYERS for name in found.split[role]),
            vocabulary=next(iter(groups_of("vocabulary", self.names)), ("vocabulary",))[0],
            splits_vocabulary=bool(found.split["vocabulary"]),
            on_indivisible="pad" if on_indivisible == "pad" else "error",
        )

    def for_model(
        self, tree: Any, mesh: AnyMesh, *, on_indivisible: OnIndivisible = "error"
    ) -> "Layout":
        """The layout in a model's own names, to look at its rules or to give them to others.

        Args:
            tree: A model or a ``TrainState``, concrete or abstract.
            mesh: The mesh.
            on_indivisible: With ``"pad"`` an axis is split though its length does not divide.

        Returns:
            The layout. Heads that are not split, as there are too few of them, are kept whole by a
            rule of their own.

        Raises:
            MeshError: A rule names a mesh axis that the mesh does not have.
            RuleTypeError: The model does not have an axis that the layout splits.
            PlanError: The length of an axis does not divide.

        >>> import jax
        >>> from penzai import pz
        >>> from penzai_shard.meshes import make_mesh
        >>> up = pz.nn.Linear.from_config("up", jax.random.key(0), {"embed": 4}, {"mlp": 8})
        >>> layout = Layout.tensor_parallel(names={"neurons": "mlp", "heads": None})
        >>> layout.for_model(up, make_mesh({"data": 4, "model": 2})).parameters
        tensor_parallel('model', axes=('mlp',))
        """
        found = self._roles(tree, mesh, on_indivisible)
        tables: dict[str, Any] = dict(found.tables)
        return dataclasses.replace(self, **tables, names={}, wanted=())

    def _refuse_padded_regions(self, on_indivisible: OnIndivisible) -> None:
        if self.manual and on_indivisible == "pad":
            raise RuleTypeError(
                'manual=True does not go with on_indivisible="pad": what jax.shard_map gives each '
                "device are equal parts, so blocks that run per device have no true lengths to "
                "compute with. Leave manual=True out, and the compiler gathers and scatters; or "
                "choose lengths that divide."
            )

    def _roles(self, tree: Any, mesh: AnyMesh, on_indivisible: OnIndivisible) -> RolesOfModel:
        refuse_other_than_mesh(mesh)
        tables = {
            name: rules
            for name in ("parameters", "compute", "optimizer", "between_blocks")
            if (rules := getattr(self, name)) is not None
        }
        for rules in tables.values():
            rules.check_mesh(mesh)
        return roles_of_model(tree, mesh, tables, self.names, self.wanted, on_indivisible)

    def shard_batch(self, batch: Any, mesh: AnyMesh | None = None, **options: Any) -> Any:
        """Places a batch: split along the logical axes of the batch, and along no other.

        Args:
            batch: A tree of named arrays; or of plain ones, with ``first_axis="batch"``.
            mesh: The mesh.
            **options: Further arguments of ``penzai_shard.shard_batch``.

        Returns:
            The batch on the mesh.

        Raises:
            ShardingError: As ``penzai_shard.shard_batch`` does; or no array has a logical axis of
                the batch, so that every device would compute all of it.
        """
        present = {name for leaf in leaves_of(batch) for name in leaf.names or ()}
        present |= {name for name in (options.get("first_axis"),) if name is not None}
        wanted = self.batch_rules.logical_axes
        if wanted and present.isdisjoint(wanted):
            known = ", ".join(map(repr, sorted(present, key=str))) or "no logical axes"
            raise RuleTypeError(
                f"no array of this batch has logical axis {' or '.join(map(repr, wanted))}; it has "
                f"{known}. Name it so, pz.nx.wrap(x, {wanted[0]!r}, ...), or, if its arrays stay "
                f"plain, say first_axis={wanted[0]!r}; or tell the layout what it is called: "
                'names={"batch": "..."}.'
            )
        return shard_batch(batch, mesh, self.batch_rules, **options)

    @property
    def batch_rules(self) -> AxisRules:
        """The rules of ``compute`` that inputs are placed by, which are those of the batch."""
        return AxisRules.from_rules(
            dataclasses.replace(rule, logical_axis=name)
            for rule in self.compute.rules
            if isinstance(rule, NameRule) and rule.logical_axis == "batch"
            for group in groups_of("batch", self.names)
            for name in group
        )

    def computing(
        self,
        loss_fn: Callable[..., Any],
        mesh: AnyMesh,
        *,
        on_indivisible: OnIndivisible = "error",
    ) -> Callable[..., Any]:
        """A loss function whose model computes in this layout, for an evaluation step of its own.

        What ``build`` gives the train step. It concerns models that constrain their activations
        themselves, as Flax linen's do with ``nn.with_logical_constraint``: ``compute`` and the
        mesh are in force in them. For any other model the function is as it was.

        Args:
            loss_fn: As for ``build_train_step_fn``.
            mesh: The mesh.
            on_indivisible: ``"pad"`` for a model whose parameters are stored padded. Its batches
                are not, and are checked.

        Returns:
            A loss function of the same signature.

        Raises:
            RuleTypeError: When it is called: the model's library cannot follow ``compute``, or has
                other rules in force.
            PlanError: When it is called: the length of a batch does not divide.

        >>> from penzai_shard.meshes import make_mesh
        >>> def loss_fn(model, rng, state, x):
        ...     return (model["w"] * x).sum(), state, {}
        >>> in_layout = Layout.fully_sharded().computing(loss_fn, make_mesh({"data": 8}))
        >>> float(in_layout(model={"w": jax.numpy.ones(3)}, rng=None, state=None, x=2.0)[0])
        6.0
        """
        if not callable(loss_fn):
            return loss_fn  # Refused by whoever gets it.

        def rules_for(model: Any) -> AxisRules:
            return self.for_model(model, mesh, on_indivisible=on_indivisible).compute

        in_layout = computing_by(loss_fn, mesh, rules_for)
        if on_indivisible != "pad":
            return in_layout
        return refusing_uneven_batches(in_layout, mesh, self.batch_rules)

    def build(
        self,
        initializer: Callable[..., Any],
        *args: Any,
        mesh: AnyMesh,
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
            mesh: The mesh. Explicit axes are treated as Auto ones. On an abstract one nothing is
                made: the state is one of structs, to price the step with.
            loss_fn: As for ``build_train_step_fn``.
            optimizer: An optax optimizer.
            rng: Random key of the whole run.
            **step_options: Further arguments of ``build_train_step_fn``, and ``loss_fn_state``,
                ``trainable``, ``plain_arrays`` and ``on_unnamed`` of ``TrainState.initial_state``.
                With ``on_indivisible="pad"`` parameters, and what the optimizer keeps for them,
                are stored padded where their lengths do not divide, and the model computes with
                their true lengths. Batches are not padded.
                The step donates the state unless ``donate_params_and_state=False``.

        Returns:
            The state, whose ``model`` is the edited model, and the step.

        Raises:
            ShardingError: Some array has no valid layout, or an argument cannot be read.

        Warns:
            ShardingWarning: As ``make_plan`` does.
        """
        refuse_made_already(initializer)
        layout = self
        on_indivisible = step_options.get("on_indivisible", "error")
        self._refuse_padded_regions(on_indivisible)
        if speaks_of_parameters([self.parameters, self.compute]):
            layout = self.for_model(
                abstract_model(initializer, *args), mesh, on_indivisible=on_indivisible
            )
        return build_state_and_step(
            initializer,
            args,
            mesh=mesh,
            parameters=layout.parameters,
            optimizer_rules=layout.optimizer,
            edited=lambda model: self.recipe(model, mesh, on_indivisible=on_indivisible).apply(
                model
            ),
            loss_fn=self.computing(loss_fn, mesh, on_indivisible=on_indivisible),
            optimizer=optimizer,
            rng=rng,
            step_options=step_options,
        )
