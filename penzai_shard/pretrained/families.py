"""Builds Penzai's model of a configuration, and says which tensor is which of its parameters.

A line of a table has the name of a tensor, and the parameter that it is with the dimensions of the
tensor: logical axes; ``heads`` for those of ``heads``, ``head_groups`` and ``query_heads`` that the
parameter has; ``a*b`` for several in one. Where queries, keys and values stand in one tensor,
``qkv`` is their dimension, and their piece of the path. Tables are read in both directions: sizes
are those of the model, so that what is stored is checked and never trusted.
"""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Container, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import gpt_neox, llamalike_common

from penzai_shard.checkpoints.filling import Shape, Source
from penzai_shard.checkpoints.records import ArrayRecord, read_manifest
from penzai_shard.checkpoints.tensor_files import is_tensors
from penzai_shard.errors import Problems, check_arguments
from penzai_shard.paths import matches
from penzai_shard.pretrained.model_configs import ModelConfig, read_config

STACK_AXIS, VOCABULARY = "blocks", "vocabulary"
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
    vocabulary: int | None = None,
) -> Any:
    """Penzai's model of a configuration, without values: to plan, to price, to restore into.

    Args:
        config: As for ``read_config``: attributes, a path, or a published name.
        dtype: ``"bfloat16"`` or ``"float32"``; by default that of the weights if the path of their
            folder is given, or else the one that the configuration says. Of other ones Penzai has
            no models, and bfloat16 takes their place.
        use_layer_stack: Whether its blocks are one ``pz.nn.LayerStack``.
        upcast_activations: Whether it computes with float32, whatever its parameters are.
        vocabulary: How many tokens it has, if these are more than the configuration says.

    Returns:
        The model that ``load_safetensors`` makes of the weights, frozen, with
        ``jax.ShapeDtypeStruct`` in place of arrays.

    Raises:
        CheckpointNotFoundError, CheckpointDamagedError, CheckpointMismatchError: As
            ``read_config``; or weights in the folder are not whole.
        RuleTypeError: An option cannot be read, blocks that differ shall be one stack, or there are
            more tokens than are asked for.

    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 16}, abstract=True)
    >>> plan = pzs.make_plan(model_of_config("llama-3-8b"), mesh, {"embedding": "data"})
    >>> {leaf.path: leaf.spec for leaf in plan.leaves}["transformer/embedder.embeddings"]
    P(None, 'data')
    """
    path, config = config, read_config(config)
    family, known = FAMILIES[config.family], config["vocab_size"]
    tokens = known if vocabulary is None else vocabulary
    if dtype is None:
        has_weights = isinstance(path, str | os.PathLike) and is_tensors(pathlib.Path(path))
        found = find_dtype(config, read_manifest(path).records if has_weights else {})
        dtype = found if found in DTYPES else "bfloat16"
    dtype = name_dtype(dtype)
    differ = len({*config.layers}) > 1 or family.build is _build_gemma_3
    no_stack = f"use_layer_stack=False, as blocks of this {config.family} differ"
    checks = {
        "use_layer_stack": (use_layer_stack, not (use_layer_stack and differ), no_stack),
        "vocabulary": (tokens, type(tokens) is int and tokens >= known, f"{known} or more"),
        "dtype": (dtype, dtype in DTYPES, DTYPE_FIX),
    }
    check_arguments(f"cannot build {config.source}", checks)

    build = functools.partial(
        family.build,
        parameter_dtype=jnp.dtype(dtype),
        activation_dtype=jnp.dtype("float32" if upcast_activations else dtype),
        use_layer_stack=use_layer_stack,
    )
    config = dataclasses.replace(config, values={**config.values, "vocab_size": tokens})
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


# Building, with a random key, or with None in its place for a model without parameters


