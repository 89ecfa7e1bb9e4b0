"""Lays a model and its training over a mesh: each parallelism in one line.

In fully sharded training a parameter is stored split over the mesh axis over which the batch is
split while it computes, so one table of rules cannot say both. A layout has a table for each.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
from jax.sharding import AbstractMesh

from penzai_shard import specs
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.errors import MeshError, Problem, Problems, RuleTypeError, require, warn_caller
from penzai_shard.layers.remat import check_policy
from penzai_shard.layouts import axis_roles
from penzai_shard.layouts.activation_rules import compute_by_rules
from penzai_shard.layouts.edits import RecipeMaker
from penzai_shard.layouts.presets import TABLES, LayoutPresets, add_unknown
from penzai_shard.layouts.toml_file import LayoutFiles
from penzai_shard.meshes import AnyMesh, auto_context, auto_twin, mesh_text
from penzai_shard.placement.sharded_init import abstract_model, sharded_init
from penzai_shard.planning import arguments
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.planning.planner import make_plan
from penzai_shard.rules import IDENTITY, AxisRules
from penzai_shard.surgery.recipe import Recipe
from penzai_shard.training.batches import shard_batch
from penzai_shard.training.step import build_train_step_fn
from penzai_shard.training.train_state import TrainState, with_strong_type

_STATE_OPTIONS = ("loss_fn_state", "trainable", "plain_arrays")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Layout(LayoutPresets, LayoutFiles):
    """How a model is laid over a mesh while it is stored and while it computes.

    The presets are those of the literature. A layout is used with any model and any mesh that has
    the axes which it names. Every preset also takes:

    - ``vocabulary``: the mesh axis over which the vocabulary is split, in the embedding table, in
      the layer that gives logits, and in the logits; see ``cross_entropy``. ``"auto"`` is the mesh
      axis of the layers, where there is one and the vocabulary divides; None leaves it whole.
    - ``experts``: the mesh axis over which the experts of a mixture of experts are split (Lepikhin
      et al. 2020, "GShard", arXiv:2006.16668).
    - where it splits the largest dimension of arrays, ``min_size``: arrays with fewer elements stay
      whole; and ``unnamed="largest"``, to split arrays without names, too.

    Attributes:
        parameters: How parameters and their gradients are stored; rules in any form that
            ``AxisRules`` takes.
        compute: How layers compute: what flows in and out of them, and their parameters.
        optimizer: How the optimizer's arrays are stored; None as their parameters.
        between_blocks: How activations lie between layers, if not as ``compute`` says.
        reshard_after_forward: Whether a gathered parameter is gathered again in the backward pass.
        manual: Whether blocks run per device with ``jax.shard_map``, as in ``manual_fsdp``.
        rematerialise: What a block keeps for its backward pass, as a policy of ``Checkpointed``,
            such as ``"dots"``; the rest is computed, and parameters are gathered, again.
        precision: The dtype to compute in, such as ``"bfloat16"``; None for that of the parameters.
        blocks: The layers that read activations and give what is added to them, as a place of
            ``wrap``: whole blocks, or attention and feed-forward where these are split. None finds
            those of Penzai's transformers, in any other sequence its layers that have parameters,
            and in what is neither none; ``()`` says that there are none. Parameters are then
            gathered in front of the loss, and activations are left to the compiler.
        names: What the model calls the axes of which rules speak, where these are not the names of
            Penzai's transformers: ``{"neurons": "mlp"}``. The roles are ``batch``, ``seq``,
            ``embedding``, ``neurons``, ``heads``, ``vocabulary`` and ``experts``; None leaves an
            axis whole.

    Raises:
        RuleTypeError: A field cannot be read, or two contradict each other.

    >>> Layout.fully_sharded()
    Layout(
        parameters=AxisRules(largest dimension -> 'data'),
        compute=AxisRules('batch' -> 'data'),
    )
    """

    parameters: Any
    compute: Any
    optimizer: Any = None
    between_blocks: Any = None
    reshard_after_forward: bool = False
    manual: bool = False
    rematerialise: str | None = None
    precision: str | None = None
    blocks: Any = None
    names: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in TABLES:
            rules = getattr(self, name)
            if rules is not None or name in TABLES[:2]:
                object.__setattr__(self, name, AxisRules(rules))
        if self.rematerialise is not None:
            check_policy("Layout", self.rematerialise, name="rematerialise")
        problems = Problems("Layout:")
        names = self.names if isinstance(self.names, Mapping) else [self.names]
        add_unknown(problems, "names", names, axis_roles.ROLES)
        if self.precision not in (None, "bfloat16"):
            problems.add("precision", f"it is {self.precision!r}", "Write 'bfloat16', or None.")
        split = {role: axis_roles.mesh_axes_of(role, [self.compute]) for role in axis_roles.ROLES}
        roles = (*axis_roles.IN_LAYERS, "vocabulary")
        for role in roles:
            if shared := {*split["batch"]} & {*split[role]}:
                what = f"batch and {role} are both split over mesh axis {min(shared)!r}"
                problems.add("compute", what, "Give them different mesh axes.")
        is_split = any(split[role] for role in roles) or self.between_blocks is not None
        if self.manual and (is_split or self.reshard_after_forward):
            what = "blocks run per device: they are not split, and gather each parameter once"
            problems.add("manual", what, "Write manual=False.")
        problems.raise_if_any(RuleTypeError)

    def __repr__(self) -> str:
        given = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        shown = (f"    {name}={x!r},\n" for name, x in given if x not in (None, False, {}))
        return f"Layout(\n{''.join(shown)})"

    @classmethod
    def auto(cls, mesh: AnyMesh) -> Self:
        """The preset that the names of a mesh's axes say.

        ``data`` is fully sharded, ``data`` and ``model`` is two-dimensional, ``replica`` and
        ``data`` is hybrid, ``model`` is tensor parallel.

        Args:
            mesh: The mesh, or the sizes of its axes by name.

        Raises:
            MeshError: They say none.

        >>> Layout.auto({"replica": 2, "data": 4}) == Layout.hybrid()
        True
        """
        presets: dict[Any, Callable[[], Self]] = {
            ("data",): cls.fully_sharded,
            ("data", "model"): cls.two_dimensional,
            ("data", "replica"): cls.hybrid,
            ("model",): functools.partial(cls.tensor_parallel, None),
        }
        sizes = mesh if isinstance(mesh, Mapping) else arguments.read("Layout", mesh, {}).mesh.shape
        preset = presets.get(tuple(sorted(sizes)))
        if preset is None:
            what = f"no preset is for a mesh with the axes {mesh_text(sizes)}"
            fix = "Call them data, data and model, or replica and data; or name a preset."
            raise MeshError("Layout.auto:", [Problem("", what, fix)])
        return preset()

    # What follows for a model

    def for_model(self, tree: Any, mesh: AnyMesh) -> "Layout":
        """The layout in a model's own names.

        Args:
            tree: A model or a train state, concrete or abstract.
            mesh: The mesh.

        Raises:
            MeshError: A rule names a mesh axis that the mesh does not have.
            RuleTypeError: The model does not have an axis that the layout splits.

        >>> import jax, penzai_shard as pzs
        >>> from penzai import pz
        >>> up = pz.nn.Linear.from_config("up", jax.random.key(0), {"embed": 4}, {"mlp": 8})
        >>> layout = Layout.tensor_parallel(names={"neurons": "mlp", "heads": None})
        >>> layout.for_model(up, pzs.make_mesh({"data": 4, "model": 2})).parameters
        AxisRules('mlp' -> 'model')
        """
        return dataclasses.replace(self, **self.find_roles(tree, mesh).tables, names={})

    def find_roles(self, tree: Any, mesh: AnyMesh) -> axis_roles.FoundRoles:
        """The layout's tables in a model's own names, and which axes they split.

        All that a layout does to a model follows from this; ``for_model`` has the errors.
        """
        arguments.read("Layout", mesh, {})  # Refuses what is no mesh.
        tables = {name: table for name in TABLES if (table := getattr(self, name)) is not None}
        return axis_roles.find_roles(tree, mesh, tables, self.names)

    def plan(self, tree: Any, mesh: AnyMesh, **options: Any) -> ShardingPlan:
        """Decides where every array of a model, or of a train state, is stored.

        Args:
            tree: A model or a train state, concrete or abstract.
            mesh: The mesh, concrete or abstract.
            **options: ``on_indivisible`` and ``on_unnamed``, as for ``make_plan``.

        Warns:
            ShardingWarning: Much memory goes to arrays that the mesh does not divide.

        Raises:
            PlanError, MeshError, RuleTypeError: As ``make_plan`` and ``for_model``.

        >>> import penzai_shard as pzs
        >>> from penzai import pz
        >>> model = {"w": pz.nx.ones({"embedding": 64, "neurons": 256})}
        >>> layout, mesh = Layout.fully_sharded(), pzs.make_mesh({"data": 8}, abstract=True)
        >>> layout.plan(model, mesh).leaves[0].reason
        "'neurons' -> 'data' (largest free)"
        """
        found = self.find_roles(tree, mesh)
        plan = make_plan(tree, mesh, found.tables["parameters"], **options)
        whole = _find_whole(plan)
        if isinstance(tree, TrainState) and self.optimizer is not None:
            other = make_plan(tree, mesh, found.tables["optimizer"], **options)
            pairs = zip(plan.leaves, other.leaves, strict=True)
            leaves = [b if a.path.startswith("opt_state/") else a for a, b in pairs]
            plan, whole = dataclasses.replace(plan, leaves=tuple(leaves)), _find_whole(other)
        warn_caller(whole)
        return dataclasses.replace(plan, remarks=(*plan.remarks, *found.notes, *whole))

    def recipe(self, model: Any, mesh: AnyMesh) -> Recipe:
        """The edits by which a model computes in this layout.

        They change no value and no parameter's name, and ``strip`` takes them off.

        Args:
            model: The model, concrete or abstract, not edited so yet.
            mesh: The mesh.

        Raises:
            RuleTypeError: The model is in a layout already, or does not have an axis that the
                layout splits.
            MeshError: A rule names a mesh axis that the mesh does not have.
        """
        return self._make_edits(model, mesh).make()

    def gathering(self, model: Any, mesh: AnyMesh) -> Callable[..., Any] | None:
        """What gathers all parameters in front of the loss, for ``build_eval_step_fn(gather=)``.

        It is for models whose blocks the layout does not know, so that ``recipe`` cannot gather
        them block by block: dictionaries, modules of Equinox and of NNX, any with ``blocks=()``. It
        is None where blocks are known, where nothing is to be gathered, and for models of linen and
        Haliax, which have constraints of their own.

        Args:
            model: The model, concrete or abstract.
            mesh: The mesh.
        """
        return self._make_edits(model, mesh).make_gathering()

    def _make_edits(self, model: Any, mesh: AnyMesh) -> RecipeMaker:
        return RecipeMaker(model, auto_twin(mesh), self, self.find_roles(model, mesh))

    def computing(self, loss_fn: Callable[..., Any], mesh: AnyMesh) -> Callable[..., Any]:
        """A loss function whose model computes in this layout, for an evaluation, for instance.

        It concerns models that constrain their activations themselves, by
        ``nn.with_logical_constraint`` of Flax or ``hax.shard``: while the loss is computed,
        ``compute`` and the mesh are in force. ``build`` does so for the train step, after
        ``for_model``.

        Args:
            loss_fn: As for ``build_train_step_fn``.
            mesh: The mesh.

        Returns:
            A loss function with the same arguments.

        Warns:
            ShardingWarning: While it is traced: a rule of ``compute`` is for nearly a name that a
                model of linen asks for, or for nearly one of ``parameters``, and for none of them.
        """
        rules = [
            dataclasses.replace(rule, logical_axis=axis)
            for rule in self.compute.rules
            for axis in axis_roles.axes_of_role(rule.logical_axis, self.names)
        ]
        return compute_by_rules(loss_fn, auto_twin(mesh), rules, self.parameters.logical_axes)

    # Training

    def shard_batch(self, batch: Any, mesh: AnyMesh, **options: Any) -> Any:
        """Puts a batch on a mesh, split along the logical axes of the batch and no other.

        Args:
            batch: A tree of named arrays, or of plain ones with ``first_axis="batch"``.
            mesh: The mesh.
            **options: As for ``penzai_shard.shard_batch``.

        Raises:
            RuleTypeError: No array has a logical axis of the batch, so that every device would
                compute all of it.
            PlanError, MeshError: As ``penzai_shard.shard_batch``.
        """
        over = axis_roles.mesh_axes_of("batch", [self.compute])
        axes = axis_roles.axes_of_role("batch", self.names) if over else ()
        present = {name for leaf in leaves_of(batch) for name in leaf.names or ()}
        if axes and not {*axes} & {*present, options.get("first_axis")}:
            known = ", ".join(sorted(map(repr, present - {None}))) or "none"
            what = f"no array has the logical axis {axes[0]!r}; they have {known}"
            fix = f"Write first_axis={axes[0]!r} for plain arrays, or names={{'batch': ...}}."
            raise RuleTypeError("Layout.shard_batch:", [Problem("", what, fix)])
        return shard_batch(batch, mesh, [(axis, over) for axis in axes], **options)

    def build(
        self,
        initializer: Callable[..., Any],
        *args: Any,
        mesh: AnyMesh,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        rng: Any,
        on_unnamed: arguments.OnUnnamed = "error",
        **step_options: Any,
    ) -> tuple[TrainState, Any]:
        """Builds, edits and lays out a model, its train state and its step.

        Each device makes its own part of the parameters, and of what the optimizer keeps.

        Args:
            initializer: A function that returns the model, as for ``sharded_init``. Stacks of
                layers run as loops if it rolls them: ``roll_layer_stacks().apply(model)``.
            *args: Its arguments; named ones by ``functools.partial``.
            mesh: The mesh. On an abstract one nothing is made: the state is one of structs, to
                price its step.
            loss_fn: As for ``build_train_step_fn``.
            optimizer: An optimizer of optax.
            rng: The random key of the run.
            on_unnamed: As for ``make_plan``.
            **step_options: Options of ``build_train_step_fn``, and ``loss_fn_state``, ``trainable``
                and ``plain_arrays`` of ``TrainState.initial_state``. The step donates the state
                unless ``donate_params_and_state=False``, and reports the loss unless
                ``step_metrics=()``.

        Returns:
            The state, whose ``model`` is the edited one, and the step.

        Raises:
            PlanError, MeshError, RuleTypeError: As the functions that this one calls.

        >>> import optax, penzai_shard as pzs
        >>> from penzai import pz
        >>> def loss_fn(model, rng, state, x):
        ...     return (model["w"] * x).untag("batch", "features").sum().unwrap(), state, {}
        >>> layout, mesh = Layout.fully_sharded(min_size=1), pzs.make_mesh({"data": 8})
        >>> state, step = layout.build(
        ...     lambda key: {"w": pz.nx.ones({"features": 8})},
        ...     jax.random.key(0),
        ...     mesh=mesh,
        ...     loss_fn=loss_fn,
        ...     optimizer=optax.sgd(0.1),
        ...     rng=jax.random.key(1),
        ... )
        >>> batch = layout.shard_batch({"x": pz.nx.ones({"batch": 8, "features": 8})}, mesh)
        >>> state, aux = step(state, **batch)
        >>> int(state.step), state.params["w"].data_array.sharding.spec
        (1, P('data',))
        """
        of_state = {name: step_options.pop(name) for name in _STATE_OPTIONS if name in step_options}
        shapes = abstract_model(initializer, *args)
        layout, edit = self.for_model(shapes, mesh), self.recipe(shapes, mesh).apply
        plan = make_plan(shapes, mesh, layout.parameters, on_unnamed=on_unnamed)

        with auto_context():
            # A state of structs says where the optimizer's arrays belong, which are made there.
            structs = edit(plan.restore_structs())
            state = TrainState.initial_state(structs, optimizer, rng, **of_state)
            state_plan = layout.plan(state, mesh, on_unnamed=on_unnamed)
            shardings = state_plan.sharding_tree()
            if isinstance(mesh, AbstractMesh):
                state = state_plan.restore_structs()
            else:
                model = edit(sharded_init(initializer, *args, mesh=mesh, plan=plan))
                optax = require("optax", extra="train")
                made = TrainState.initial_state(model, optax.identity(), rng, **of_state)
                init = jax.jit(optimizer.init, out_shardings=shardings.opt_arrays)
                opt_arrays = jax.tree.map(with_strong_type, init(made.trained_arrays))
                state = dataclasses.replace(made, opt_arrays=opt_arrays, template=state.template)
        step_options.setdefault("donate_params_and_state", step_options.get("jit", True))
        step_options.setdefault("step_metrics", ["loss"])
        step_options.setdefault("gather", self.gathering(shapes, mesh))
        step_options["train_state_shardings"] = shardings
        return state, build_train_step_fn(layout.computing(loss_fn, mesh), **step_options)


def _find_whole(plan: ShardingPlan) -> list[str]:
    """Warns of arrays that the mesh does not divide, if much of the memory is theirs."""
    rule = next((rule for rule in plan.rules.rules if rule.logical_axis is None), IDENTITY)
    parts = specs.part_count(rule.mesh_axes, plan.mesh.shape)
    large = [x for x in plan.leaves if x.shape and math.prod(x.shape) >= rule.min_size]
    asked = [leaf for leaf in large if leaf.names is not None or rule.unnamed]
    whole = [leaf for leaf in asked if leaf.bytes_per_device == leaf.total_bytes]
    lost = sum(leaf.total_bytes for leaf in whole)
    if parts == 1 or lost <= 0.1 * plan.bytes_per_device:
        return []

    fix = "Pad them, or write data=('data', 'more') on a mesh of which each mesh axis divides one."
    return [
        f"arrays that are whole on every device: {len(whole)}, such as {whole[0].path} "
        f"{whole[0].shape}, of which rule {rule} ({parts}) divides no dimension. {fix}"
    ]
