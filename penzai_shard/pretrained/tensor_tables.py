"""Reads the tables of families: which part of which tensor each parameter is, in both directions.

``read_tables`` gives one ``Source`` for each parameter. To load, parts of parameters are read
through them; to save, ``join_tensor`` fills a tensor with the parameters that it holds. The sizes
are those of the model, so that what is stored is checked and never trusted.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penzai_shard.checkpoints.filling import Source
from penzai_shard.checkpoints.matching import Options
from penzai_shard.checkpoints.records import ArrayRecord
from penzai_shard.errors import CheckpointMismatchError, Problems
from penzai_shard.paths import matches
from penzai_shard.pretrained.families import family_of
from penzai_shard.pretrained.model_configs import ModelConfig

Shape = tuple[int, ...]
Part = tuple[str, Source, int]
"""An array that goes into a tensor: its path, its source, and which of that one's tensors it is."""

STACK_AXIS, VOCABULARY = "blocks", "vocabulary"
_PLUS_ONE = "1+ "
# The logical axes of what Hugging Face calls heads; a parameter has some of them, in this order.
_HEADS = ("heads", "head_groups", "query_heads")


def read_tables(
    config: ModelConfig, parameters: Mapping[str, ArrayRecord]
) -> tuple[dict[str, Source], dict[str, Shape]]:
    """What each parameter is made of, and the shape of each tensor.

    Args:
        config: The configuration of the model.
        parameters: The parameters of its model, by path; blocks may be stacked.

    Returns:
        A source for each path, and a shape for each tensor, also for those that are not stored if
        embeddings are tied.
    """
    family = family_of(config)
    rows = [(name, text, "") for name, text in family.tensors.items()]
    for number in range(len(config.layers)):
        start = family.blocks.format(number)
        rows += [(start + name, text, f"block_{number}/") for name, text in family.of_block.items()]
    sources: dict[str, Source] = {}
    shapes: dict[str, Shape] = {}
    for name, text, block in rows:
        tensor = family.prefix + name
        for line in text.split("; "):
            parameter, dims = line.split(": ")
            path = f"transformer/{block}{parameter}"
            if path not in parameters:
                path = f"transformer/{STACK_AXIS}/{parameter}"
            source, shapes[tensor] = _read_line(dims, parameters[path], config["vocab_size"])
            before = sources[path].stored if path in sources else ()
            sources[path] = dataclasses.replace(source, stored=(*before, tensor))
    return sources, shapes


def _read_line(dims: str, parameter: ArrayRecord, tokens: int) -> tuple[Source, Shape]:
    """How a parameter lies in a tensor with these dimensions, and the tensor's shape.

    Args:
        dims: The dimensions as a table has them.
        parameter: The parameter.
        tokens: How many tokens the stored vocabulary has.
    """
    axes = parameter.names or ()
    sizes: dict[Any, int] = dict(zip(axes, parameter.shape, strict=True))
    pad = sizes.get(VOCABULARY, tokens) - tokens
    split: list[tuple[Any, int]] = []
    shape, pick = [], None
    for dim in dims.removeprefix(_PLUS_ONE).split():
        start = len(split)
        for axis in dim.split("*"):
            position, _, count = axis.partition("/")
            if count:
                pick = len(split), int(position)
                split.append((axis, int(count)))
            elif axis == VOCABULARY:
                split.append((axis, tokens))
            else:
                known = _HEADS if axis == "heads" else (axis,)
                split += [(each, sizes[each]) for each in known if each in sizes]
        shape.append(math.prod(size for _, size in split[start:]))
    places = [axis for axis, _ in split]
    source = Source(
        (),
        tuple(size for _, size in split),
        tuple(places.index(axis) for axis in axes if axis != STACK_AXIS),
        stack=axes.index(STACK_AXIS) if STACK_AXIS in axes else None,
        pick=pick,
        plus=1.0 if dims.startswith(_PLUS_ONE) else 0.0,
        pad=pad,
    )
    return source, tuple(shape)


