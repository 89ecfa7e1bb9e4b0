"""Holds everything that a training run carries from step to step.

A state is a pytree of plain arrays by path: a step hands its fields to a compiled program as they
are, and takes nothing apart. All that the arrays mean is static: the rest of the model, and the
optimizer. Plans, placement and checkpoints see a state through its reader, with names.
"""

import dataclasses
import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from penzai_shard import specs
from penzai_shard.arrays.inputs import bound_sharding, find_mesh, run_inputs
from penzai_shard.arrays.kinds import is_key_type, is_struct, is_traced
from penzai_shard.arrays.statistics import kept_dimensions
from penzai_shard.arrays.structure import Leaf, Named, Statistic, flatten, leaves_of
from penzai_shard.errors import Problems, RuleTypeError, ShardingError
from penzai_shard.jax_internals.tracing import is_weak_type
from penzai_shard.meshes import AnyMesh
from penzai_shard.paths import join_paths, path_text
from penzai_shard.planning import arguments
from penzai_shard.planning.planner import plan_tree
from penzai_shard.processes.arrays import put
from penzai_shard.readers.reader import Content
from penzai_shard.rules import OnIndivisible
from penzai_shard.training.model_parts import (
    CONSTANT,
    FROZEN,
    SETTING,
    STATE,
    TRAINED,
    StateTemplate,
    name_array,
    split_model,
)

