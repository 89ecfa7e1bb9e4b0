"""Making models on a mesh by logical axis names, or without any memory."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from penzai import pz
from penzai.core.variables import AbstractVariableValue

from penzai_shard.errors import RuleTypeError, ShardingError, raise_all
from penzai_shard.meshes import AnyMesh
from penzai_shard.model_variables import first_api, thawed, with_own_label
from penzai_shard.named_arrays import stored_data
from penzai_shard.padded_arrays import is_padded, padded_like, without_padding
from penzai_shard.placement.builders import (
    OWN_ARGUMENTS,
    check_builder,
    is_model,
    naming_numbers_as_keys,
)
from penzai_shard.placement.tracing import Layouts, initialized
from penzai_shard.planning import PlacingRequest, PlanRequest, ShardingPlan
from penzai_shard.readers import (
    copied,
    loaded_readers,
    reader_of,
    with_repeats,
    without_repeats,
)
from penzai_shard.rule_kinds import OnIndivisible, OnUnnamed
from penzai_shard.tree_arguments import refuse_module_without_arrays


def sharded_init(
    initializer: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    axis_name_to_mesh_name: Any = None,
    rules: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
    plan: ShardingPlan | None = None,
    **kwargs: Any,
) -> Any:
    """Builds a model with every array laid out over a mesh from the start.

    The initialiser is traced once and split by its outputs. Parameters that are computed alike and
    laid out alike, but for the key that each starts from, share one compiled program, so that the
    time to compile does not grow with depth. Beyond the sharded model, memory is needed for about
    one array more; none exists unsharded, except results of operations that sum floating-point
    numbers (``qr``, norms): these are computed on one device, one after the other, because their
    values would depend on the mesh otherwise.

    Values are those of ``jax.jit`` around the initialiser, up to one unit in the last place, and
    the same to the bit on every mesh.

    Args:
        initializer: Called as ``initializer(*args, **kwargs)``; returns a model with new
            ``pz.Parameter`` and ``pz.StateVariable`` objects, or any other tree of arrays. Anything
            that can be traced works, also with effects such as ``jax.debug.print``, which happen
            once.
        *args: Passed on; arrays and anything else.
        mesh: The mesh. One with Explicit axes is treated as its twin with Auto axes.
        axis_name_to_mesh_name: Rules, in any form that ``AxisRules`` reads; None maps each
            logical axis to the mesh axis of the same name.
        rules: The same; give one of the two.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        plan: A plan to carry out instead of mesh, rules and options, as ``make_plan`` gives it
            for ``abstract_model(initializer, *args, **kwargs)``.
        **kwargs: Passed on. The names above are never passed on: an initialiser that has a
            parameter of such a name gets it by ``functools.partial``.

    Returns:
        The model. Its variables are new, with the initialiser's labels and metadata, and shared
        where the initialiser's are. State variables that had no label of their own get a new
        automatic one.

    Raises:
        ShardingError: Some array has no valid layout, or the plan is of another model; nothing
            has been computed then.

    Warns:
        ShardingWarning: As ``make_plan`` does.

    >>> from penzai.models import simple_mlp
    >>> from penzai_shard.meshes import make_mesh
    >>> model = sharded_init(
    ...     simple_mlp.MLP.from_config,
    ...     name="mlp",
    ...     init_base_rng=jax.random.key(0),
    ...     feature_sizes=[8, 16, 4],
    ...     mesh=make_mesh({"data": 4, "model": 2}),
    ...     axis_name_to_mesh_name={"features_out": "model"},
    ... )
    >>> weights = model.sublayers[0].sublayers[0].weights.value
    >>> dict(weights.named_axes), weights.data_array.sharding.spec
    ({'features': 8, 'features_out': 16}, P(None, 'model'))
    """
    own = (mesh, rules, axis_name_to_mesh_name, on_indivisible, on_unnamed, plan)
    given = [
        name
        for name, value in zip(OWN_ARGUMENTS, own, strict=True)
        if value is not None and value != "error"
    ]
    check_builder(initializer, args, kwargs, given)
    request = PlacingRequest.read(
        "sharded_init", mesh, rules, axis_name_to_mesh_name, on_indivisible, on_unnamed, plan
    )
    request = dataclasses.replace(request, keep_others=True)

    def bound(tree: Any) -> Any:
        return _bound(tree, frozen=AbstractVariableValue)

    def unbound(*args: Any, **kwargs: Any) -> Any:
        # What exists already may be padded as it is stored elsewhere.
        tree = without_padding(_unbound(initializer)(*args, **kwargs))
        return _padded(request, tree, bound(tree)) if request.can_pad else tree

    def layouts_of(tree: Any) -> Layouts:
        return _planned_layouts(request, bound(tree))

    tree = initialized(unbound, args, kwargs, layouts_of, request.mesh)
    return _bound(tree, frozen=())


def partly_initialized(
    initializer: Callable[[], Any], layouts_of: Callable[[Any], Layouts], mesh: AnyMesh
) -> Any:
    """Builds a model of which only some arrays are computed, with the values of ``sharded_init``.

    Args:
        initializer: Called without arguments; returns a model. It is traced.
        layouts_of: Gives the layouts of the arrays to compute, for the model with a
            ``jax.ShapeDtypeStruct`` in place of each.
        mesh: The mesh that they are for.

    Returns:
        The model, its variables frozen, with structs in place of the other arrays.

    >>> from penzai_shard.meshes import make_mesh
    >>> model = partly_initialized(
    ...     lambda: [pz.nx.ones({"a": 2}), pz.nx.zeros({"a": 3})],
    ...     lambda model: {id(model[1].data_array): None},
    ...     make_mesh({"data": 8}),
    ... )
    >>> model[0].data_array, model[1].data_array.tolist()
    (ShapeDtypeStruct(shape=(2,), dtype=float32), [0.0, 0.0, 0.0])
    """

    def bound(tree: Any) -> Any:
        return _bound(tree, frozen=AbstractVariableValue)

    tree = initialized(_unbound(initializer), (), {}, lambda tree: layouts_of(bound(tree)), mesh)
    return bound(tree)


def initialize_parameters_sharded(
    model_def: Any,
    rng: jax.Array,
    mesh: Mesh | None = None,
    axis_name_to_mesh_name: Any = None,
    *,
    rules: Any = None,
    on_indivisible: OnIndivisible = "error",
    on_unnamed: OnUnnamed = "error",
    plan: ShardingPlan | None = None,
) -> Any:
    """Initialises a model of ``penzai.deprecated.v1``, every parameter laid out over a mesh.

    Time, memory and values are as for ``sharded_init``.

    Args:
        model_def: A model, or any tree, with ``pz.nn.UninitializedParameter`` objects.
        rng: The key from which ``pz.nn.initialize_parameters`` derives those of the parameters.
        mesh: The mesh. One with Explicit axes is treated as its twin with Auto axes.
        axis_name_to_mesh_name: Rules, in any form that ``AxisRules`` reads; None maps each
            logical axis to the mesh axis of the same name.
        rules: The same; give one of the two.
        on_indivisible: As for ``make_plan``.
        on_unnamed: As for ``make_plan``.
        plan: A plan to carry out instead of mesh, rules and options, as ``make_plan`` gives it
            for ``model_def``.

    Returns:
        The model with initialised ``pz.nn.Parameter`` objects of the same names. The rest of it
        is what it was.

    Raises:
        ShardingError: Some parameter has no valid layout; nothing has been computed then.
        ValueError: Two parameters have the same name.

    >>> import warnings
    >>> from penzai.deprecated.v1 import pz as v1
    >>> from penzai_shard.meshes import make_mesh
    >>> model_def = v1.nn.add_parameter_prefix(
    ...     "linear", v1.nn.Linear.from_config({"features": 8}, {"features_out": 16})
    ... )
    >>> mesh = make_mesh({"data": 4, "model": 2})
    >>> model = initialize_parameters_sharded(
    ...     model_def, jax.random.key(0), mesh, {"features_out": "model"}
    ... )
    >>> model.weights.name, model.weights.value.data_array.sharding.spec
    ('linear.weights', P(None, 'model'))
    """
    if not isinstance(rng, jax.Array | np.ndarray):
        fix = f"jax.random.key({rng})" if isinstance(rng, int) else "jax.random.key(0)"
        raise RuleTypeError(
            f"initialize_parameters_sharded: rng is a random key, not {rng!r}. Write {fix}."
        )
    uninitialized = first_api.uninitialized_parameters(model_def)
    request = PlacingRequest.read(
        "initialize_parameters_sharded",
        mesh,
        rules,
        axis_name_to_mesh_name,
        on_indivisible,
        on_unnamed,
        plan,
    )
    if request.given is not None:
        # Only the parameters are made; a plan of the whole model says more.
        names = {parameter.name for parameter in uninitialized.get_sequence()}
        leaves = tuple(leaf for leaf in request.given.leaves if leaf.path in names)
        given = dataclasses.replace(request.given, leaves=leaves)
        request = dataclasses.replace(request, given=given)

    def parameters_of(key: Any) -> Any:
        made = first_api.initialize_parameters(uninitialized.get_sequence(), key)
        return _padded(request, made, made) if request.can_pad else made

    parameters = initialized(
        parameters_of,
        (rng,),
        {},
        functools.partial(_planned_layouts, request),
        request.mesh,
    )
    return uninitialized.set_sequence(parameters)


def abstract_model(initializer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Builds a model without memory for its parameters, to plan for it or to restore into it.

    Each parameter is a frozen ``pz.ParameterValue`` whose arrays are
    ``jax.ShapeDtypeStruct`` objects. What a checkpoint of parameters does not hold is computed for
    real, and only that: constants of the layers (an epsilon, a mask) and state variables, which are
    ordinary mutable ones. So the model can run once values are put in place of the parameters. In a
    model without any, of another library or a dictionary of arrays, all arrays are structs.

    Args:
        initializer: Called as ``initializer(*args, **kwargs)``; returns a model. It is traced.
        *args: Passed on.
        **kwargs: Passed on.

    Returns:
        The model. A parameter shared by several layers is one object in all of them.

    Raises:
        ShardingError: The initialiser left the places of parameters empty, as Penzai's do
            without a key.

    >>> from penzai.models import simple_mlp
    >>> model = abstract_model(
    ...     simple_mlp.MLP.from_config,
    ...     name="mlp",
    ...     init_base_rng=jax.random.key(0),
    ...     feature_sizes=[8, 16],
    ... )
    >>> model.sublayers[0].sublayers[0].weights.value.data_array
    ShapeDtypeStruct(shape=(8, 16), dtype=float32)
    """
    refuse_module_without_arrays(
        "abstract_model takes the function that builds a model", initializer
    )
    if not callable(initializer) or is_model(initializer):
        raise RuleTypeError(
            "abstract_model calls the function that builds a model, and this is a "
            f"{type(initializer).__name__}. Give the function and its arguments: "
            "abstract_model(build_model, seed=0). A model that exists already needs none: "
            "make_plan and restore_params take it as it is."
        )
    tree = initialized(_unbound(initializer), args, kwargs, _layouts_but_of_parameters)
    return _bound(tree, frozen=pz.ParameterValue)


