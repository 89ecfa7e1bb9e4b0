"""Reads a model with its inputs as one function of arrays.

An array goes by the path that it has in ``strip(model)``, so that wrappers do not change its name.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz

from penzai_shard.arrays.inputs import find_mesh, run_inputs
from penzai_shard.arrays.kinds import is_key_type
from penzai_shard.arrays.structure import Leaf
from penzai_shard.layers.pure_call import PureCall, read_settings
from penzai_shard.meshes import on_auto_twin
from penzai_shard.surgery.inserted import flatten_bare

# Where the arrays of the model stand among those of the call.
MODEL = "body/model/"


@pz.pytree_dataclass
class _Spread(pz.Struct):  # type: ignore[misc]
    """Calls a model with several arguments, which for a ``PureCall`` are one."""

    model: Any

    def __call__(self, arguments: tuple[Any, ...], /, **side_inputs: Any) -> Any:
        return self.model(*arguments, **side_inputs)


@dataclasses.dataclass(frozen=True)
class NamedCall:
    """A model and its inputs as a function of arrays.

    Attributes:
        call: The function.
        leaves: What it takes, dimensions sorted by ``sort_dims``. The role of each is "parameter",
            "state", "input" or "constant".
    """

    call: PureCall
    leaves: list[Leaf]

    def of_role(self, *roles: str) -> dict[str, Leaf]:
        """The arrays with some roles, by path."""
        return {leaf.path: leaf for leaf in self.leaves if leaf.role in roles}


def read_call(model: Any, args: tuple[Any, ...], side_inputs: Mapping[str, Any]) -> NamedCall:
    """Reads a model and its inputs.

    Raises:
        ShardingError: Arrays are deleted, or shapes; all of them are in it.
        MeshError: Arrays are bound to different devices.
    """
    if isinstance(model, functools.partial):
        # JAX looks for arrays only in a partial of its own.
        model = jax.tree_util.Partial(model.func, *model.args, **model.keywords)
    inputs = {"argument": args, "side_inputs": dict(side_inputs)}
    arrays, _ = run_inputs(inputs | {"model": model}, "check_equivalent")
    find_mesh(arrays, "check_equivalent")

    tree = {**inputs, "body": _Spread(model)}
    leaves, structure = flatten_bare(tree)
    structure.check_paths()
    # In a model that names no parameters, each array of floats is one.
    has_parameters = any(leaf.role == "parameter" for leaf in leaves)
    for number, leaf in enumerate(leaves):
        role = "parameter" if is_float(leaf) and not has_parameters else "constant"
        role = leaf.role or (role if leaf.path.startswith(MODEL) else "input")
        names = leaf.names and tuple(sorted(leaf.names, key=_name_order))
        value = sort_dims(on_auto_twin(jnp.asarray(leaf.value)), leaf.names)
        leaves[number] = dataclasses.replace(leaf, role=role, names=names, value=value)
    return NamedCall(PureCall(structure, read_settings(tree)), leaves)


def sort_dims(value: Any, names: Sequence[Any] | None, *, back: bool = False) -> Any:
    """An array with its positional dimensions first, then the named ones by name; or back again."""
    given = list(names or ())
    order = sorted(range(len(given)), key=lambda i: _name_order(given[i]))
    order = sorted(order, key=order.__getitem__) if back else order
    return value if order == sorted(order) else jnp.transpose(value, order)


def _name_order(name: Any) -> tuple[bool, str]:
    return name is not None, str(name)


def to_array(value: Any) -> Any:
    """A value as an array; a random key as its bits."""
    array = value if hasattr(value, "dtype") else jnp.asarray(value)
    return jax.random.key_data(array) if is_key_type(array.dtype) else array


def is_float(value: Any) -> bool:
    """Whether an array, or a leaf, has floating-point or complex numbers."""
    return value.dtype is not None and bool(jnp.issubdtype(value.dtype, jnp.inexact))
