"""The parameters of a model as a dictionary by name, and a model from such a dictionary.

A parameter is known by its name alone, wherever in the model it is. So wrapper layers and
constraints that are inserted or taken out never change the dictionary.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Sharding
from penzai import pz
from penzai.core.variables import LabeledVariable, LabeledVariableValue

from penzai_shard.array_kinds import has_abstract, is_abstract, is_array_like, is_deleted, is_traced
from penzai_shard.checkpointing.array_records import record_of
from penzai_shard.checkpointing.arrays_by_name import ArraysByName, leaves_with_paths
from penzai_shard.checkpointing.comparison import REPLACING, Tolerance, compare
from penzai_shard.checkpointing.padded_layouts import stored_like
from penzai_shard.equinox_modules import is_equinox_module, is_module_value
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError, raise_all
from penzai_shard.model_variables import (
    is_copy,
    is_parameter,
    is_variable,
    problem_of,
    thawed,
    value_of,
    variable_name,
    with_own_label,
    with_value,
)
from penzai_shard.named_arrays import unnamed_data
from penzai_shard.named_leaves import is_named_unit
from penzai_shard.padded_arrays import is_padded
from penzai_shard.readers import (
    is_bare_array,
    is_foreign,
    not_a_tree,
    refusal,
    with_repeats,
    without_repeats,
)
from penzai_shard.tree_paths import join_paths, path_text


def param_dict(model: Any) -> dict[str, Any]:
    """The parameters of a model by name.

    Args:
        model: A model of either of Penzai's APIs, with mutable, frozen, abstract or uninitialised
            parameters; a module of Equinox, whose arrays are named by their paths; a module or a
            state of Flax NNX, whose parameters are; or a mapping by name, possibly nested, of which
            the nested names are joined with slashes.

    Returns:
        A new dictionary from names to values: named arrays, as the parameters hold them, those
        that are stored padded without their padding. Uninitialised parameters have the structs of
        their values. A parameter that occurs several times in the model is given once.

    Raises:
        CheckpointMismatchError: Two different parameters have one name, or the axis names of one
            cannot be used.
        RuleTypeError: What was given is an array and not a model, or a module of torch.

    >>> model = pz.nn.Affine.from_config(
    ...     "mlp", jax.random.key(0), {"embedding": 4}, {"neurons": 8})
    >>> {name: dict(value.named_shape) for name, value in param_dict(model).items()}
    {'mlp/Linear.weights': {'embedding': 4, 'neurons': 8}, 'mlp/AddBias.bias': {'neurons': 8}}
    """
    return {name: _true_value(value) for name, value in stored_params(model).items()}


def _true_value(value: Any) -> Any:
    """A parameter's value without padding; what describes a padded array keeps its layout."""

    def true(node: Any) -> Any:
        has_values = is_padded(node) and not is_abstract(node.stored) and is_array_like(node.stored)
        return node.as_namedarray() if has_values else node

    # As it is, if it can be.
    padded = any(map(is_padded, jax.tree_util.tree_leaves(value, is_leaf=is_padded)))
    return jax.tree_util.tree_map(true, value, is_leaf=is_padded) if padded else value


def stored_params(model: Any) -> dict[str, Any]:
    """``param_dict`` with padded arrays as they are stored, whatever stands in place of data.

    >>> stored_params({"w": pz.nx.ones({"a": 2})})["w"].named_shape
    {'a': 2}
    """
    if is_parameter_mapping(model):
        found: dict[str, Any] = {}
        clashes = []

        def add(name: str, value: Any) -> None:
            if name in found:
                clashes.append(f"{name}: two entries have this name once nested names are joined.")
            found[name] = value

        _mapped(model, add)
        raise_all(CheckpointMismatchError, "cannot tell entries apart by name:", clashes)
        return found
    if problem := refusal(model, as_model=True) or not_a_tree(model):
        raise RuleTypeError(f"parameters are read from a model, {problem}.")
    is_array = isinstance(model, pz.nx.NamedArrayBase) or is_array_like(model)
    if is_array or is_bare_array(model):
        raise RuleTypeError(
            "parameters are read from a model or from a dictionary by name, not from a single "
            "array. Pass {'name': array}."
        )
    places: dict[str, tuple[str, Any]] = {}
    problems, unusable = [], []
    for path, node in _variables(model):
        if not is_parameter(node):
            continue
        name = variable_name(node, path)
        if problem := problem_of(node):
            unusable.append(f"{path}: {problem}.")
        if name not in places:
            places[name] = (path, node)
        elif not _same_parameter(places[name][1], node):
            problems.append(
                f"{name}: two different parameters have this name, at {places[name][0]} and at "
                f"{path}. Name one of them otherwise, for instance with pz.nn.add_parameter_prefix "
                "or another name at construction; or put the same Parameter object at both places."
            )
    raise_all(CheckpointMismatchError, "cannot tell parameters apart by name:", problems)
    raise_all(CheckpointMismatchError, "cannot read some parameters:", unusable)
    return {name: value_of(node) for name, (_, node) in places.items()}


