"""Dictionaries of parameters with their blocks one by one, or stacked as ``pz.nn.LayerStack`` has
them."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from penzai_shard.array_kinds import is_abstract
from penzai_shard.checkpointing.array_records import record_of
from penzai_shard.checkpointing.arrays_by_name import ArraysByName
from penzai_shard.checkpointing.block_names import BlockNames, Member, by_group
from penzai_shard.checkpointing.parameter_dict import is_parameter_mapping, param_dict
from penzai_shard.checkpointing.stacking import (
    sharding_of_blocks,
    sharding_of_stack,
    stacked,
    unstacked,
)
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError, raise_all
from penzai_shard.named_arrays import named_array
from penzai_shard.named_leaves import NamedLeaf


def stack_blocks(
    params: Mapping[str, Any],
    *,
    block: str = "block_*",
    stacked_name: str = "blocks",
    axis: str = "blocks",
    within: str | None = None,
    donate: bool = False,
) -> dict[str, Any]:
    """Stacks the parameters of equal blocks, as Penzai does with ``use_layer_stack=True``.

    ``transformer/block_0/mlp/up.weights`` and so on become ``transformer/blocks/mlp/up.weights``,
    with a first logical axis ``blocks``: what ``pz.nn.LayerStack.from_sublayer_builder`` makes of
    the blocks' builder. All others stay as they are. ``unstack_blocks`` is the inverse.

    Args:
        params: Named arrays by name, as ``param_dict`` gives them; of ``jax.ShapeDtypeStruct`` too.
        block: The part of a name that says which block it is of, ``*`` standing for the number,
            from 0 up.
        stacked_name: What takes its place.
        axis: The logical axis of the stacks.
        within: A pattern of what stands before that part, if not all blocks are meant.
        donate: Whether the arrays of the blocks are deleted once they are stacked, so that only
            those of one stack are there twice.

    Returns:
        A new dictionary. Sharded arrays stay sharded as they are, whole along the new axis.

    Raises:
        CheckpointMismatchError: With one line per array: blocks that are missing or lack a
            parameter, differ in axes, sizes or dtype; a name that exists already; a name with
            several parts that may be the block's.
        RuleTypeError: Something else than a dictionary of arrays is given.

    >>> from penzai import pz
    >>> params = {f"net/block_{i}/w": pz.nx.ones({"in": 2}) * i for i in range(3)}
    >>> stack = stack_blocks(params)["net/blocks/w"]
    >>> dict(stack.named_shape), stack.unwrap("blocks", "in").tolist()
    ({'blocks': 3, 'in': 2}, [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    """
    names = BlockNames(block, stacked_name, axis, within)
    values, leaves = _read("stack_blocks", params)
    members, problems = _members(leaves, names.numbered, f"is named {block!r}")
    groups = by_group(members.items())
    problems += _unequal_blocks(names, leaves, members, groups)
    made = [names.of_stack(members[next(iter(numbered.values()))]) for numbered in groups.values()]
    problems += _clashes(made, values)
    raise_all(CheckpointMismatchError, "cannot stack these blocks:", problems)
    result: dict[str, Any] = {}
    for name, value in values.items():
        if name not in members:
            result[name] = value
        elif (numbered := groups.pop(members[name].group, None)) is not None:
            blocks = [leaves[numbered[number]] for number in sorted(numbered)]
            result[names.of_stack(members[name])] = _stack(blocks, axis, donate)
    return result


def unstack_blocks(
    params: Mapping[str, Any],
    *,
    block: str = "block_*",
    stacked_name: str = "blocks",
    axis: str = "blocks",
    within: str | None = None,
    donate: bool = False,
) -> dict[str, Any]:
    """Takes stacked parameters apart into those of single blocks; the inverse of ``stack_blocks``.

    Args:
        params: Named arrays by name, as ``param_dict`` gives them; of ``jax.ShapeDtypeStruct`` too.
        block: The part of the new names that says which block it is of, ``*`` standing for the
            number.
        stacked_name: What stands in its place.
        axis: The logical axis of the stacks, wherever it is among their axes.
        within: A pattern of what stands before that part, if not all stacks are meant.
        donate: Whether each stack is deleted once it is taken apart.

    Returns:
        A new dictionary. Sharded arrays stay sharded as they are in their other axes.

    Raises:
        CheckpointMismatchError: With one line per array: one without the axis, or of another number
            of blocks than the others; a name that exists already.
        RuleTypeError: Something else than a dictionary of arrays is given.

    >>> from penzai import pz
    >>> stack = pz.nx.wrap(jax.numpy.arange(6).reshape(3, 2), "blocks", "in")
    >>> params = unstack_blocks({"net/blocks/w": stack, "net/b": pz.nx.ones({"in": 2})})
    >>> list(params), params["net/block_2/w"].unwrap("in").tolist()
    (['net/block_0/w', 'net/block_1/w', 'net/block_2/w', 'net/b'], [4, 5])
    """
    names = BlockNames(block, stacked_name, axis, within)
    values, leaves = _read("unstack_blocks", params)
    members, problems = _members(leaves, names.stacks, f"is named {stacked_name!r}")
    # Those that stand before the same blocks have one number of them.
    together: dict[str, list[str]] = {}
    for name, member in members.items():
        together.setdefault(member.before, []).append(name)
    problems += _unequal_stacks(leaves, together, axis)
    counts = {name: _count(leaves[name], axis) for name in members}
    made = [names.of_block(m, i) for name, m in members.items() for i in range(counts[name])]
    raise_all(
        CheckpointMismatchError, "cannot unstack these blocks:", problems + _clashes(made, values)
    )
    result: dict[str, Any] = {}
    for name, value in values.items():
        if name not in members:
            result[name] = value
            continue
        # Block by block, as a model has them.
        stacks = together.pop(members[name].before, [])
        blocks = {stack: _unstack(leaves[stack], axis, donate) for stack in stacks}
        for number in range(counts[name] if stacks else 0):
            for stack in stacks:
                result[names.of_block(members[stack], number)] = blocks[stack][number]
    return result


def _read(called: str, params: Any) -> tuple[dict[str, Any], dict[str, NamedLeaf]]:
    """All values by name, and those that are single arrays."""
    if not is_parameter_mapping(params):
        raise RuleTypeError(
            f"{called} takes a dictionary of arrays by name, not a {type(params).__name__}. Of a "
            f"model give its parameters: {called}(param_dict(model))."
        )
    values = param_dict(params)
    leaves = ArraysByName(values).leaves
    return values, {name: leaves[name] for name in values if name in leaves}


def _members(
    leaves: Mapping[str, NamedLeaf], read: Callable[[str], list[Member]], what: str
) -> tuple[dict[str, Member], list[str]]:
    """The arrays that belong to blocks, and a line for each name that can be read in two ways."""
    found = {name: members for name in leaves if (members := read(name))}
    problems = [
        f"{name}: several parts of it may be that of the blocks, after "
        f"{' or after '.join(repr(member.before) for member in members)}. Say which: "
        f"within={members[0].before.strip('/.')!r}."
        for name, members in found.items()
        if len(members) > 1
    ]
    if not found:
        some = ", ".join(map(repr, list(leaves)[:3]))
        problems = [f"no array has a part that {what}. There are {some or 'none'}."]
    return {name: members[0] for name, members in found.items()}, problems


def _unequal_blocks(
    names: BlockNames,
    leaves: Mapping[str, NamedLeaf],
    members: Mapping[str, Member],
    groups: Mapping[tuple[str, str], Mapping[int, str]],
) -> list[str]:
    """What keeps blocks from being stacked."""
    counts: dict[str, int] = {}
    for (before, _), numbered in groups.items():
        counts[before] = max(counts.get(before, 0), 1 + max(numbered))
    problems = [
        f"{name}: is written with another number than {names.of_block(member, member.number)!r}. "
        "Rename it so."
        for name, member in members.items()
        if name != names.of_block(member, member.number)
    ]
    for numbered in groups.values():
        first = numbered[min(numbered)]
        member = members[first]
        like = record_of(leaves[first])
        problems += [
            f"{names.of_block(member, number)}: is missing, and {first!r} is there. Blocks that "
            "are stacked have the same parameters, and numbers without a gap."
            for number in range(counts[member.before])
            if number not in numbered
        ]
        for name in numbered.values():
            leaf, record = leaves[name], record_of(leaves[name])
            if leaf.names is None:
                axes = tuple(f"axis_{i}" for i in range(len(leaf.shape)))
                problems.append(
                    f"{name}: has no logical axes. Name it: name_axes(params, {{{name!r}: "
                    f"{axes}}})."
                )
            elif names.axis in leaf.names:
                problems.append(
                    f"{name}: has a logical axis {names.axis!r} already, {record}. Pass axis= "
                    "another name."
                )
            elif record != like:
                problems.append(
                    f"{name}: is {record} {record.dtype}, and {first!r} is {like} {like.dtype}. "
                    "Blocks that are stacked are equal, also in the order of their axes."
                )
    return problems


def _unequal_stacks(
    leaves: Mapping[str, NamedLeaf], together: Mapping[str, Sequence[str]], axis: str
) -> list[str]:
    """What keeps stacks from being taken apart."""
    problems = [
        f"{name}: has no logical axis {axis!r}, {record_of(leaves[name])}. Pass axis= the one "
        "along which the blocks are stacked, or within= what stands before those that are."
        for stacks in together.values()
        for name in stacks
        if axis not in (leaves[name].names or ())
    ]
    for stacks in together.values():
        counts = collections.Counter(_count(leaves[name], axis) for name in stacks)
        usual = counts.most_common(1)[0][0]
        problems += [
            f"{name}: has {count} blocks, and {next(n for n in stacks if n != name)!r} beside it "
            f"{usual}. All parameters of the blocks have one number of them."
            for name in stacks
            if (count := _count(leaves[name], axis)) not in (usual, 0)
        ]
    return problems


def _count(leaf: NamedLeaf, axis: str) -> int:
    return leaf.shape[leaf.names.index(axis)] if leaf.names and axis in leaf.names else 0


def _clashes(made: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: is there already, beside those that would get this name. Rename one of them."
        for name in made
        if name in values
    ]


def _stack(blocks: Sequence[NamedLeaf], axis: str, donate: bool) -> Any:
    names = (axis, *(blocks[0].names or ()))
    first = blocks[0].array
    if is_abstract(first):
        shape = (len(blocks), *blocks[0].shape)
        sharding = first.sharding and sharding_of_stack(first.sharding, 0)
        return named_array(jax.ShapeDtypeStruct(shape, first.dtype, sharding=sharding), names)
    made = stacked([block.array for block in blocks], 0)
    _delete([block.array for block in blocks] if donate else [], made)
    return named_array(made, names)


def _unstack(stack: NamedLeaf, axis: str, donate: bool) -> list[Any]:
    assert stack.names is not None
    k = stack.names.index(axis)
    names = (*stack.names[:k], *stack.names[k + 1 :])
    if is_abstract(stack.array):
        sharding = stack.array.sharding and sharding_of_blocks(stack.array.sharding, k)
        shape = (*stack.shape[:k], *stack.shape[k + 1 :])
        struct = jax.ShapeDtypeStruct(shape, stack.array.dtype, sharding=sharding)
        return [named_array(struct, names)] * stack.shape[k]
    made = unstacked(stack.array, k)
    _delete([stack.array] if donate else [], made)
    return [named_array(block, names) for block in made]


def _delete(arrays: Sequence[Any], made: Any) -> None:
    if arrays:
        jax.block_until_ready(made)
    for array in arrays:
        if isinstance(array, jax.Array):
            array.delete()
