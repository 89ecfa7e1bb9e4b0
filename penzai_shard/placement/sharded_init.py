"""Builds models where they belong: each device makes its own part of every array.

The initialiser is traced once. Its program is cut into parts and run by ``run_parts``, so that a
model may be larger than one device, and compiling takes no longer for more layers.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from penzai_shard.arrays.kinds import is_struct
from penzai_shard.arrays.structure import Leaf, Structure, flatten, leaves_of, read_variables
from penzai_shard.errors import Problem, Problems, RuleTypeError, ShardingError, warn_caller
from penzai_shard.meshes import AnyMesh, auto_context, auto_twin, on_auto_twin
from penzai_shard.paths import nearest
from penzai_shard.placement.place import check_devices, planned_shardings
from penzai_shard.placement.run_parts import run_initializer
from penzai_shard.planning import arguments
from penzai_shard.planning.plan import ShardingPlan
from penzai_shard.planning.planner import plan_tree
from penzai_shard.readers.reader import find_refusal, initializing_contexts
from penzai_shard.rules import OnIndivisible

_LOST_ASSIGNMENT = (
    "sharded_init: the initialiser assigned a variable of its arguments, such as a count of "
    "nnx.Rngs, which keeps its value. Make it inside: sharded_init(lambda: Model(nnx.Rngs(0)))."
)


def sharded_init(
    initializer: Callable[..., Any],
    *args: Any,
    mesh: AnyMesh | None = None,
    rules: Any = None,
    axis_name_to_mesh_name: Any = None,
    plan: ShardingPlan | None = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: arguments.OnUnnamed = "error",
    **kwargs: Any,
) -> Any:
    """Builds a model on a mesh, each part of every array on the device that holds it.

    The values are those of ``jax.jit(initializer)``, up to the last bit of float arithmetic, and
    have the same bits on every mesh.

    Args:
        initializer: A function that JAX can trace and that returns a model, or any tree of arrays;
            a class too.
        *args: Its arguments; variables in them are copied.
        mesh: A mesh.
        rules: As for ``make_plan``.
        axis_name_to_mesh_name: The same under Penzai's name.
        plan: A plan of ``abstract_model(initializer, ...)``, in place of mesh and rules.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        **kwargs: Its named arguments.

    Raises:
        PlanError, MeshError, RuleTypeError: As ``make_plan``; also where a model or a mesh stands
            in the place of the initialiser or its arguments.
        ShardingError: The initialiser left a parameter without a value.

    >>> from penzai import pz
    >>> import penzai_shard as pzs
    >>> def build(key):
    ...     return pz.nx.wrap(jax.random.normal(key, (64, 16))).tag("embed", "mlp")
    >>> mesh = pzs.make_mesh({"data": 8})
    >>> weights = sharded_init(build, jax.random.key(0), mesh=mesh, rules={"embed": "data"})
    >>> weights.data_array.sharding.spec
    P('data',)
    """
    _check_initializer("sharded_init", initializer, args, kwargs)
    options = axis_name_to_mesh_name, on_indivisible, on_unnamed
    request = arguments.read("sharded_init", mesh, rules, *options, plan=plan)
    check_devices(request)
    build, structures = _prepare("sharded_init", initializer, args, kwargs)
    # Functions under jax.jit keep the mesh in force, which must have Auto axes where they run.
    with jax.set_mesh(auto_twin(jax.sharding.get_mesh())), _enter_contexts():  # type: ignore[arg-type]
        traced, structs = jax.make_jaxpr(build, return_shape=True)({})
    structure = structures[-1]
    shardings = planned_shardings(plan_tree(structure.fill(structs), request), structure)
    made = run_initializer(traced, dict(enumerate(shardings)))
    return structure.fill_alike(list(made.values()))


def abstract_model(initializer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Finds the shapes of what an initialiser would build, without memory for its parameters.

    For planning, pricing and restoring. What is no parameter of a model with parameters, such as
    the epsilon of a norm or a state variable, is made: a checkpoint of parameters does not hold it.

    Args:
        initializer: As for ``sharded_init``.
        *args: Its arguments; arrays may be shapes.
        **kwargs: Its named arguments.

    Returns:
        The model with ``jax.ShapeDtypeStruct`` in place of parameters, or of all arrays where the
        library knows no parameters, or an argument is a shape. Its variables are frozen.

    Raises:
        RuleTypeError: A model stands in the place of the initialiser.
        ShardingError: The initialiser left a parameter without a value.

    >>> from penzai import pz
    >>> abstract_model(pz.nx.zeros, {"embed": 4096, "mlp": 14336}).data_array.shape
    (4096, 14336)
    """
    _check_initializer("abstract_model", initializer, args, {})
    build, structures = _prepare("abstract_model", initializer, args, kwargs)
    shapes = {i: x.value for i, x in enumerate(leaves_of((args, kwargs))) if is_struct(x.value)}
    with _enter_contexts():
        traced, values = jax.make_jaxpr(build, return_shape=True)(shapes)
    structure = structures[-1]
    # Of what is no parameter the values are needed, as no checkpoint of parameters has them.
    roles = [leaf.role for leaf in leaves_of(structure.fill(values))]
    if "parameter" in roles and not shapes:
        others: dict[int, Any] = {i: None for i, role in enumerate(roles) if role != "parameter"}
        for i, value in run_initializer(traced, others).items() if others else ():
            values[i] = value
    return structure.fill(values)


