"""Parameters and layers of Penzai's first API, ``penzai.deprecated.v1``.

Its types are looked up, not imported: a tree can hold objects of them only if somebody has
imported them already. What its handlers put into layers is in ``first_api_effects``.
"""

import dataclasses
import importlib
import sys
from typing import Any, Literal

import jax

_FIRST_API = "penzai.deprecated.v1"

ParameterKind = Literal["parameter", "frozen", "uninitialized"]
_PARAMETER_KINDS: dict[ParameterKind, str] = {
    "parameter": "Parameter",
    "frozen": "FrozenParameter",
    "uninitialized": "UninitializedParameter",
}

# Norms and softmax, of which each sums many terms or divides by such a sum.
_SENSITIVE_LAYERS = {
    "nn.basic_ops": ("Softmax",),
    "nn.standardization": ("LayerNorm", "RMSLayerNorm", "RMSStandardize", "Standardize"),
}


# Parts of parameters' names that are others in the second API: Gemma's attention.
_RENAMED_PARTS = {"attn": "attention"}


def parts_in_second_api(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The parts of the name that a parameter of the first API has in a model of the second.

    Both name a parameter by the layers that it is in, the first with dots between them. The second
    has the name of the model before that.

    >>> parts_in_second_api(("block_0", "attn", "query", "weights"))
    ('block_0', 'attention', 'query', 'weights')
    """
    return tuple(_RENAMED_PARTS.get(part, part) for part in parts)


def looked_up(module: str) -> Any:
    """A module of the first API, such as ``nn.parameters``; None if nobody has imported it.

    >>> looked_up("no.such.module") is None
    True
    """
    return sys.modules.get(f"{_FIRST_API}.{module}")


def parameter_types() -> tuple[type, ...]:
    """The types of parameters that a model can hold, initialised or not."""
    module = looked_up("nn.parameters")
    return () if module is None else tuple(getattr(module, n) for n in _PARAMETER_KINDS.values())


def parameter_kind(node_type: type) -> ParameterKind | None:
    """Which kind of parameter of the first API a type is; None for every other type.

    >>> from penzai.deprecated.v1 import pz as v1
    >>> parameter_kind(v1.nn.FrozenParameter), parameter_kind(int)
    ('frozen', None)
    """
    for kind, parameter_type in zip(_PARAMETER_KINDS, parameter_types(), strict=False):
        if issubclass(node_type, parameter_type):
            return kind
    return None


def with_parameter_value(parameter: Any, value: Any) -> Any:
    """A parameter of the same name and kind with another value; an uninitialised one gets its."""
    if parameter_kind(type(parameter)) == "uninitialized":
        parameter = parameter.as_empty_parameter()
    return dataclasses.replace(parameter, value=value)


def sensitive_layer_types() -> tuple[type, ...]:
    """Norms and softmax of the first API, as far as somebody has imported them."""
    return tuple(
        getattr(module, name)
        for path, names in _SENSITIVE_LAYERS.items()
        if (module := looked_up(path)) is not None
        for name in names
    )


def uninitialized_parameters(model_def: Any) -> Any:
    """The selection of all uninitialised parameters of a model or tree; imports the first API.

    Of the selection, ``get_sequence()`` gives the parameters and ``set_sequence(others)`` the tree
    with others in their places.
    """
    v1 = importlib.import_module(f"{_FIRST_API}.pz")
    return v1.select(model_def).at_instances_of(v1.nn.UninitializedParameter)


def initialize_parameters(parameters: Any, key: jax.Array) -> Any:
    """The parameters with values, each from a key of its own that its name decides.

    Raises:
        ValueError: Two parameters have the same name.
    """
    return importlib.import_module(f"{_FIRST_API}.pz").nn.initialize_parameters(parameters, key)