_NOTHING: Mapping[Any, Any] = types.MappingProxyType({})


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
    """

    step: Any
    trained_arrays: dict[str, Any]
    opt_arrays: Any
    state_arrays: dict[str, Any]
    loss_fn_state: Any
    root_rng: Any
    fixed_arrays: dict[str, Any]
    template: StateTemplate = dataclasses.field(metadata={"static": True})
    # What steps keep with a state, by step.
    prepared: ClassVar[Mapping[Any, Any]] = _NOTHING

    @classmethod
    def initial_state(
        cls,
        model: Any,
        optimizer_def: Any,
        root_rng: Any,
        loss_fn_state: Any = None,
        *,
        trainable: Callable[[Any], bool] | None = None,
        optimizer_rules: Any = None,
        on_unnamed: arguments.OnUnnamed = "error",
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
            optimizer_rules: Rules for the optimizer's state, if the model is on a mesh; as its
                parameters by default.
            on_unnamed: As for ``make_plan``, with ``optimizer_rules``.
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
        name = getattr(optimizer_def, "__name__", "adam")
        is_predicate = trainable is None or callable(trainable)
        checks = {
            "optimizer_def": (optimizer_def, is_optimizer, f"optax.{name}(1e-3)"),
            "root_rng": (root_rng, _is_key(root_rng), "jax.random.key(0)"),
            "trainable": (trainable, is_predicate, "lambda parameter: 'lora' in parameter.label"),
        }
        check_arguments(called, checks)
        arrays, structure = split_model(model, trainable)
        kinds = {path: kind for kind, found in arrays.items() for path in found}
        settings, fixed = arrays[SETTING], arrays[FROZEN] | arrays[CONSTANT]
        template = StateTemplate(structure, kinds, settings, optimizer_def, plain_arrays)
        fields = arrays[TRAINED], None, arrays[STATE], loss_fn_state, root_rng, fixed, template
        state = cls(jnp.zeros((), jnp.int32), *fields)

        leaves, structure = run_inputs(state, called, allow_structs=True)
        refuse_statics(structure.statics, called)
        # What is bound to one device, as constants of an abstract model are, follows the others.
        mesh = find_mesh((x for x in leaves if hasattr(bound_sharding(x.value), "mesh")), called)
        is_abstract = any(is_struct(leaf.value) for leaf in leaves)
        state = cast(TrainState, structure.fill(settle(leaves, mesh)))

        init, trained = optimizer_def.init, state.trained_arrays
        shapes = dataclasses.replace(state, opt_arrays=jax.eval_shape(init, trained))
        made = shapes.opt_arrays
        if mesh is not None:
            shardings = _layout_optimizer(shapes, mesh, optimizer_rules, on_unnamed)
            init = jax.jit(init, out_shardings=shardings)
            made = jax.tree.map(lambda struct, own: struct.update(sharding=own), made, shardings)
        if not is_abstract:
            # On one device operation by operation: to compile them takes three times as long.
            made = init(trained)
        return dataclasses.replace(state, opt_arrays=jax.tree.map(strengthen, made))

    @property
    def optimizer_def(self) -> Any:
        """The optimizer."""
        return self.template.optimizer

    @property
    def model(self) -> Any:
        """The model with the current values, in new variables."""
        return self.template.bind(self.trained_arrays | self.state_arrays | self.fixed_arrays)

    @property
    def params(self) -> dict[str, Any]:
        """Every parameter by path, with its logical axes; ``replace`` takes others."""
        frozen = self._fixed_arrays(FROZEN)
        return self._named(self.trained_arrays | frozen)

    @property
    def state_vars(self) -> dict[str, Any]:
        """What the model itself changes, by path, with logical axes."""
        return self._named(self.state_arrays)

    @property
    def opt_state(self) -> Any:
        """The optimizer's state, in which what belongs to a parameter has its logical axes."""
        return self._map_statistics(lambda x, s: name_array(x, _statistic_names(s)) if s else x)

    def _named(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        names = self.template.names
        return {path: name_array(array, names[path]) for path, array in arrays.items()}

    def _fixed_arrays(self, kind: str) -> dict[str, Any]:
        kinds = self.template.kinds
        return {path: array for path, array in self.fixed_arrays.items() if kinds[path] == kind}

    def _map_statistics(self, function: Callable[[Any, Statistic | None], Any]) -> Any:
        """``opt_arrays`` with the results for each array and what is known of it."""
        definition: Any = jax.tree.structure(self.opt_arrays)
        pairs = zip(jax.tree.leaves(self.opt_arrays), self.statistics(), strict=True)
        return definition.unflatten(function(*pair) for pair in pairs)

    def statistics(self) -> list[Statistic | None]:
        """Of each array of ``opt_arrays``, in their order, to which parameter it belongs."""
        return [self._find_statistic(*item) for item in jax.tree.leaves_with_path(self.opt_arrays)]

    def _find_statistic(self, keys: Any, value: Any) -> Statistic | None:
        known = [i for i, key in enumerate(keys) if getattr(key, "key", "") in self.trained_arrays]
        if not known:
            return None
        number, path = known[-1], keys[known[-1]].key
        sizes, kept = getattr(self.trained_arrays[path], "shape", None), None
        if sizes is not None and hasattr(value, "shape"):
            # The path of the field, and what stands below the parameter, tell the convention.
            around = join_paths(path_text(keys[:number]), path_text(keys[number + 1 :]))
            kept = kept_dimensions(sizes, value.shape, around)
        return Statistic(f"params/{path}", self.template.names[path], sizes, kept)

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
        leaves, structure = flatten(self)
        own = {leaf.path: leaf for leaf in leaves}
        given = {leaf.path: leaf for leaf in leaves_of(fields)}
        problems = Problems("TrainState.replace:")
        for path, leaf in given.items():
            if path not in own:
                problems.add(path, "the state has no array of this path", f"It has {[*own][:5]}.")
            elif leaf.shape != own[path].shape or leaf.names not in (None, own[path].names):
                was = f"{own[path].shape} with axes {own[path].names}"
                what = f"it has shape {leaf.shape} with axes {leaf.names}, and had {was}"
                problems.add(path, what, "Give an array like the one that it replaces.")
        problems.raise_if_any(ShardingError)
        values = [given.get(leaf.path, leaf).value for leaf in leaves]
        return cast(TrainState, structure.fill(values))

    # What a step needs

    def arguments(self) -> tuple[Any, Any, Any]:
        """The fields as the program of a step takes them: what it replaces, and what it reads."""
        replaced = self.trained_arrays, self.opt_arrays, self.state_arrays, self.loss_fn_state
        return replaced, self.step, (self.root_rng, self.fixed_arrays)

    def after(self, replaced: Sequence[Any], step: Any, prepared: Any = _NOTHING) -> "TrainState":
        """The state that follows; made without the constructor, since each step makes one.

        Args:
            replaced: The new values of the fields that a step replaces.
            step: The new number of steps.
            prepared: What steps keep with the state, so that the next one is quick.
        """
        new: TrainState = object.__new__(TrainState)
        vars(new).update(vars(self), step=step, prepared=prepared)
        vars(new).update(zip(_REPLACED, replaced, strict=True))
        return new

    def __getstate__(self) -> dict[str, Any]:
        # What a step keeps with a state is not copied with it.
        return {name: value for name, value in vars(self).items() if name != "prepared"}

    def __repr__(self) -> str:
        kinds = [*self.template.kinds.values()]
        counts = [f"{kinds.count(kind)} {kind}" for kind in (TRAINED, FROZEN, STATE)]
        return f"TrainState(step={self.step}, {', '.join(counts)})"


_REPLACED = ("trained_arrays", "opt_arrays", "state_arrays", "loss_fn_state")


def _statistic_names(statistic: Statistic) -> tuple[Any, ...] | None:
    names, kept = statistic.names, statistic.kept
    if names is None or kept is None:
        return None
    return tuple(None if dim is None else names[dim] for dim in kept)


def _is_key(value: Any) -> bool:
    """Whether a value is a random key, typed or raw."""
    dtype, rank = getattr(value, "dtype", None), len(getattr(value, "shape", ()))
    return (dtype == "uint32" and rank == 1) or (is_key_type(dtype) and not rank)


def _layout_optimizer(
    state: TrainState, mesh: AnyMesh, rules: Any, on_unnamed: arguments.OnUnnamed
) -> Any:
    """Shardings of an optimizer's arrays: by rules, or as the dimensions of parameters lie."""
    if rules is not None:
        return train_state_sharding(state, mesh, rules, on_unnamed=on_unnamed).opt_arrays

    def find_sharding(array: Any, statistic: Statistic | None) -> NamedSharding:
        axes: tuple[Any, ...] = ()
        kept = statistic.kept if statistic else None
        if statistic and kept is not None:
            parameter = state.trained_arrays[statistic.parameter.removeprefix("params/")]
            of_parameter = specs.mesh_axes(parameter.sharding.spec, len(parameter.shape))
            axes = tuple(() if dim is None else of_parameter[dim] for dim in kept)
        return NamedSharding(mesh, specs.canonical(axes))

    return state._map_statistics(find_sharding)


# Arguments and arrays as a step takes them


def check_arguments(called: str, checks: Mapping[str, tuple[Any, bool, str]]) -> None:
    """Refuses arguments of the wrong kind.

    Args:
        called: The function that was called.
        checks: By name the value of an argument, whether it is right, and what to write.

    Raises:
        RuleTypeError: Some are wrong; all of them are in it.
    """
    problems = Problems(f"{called}:")
    for name, (value, is_right, fix) in checks.items():
        if not is_right:
            problems.add(name, f"it cannot be {reprlib.repr(value)}", f"Write {fix}.")
    problems.raise_if_any(RuleTypeError)


def refuse_statics(statics: Sequence[tuple[str, Any]], called: str) -> None:
    """Refuses texts, functions and other values where arrays are needed.

    Raises:
        ShardingError: There are some; all of them are in it.
    """
    problems = Problems(f"{called} takes arrays:")
    for path, value in statics:
        what = f"the {type(value).__name__} {reprlib.repr(value)} is no array"
        problems.add(path, what, "Give it to the loss function itself: functools.partial.")
    problems.raise_if_any(ShardingError)


def describe(value: Any) -> jax.ShapeDtypeStruct:
    """A struct of an array, with its sharding over a mesh; each time another object."""
    array = value if hasattr(value, "dtype") else jnp.asarray(value)
    own = bound_sharding(array)
    sharding = own if isinstance(own, NamedSharding) else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def strengthen(value: Any) -> Any:
    """An array whose dtype stays where it meets another; that of a Python number gives way."""
    if is_struct(value):
        return value.update(weak_type=False)
    array = value if isinstance(value, jax.Array) else jnp.asarray(value)
    return jax.lax.convert_element_type(array, array.dtype) if is_weak_type(array) else array


def settle(
    leaves: Sequence[Leaf],
    mesh: AnyMesh | None,
    wanted: Mapping[str, Sharding | None] = _NOTHING,
) -> list[Any]:
    """The arrays of a state with strong types, and on a mesh if others are.

    Args:
        leaves: The arrays.
        mesh: The mesh over which some of them lie.
        wanted: By path where arrays go that are on no mesh; to every device by default.
    """
    values = [strengthen(leaf.value) for leaf in leaves]
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    moves: dict[int, Sharding] = {}
    for index, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
        target = wanted.get(leaf.path) or whole
        is_placed = isinstance(bound_sharding(value), NamedSharding)
        if target is None or is_placed or is_traced(value):
            continue
        if is_struct(value) or isinstance(getattr(target, "mesh", None), AbstractMesh):
            values[index] = describe(value).update(sharding=target)
        else:
            moves[index] = target
    paths = [leaves[index].path for index in moves]
    placed = put([values[index] for index in moves], list(moves.values()), paths=paths)
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
    is_state = isinstance(train_state, TrainState)
    fix = "TrainState.initial_state(model, optimizer, root_rng)"
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
        def name(arrays: Mapping[str, Any], role: str) -> dict[str, Any]:
            names = node.template.names
            return {path: Named(value, names[path], role) for path, value in arrays.items()}

        key = node.root_rng
        data = {
            "step": node.step,
            "params": name(node.trained_arrays | node._fixed_arrays(FROZEN), "parameter"),
            "opt_state": node._map_statistics(
                lambda x, s: Named(x, _statistic_names(s), statistic=s) if s else x
            ),
            "state_vars": name(node.state_arrays, "state"),
            "loss_fn_state": node.loss_fn_state,
            # A raw key is an array, whose dimension has nothing to name.
            "root_rng": Named(key, (None,) * len(getattr(key, "shape", ()))),
            "constants": name(node._fixed_arrays(CONSTANT), "constant"),
        }
        return Content(data, node.template)

    def close(self, template: StateTemplate, data: Any) -> TrainState:
        names = "step", "params", "opt_state", "state_vars", "loss_fn_state", "root_rng"
        step, params, *others = (data[name] for name in names)
        kinds, fixed = template.kinds, params | data["constants"]
        trained = {path: fixed.pop(path) for path in params if kinds[path] == TRAINED}
        fields: Any = step, trained, *others, fixed, template
        return TrainState(*fields)


READERS = [_TrainStates()]
