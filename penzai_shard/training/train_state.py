"""Holds everything that a training run carries from step to step.

A state is a pytree of plain arrays by path: a step hands its fields to a compiled program as they
are, and takes nothing apart. All that the arrays mean is static: the rest of the model, and the
optimizer. Plans, placement and checkpoints see a state through its reader, with names.
"""

import dataclasses
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from penzai_shard import specs
from penzai_shard.arrays.inputs import bound_sharding, find_mesh, make_struct, run_inputs
from penzai_shard.arrays.kinds import is_key_type, is_struct, is_traced
from penzai_shard.arrays.statistics import name_statistics
from penzai_shard.arrays.structure import Leaf, Named, Structure, flatten, leaves_of
from penzai_shard.errors import Problems, ShardingError, check_arguments
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import arguments
from penzai_shard.planning.planner import plan_tree
from penzai_shard.processes.arrays import put
from penzai_shard.readers.reader import Content, register_reader
from penzai_shard.rules import OnIndivisible
from penzai_shard.training.model_parts import Kind, StateTemplate, name_array, split_model

_FIELDS = "step", "params", "opt_state", "state_vars", "loss_fn_state", "root_rng"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrainState:
    """A model, the state of its optimizer, and what else a training run carries along.

    It is a pytree: ``jax.device_put(state, train_state_sharding(state, mesh, rules))`` lays it out,
    and ``jax.tree.map`` goes through its arrays. Two states have the same structure if their models
    and optimizers were built in the same way.

    Attributes:
        step: The number of steps that were made.
        trained_arrays: The parameters that are trained, by path, without names.
        opt_arrays: The state that optax made of these.
        state_arrays: What the model itself changes, such as running means, by path.
        loss_fn_state: What the loss function gets as ``state``, and returned in the last step.
        root_rng: The random key of the run, from which each step derives its own.
        fixed_arrays: The other arrays of the model, by path: frozen parameters, and constants.
        template: The rest of the model, and the optimizer.

    >>> import optax
    >>> from penzai import pz
    >>> model = {"w": pz.nx.ones({"features": 8})}
    >>> state = TrainState.initial_state(model, optax.adam(1e-3), jax.random.key(0))
    >>> state, state.params["w"].named_shape
    (TrainState(step=0, 1 trained, 0 frozen, 0 state), {'features': 8})
    """

    step: Any
    trained_arrays: dict[str, Any]
    opt_arrays: Any
    state_arrays: dict[str, Any]
    loss_fn_state: Any
    root_rng: Any
    fixed_arrays: dict[str, Any]
    template: StateTemplate = dataclasses.field(metadata={"static": True})

    @classmethod
    def initial_state(
        cls,
        model: Any,
        optimizer_def: Any,
        root_rng: Any,
        loss_fn_state: Any = None,
        *,
        trainable: Callable[[Any], bool] | None = None,
        plain_arrays: bool | None = None,
    ) -> "TrainState":
        """The state before the first step.

        If an array of the model is on a mesh, the optimizer's state is made there, laid out as the
        parameters that it belongs to, and all else is copied to every device of the mesh. Of
        parameters that are shapes, the optimizer's state is shapes too.

        Args:
            model: A model of any library. It stays as it is, but shares its arrays with the state.
            optimizer_def: An optimizer of optax; its ``init`` gets the trained parameters as a
                dictionary by path.
            root_rng: A random key.
            loss_fn_state: What the loss function gets as ``state`` in the first step.
            trainable: Whether a parameter is trained; it is called with a ``pz.ParameterValue``
                that has the parameter's path as ``label``. By default those are that are not
                frozen, and whose metadata do not say ``{"trainable": False}``.
            plain_arrays: Whether a loss function gets plain arrays. By default in place of the
                boxes of linen and of names in a module of Equinox; True also in place of names in
                a dictionary, False never.

        Raises:
            RuleTypeError: An argument is of the wrong kind.
            ShardingError: Arrays are deleted, or are no arrays; two have one path; or no parameter
                is trained.
            MeshError: Arrays are on different devices.

        >>> import optax
        >>> state = TrainState.initial_state(
        ...     {"w": jnp.ones((2, 3))}, optax.adam(1e-3), jax.random.key(0)
        ... )
        >>> state, state.opt_state[0].mu["w"].shape
        (TrainState(step=0, 1 trained, 0 frozen, 0 state), (2, 3))
        """
        called = "TrainState.initial_state"
        is_optimizer = all(callable(getattr(optimizer_def, x, None)) for x in ("init", "update"))
        seed = root_rng if isinstance(root_rng, int) else 0
        checks = {
            "optimizer_def": (optimizer_def, is_optimizer, "optax.adam(1e-3)"),
            "root_rng": (root_rng, _is_key(root_rng), f"jax.random.key({seed})"),
        }
        check_arguments(called, checks)
        arrays, template = split_model(model, optimizer_def, trainable, plain_arrays)
        fixed = arrays[Kind.FROZEN] | arrays[Kind.CONSTANT]
        carry = arrays[Kind.STATE], loss_fn_state, root_rng, fixed, template
        state = cls(jnp.zeros((), jnp.int32), arrays[Kind.TRAINED], None, *carry)

        leaves, structure = read_arrays(state, called, allow_structs=True)
        # What is bound to one device, as constants of an abstract model are, follows the others.
        mesh = find_mesh((x for x in leaves if hasattr(bound_sharding(x.value), "mesh")), called)
        state = cast(TrainState, structure.fill(put_on_mesh(leaves, mesh, {})))

        init, trained = optimizer_def.init, state.trained_arrays
        opt_arrays = jax.eval_shape(init, trained)
        if mesh is not None:
            shapes = dataclasses.replace(state, opt_arrays=opt_arrays)
            shardings = _find_optimizer_shardings(shapes, mesh)
            init = jax.jit(init, out_shardings=shardings)
            opt_arrays = jax.tree.map(lambda x, own: x.update(sharding=own), opt_arrays, shardings)
        if not any(map(is_struct, trained.values())):
            # On one device operation by operation: to compile them takes three times as long.
            opt_arrays = init(trained)
        opt_arrays = jax.tree.map(with_strong_type, opt_arrays)
        return dataclasses.replace(state, opt_arrays=opt_arrays)

    @property
    def optimizer_def(self) -> Any:
        """The optimizer."""
        return self.template.optimizer

    @property
    def model(self) -> Any:
        """The model with the current values, in new variables."""
        return self.template.bind(self.trained_arrays | self.state_arrays | self.fixed_arrays)

    @property
    def params(self) -> Any:
        """Every parameter by path, with its logical axes; ``replace`` takes others."""
        return _view(self._name_arrays(Kind.TRAINED, Kind.FROZEN))

    @property
    def state_vars(self) -> Any:
        """What the model itself changes, by path, with logical axes."""
        return _view(self._name_arrays(Kind.STATE))

    @property
    def opt_state(self) -> Any:
        """The optimizer's state, in which what belongs to a parameter has its logical axes."""
        return _view(self.statistics())

    def named_fields(self) -> dict[str, Any]:
        """The state as plans and checkpoints see it: a ``Named`` for each array with names."""
        return {
            "step": self.step,
            "params": self._name_arrays(Kind.TRAINED, Kind.FROZEN),
            "opt_state": self.statistics(),
            "state_vars": self._name_arrays(Kind.STATE),
            "loss_fn_state": self.loss_fn_state,
            # A raw key is an array, whose dimension has nothing to name.
            "root_rng": Named(self.root_rng, (None,) * len(getattr(self.root_rng, "shape", ()))),
            "constants": self._name_arrays(Kind.CONSTANT),
        }

    def _name_arrays(self, *kinds: Kind) -> dict[str, Any]:
        role = "parameter" if Kind.TRAINED in kinds else kinds[0].value
        arrays = self.trained_arrays | self.state_arrays | self.fixed_arrays
        names, kind_of = self.template.names, self.template.kinds
        paths = [path for path in arrays if kind_of[path] in kinds]
        return {path: Named(arrays[path], names[path], role) for path in paths}

    def statistics(self) -> Any:
        """``opt_arrays`` with a ``Named`` for each array, which says what it is a statistic of."""
        fields = {"opt_state": self.opt_arrays, "params": self._name_arrays(Kind.TRAINED)}
        leaves, structure = flatten(fields)
        named = [Named(x.value, x.names, statistic=x.statistic) for x in name_statistics(leaves)]
        return structure.fill_alike(named)["opt_state"]

    def replace(self, **fields: Any) -> "TrainState":
        """A state with other values in some fields.

        Args:
            **fields: ``params``, ``state_vars`` and ``opt_state`` as these properties give them, or
                some of their arrays; ``step``, ``root_rng``, ``loss_fn_state``.

        Raises:
            ShardingError: A path is not one of the state's, or an array has another shape or other
                names; all of them are in it.

        >>> import optax
        >>> state = TrainState.initial_state({"w": jnp.ones(2)}, optax.sgd(0.1), jax.random.key(0))
        >>> state.replace(params={"w": jnp.zeros(2)}).model["w"].tolist()
        [0.0, 0.0]
        """
        new = {leaf.path: leaf for leaf in leaves_of(self) + leaves_of(fields)}
        fix = "Give arrays like those of the state."
        return cast(TrainState, keep_form(self, [*new.values()], fix))

    # What a step needs

    def arguments(self) -> tuple[Any, Any, Any]:
        """The fields as the program of a step takes them: what it replaces, and what it reads."""
        fields = self.trained_arrays, self.opt_arrays, self.state_arrays, self.loss_fn_state
        return fields, self.step, (self.root_rng, self.fixed_arrays)

    def with_fields(self, fields: Sequence[Any], step: Any) -> "TrainState":
        """The state that follows, with new values of what a step replaces."""
        values: Any = step, *fields, self.root_rng, self.fixed_arrays, self.template
        return TrainState(*values)

    def __repr__(self) -> str:
        kinds = [*self.template.kinds.values()]
        counts = [f"{kinds.count(kind)} {kind}" for kind in (Kind.TRAINED, Kind.FROZEN, Kind.STATE)]
        return f"TrainState(step={self.step}, {', '.join(counts)})"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        import treescope

        # Mapped one by one, since jax.tree.map sorts a dictionary, and the step comes first.
        fields = {name: _view(value) for name, value in self.named_fields().items()}
        render = treescope.repr_lib.render_object_constructor
        return render(TrainState, fields, path=path, subtree_renderer=subtree_renderer)


