"""Why a wrapped layer cannot be called: in terms of its parameters and inputs, not of JAX's."""

import collections
import types
from collections.abc import Iterable
from typing import Any

from jax.sharding import NamedSharding, Sharding
from penzai import pz

from penzai_shard.array_kinds import is_abstract, is_array_like, is_concrete, is_deleted
from penzai_shard.errors import MeshError, RuleTypeError, ShardingError
from penzai_shard.layers.constrain_sharding import ConstrainSharding, ConstrainShardingByName
from penzai_shard.meshes import mesh_text
from penzai_shard.named_leaves import NamedLeaf, leaves_of
from penzai_shard.tree_paths import path_text

UNFIT_CALL = (RuntimeError, TypeError, ValueError)
"""What JAX raises where ``explain_unfit_call`` may know the reason."""


def explain_unfit_call(
    error: Exception, layer: Any, argument: Any, side_inputs: dict[str, Any]
) -> None:
    """Raises what is wrong with the arrays of a call that failed.

    An error of a function in the place of a layer gets a note.

    Args:
        error: What JAX, or the layer, said.
        layer: The wrapper layer.
        argument: Its input.
        side_inputs: Its side inputs.

    Raises:
        RuleTypeError: A parameter or an input is a struct that describes an array, or was donated;
            or an input of ``Jitted`` is not an array.
        MeshError: Not all arrays are on the same devices, or the argument is placed otherwise
            than ``in_shardings`` says.
    """
    if isinstance(layer.body, types.FunctionType):
        error.add_note(
            f"{type(layer).__name__} runs the function {layer.body.__name__} itself here. If that "
            f"builds a model, call it: {type(layer).__name__}({layer.body.__name__}(...))."
        )
    said = str(error)
    # What JAX says decides, as what a layer does not use may be abstract, deleted or anywhere. A
    # ShardingError has been explained already, by a layer inside.
    explain = next((explain for words, explain in _EXPLANATIONS.items() if words in said), None)
    if explain is None or isinstance(error, ShardingError):
        return
    own = leaves_of(layer.body)
    given = ("argument", argument), *side_inputs.items()
    inputs = [leaf for key, tree in given for leaf in leaves_of(tree, key)]
    problem = explain(f"{type(layer).__name__}({type(layer.body).__name__})", layer, own, inputs)
    if problem is not None:
        raise problem from None


Leaves = list[NamedLeaf]


def _abstract(name: str, layer: Any, own: Leaves, inputs: Leaves) -> ShardingError | None:
    structs = [leaf for leaf in own if is_abstract(leaf.array)]
    if not structs:
        return _not_arrays(name, layer, own, inputs)
    return RuleTypeError(
        f"{name} was called as an abstract model, whose parameters have no values. Build it with "
        "sharded_init, fill it with restore_params or with_params, or trace it: "
        "jax.eval_shape(model, x).",
        [f"{_title(leaf)}: has a shape and no value." for leaf in structs],
    )


def _not_arrays(name: str, layer: Any, own: Leaves, inputs: Leaves) -> ShardingError | None:
    problems = [
        f"{leaf.path}: {problem}" for leaf in inputs if (problem := _input_problem(leaf.array))
    ]
    return RuleTypeError(f"{name} cannot take these inputs:", problems) if problems else None


def _input_problem(value: Any) -> str | None:
    if is_abstract(value):
        return (
            "is a jax.ShapeDtypeStruct, which has a shape and no value. "
            "Give an array, or trace the layer: jax.eval_shape(model, x)."
        )
    if is_array_like(value):
        return None
    if hasattr(value, "dtype"):
        return f"{value!r} is not an array that a device can hold. Give numbers, such as token ids."
    return (
        f"{value!r} is not an array. What a layer needs besides arrays is a field of it, declared "
        "with metadata={'pytree_node': False}."
    )


def _deleted(name: str, layer: Any, own: Leaves, inputs: Leaves) -> ShardingError | None:
    return refusal_of_deleted(name, (*own, *inputs))


def refusal_of_deleted(name: str, leaves: Iterable[NamedLeaf]) -> ShardingError | None:
    """What is wrong with a call of which some arrays were donated; None if none was.

    Args:
        name: What was called.
        leaves: The arrays of its parameters and inputs.
    """
    problems = [
        f"{_title(leaf)}: was donated or deleted." for leaf in leaves if is_deleted(leaf.array)
    ]
    if not problems:
        return None
    return RuleTypeError(
        f"{name} was called with arrays that are no longer there. Whatever donates an array, as a "
        "train step that donates its state does, returns the one to go on with: take the model "
        "from the newest state, or call before that with a copy.",
        problems,
    )