def with_params(model: Any, params: Mapping[str, Any]) -> Any:
    """A model of the same structure whose parameters hold other values.

    Args:
        model: What ``param_dict`` takes. It is not changed, and shares no variable with the
            result.
        params: A value for each parameter by name. Its logical axes, their order and sizes must
            be those of the model's parameter; its dtype may differ.

    Returns:
        The new model. Its parameters keep their metadata, shared ones stay shared, and frozen
        ones frozen. Those that the model stores padded are stored alike, on the same devices.
        Abstract parameters, which can only be frozen, become mutable ones, unless the given values
        are structs themselves. State variables are copied.

    Raises:
        CheckpointMismatchError: With one line per parameter that is missing, superfluous, or of
            other axes or sizes.

    >>> model = pz.nn.AddBias.from_config(
    ...     "b", jax.random.key(0), {"neurons": 2})
    >>> other = with_params(model, {"b.bias": pz.nx.ones({"neurons": 2})})
    >>> param_dict(other)["b.bias"].unwrap("neurons").tolist()
    [1.0, 1.0]
    """
    own = ArraysByName(stored_params(model))
    given = ArraysByName(stored_params(dict(params)))
    compare(
        {name: record_of(leaf) for name, leaf in given.leaves.items()},
        {name: record_of(leaf) for name, leaf in own.leaves.items()},
        headline="cannot put these values into the model:",
        wording=REPLACING,
        tolerance=Tolerance(),
        compare_dtypes=False,
    )
    arrays = {
        name: stored_like(leaf, own.leaves[name], "with_params")
        for name, leaf in given.leaves.items()
    }
    return rebuilt(without_repeats(model), own.filled(arrays))


def rebuilt(model: Any, values: Mapping[str, Any], shardings: Any = None) -> Any:
    """A model with other parameter values and fresh variables.

    Args:
        model: What ``param_dict`` takes, without repeats.
        values: The value of each parameter by name.
        shardings: The sharding tree of the model's plan: where every other array is put, those of
            constants and those that state variables hold. They stay where they are by default.

    Returns:
        The new model; see ``with_params``.

    >>> rebuilt({"a": {"b": 1.0}}, {"a/b": 2.0})
    {'a': {'b': 2.0}}
    """
    if is_parameter_mapping(model):
        return _mapped(model, lambda name, _: values[name])
    fresh: dict[Any, Any] = {}

    def place(path: str, node: Any, layout: Any = None) -> Any:
        if not is_variable(node):
            return _put(node, layout)
        if not isinstance(node, LabeledVariable | LabeledVariableValue):
            # A parameter of Penzai's first API is a plain value with a name, shared by nobody; of
            # another library's variables there is one of each here.
            if is_parameter(node):
                return with_value(node, values[variable_name(node, path)])
            if layout is None:
                return with_value(node, value_of(node))
            value = jax.tree_util.tree_map(
                _put, unnamed_data(value_of(node)), unnamed_data(value_of(layout))
            )
            return with_value(node, value)
        slot = node.get_slot()
        if slot not in fresh:
            if is_parameter(node):
                value = values[variable_name(node)]
            elif layout is None:
                value = node.value
            else:
                value = jax.tree_util.tree_map(_put, node.value, layout.value)
            fresh[slot] = _fresh_variable(node, value)
        return fresh[slot]

    treedef: Any
    nodes, treedef = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_variable)
    layouts = [None] * len(nodes) if shardings is None else treedef.flatten_up_to(shardings)
    return with_repeats(
        treedef.unflatten(
            [
                place(path_text(path), node, layout)
                for (path, node), layout in zip(nodes, layouts, strict=True)
            ]
        )
    )


def _put(leaf: Any, sharding: Any) -> Any:
    """An array in its sharding; anything else, and what JAX is to place, as it is."""
    if sharding is None or not is_array_like(leaf) or is_traced(leaf):
        return leaf
    return jax.device_put(leaf, sharding)


def _fresh_variable(node: Any, value: Any) -> Any:
    """A new variable like another, mutable unless that was frozen on purpose."""
    # A mutable variable holds no structs: what is frozen around them could not be mutable.
    was_frozen = isinstance(node, LabeledVariableValue) and not has_abstract(node.value)
    holds_arrays = all(map(is_array_like, jax.tree_util.tree_leaves(value)))
    frozen = with_value(node, value)
    if was_frozen or not holds_arrays or has_abstract(value):
        return frozen
    return with_own_label(thawed(frozen))


