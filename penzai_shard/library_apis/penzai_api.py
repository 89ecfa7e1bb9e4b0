"""What this library uses of Penzai beyond its stable interface.

A variable's value can be read and assigned through ``.value``, which converts and checks it each
time. Where a layer is called often, and the value comes out of a transformation of JAX, it is read
and assigned as it is stored.
"""

from collections.abc import Iterable
from typing import Any

from penzai.core.variables import AbstractVariable

SIDE_OUTPUTS = "_destination"
EFFECT_FIELDS = {
    ("local_state", "LocalStateEffectImpl"): "_state",
    ("side_input", "SideInputEffectImpl"): "_value",
    ("side_output", "SideOutputEffectImpl"): SIDE_OUTPUTS,
}
"""For each effect of ``penzai.deprecated.v1`` that is handled, by module and class, the field with
what it holds."""


def stored_values(variables: Iterable[AbstractVariable]) -> list[Any]:
    """What plain ``pz.Parameter`` and ``pz.StateVariable`` objects hold, without a check.

    >>> import jax
    >>> from penzai import pz
    >>> array = jax.numpy.ones(2)
    >>> stored_values([pz.StateVariable(array)])[0] is array
    True
    """
    # One comprehension over one attribute is the fastest loop that Python has here.
    return [variable._raw_value for variable in variables]


def store_value(variable: AbstractVariable, value: Any) -> None:
    """Assigns a value that is known to be valid, without a check.

    >>> from penzai import pz
    >>> variable = pz.StateVariable(1.5)
    >>> store_value(variable, 2.5)
    >>> variable.value
    2.5
    """
    variable._raw_value = value


def side_outputs(effect: Any) -> list[Any]:
    """The list that a side output of ``penzai.deprecated.v1`` appends to, while it is handled."""
    return effect._destination


def share_side_outputs(effect: Any, outputs: list[Any]) -> None:
    """Lets a side output of ``penzai.deprecated.v1`` append to another list."""
    effect._destination = outputs