def _misplaced(name: str, layer: Any, own: Leaves, inputs: Leaves) -> ShardingError | None:
    # Only committed arrays are bound to their devices; JAX may move all others.
    own, inputs = (
        [leaf for leaf in leaves if is_concrete(leaf.array) and leaf.array.committed]
        for leaves in (own, inputs)
    )
    problems = (
        _placement_problems(inputs, vars(layer).get("in_shardings"))
        or _device_problems(own, inputs)
        or _constraint_problems(layer, [*own, *inputs])
    )
    if not problems:
        return None
    return MeshError(f"{name} was called with arrays in places that do not fit:", problems)


_EXPLANATIONS = {
    "ShapeDtypeStruct": _abstract,
    "as an abstract array": _not_arrays,
    "deleted": _deleted,
    "incompatible devices": _misplaced,
    "does not match the sharding on the respective arg": _misplaced,
}
"""What explains an error of JAX that has these words."""


def _placement_problems(inputs: Leaves, in_shardings: Any) -> list[str]:
    """One line for every array of the argument that is bound to another layout than declared."""
    if in_shardings is None:
        return []
    single = in_shardings if isinstance(in_shardings, Sharding) else None
    declared = "" if single is None else f" as {_layout(single)}"
    return [
        f"{leaf.path}: is {_where(leaf.array)} as {_layout(leaf.array.sharding)}, and in_shardings "
        f"places it{declared}. Place it so: jax.device_put(x, layer.in_shardings)."
        for leaf in inputs
        if leaf.path.partition("/")[0] == "argument"
        and (single is None or not leaf.array.sharding.is_equivalent_to(single, leaf.array.ndim))
    ]


def _device_problems(own: Leaves, inputs: Leaves) -> list[str]:
    """One line for every array that is committed to other devices than most of the model."""
    leading = own or inputs
    if not leading:
        return []
    ((usual, _),) = collections.Counter(map(_devices, leading)).most_common(1)
    example = next(leaf for leaf in leading if _devices(leaf) == usual)
    most = f"(for instance {_title(example)}) {_where(example.array)}"
    place_input = (
        "shard_batch(x, mesh, rules)"
        if len(usual) > 1
        else f"jax.device_put(x, jax.devices()[{usual[0].id}])"
    )

    def problems(leaves: Leaves, others: str, fix: str) -> list[str]:
        return [
            f"{_title(leaf)}: is {_where(leaf.array)}"
            f"{' with the devices in another order' if set(_devices(leaf)) == set(usual) else ''}"
            f", and {others} {most}. {fix}."
            for leaf in leaves
            if _devices(leaf) != usual
        ]

    place_model = "Place the whole model: place(model, mesh, rules)"
    return [
        *problems(own, "most of the model", place_model),
        *problems(inputs, "the model" if own else "most", f"Place it there: {place_input}"),
    ]


def _constraint_problems(layer: Any, bound: Leaves) -> list[str]:
    """One line for every constraint layer inside that is for other devices than the arrays are."""
    if not bound:
        return []
    # A wrapper layer, which explains unfit calls by this module.
    from penzai_shard.layers.constrain_activations import ConstrainActivations

    kinds = (ConstrainActivations, ConstrainSharding, ConstrainShardingByName)
    constraints = pz.select(layer).at_instances_of(kinds)
    return [
        f"{path_text(path)}: this {type(constraint).__name__} is for the mesh "
        f"{mesh_text(mesh)} of other devices, or of the same in another order, and the model and "
        f"its input are {_where(bound[0].array)}. Make the constraint with the mesh of the model."
        for path, constraint in constraints.get_by_path().items()
        for mesh in dict.fromkeys(constraint.meshes())
        if tuple(mesh.devices.flat) != _devices(bound[0])
    ]


def _title(leaf: NamedLeaf) -> str:
    return leaf.path or "the layer itself"


def _layout(sharding: Sharding) -> str:
    return str(sharding.spec) if isinstance(sharding, NamedSharding) else "one piece"


def _devices(leaf: NamedLeaf) -> tuple[Any, ...]:
    """The devices of an array, in the order that a program of one device mesh must agree on."""
    sharding = leaf.array.sharding
    if isinstance(sharding, NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def _where(array: Any) -> str:
    sharding = array.sharding
    if isinstance(sharding, NamedSharding):
        return f"on a mesh {mesh_text(sharding.mesh)}"
    ids = sorted(device.id for device in sharding.device_set)
    return f"on device {ids[0]}" if len(ids) == 1 else f"on devices {', '.join(map(str, ids))}"