def refuse_states_without_values(model: Any, headline: str) -> None:
    """Refuses a model whose state variables have structs in place of values, or were donated.

    Raises:
        CheckpointMismatchError: With one line per variable.
    """
    problems = [
        f"{path}: this state variable has {lack}. Set its value first, or give a model that has "
        "values: build_model(...) in place of abstract_model(build_model, ...)."
        for path, node in _variables(model)
        if not is_parameter(node) and (lack := _lack_of(node))
    ]
    raise_all(CheckpointMismatchError, headline, problems)


def _lack_of(state_variable: Any) -> str:
    leaves = jax.tree_util.tree_leaves(value_of(state_variable))
    if any(map(is_abstract, leaves)):
        return "a shape and no value"
    if any(map(is_deleted, leaves)):
        return "no value any more, since it was donated or deleted"
    return ""


def statistics_of(model: Any) -> list[str]:
    """The paths of a model's state variables of other libraries that hold floating numbers.

    These are what training has found out beside the parameters, such as the means of a batch norm.
    Integers count something, or belong to a random stream.

    >>> statistics_of({"w": 1.0})
    []
    """
    return [
        path
        for path, node in _variables(model)
        if is_foreign(node)
        and not is_parameter(node)
        and any(map(_is_floating, jax.tree_util.tree_leaves(unnamed_data(value_of(node)))))
    ]


def _is_floating(leaf: Any) -> bool:
    return is_array_like(leaf) and bool(
        jax.numpy.issubdtype(jax.dtypes.result_type(leaf), jax.numpy.inexact)
    )


def is_parameter_mapping(model: Any) -> bool:
    """Whether something is a mapping of values by name, and not a model with variables.

    So is a module of Equinox, whose arrays are named by their paths.

    >>> is_parameter_mapping({"w": pz.nx.ones({"a": 2})})
    True
    """
    is_mapping = isinstance(model, Mapping) or is_equinox_module(model)
    return is_mapping and not any(True for _ in _variables(model))


def _is_weight(leaf: Any) -> bool:
    """Whether a leaf of a module is an array, or a sharding in the place of one."""
    return is_named_unit(leaf) or isinstance(leaf, Sharding) or not is_module_value(leaf)


def _variables(tree: Any) -> Iterator[tuple[str, Any]]:
    for key_path, node in leaves_with_paths(without_repeats(tree), is_variable):
        if is_variable(node):
            yield path_text(key_path), node


def _same_parameter(first: Any, second: Any) -> bool:
    """Whether two occurrences of a name are one parameter."""
    if isinstance(first, LabeledVariable) or isinstance(second, LabeledVariable):
        return first is second
    if type(first) is not type(second) or not isinstance(first, LabeledVariableValue):
        return False
    # Frozen values of one shared parameter are different objects. They hold the same arrays, or
    # equal ones if they went through a transformation; of traced arrays nobody knows.
    ours, theirs = (jax.tree_util.tree_leaves(node.value) for node in (first, second))
    can_tell = all(
        a is b or (is_abstract(a) == is_abstract(b) and not is_traced(a) and not is_traced(b))
        for a, b in zip(ours, theirs, strict=False)
    )
    return can_tell and is_copy(first, second)


def _mapped(mapping: Any, visit: Callable[[str, Any], Any], prefix: str = "") -> Any:
    """A mapping, possibly nested, with ``visit(name, value)`` in place of each value.

    Mappings that are pytrees of another type, such as those of Flax, keep their type. Of a module
    of Equinox the arrays are the values.
    """

    def mapped(key: str, value: Any) -> Any:
        name = join_paths(prefix, key)
        is_mapping = isinstance(value, Mapping) or is_equinox_module(value)
        return _mapped(value, visit, name) if is_mapping else visit(name, value)

    if is_equinox_module(mapping):
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: mapped(path_text(path), leaf) if _is_weight(leaf) else leaf,
            mapping,
            is_leaf=is_named_unit,
        )
    if type(mapping) is dict or jax.tree_util.all_leaves([mapping]):
        return {key: mapped(str(key), value) for key, value in mapping.items()}
    # Its values as JAX sees them, since such a mapping may give them out in another form.
    values, treedef = jax.tree_util.tree_flatten_with_path(
        mapping, is_leaf=lambda node: node is not mapping
    )
    made = [mapped(path_text(key), value) for key, value in values]
    return jax.tree_util.tree_unflatten(treedef, made)