def _view(named: Any) -> Any:
    """A tree with the arrays themselves in place of each ``Named``, as Penzai names them."""

    def name(value: Any) -> Any:
        return name_array(value.value, value.names) if isinstance(value, Named) else value

    return jax.tree.map(name, named)


def _is_key(value: Any) -> bool:
    """Whether a value is a random key, typed or raw."""
    dtype, rank = getattr(value, "dtype", None), len(getattr(value, "shape", ()))
    return (dtype == "uint32" and rank == 1) or (is_key_type(dtype) and not rank)


def _find_optimizer_shardings(state: TrainState, mesh: AnyMesh) -> Any:
    """Shardings of an optimizer's arrays, which lie as the dimensions of their parameters."""

    def find_sharding(value: Named) -> NamedSharding:
        axes: tuple[Any, ...] = ()
        statistic = value.statistic
        if statistic is not None and statistic.kept is not None:
            parameter = state.trained_arrays[statistic.parameter.removeprefix("params/")]
            of_parameter = specs.mesh_axes(parameter.sharding.spec, len(parameter.shape))
            axes = tuple(() if dim is None else of_parameter[dim] for dim in statistic.kept)
        return NamedSharding(mesh, specs.canonical(axes))

    return jax.tree.map(find_sharding, state.statistics())


