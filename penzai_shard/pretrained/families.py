"""Says of each family of models what its configuration may say, its layers, and its tensors.

A line of a table of tensors has the name of a tensor, and the parameter that it is with the
dimensions of the tensor: logical axes; ``heads`` for those of ``heads``, ``head_groups`` and
``query_heads`` that the parameter has; ``a*b`` for several in one. Where queries, keys and values
stand in one tensor, ``qkv`` is their dimension, and their piece of the path. ``{}`` is each block.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.models.transformer.variants import gpt_neox, llamalike_common

if TYPE_CHECKING:
    from penzai_shard.pretrained.model_configs import ModelConfig

COPY = "Copy it from the published config.json."
BUILD = "Build the model yourself, and load it with into=."


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        model_type: What its configurations call it besides the architecture.
        attributes: What each of their attributes may be.
        build: Builds the model of a configuration with a random key, or with None in its place
            without parameters; it takes more fields of Penzai's own configuration by name.
        tensors: Of each tensor the parameter that it is.
        plus: What the model adds to the weights of norms, which are stored without it.
        can_stack: Whether blocks that do not differ may be one ``pz.nn.LayerStack``.
        prefix: What stands before all names of tensors where the model is a part of another.
        blocks: What ``{}`` is in these, for the number of a block.
    """

    model_type: str
    attributes: Mapping[str, "Attribute"]
    build: Callable[..., Any]
    tensors: Mapping[str, str]
    plus: float = 0.0
    can_stack: bool = True
    prefix: str = ""
    blocks: str = "model.layers.{}"


# What attributes may be


@dataclasses.dataclass(frozen=True)
class Attribute:
    """What an attribute may be.

    Attributes:
        text: What it has to be, as messages have it.
        fits: Whether a value is so.
        default: What it means if it is absent, or null where null does not fit.
        also: Its other names, also within ``rope_parameters``; if there are several, they agree.
        fix: What to do with another value.
    """

    text: str
    fits: Callable[[Any], bool]
    default: Any = None
    also: tuple[str, ...] = ()
    fix: str = COPY


def _number(
    default: Any = None, *also: str, is_whole: bool = False, or_none: bool = False
) -> Attribute:
    """A number; without a default it has to be given, unless null is a value of it."""
    kind, most = (int, 10**7) if is_whole else (int | float, 1e30)

    def fits(value: Any) -> bool:
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        return (is_number and 0 < value <= most) or (or_none and value is None)

    text = f"a {'whole ' if is_whole else ''}number above 0, up to {most:,}"
    return Attribute(text, fits, default, also)


_size = functools.partial(_number, is_whole=True)


def _one_of(*accepted: Any, also: tuple[str, ...] = ()) -> Attribute:
    """Of these values; the first is the default."""
    text = " or ".join(map(repr, accepted))
    return Attribute(text, lambda x: x in accepted, accepted[0], also, fix=BUILD)


FULL, SLIDING = "full_attention", "sliding_attention"
_ROPE = ("rope_parameters", f"rope_parameters/{FULL}", "rope_scaling")


def _in_rope(*names: str) -> tuple[str, ...]:
    return tuple(f"{table}/{name}" for table in _ROPE for name in names)


