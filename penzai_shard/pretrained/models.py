"""Builds Penzai's model of a configuration, and finds the tensors of its parameters.

The tables of ``families`` are read in both directions: sizes are those of the model, so that what
is stored is checked and never trusted.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz

from penzai_shard.checkpoints.filling import Shape, Source
from penzai_shard.checkpoints.records import ArrayRecord
from penzai_shard.errors import Problems, check_arguments
from penzai_shard.paths import matches
from penzai_shard.pretrained.families import FAMILIES
from penzai_shard.pretrained.model_configs import ModelConfig, read_config

STACK_AXIS = "blocks"
_QKV, _PARTS = "qkv", ("query", "key", "value")
# The logical axes of what Hugging Face calls heads; a parameter has some of them, in this order.
_HEADS = ("heads", "head_groups", "query_heads")
_NORM, _HEAD = "/scale.weights", "lm_head.weights"
# Of these Penzai has models.
DTYPES = ("bfloat16", "float32")
DTYPE_FIX = "dtype='bfloat16' or dtype='float32'"
# Early versions of transformers stored these, and nothing is computed from them.
_BUFFERS = ("**.rotary_emb.inv_freq", "**.attention.bias", "**.attention.masked_bias")


def model_of_config(
    config: Any,
    *,
    dtype: Any = None,
    use_layer_stack: bool = False,
    upcast_activations: bool = False,
) -> Any:
    """Penzai's model of a configuration, without values: to plan, to price, to restore into.

    Args:
        config: As for ``read_config``: attributes, a path, or a published name.
        dtype: ``"bfloat16"`` or ``"float32"``; by default the one that the configuration says. Of
            other ones Penzai has no models, and bfloat16 takes their place.
        use_layer_stack: Whether its blocks are one ``pz.nn.LayerStack``.
        upcast_activations: Whether it computes with float32, whatever its parameters are.

    Returns:
        The model that ``load_safetensors`` makes of weights of this dtype, frozen, with
        ``jax.ShapeDtypeStruct`` in place of arrays.

    Raises:
        CheckpointNotFoundError, CheckpointDamagedError, CheckpointMismatchError: As
            ``read_config``.
        RuleTypeError: An option cannot be read, or blocks that differ shall be one stack.

    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 16}, abstract=True)
    >>> plan = pzs.make_plan(model_of_config("llama-3-8b"), mesh, {"embedding": "data"})
    >>> {leaf.path: leaf.spec for leaf in plan.leaves}["transformer/embedder.embeddings"]
    P(None, 'data')
    """
    config = read_config(config)
    family = FAMILIES[config.family]
    if dtype is None:
        said = find_dtype(config, {})
        dtype = said if said in DTYPES else "bfloat16"
    dtype = name_dtype(dtype)
    differ = len({*config.layers}) > 1 or not family.can_stack
    no_stack = f"use_layer_stack=False, as blocks of this {config.family} differ"
    checks = {
        "use_layer_stack": (use_layer_stack, not (use_layer_stack and differ), no_stack),
        "dtype": (dtype, dtype in DTYPES, DTYPE_FIX),
    }
    check_arguments(f"cannot build {config.source}", checks)

    build = functools.partial(
        family.build,
        parameter_dtype=jnp.dtype(dtype),
        activation_dtype=jnp.dtype("float32" if upcast_activations else dtype),
        use_layer_stack=use_layer_stack,
    )
    # The parameters of all blocks are as those of the first: one is traced 30 times as fast as 80.
    traced = config.layers if use_layer_stack else config.layers[:1]
    first = dataclasses.replace(config, layers=traced)

    def trace(key: Any) -> Any:
        _, parameters = pz.unbind_params(build(first, key), freeze=True)
        # Penzai leaves some layers in float32: the last one, and the feed-forward ones of GPT-NeoX.
        return [dataclasses.replace(x, value=x.value.astype(dtype)) for x in parameters]

    parameters = [
        dataclasses.replace(each, label=each.label.replace("/block_0/", f"/block_{i}/"))
        for each in jax.eval_shape(trace, jax.random.key(0))
        for i in range(len(config.layers) if "/block_0/" in each.label else 1)
    ]
    return pz.bind_variables(build(config, None), parameters)


def name_dtype(dtype: Any) -> str | None:
    """The name of a dtype, if one is given."""
    return None if dtype is None else getattr(dtype, "__name__", str(dtype))


def find_dtype(config: ModelConfig, records: Mapping[str, ArrayRecord]) -> str:
    """The dtypes of tensors of which a model is made, or else what its configuration says."""
    said = str(config.given.get("dtype") or config.given.get("torch_dtype"))
    return ", ".join(sorted({x.dtype for x in without_buffers(records).values()})) or said


def without_buffers(records: Mapping[str, ArrayRecord]) -> dict[str, ArrayRecord]:
    """Tensors without those from which nothing is computed."""
    return {n: x for n, x in records.items() if not any(matches(buffer, n) for buffer in _BUFFERS)}


# Reading tables


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
    family = FAMILIES[config.family]
    of_blocks = [(name, text) for name, text in family.tensors.items() if "{}" in name]
    rows = [(name, text, "") for name, text in family.tensors.items() if "{}" not in name]
    for number in range(len(config.layers)):
        start, block = family.blocks.format(number), f"block_{number}/"
        rows += [(name.format(start), text, block) for name, text in of_blocks]
    sources: dict[str, Source] = {}
    shapes: dict[str, Shape] = {}
    for name, text, block in rows:
        tensor = family.prefix + name
        place, dims = text.split(": ")
        for number, part in enumerate(_PARTS if _QKV in place else ("",)):
            parameter = place.replace(_QKV, part)
            path = f"transformer/{block}{parameter}"
            if path not in parameters:
                path = f"transformer/{STACK_AXIS}/{parameter}"
            source, shapes[tensor] = _read_dims(dims, number, parameters[path])
            plus = family.plus if parameter.endswith(_NORM) else 0.0
            before = sources[path].stored if path in sources else ()
            sources[path] = dataclasses.replace(source, stored=(*before, tensor), plus=plus)
    return sources, shapes


def _read_dims(dims: str, number: int, parameter: ArrayRecord) -> tuple[Source, Shape]:
    """How a parameter lies in a tensor with these dimensions, and the tensor's shape.

    Args:
        dims: The dimensions as a table has them.
        number: Which one of queries, keys and values it is, if these stand in one tensor.
        parameter: The parameter.
    """
    axes: Any = parameter.names or ()
    sizes: dict[Any, int] = {**dict(zip(axes, parameter.shape, strict=True)), _QKV: len(_PARTS)}
    heads = "*".join(axis for axis in _HEADS if axis in sizes)
    tensor = [dim.split("*") for dim in dims.replace("heads", heads).split()]
    split = [axis for dim in tensor for axis in dim if axis]
    source = Source(
        (),
        tuple(sizes[axis] for axis in split),
        tuple(split.index(axis) for axis in axes if axis != STACK_AXIS),
        stack=axes.index(STACK_AXIS) if STACK_AXIS in axes else None,
        pick=(split.index(_QKV), number) if _QKV in split else None,
    )
    return source, tuple(math.prod(sizes[axis] for axis in dim if axis) for dim in tensor)


def find_tied(config: ModelConfig) -> dict[str, str]:
    """Of the head, which need not be stored if it is tied, the tensor in its place."""
    family = FAMILIES[config.family]
    names = {text.split(": ")[0]: family.prefix + name for name, text in family.tensors.items()}
    is_tied = config["tie_word_embeddings"] and _HEAD in names
    return {names[_HEAD]: names["embedder.embeddings"]} if is_tied else {}


def check_tied(
    config: ModelConfig, names: Container[str], sum_up: Callable[[str], str], problems: Problems
) -> None:
    """Adds each tensor that is there, and differs from the one in its place by its checksum."""
    for name, other in find_tied(config).items():
        if name in names and other in names and sum_up(name) != sum_up(other):
            what = f"{config.source} ties it to {other}, and their numbers differ"
            problems.add(name, what, "Write config= with tie_word_embeddings=False.", "tied")