# Arguments and arrays as a step takes them


def read_arrays(
    tree: Any, called: str, *, allow_structs: bool = False
) -> tuple[list[Leaf], Structure]:
    """Takes a tree apart as ``run_inputs`` does, in which there may be nothing but arrays.

    Raises:
        ShardingError: There are texts or functions; all of them are in it.
    """
    leaves, structure = run_inputs(tree, called, allow_structs=allow_structs)
    problems = Problems(f"{called} takes and gives arrays:")
    for path, value in structure.statics:
        what = f"the {type(value).__name__} {reprlib.repr(value)} is no array"
        problems.add(path, what, "Bind it to the loss function itself: functools.partial.")
    problems.raise_if_any(ShardingError)
    return leaves, structure


def with_strong_type(value: Any, dtype: Any = None) -> Any:
    """An array whose dtype stays where it meets another; that of a Python number gives way.

    Args:
        value: The array, which comes back if it is so.
        dtype: Another dtype for it.
    """
    if is_struct(value):
        return value.update(dtype=dtype or value.dtype, weak_type=False)
    array = jnp.asarray(value)
    return jax.lax.convert_element_type(array, dtype or array.dtype)


def keep_form(old: Any, new: Sequence[Leaf], fix: str) -> Any:
    """A tree with new values in the form of old ones, so that the next step is the same program.

    Floats of another precision are rounded to what they were.

    Args:
        old: A state, or some of its fields.
        new: What takes the places of its arrays, by path.
        fix: What to do about another form.

    Raises:
        ShardingError: Paths, shapes, names or kinds of dtypes differ; all that do are in it.
    """

    def write(leaf: Leaf) -> str:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        names = f" with axes {leaf.names}" if any(leaf.names or ()) else ""
        return f"{'float' if is_float else leaf.dtype}{list(leaf.shape)}{names}"

    leaves, structure = flatten(old)
    before, after = ({leaf.path: leaf for leaf in each} for each in (leaves, new))
    problems = Problems("arrays of a train state must keep their form:")
    was, became = ({path: write(leaf) for path, leaf in side.items()} for side in (before, after))
    problems.compare(was, became, "it was {}, and became {}", fix)
    problems.raise_if_any(ShardingError)
    pairs = [(after[leaf.path].value, leaf.dtype) for leaf in leaves]
    return structure.fill_alike([with_strong_type(value, dtype) for value, dtype in pairs])