def initialize_parameters_sharded(
    model: Any,
    prng_key: jax.Array,
    mesh: AnyMesh,
    axis_name_to_mesh_name: Any = None,
    *,
    rules: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: arguments.OnUnnamed = "error",
) -> Any:
    """Initialises the parameters of a model of ``penzai.deprecated.v1`` on a mesh.

    Args:
        model: A model with uninitialised parameters.
        prng_key: The key.
        mesh: A mesh.
        axis_name_to_mesh_name: Rules in any form that ``make_plan`` takes.
        rules: Another name for them.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.

    Returns:
        What ``pz.nn.initialize_parameters(model, prng_key)`` returns, laid out.

    Raises:
        PlanError, MeshError, RuleTypeError: As ``make_plan``.

    >>> import penzai_shard as pzs
    >>> from penzai.deprecated.v1 import pz as pz_v1
    >>> layer = pz_v1.nn.Linear.from_config(input_axes={"a": 4}, output_axes={"b": 8})
    >>> mesh = pzs.make_mesh({"data": 8})
    >>> layer = initialize_parameters_sharded(layer, jax.random.key(0), mesh, {"b": "data"})
    >>> layer.weights.value.data_array.sharding.spec
    P(None, 'data')
    """
    from penzai.deprecated.v1.nn.parameters import initialize_parameters

    return sharded_init(
        lambda: initialize_parameters(model, prng_key),
        mesh=mesh,
        rules=rules,
        axis_name_to_mesh_name=axis_name_to_mesh_name,
        on_indivisible=on_indivisible,
        on_unnamed=on_unnamed,
    )


def _prepare(
    called: str, initializer: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[[dict[int, Any]], list[Any]], list[Structure]]:
    """A function that makes the arrays of the model, and a list that gets their structure.

    The function takes tracers for some of the arguments' arrays, by number; others are constants.
    """
    leaves, given = flatten((args, kwargs))
    values = on_auto_twin([leaf.value for leaf in leaves])
    is_same = all(value is leaf.value for value, leaf in zip(values, leaves, strict=True))
    # A trace gives arrays back, and nothing of the model around them: that leaves by this list.
    structures: list[Structure] = []

    def build(tracers: dict[int, Any]) -> list[Any]:
        own_args, own_kwargs = args, kwargs
        # Variables are made anew inside the trace: those of outside may not be assigned in it.
        if tracers or not is_same or any(variable.live for variable in given.variables):
            own = [tracers.get(i, value) for i, value in enumerate(values)]
            own_args, own_kwargs = given.fill_alike(own)
        before = read_variables((own_args, own_kwargs))
        made = initializer(*own_args, **own_kwargs)
        pairs = zip(before, read_variables((own_args, own_kwargs)), strict=True)
        if called == "sharded_init" and any(a is not b for a, b in pairs):
            warn_caller([_LOST_ASSIGNMENT])
        made_leaves, structure = flatten(made)
        _check_complete(made_leaves, structure)
        structures.append(structure)
        return [leaf.value for leaf in made_leaves]

    return build, structures


def _enter_contexts() -> contextlib.AbstractContextManager[Any]:
    """Contexts in which libraries build models without laying them out themselves."""
    stack = contextlib.ExitStack()
    for context in (auto_context(), *initializing_contexts()):
        stack.enter_context(context)
    return stack


def _check_complete(leaves: Sequence[Leaf], structure: Structure) -> None:
    """Refuses parameters without values: those of the first API, and those made without a key."""
    problems = Problems("the initialiser left parameters without a value:")
    # Beside its variables a model that they were taken out of is whole.
    held = {leaf.path for leaf in leaves}
    problems.extend(place for place in structure.empty if place.path not in held)
    for leaf in leaves:
        if is_struct(leaf.value):
            fix = "Write initialize_parameters_sharded(model, key, mesh, rules)."
            problems.add(leaf.path, "it is a shape and holds no values", fix)
    problems.raise_if_any(ShardingError)


def _check_initializer(called: str, initializer: Any, args: Any, kwargs: Any) -> None:
    """Refuses a model that exists, and a mesh or plan that would be an argument of the model."""
    reason = find_refusal(initializer)
    if reason is not None:
        raise RuleTypeError(f"{called}:", [Problem("", *reason)])
    leaves, structure = flatten(initializer)
    if not callable(initializer) or leaves or structure.problems:
        what = f"a {type(initializer).__name__} stands in the place of the function that builds it"
        fix = f"Write {called}(build, ...), or for a model that exists place(model, mesh, rules)."
        if any("penzai.deprecated" in kind.__module__ for kind in type(initializer).mro()):
            # A model of Penzai's first API before it is initialised; place would refuse it, too.
            fix = "Write lambda: pz.nn.initialize_parameters(model, key)."
        raise RuleTypeError(f"{called}:", [Problem("", what, fix)])
    # Other functions of this library take the mesh second, by position.
    given = next((arg for arg in args if isinstance(arg, Mesh | AbstractMesh | ShardingPlan)), None)
    if given is not None and called == "sharded_init":
        name = "plan" if isinstance(given, ShardingPlan) else "mesh"
        what = f"the {name} is given by position, where arguments of the initialiser stand"
        raise RuleTypeError(f"{called}:", [Problem("", what, f"Name it: {name}={name}.")])
    # A named argument that the initialiser does not take, and that is nearly one of these.
    own_names = inspect.signature(sharded_init).parameters.keys() - {"args", "kwargs"}
    for name in kwargs:
        near = nearest(name, own_names)
        # Functions of C do not say what they take.
        is_told = near and hasattr(initializer, "__code__")
        taken = inspect.signature(initializer).parameters.values() if is_told else ()
        if is_told and not any(own.name == name or own.kind is own.VAR_KEYWORD for own in taken):
            what = "neither the initialiser nor sharded_init has this argument"
            raise RuleTypeError(f"{called}:", [Problem(name, what, f"Write {near}=.")])
