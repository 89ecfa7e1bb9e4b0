"""What one variable of a model is, mutable or frozen, of either of Penzai's APIs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz
from penzai.core.variables import (
    AbstractVariable,
    AutoStateVarLabel,
    LabeledVariable,
    LabeledVariableValue,
)

from penzai_shard.array_kinds import is_abstract, is_traced
from penzai_shard.model_variables import first_api
from penzai_shard.named_arrays import unnamed_data
from penzai_shard.named_nodes import value_in_node
from penzai_shard.readers import Role, reader_of


def is_variable(node: Any) -> bool:
    """Whether a node is a parameter or a state variable, mutable or frozen, of either API.

    Variables of other libraries, such as Flax NNX, are variables too.

    >>> is_variable(pz.StateVariable(0)), is_variable(pz.nx.ones({"a": 2}))
    (True, False)
    """
    is_own = isinstance(node, LabeledVariable | LabeledVariableValue) or _is_first_api(node)
    return is_own or _role(node) is not None


def is_parameter(node: Any) -> bool:
    """Whether a node is a parameter, mutable, frozen or uninitialised, of either API.

    Or one of another library, as far as that tells parameters from other variables.
    """
    is_own = isinstance(node, pz.Parameter | pz.ParameterValue) or _is_first_api(node)
    return is_own or _role(node) == "parameter"


def _is_first_api(node: Any) -> bool:
    return first_api.parameter_kind(type(node)) is not None


def _role(node: Any) -> Role | None:
    reader = reader_of(node)
    return None if reader is None else reader.role(node)


def variable_name(variable: Any, path: str = "") -> str:
    """The label of a variable, or the name of a parameter of the first API.

    Args:
        variable: The variable.
        path: Where it is, which is the name of one of another library.

    >>> variable_name(pz.StateVariable(0, label="count"))
    'count'
    """
    if _role(variable) is not None:
        return path
    return str(variable.name if _is_first_api(variable) else variable.label)


def value_of(variable: Any) -> Any:
    """The value of a variable; of an uninitialised parameter the structs of its value.

    That of one of another library is a named array, if it has names that can be used.
    """
    reader = reader_of(variable)
    if reader is not None:
        return value_in_node(reader, variable)[0]
    if first_api.parameter_kind(type(variable)) == "uninitialized":
        return variable.as_empty_parameter().value
    return variable.value


def problem_of(variable: Any) -> str:
    """Why the axis names of a variable cannot be used; empty if they can."""
    reader = reader_of(variable)
    return "" if reader is None else value_in_node(reader, variable)[1]


def with_value(variable: Any, value: Any) -> Any:
    """A frozen variable or parameter like another, with another value and metadata of its own.

    >>> frozen = with_value(pz.StateVariable(0, label="count"), 1)
    >>> type(frozen).__name__, frozen.label, frozen.value
    ('StateVariableValue', 'count', 1)
    """
    reader = reader_of(variable)
    if reader is not None:
        return reader.with_data(variable, unnamed_data(value))
    if _is_first_api(variable):
        return first_api.with_parameter_value(variable, value)
    frozen = variable.freeze() if isinstance(variable, AbstractVariable) else variable
    return dataclasses.replace(frozen, value=value, metadata=dict(frozen.metadata))


def thawed(frozen: Any) -> Any:
    """A new mutable variable with a frozen one's value, sharing nothing mutable with it.

    >>> thawed(pz.StateVariable(0, label="count").freeze()).label
    'count'
    """
    variable = frozen.unfreeze_as_copy()
    metadata = getattr(variable, "metadata", None)
    if isinstance(metadata, dict):
        variable.metadata = dict(metadata)
    return variable


def with_own_label(variable: Any) -> Any:
    """Gives a new variable a label of its own if it has the automatic one of another.

    An automatic label is the id of an object. When that object is gone, a later one may get its
    id, and two variables of one model would have one label.

    >>> copy = with_own_label(thawed(pz.StateVariable(0).freeze()))
    >>> copy.label == AutoStateVarLabel(id(copy))
    True
    """
    if isinstance(getattr(variable, "label", None), AutoStateVarLabel):
        variable.label = AutoStateVarLabel(id(variable))
    return variable


def is_copy(variable: Any, first: Any) -> bool:
    """Whether a variable is another copy of a frozen one.

    A frozen parameter is a plain value: placing a model, ``jax.tree.map`` and checkpoints give
    each of its places an object, and arrays, of its own.

    Args:
        variable: A variable, mutable or frozen, of either API of Penzai.
        first: Another one of the same name.

    Returns:
        Whether both hold the same array, or are frozen with equal values. Of values that are not
        known, structs and tracers, shape and dtype count.

    >>> def frozen(value):
    ...     return pz.ParameterValue(label="w", value=jnp.asarray(value), metadata={})
    >>> is_copy(frozen([1.0]), frozen([1.0])), is_copy(frozen([1.0]), frozen([2.0]))
    (True, False)
    """
    if variable.value is first.value:
        return True
    if type(variable) is not type(first) or isinstance(first, AbstractVariable):
        return False
    my_form: Any
    their_form: Any
    mine, my_form = jax.tree.flatten(variable.value)
    theirs, their_form = jax.tree.flatten(first.value)
    return bool(my_form == their_form) and all(map(_equal_arrays, mine, theirs))


def _equal_arrays(a: Any, b: Any) -> bool:
    if a is b:
        return True
    dtype = jnp.result_type(a)
    if np.shape(a) != np.shape(b) or dtype != jnp.result_type(b):
        return False
    if any(is_abstract(array) or is_traced(array) for array in (a, b)):
        return True
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    has_nan = jnp.issubdtype(dtype, jnp.inexact)
    if getattr(a, "sharding", None) == getattr(b, "sharding", None):
        return bool(jnp.array_equal(a, b, equal_nan=has_nan))
    return bool(np.array_equal(np.asarray(a), np.asarray(b), equal_nan=has_nan))