def _build_llama(config: ModelConfig, key: Any, **fields: Any) -> Any:
    query_heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    kinds = tuple(
        llamalike_common.AttentionTypeSlidingWindowCausal(layer.window)
        if layer.window
        else llamalike_common.AttentionTypeGlobalCausal()
        for layer in config.layers
    )
    own = llamalike_common.LlamalikeTransformerConfig(
        num_kv_heads=key_heads,
        query_head_multiplier=query_heads // key_heads,
        embedding_dim=config["hidden_size"],
        projection_dim=config["head_dim"],
        mlp_hidden_dim=config["intermediate_size"],
        num_decoder_blocks=len(config.layers),
        vocab_size=config["vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
        attention_type=kinds[0] if len(set(kinds)) == 1 else kinds,
        **{"mlp_variant": "swiglu", "tie_embedder_and_logits": False, **fields},
    )
    model = llamalike_common.build_llamalike_transformer(own, key)

    def rescale(number: int, rope: pz.nn.ApplyRoPE) -> pz.nn.Layer:
        layer = config.layers[number // 2]
        rope = dataclasses.replace(rope, max_wavelength=layer.theta)
        return rope if layer.factor == 1.0 else ApplyScaledRoPE(rope, layer.factor, layer.bands)

    # There are two in each layer, of queries and of keys; a stack has them once for all its layers.
    ropes = pz.select(model).at_instances_of(pz.nn.ApplyRoPE)
    return ropes.apply_with_selected_index(rescale)


_build_gemma = functools.partial(
    _build_llama, mlp_variant="geglu_approx", tie_embedder_and_logits=True
)


def _build_gemma_2(config: ModelConfig, key: Any, **fields: Any) -> Any:
    return _build_gemma(
        config,
        key,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        query_scaling_factor=config["query_pre_attn_scalar"] ** -0.5,
        attn_logits_soft_cap=config["attn_logit_softcapping"],
        final_logit_softcap=config["final_logit_softcapping"],
        **fields,
    )


def _build_gemma_3(config: ModelConfig, key: Any, **fields: Any) -> Any:
    """Gemma 2 with norms of queries and keys before they are rotated."""
    axes, epsilon = {"projection": config["head_dim"]}, config["rms_norm_eps"]

    def add_norm(linear: pz.nn.Linear) -> tuple[pz.nn.Layer, ...]:
        name = linear.weights.label.removesuffix(".weights") + "_norm"
        return linear, pz.nn.RMSLayerNorm.from_config(name, key, axes, epsilon)

    linears = pz.select(_build_gemma_2(config, key, **fields)).at_instances_of(pz.nn.Linear)
    heads = linears.where(lambda x: x.weights.label.endswith(("/query.weights", "/key.weights")))
    return heads.apply_and_inline(add_norm)


def _build_neox(config: ModelConfig, key: Any, **fields: Any) -> Any:
    own = gpt_neox.GPTNeoXTransformerConfig(
        num_attention_heads=config["num_attention_heads"],
        embedding_dim=config["hidden_size"],
        projection_dim=config["head_dim"],
        mlp_hidden_dim=config["intermediate_size"],
        num_decoder_blocks=len(config.layers),
        vocab_size=config["vocab_size"],
        activation_fn="gelu_exact" if config["hidden_act"] == "gelu" else "gelu_approx",
        rope_wavelength=config.layers[0].theta,
        rope_subset_size=config["rotated"],
        layernorm_epsilon=config["layer_norm_eps"],
        **fields,
    )
    # Penzai gives the configuration's epsilon to every norm but the last.
    model = gpt_neox.build_gpt_neox_transformer(own, key)
    norms = pz.select(model).at_instances_of(pz.nn.Standardize)
    return norms.apply(lambda norm: dataclasses.replace(norm, epsilon=own.layernorm_epsilon))


@pz.pytree_dataclass
class ApplyScaledRoPE(pz.nn.Layer):  # type: ignore[misc]
    """Rotary embeddings of positions that are divided by a number, so that longer texts fit.

    From Llama 3.1 on, those of slow rotations only are: the rope type ``llama3`` of transformers.

    Attributes:
        rope: The rotary embeddings that are changed.
        factor: What positions are divided by.
        bands: As ``Layer.bands``.
    """

    rope: pz.nn.ApplyRoPE
    factor: float = dataclasses.field(metadata={"pytree_node": False})
    bands: Any = dataclasses.field(metadata={"pytree_node": False})

    def __call__(self, inputs: pz.nx.NamedArray, **side_inputs: Any) -> pz.nx.NamedArray:
        """Rotates each position."""

        def rotate(head: jax.Array, position: jax.Array) -> jax.Array:
            half = len(head) // 2
            frequencies = self.rope.max_wavelength ** (-jnp.arange(half) / half)
            # Without bands all are divided, as if they were slow.
            slow, fast, length = self.bands or (1.0, 2.0, 0.0)
            turns = length * frequencies / (2 * jnp.pi)
            kept = jnp.clip((turns - slow) / (fast - slow), 0, 1)
            angles = position * frequencies * (kept + (1 - kept) / self.factor)
            sin, cos = jnp.sin(angles), jnp.cos(angles)
            first, second = jnp.split(head, 2)
            return jnp.concatenate([first * cos - second * sin, second * cos + first * sin])

        axis, positions = self.rope.embedding_axis, side_inputs[self.rope.positions_input_name]
        rotated = pz.nx.nmap(rotate)(inputs.untag(axis), positions).tag(axis)
        return rotated.astype(inputs.dtype)


# Tensors


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        build: Builds the model of a configuration with a random key; it takes more fields of
            Penzai's own configuration by name.
        tensors: Of each tensor outside of the blocks, the parameter that it is.
        of_block: The same of each tensor of a block, behind ``blocks``.
        plus: What the model adds to the weights of norms, which are stored without it.
        prefix: What stands before all names.
        blocks: What stands before the tensors of a block, behind the prefix.
    """

    build: Callable[..., Any]
    tensors: Mapping[str, str]
    of_block: Mapping[str, str]
    plus: float = 0.0
    prefix: str = ""
    blocks: str = "model.layers.{}."


# Penzai's Gemma has one parameter for the tokens that go in and those that come out.
_GEMMA = {
    "model.embed_tokens.weight": "embedder.embeddings: vocabulary embedding",
    "model.norm.weight": "final_norm/scale.weights: embedding",
}
_LLAMA = {**_GEMMA, "lm_head.weight": "lm_head.weights: vocabulary embedding"}
_BLOCK = {
    "input_layernorm.weight": "pre_attention_norm/scale.weights: embedding",
    "post_attention_layernorm.weight": "pre_ffw_norm/scale.weights: embedding",
    "mlp.gate_proj.weight": "mlp/gating_linear.weights: neurons embedding",
    "mlp.up_proj.weight": "mlp/value_linear.weights: neurons embedding",
    "mlp.down_proj.weight": "mlp/out_linear.weights: embedding neurons",
    "self_attn.q_proj.weight": "attention/query.weights: heads*projection embedding",
    "self_attn.k_proj.weight": "attention/key.weights: heads*projection embedding",
    "self_attn.v_proj.weight": "attention/value.weights: heads*projection embedding",
    "self_attn.o_proj.weight": "attention/output.weights: embedding heads*projection",
}
_GEMMA_2_BLOCK = {
    **_BLOCK,
    "post_attention_layernorm.weight": "post_attention_norm/scale.weights: embedding",
    "pre_feedforward_layernorm.weight": "pre_ffw_norm/scale.weights: embedding",
    "post_feedforward_layernorm.weight": "post_ffw_norm/scale.weights: embedding",
}
_GEMMA_3_BLOCK = {
    **_GEMMA_2_BLOCK,
    "self_attn.q_norm.weight": "attention/query_norm/scale.weights: projection",
    "self_attn.k_norm.weight": "attention/key_norm/scale.weights: projection",
}
_NEOX = {
    "gpt_neox.embed_in.weight": "embedder.embeddings: vocabulary embedding",
    "gpt_neox.final_layer_norm.weight": "final_norm/scale.weights: embedding",
    "gpt_neox.final_layer_norm.bias": "final_norm/shift.bias: embedding",
    "embed_out.weight": "lm_head.weights: vocabulary embedding",
}
_NEOX_BLOCK = {
    "input_layernorm.weight": "pre_attention_norm/scale.weights: embedding",
    "input_layernorm.bias": "pre_attention_norm/shift.bias: embedding",
    "post_attention_layernorm.weight": "pre_ffw_norm/scale.weights: embedding",
    "post_attention_layernorm.bias": "pre_ffw_norm/shift.bias: embedding",
    "mlp.dense_h_to_4h.weight": "mlp/in/Linear.weights: neurons embedding",
    "mlp.dense_h_to_4h.bias": "mlp/in/AddBias.bias: neurons",
    "mlp.dense_4h_to_h.weight": "mlp/out/Linear.weights: embedding neurons",
    "mlp.dense_4h_to_h.bias": "mlp/out/AddBias.bias: embedding",
    "attention.query_key_value.weight": (
        "attention/qkv/Linear.weights: heads*qkv*projection embedding"
    ),
    "attention.query_key_value.bias": "attention/qkv/AddBias.bias: heads*qkv*projection",
    "attention.dense.weight": "attention/output/Linear.weights: embedding heads*projection",
    "attention.dense.bias": "attention/output/AddBias.bias: embedding",
}

# The families that are known, as ``ModelConfig.family`` has them.
FAMILIES: Mapping[str, Family] = {
    "Llama": Family(_build_llama, _LLAMA, _BLOCK),
    "Mistral": Family(_build_llama, _LLAMA, _BLOCK),
    "Gemma": Family(_build_gemma, _GEMMA, _BLOCK, 1.0),
    "Gemma 2": Family(_build_gemma_2, _GEMMA, _GEMMA_2_BLOCK, 1.0),
    "Gemma 3": Family(_build_gemma_3, _GEMMA, _GEMMA_3_BLOCK, 1.0),
    "Gemma 3 with images": Family(_build_gemma_3, _GEMMA, _GEMMA_3_BLOCK, 1.0, "language_model."),
    "GPT-NeoX": Family(_build_neox, _NEOX, _NEOX_BLOCK, blocks="gpt_neox.layers.{}."),
}


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
    rows = [(name, text, "") for name, text in family.tensors.items()]
    for number in range(len(config.layers)):
        start = family.blocks.format(number)
        rows += [(start + name, text, f"block_{number}/") for name, text in family.of_block.items()]
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
            record, tokens = parameters[path], config["vocab_size"]
            source, shapes[tensor] = _read_dims(dims, number, record, tokens)
            plus = family.plus if parameter.endswith(_NORM) else 0.0
            before = sources[path].stored if path in sources else ()
            sources[path] = dataclasses.replace(source, stored=(*before, tensor), plus=plus)
    return sources, shapes


def _read_dims(dims: str, number: int, parameter: ArrayRecord, tokens: int) -> tuple[Source, Shape]:
    """How a parameter lies in a tensor with these dimensions, and the tensor's shape.

    Args:
        dims: The dimensions as a table has them.
        number: Which one of queries, keys and values it is, if these stand in one tensor.
        parameter: The parameter.
        tokens: How many tokens the stored vocabulary has.
    """
    axes: Any = parameter.names or ()
    sizes: dict[Any, int] = dict(zip(axes, parameter.shape, strict=True))
    stored = {**sizes, VOCABULARY: tokens, _QKV: len(_PARTS)}
    heads = "*".join(axis for axis in _HEADS if axis in sizes)
    tensor = [dim.split("*") for dim in dims.replace("heads", heads).split()]
    split = [axis for dim in tensor for axis in dim if axis]
    source = Source(
        (),
        tuple(stored[axis] for axis in split),
        tuple(split.index(axis) for axis in axes if axis != STACK_AXIS),
        stack=axes.index(STACK_AXIS) if STACK_AXIS in axes else None,
        pick=(split.index(_QKV), number) if _QKV in split else None,
        pad=sizes.get(VOCABULARY, tokens) - tokens,
    )
    return source, tuple(math.prod(stored[axis] for axis in dim if axis) for dim in tensor)


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