_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
_OFF = ("attention_bias", "mlp_bias", "rope_interleaved", "use_bidirectional_attention")
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "hidden_dropout")
BANDS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ALL = {
    **dict.fromkeys((*_NEEDED, "vocab_size"), _size()),
    **dict.fromkeys(_OFF, _one_of(False)),
    **dict.fromkeys((*_DROPOUTS, "hidden_dropout_prob"), _one_of(0.0)),
    **dict.fromkeys(("use_parallel_residual", "is_llama_config"), _one_of(True)),
    "tie_word_embeddings": _one_of(False, True),
    "rope_theta": _number(1e4, *_in_rope("rope_theta")),
    "rope_type": _one_of("default", also=_in_rope("rope_type", "type")),
    "partial_rotary_factor": _one_of(1.0, also=_in_rope("partial_rotary_factor")),
}
_LLAMA = {
    **_ALL,
    **dict.fromkeys(("num_key_value_heads", "head_dim"), _size(or_none=True)),
    "rms_norm_eps": _number(1e-6),
    "sliding_window": _one_of(None),
    "hidden_act": _one_of("silu"),
    "rope_type": _one_of("default", "linear", "llama3", also=_in_rope("rope_type", "type")),
    "rope_factor": _number(1.0, *_in_rope("factor")),
    **{name: _number(None, *_in_rope(name), or_none=True) for name in BANDS},
}
_MISTRAL = {**_LLAMA, "num_key_value_heads": _size(), "sliding_window": _size(4096, or_none=True)}
_GEMMA = {
    **_LLAMA,
    **dict.fromkeys(("num_key_value_heads", "head_dim"), _size()),
    # The first files have "gelu" here, which is read as the approximation.
    "hidden_act": _one_of("gelu_pytorch_tanh", "gelu"),
    "hidden_activation": _one_of("gelu_pytorch_tanh"),
    "tie_word_embeddings": _one_of(True),
}
_GEMMA_2 = {
    **_GEMMA,
    "sliding_window": _size(4096, "sliding_window_size", or_none=True),
    "sliding_window_pattern": _one_of(2),
    "layer_types": Attribute("a list", lambda value: isinstance(value, list | None)),
    "query_pre_attn_scalar": _number(256),
    "attn_logit_softcapping": _number(50.0, or_none=True),
    "final_logit_softcapping": _number(30.0, or_none=True),
}
_GEMMA_3 = {
    **_GEMMA_2,
    # Models with images leave out of their text what is as transformers has it by default.
    "num_attention_heads": _size(8),
    "num_key_value_heads": _size(4),
    "head_dim": _size(256),
    "vocab_size": _size(262_208),
    "sliding_window_pattern": _size(6, "_sliding_window_pattern"),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _number(or_none=True)),
    "rope_theta": _number(1e6, *_in_rope("rope_theta")),
    "rope_local_base_freq": _number(1e4, f"rope_parameters/{SLIDING}/rope_theta"),
    "local_rope_type": _one_of("default", also=(f"rope_parameters/{SLIDING}/rope_type",)),
}
_NEOX = {
    **_ALL,
    "attention_bias": _one_of(True),
    "layer_norm_eps": _number(1e-5),
    "hidden_act": _one_of("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    "rope_theta": _number(1e4, "rotary_emb_base", *_in_rope("rope_theta")),
    "partial_rotary_factor": _number(0.25, "rotary_pct", *_in_rope("partial_rotary_factor")),
}


# Layers


def _build_llama(config: "ModelConfig", key: Any, **fields: Any) -> Any:
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


def _build_gemma_2(config: "ModelConfig", key: Any, **fields: Any) -> Any:
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


def _build_gemma_3(config: "ModelConfig", key: Any, **fields: Any) -> Any:
    """Gemma 2 with norms of queries and keys before they are rotated."""
    axes, epsilon = {"projection": config["head_dim"]}, config["rms_norm_eps"]

    def add_norm(linear: pz.nn.Linear) -> tuple[pz.nn.Layer, ...]:
        name = linear.weights.label.removesuffix(".weights") + "_norm"
        return linear, pz.nn.RMSLayerNorm.from_config(name, key, axes, epsilon)

    linears = pz.select(_build_gemma_2(config, key, **fields)).at_instances_of(pz.nn.Linear)
    heads = linears.where(lambda x: x.weights.label.endswith(("/query.weights", "/key.weights")))
    return heads.apply_and_inline(add_norm)


def _build_neox(config: "ModelConfig", key: Any, **fields: Any) -> Any:
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

# Penzai's Gemma has one parameter for the tokens that go in and those that come out.
_OF_GEMMA = {
    "model.embed_tokens.weight": "embedder.embeddings: vocabulary embedding",
    "model.norm.weight": "final_norm/scale.weights: embedding",
    "{}.input_layernorm.weight": "pre_attention_norm/scale.weights: embedding",
    "{}.post_attention_layernorm.weight": "pre_ffw_norm/scale.weights: embedding",
    "{}.mlp.gate_proj.weight": "mlp/gating_linear.weights: neurons embedding",
    "{}.mlp.up_proj.weight": "mlp/value_linear.weights: neurons embedding",
    "{}.mlp.down_proj.weight": "mlp/out_linear.weights: embedding neurons",
    "{}.self_attn.q_proj.weight": "attention/query.weights: heads*projection embedding",
    "{}.self_attn.k_proj.weight": "attention/key.weights: heads*projection embedding",
    "{}.self_attn.v_proj.weight": "attention/value.weights: heads*projection embedding",
    "{}.self_attn.o_proj.weight": "attention/output.weights: embedding heads*projection",
}
_OF_LLAMA = {**_OF_GEMMA, "lm_head.weight": "lm_head.weights: vocabulary embedding"}
_OF_GEMMA_2 = {
    **_OF_GEMMA,
    "{}.post_attention_layernorm.weight": "post_attention_norm/scale.weights: embedding",
    "{}.pre_feedforward_layernorm.weight": "pre_ffw_norm/scale.weights: embedding",
    "{}.post_feedforward_layernorm.weight": "post_ffw_norm/scale.weights: embedding",
}
_OF_GEMMA_3 = {
    **_OF_GEMMA_2,
    "{}.self_attn.q_norm.weight": "attention/query_norm/scale.weights: projection",
    "{}.self_attn.k_norm.weight": "attention/key_norm/scale.weights: projection",
}
_OF_NEOX = {
    "gpt_neox.embed_in.weight": "embedder.embeddings: vocabulary embedding",
    "gpt_neox.final_layer_norm.weight": "final_norm/scale.weights: embedding",
    "gpt_neox.final_layer_norm.bias": "final_norm/shift.bias: embedding",
    "embed_out.weight": "lm_head.weights: vocabulary embedding",
    "{}.input_layernorm.weight": "pre_attention_norm/scale.weights: embedding",
    "{}.input_layernorm.bias": "pre_attention_norm/shift.bias: embedding",
    "{}.post_attention_layernorm.weight": "pre_ffw_norm/scale.weights: embedding",
    "{}.post_attention_layernorm.bias": "pre_ffw_norm/shift.bias: embedding",
    "{}.mlp.dense_h_to_4h.weight": "mlp/in/Linear.weights: neurons embedding",
    "{}.mlp.dense_h_to_4h.bias": "mlp/in/AddBias.bias: neurons",
    "{}.mlp.dense_4h_to_h.weight": "mlp/out/Linear.weights: embedding neurons",
    "{}.mlp.dense_4h_to_h.bias": "mlp/out/AddBias.bias: embedding",
    "{}.attention.query_key_value.weight": (
        "attention/qkv/Linear.weights: heads*qkv*projection embedding"
    ),
    "{}.attention.query_key_value.bias": "attention/qkv/AddBias.bias: heads*qkv*projection",
    "{}.attention.dense.weight": "attention/output/Linear.weights: embedding heads*projection",
    "{}.attention.dense.bias": "attention/output/AddBias.bias: embedding",
}

# The families that are known, by the architecture in their configurations.
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", _LLAMA, _build_llama, _OF_LLAMA),
    "MistralForCausalLM": Family("mistral", _MISTRAL, _build_llama, _OF_LLAMA),
    "GemmaForCausalLM": Family("gemma", _GEMMA, _build_gemma, _OF_GEMMA, 1.0),
    "Gemma2ForCausalLM": Family("gemma2", _GEMMA_2, _build_gemma_2, _OF_GEMMA_2, 1.0),
    "Gemma3ForCausalLM": Family("gemma3_text", _GEMMA_3, _build_gemma_3, _OF_GEMMA_3, 1.0, False),
    "Gemma3ForConditionalGeneration": Family(
        "gemma3", _GEMMA_3, _build_gemma_3, _OF_GEMMA_3, 1.0, False, prefix="language_model."
    ),
    "GPTNeoXForCausalLM": Family(
        "gpt_neox", _NEOX, _build_neox, _OF_NEOX, blocks="gpt_neox.layers.{}"
    ),
}