def find_tied(config: ModelConfig) -> dict[str, str]:
    """Of each tensor that need not be stored, as embeddings are tied, the one in its place."""
    family = family_of(config)
    tied = family.tied if config["tie_word_embeddings"] else {}
    return {family.prefix + name: family.prefix + other for name, other in tied.items()}


# Loading


def match_tensors(
    config: ModelConfig,
    stored: Mapping[str, ArrayRecord],
    wanted: Mapping[str, ArrayRecord],
    options: Options,
    *,
    headline: str,
    **_: Any,
) -> dict[str, Source]:
    """What each parameter is read from, like ``match``, or an error with all that does not fit.

    Args:
        config: The configuration of the model.
        stored: The tensors that there are.
        wanted: The parameters of the model.
        options: If ``"extra"`` is allowed, tensors may be there that no parameter is made of.
        headline: The first line of the error.

    Raises:
        CheckpointMismatchError: Tensors are missing, left over, or of other shapes.
    """
    sources, shapes = read_tables(config, wanted)
    tied = find_tied(config)
    names = {name: tied.get(name, name) if name not in stored else name for name in shapes}
    problems = Problems(headline)
    for tensor, shape in shapes.items():
        record = stored.get(names[tensor])
        if record is None:
            fix = "Give all files of these weights, with the config.json that belongs to them."
            problems.add(tensor, "no file has it", fix, "missing")
        elif record.shape != shape:
            what = f"it is {record}, and {config.source} makes it {[*shape]}"
            problems.add(tensor, what, "Give config= the config.json of these weights.", "sizes")
    known = {*names, *names.values()}
    for tensor in sorted(stored.keys() - known) if "extra" not in options.allow else ():
        if not any(matches(pattern, tensor) for pattern in family_of(config).harmless):
            what = f"no parameter of {config.family} is made of it"
            problems.add(tensor, what, f"Write allow={(*options.allow, 'extra')}.", "extra")
    problems.raise_if_any(CheckpointMismatchError)
    return {
        path: dataclasses.replace(source, stored=tuple(names[name] for name in source.stored))
        for path, source in sources.items()
    }


# Saving


def find_parts(sources: Mapping[str, Source]) -> dict[str, list[Part]]:
    """The arrays from which each tensor is made, where sources say the inverse."""
    parts: dict[str, list[Part]] = {}
    for path, source in sources.items():
        for number, tensor in enumerate(source.stored):
            parts.setdefault(tensor, []).append((path, source, number))
    return parts


def join_tensor(parts: Sequence[Part], shape: Shape, arrays: Mapping[str, Any]) -> np.ndarray:
    """A tensor in host memory, made of arrays that fill it wholly.

    Args:
        parts: What goes into it.
        shape: Its shape.
        arrays: The arrays by path.
    """
    whole = None
    for path, source, number in parts:
        # The inverse of ``Source.read``: rows of zeros are cut off, and ones are subtracted.
        order = tuple(source.order.index(dim) for dim in sorted(source.order))
        array = np.asarray(_copy_part(arrays[path], number, source.stack, order))
        array = array[: source.shape[0]] if source.pad else array
        array = array - np.asarray(source.plus, array.dtype) if source.plus else array
        if source.pick is None:
            whole = array
        else:
            whole = np.empty(source.shape, array.dtype) if whole is None else whole
            dimension, position = source.pick
            np.moveaxis(whole, dimension, 0)[position] = array
    assert whole is not None
    return np.ascontiguousarray(whole).reshape(shape)


@functools.partial(jax.jit, static_argnames=("stack", "order"))
def _copy_part(array: Any, number: Any, stack: int | None, order: tuple[int, ...]) -> Any:
    """An array in another order, of a stack one; made on devices, where it is faster."""
    if stack is not None:
        array = jax.lax.dynamic_index_in_dim(array, number, stack, keepdims=False)
    # An array of JAX keeps what the host has read of it: the host would have the whole model.
    return jnp.copy(array.transpose(order))