def _refuse_empty_slots(tree: dict[str, Any]) -> None:
    nodes = jax.tree_util.tree_leaves(
        tree["model"],
        is_leaf=lambda node: isinstance(node, AbstractVariableValue | pz.ParameterSlot),
    )
    # A model may also come unbound, with its values beside it.
    values = (*tree["variables"], *nodes)
    filled = {value.get_slot() for value in values if isinstance(value, AbstractVariableValue)}
    slots = [node for node in nodes if isinstance(node, pz.ParameterSlot)]
    raise_all(
        ShardingError,
        "the initialiser left parameters without a value, so nothing is known of them:",
        [
            f"{slot.label}: its place is empty. Give the initialiser a key, for instance "
            "init_base_rng=jax.random.key(0)."
            for slot in dict.fromkeys(slots)
            if slot not in filled
        ],
    )


def _unbound(initializer: Callable[..., Any]) -> Callable[..., Any]:
    def unbound(*args: Any, **kwargs: Any) -> Any:
        # Its own copies, as an initialiser may change variables that it is given.
        args, kwargs = copied((args, kwargs))
        with contextlib.ExitStack() as stack:
            for reader in loaded_readers():
                stack.enter_context(reader.initializing())
            stack.enter_context(naming_numbers_as_keys(initializer, args, kwargs))
            built = initializer(*args, **kwargs)
        built = without_repeats(built)
        raise_all(
            RuleTypeError,
            "the initialiser makes arrays that would be lost:",
            [problem for reader in loaded_readers() for problem in reader.lost_arrays(built)],
        )
        model, variables = pz.unbind_variables(built, freeze=True)
        # The names are what paths in error messages begin with.
        return {"model": model, "variables": variables}

    return unbound


