"""Builds Penzai's model of a configuration, and says which tensor is which of its parameters.

A line of a table has the name of a tensor, and the parameter that it is with the dimensions of the
tensor: logical axes; ``heads`` for those of ``heads``, ``head_groups`` and ``query_heads`` that the
parameter has; ``a*b`` for several in one; ``0/3`` for the first of three parameters that stand in
one tensor. ``1+`` marks tensors to which the model adds one.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import gpt_neox, llamalike_common

from penzai_shard.errors import Problems, RuleTypeError
from penzai_shard.pretrained.model_configs import ModelConfig, read_config

# Early versions of transformers stored these, and nothing is computed from them.
_BUFFERS = ("**.rotary_emb.inv_freq", "**.attention.bias", "**.attention.masked_bias")


def model_of_config(config: Any, *, dtype: Any = "bfloat16", use_layer_stack: bool = False) -> Any:
    """Penzai's model of a configuration, without values: to plan, to price, to restore into.

    Args:
        config: As for ``read_config``: attributes, a path, or a published name.
        dtype: ``"bfloat16"`` or ``"float32"``.
        use_layer_stack: Whether its blocks are one ``pz.nn.LayerStack``.

    Returns:
        The model that ``load_safetensors`` makes of the weights, frozen, with
        ``jax.ShapeDtypeStruct`` in place of arrays.

    Raises:
        CheckpointNotFoundError, CheckpointDamagedError, CheckpointMismatchError: As
            ``read_config``.
        RuleTypeError: Penzai has no models of this dtype, or blocks that differ shall be one stack.

    >>> import penzai_shard as pzs
    >>> mesh = pzs.make_mesh({"data": 16}, abstract=True)
    >>> plan = pzs.make_plan(model_of_config("llama-3-8b"), mesh, {"embedding": "data"})
    >>> {leaf.path: leaf.spec for leaf in plan.leaves}["transformer/embedder.embeddings"]
    P(None, 'data')
    """
    return build_model(read_config(config), dtype=dtype, use_layer_stack=use_layer_stack)


def build_model(
    config: ModelConfig,
    *,
    dtype: Any,
    use_layer_stack: bool = False,
    upcast_activations: bool = False,
    vocabulary: int | None = None,
) -> Any:
    """The model of a checked configuration, frozen, with structs in place of arrays.

    Args:
        config: The configuration.
        dtype: Of the parameters: ``"bfloat16"`` or ``"float32"``.
        use_layer_stack: Whether its blocks are one ``pz.nn.LayerStack``.
        upcast_activations: Whether it computes with float32.
        vocabulary: How many tokens it has, if these are more than the configuration says.

    Raises:
        RuleTypeError: There are no models of this dtype, blocks that differ shall be one stack, or
            there are more tokens than are asked for.
    """
    family, known = family_of(config), config["vocab_size"]
    tokens = known if vocabulary is None else vocabulary
    dtype_name = getattr(dtype, "__name__", str(dtype))
    problems = Problems(f"cannot build {config.source}:")
    if dtype_name not in ("float32", "bfloat16"):
        problems.add("dtype", f"Penzai has no models of {dtype_name}", "Write dtype='bfloat16'.")
    if use_layer_stack and (len({*config.layers}) > 1 or family.build is _build_gemma_3):
        problems.add("use_layer_stack", f"this {config.family} cannot be stacked", "Leave it out.")
    if not isinstance(tokens, int) or tokens < known:
        problems.add("vocabulary", f"{tokens!r} is not {known} or more", f"Write {known} or more.")
    problems.raise_if_any(RuleTypeError)

    dtype = jnp.dtype(dtype_name)
    build = functools.partial(
        family.build,
        parameter_dtype=dtype,
        activation_dtype=jnp.dtype("float32") if upcast_activations else dtype,
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
        tied: Of a tensor that is not stored if embeddings are tied, the one in its place.
        blocks: What stands before the tensors of a block.
        prefix: What stands before all names but those of ``harmless``.
        harmless: Patterns of tensors from which nothing is computed.
    """

    build: Callable[..., Any]
    tensors: Mapping[str, str]
    of_block: Mapping[str, str]
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    blocks: str = "model.layers.{}."
    prefix: str = ""
    harmless: tuple[str, ...] = _BUFFERS


def family_of(config: ModelConfig) -> Family:
    """The family of a configuration."""
    return FAMILIES[config.family]


_LLAMA = {
    "model.embed_tokens.weight": "embedder.embeddings: vocabulary embedding",
    "model.norm.weight": "final_norm/scale.weights: embedding",
    "lm_head.weight": "lm_head.weights: vocabulary embedding",
}
# Penzai's Gemma has one parameter for the tokens that go in and those that come out.
_GEMMA = {
    "model.embed_tokens.weight": "embedder.embeddings: vocabulary embedding",
    "model.norm.weight": "final_norm/scale.weights: 1+ embedding",
}
_LLAMA_BLOCK = {
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
_GEMMA_BLOCK = {
    **_LLAMA_BLOCK,
    "input_layernorm.weight": "pre_attention_norm/scale.weights: 1+ embedding",
    "post_attention_layernorm.weight": "pre_ffw_norm/scale.weights: 1+ embedding",
}
_GEMMA_2_BLOCK = {
    **_GEMMA_BLOCK,
    "post_attention_layernorm.weight": "post_attention_norm/scale.weights: 1+ embedding",
    "pre_feedforward_layernorm.weight": "pre_ffw_norm/scale.weights: 1+ embedding",
    "post_feedforward_layernorm.weight": "post_ffw_norm/scale.weights: 1+ embedding",
}
_GEMMA_3_BLOCK = {
    **_GEMMA_2_BLOCK,
    "self_attn.q_norm.weight": "attention/query_norm/scale.weights: 1+ projection",
    "self_attn.k_norm.weight": "attention/key_norm/scale.weights: 1+ projection",
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
        "attention/query/Linear.weights: heads*0/3*projection embedding; "
        "attention/key/Linear.weights: heads*1/3*projection embedding; "
        "attention/value/Linear.weights: heads*2/3*projection embedding"
    ),
    "attention.query_key_value.bias": (
        "attention/query/AddBias.bias: heads*0/3*projection; "
        "attention/key/AddBias.bias: heads*1/3*projection; "
        "attention/value/AddBias.bias: heads*2/3*projection"
    ),
    "attention.dense.weight": "attention/output/Linear.weights: embedding heads*projection",
    "attention.dense.bias": "attention/output/AddBias.bias: embedding",
}

_TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_NEOX_TIED = {"embed_out.weight": "gpt_neox.embed_in.weight"}
FAMILIES: Mapping[str, Family] = {
    "Llama": Family(_build_llama, _LLAMA, _LLAMA_BLOCK, _TIED),
    "Mistral": Family(_build_llama, _LLAMA, _LLAMA_BLOCK, _TIED),
    "Gemma": Family(_build_gemma, _GEMMA, _GEMMA_BLOCK),
    "Gemma 2": Family(_build_gemma_2, _GEMMA, _GEMMA_2_BLOCK),
    "Gemma 3": Family(_build_gemma_3, _GEMMA, _GEMMA_3_BLOCK),
    "Gemma 3 with images": Family(_build_gemma_3, _GEMMA, _GEMMA_3_BLOCK, prefix="language_model."),
    "GPT-NeoX": Family(_build_neox, _NEOX, _NEOX_BLOCK, _NEOX_TIED, "gpt_neox.layers.{}."),
}
"""The families that are known, as ``ModelConfig.family`` has them."""