def put_on_mesh(
    leaves: Sequence[Leaf], mesh: AnyMesh | None, shardings: Mapping[str, Any]
) -> list[Any]:
    """The arrays of a state, each once, with strong types, and all on a mesh if some are.

    Args:
        leaves: The arrays.
        mesh: The mesh over which some of them lie.
        shardings: By path where arrays go that are on no mesh; others go to every device.
    """
    values = [with_strong_type(leaf.value) for leaf in leaves]
    moves: dict[int, NamedSharding] = {}
    seen: set[int] = set()
    for index, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
        if id(value) in seen and not is_struct(value):
            # Nobody can donate an array twice.
            values[index] = value.copy()
        seen.add(id(value))
        is_bound = isinstance(bound_sharding(value), NamedSharding)
        if mesh is not None and not is_bound and not is_traced(value):
            moves[index] = shardings.get(leaf.path) or NamedSharding(mesh, PartitionSpec())
            if is_struct(value) or isinstance(mesh, AbstractMesh):
                values[index] = make_struct(value).update(sharding=moves.pop(index))
    paths = [leaves[index].path for index in moves]
    placed = put([values[index] for index in moves], [*moves.values()], paths=paths)
    for index, array in zip(moves, placed, strict=True):
        values[index] = array
    return values


# Layouts


def train_state_sharding(
    train_state: TrainState,
    mesh: AnyMesh,
    rules: Any = None,
    optimizer_rules: Any = None,
    *,
    axis_name_to_mesh_name: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: arguments.OnUnnamed = "error",
) -> TrainState:
    """The layout of a train state, as a state of shardings.

    An array of the optimizer lies as the dimensions of its parameter that it has.

    Args:
        train_state: A state, of arrays or of shapes.
        mesh: As for ``make_plan``.
        rules: As for ``make_plan``.
        optimizer_rules: Other rules for the optimizer's arrays, as ZeRO-1 splits them further than
            the parameters.
        axis_name_to_mesh_name: The rules under Penzai's name.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.

    Returns:
        A state of shardings: for ``jax.device_put``, and for ``build_train_step_fn``.

    Raises:
        RuleTypeError: It is no train state, or an argument cannot be read.
        PlanError, MeshError: As ``make_plan``.

    >>> import optax
    >>> import penzai_shard as pzs
    >>> model = pzs.name_axes({"w": jnp.ones((8, 4))}, {"w": ("in", "out")})
    >>> state = TrainState.initial_state(model, optax.adam(1e-3), jax.random.key(0))
    >>> shardings = train_state_sharding(state, pzs.make_mesh({"data": 8}), {}, {"in": "data"})
    >>> shardings.trained_arrays["w"].spec, shardings.opt_arrays[0].mu["w"].spec
    (P(), P('data',))
    """
    called = "train_state_sharding"
    is_state, fix = isinstance(train_state, TrainState), "train_state_sharding(state, mesh, rules)"
    check_arguments(called, {"train_state": (train_state, is_state, fix)})
    options: Any = {"on_indivisible": on_indivisible, "on_unnamed": on_unnamed}
    request = arguments.read(called, mesh, rules, axis_name_to_mesh_name, **options)
    shardings = cast(TrainState, plan_tree(train_state, request).sharding_tree())
    if optimizer_rules is None:
        return shardings
    request = arguments.read(called, mesh, optimizer_rules, **options)
    others = plan_tree(train_state, request).sharding_tree()
    return dataclasses.replace(shardings, opt_arrays=others.opt_arrays)


class _TrainStates:
    library = __name__

    def reads(self, kind: type) -> bool:
        return kind is TrainState

    def open(self, node: TrainState) -> Content:
        return Content(node.named_fields(), node.template)

    def close(self, template: StateTemplate, data: Any) -> TrainState:
        step, params, *others = (data[field] for field in _FIELDS)
        fixed = params | data["constants"]
        trained = {path: fixed.pop(path) for path in params if template.kinds[path] == Kind.TRAINED}
        values: Any = step, trained, *others, fixed, template
        return TrainState(*values)


register_reader(_TrainStates())