def _bound(tree: dict[str, Any], frozen: type | tuple[type, ...]) -> Any:
    """The model with its variables in their slots: new mutable ones, but for frozen types."""
    _refuse_empty_slots(tree)
    variables = [v if isinstance(v, frozen) else thawed(v) for v in tree["variables"]]
    bound = with_repeats(pz.bind_variables(tree["model"], variables))
    # Only now: the slots of the model have the labels of the objects that were traced.
    for variable in variables:
        if not isinstance(variable, frozen):
            with_own_label(variable)
    return bound


def _padded(request: PlanRequest, tree: Any, planned: Any) -> Any:
    """What an initialiser returned, each array padded that its plan pads.

    Args:
        request: What was asked for.
        tree: What it returned, traced.
        planned: The same arrays in the tree that is planned.
    """
    shardings = request.plan_quietly(planned).sharding_tree()
    nodes, treedef = jax.tree_util.tree_flatten(planned, is_leaf=pz.nx.is_namedarray)
    by_array: dict[int, Any] = {}
    layouts: Any = treedef
    for node, layout in zip(nodes, layouts.flatten_up_to(shardings), strict=True):
        if is_padded(layout):
            by_array[id(stored_data(node))] = layout

    def padded(node: Any) -> Any:
        layout = by_array.get(id(stored_data(node))) if pz.nx.is_namedarray(node) else None
        return node if layout is None else padded_like(node, layout)

    return jax.tree_util.tree_map(padded, tree, is_leaf=pz.nx.is_namedarray)


def _planned_layouts(request: PlanRequest, tree: Any) -> Layouts:
    """The planned layout of each struct of a tree.

    The tree that is planned may have its arrays in another order than the one that was traced, and
    the array of a shared variable at several places.
    """
    shardings = request.plan(tree).sharding_tree()
    structs, treedef = jax.tree_util.tree_flatten(tree)
    planned: Any = treedef
    layouts = zip(structs, planned.flatten_up_to(shardings), strict=True)
    return {id(struct): sharding for struct, sharding in layouts}


def _layouts_but_of_parameters(tree: Any) -> Layouts:
    """Any layout for each struct that is not in a parameter."""
    nodes = jax.tree_util.tree_leaves(tree, is_leaf=_is_parameter_value)
    others = [node for node in nodes if not _is_parameter_value(node)]
    if len(others) == len(nodes) and not tree["variables"]:
        return {}  # A tree of bare weights, all of which count as parameters.
    return dict.fromkeys(map(id, others))


def _is_parameter_value(node: Any) -> bool:
    if isinstance(node, pz.ParameterValue):
        return True
    reader = reader_of(node)
    return reader is not None and reader.role(node) == "parameter"
