"""Gemma's tensors: as Hugging Face names and shapes them, and as Google does for Flax.

Penzai converts the latter. What leads from one to the other is a table of views.
"""

from collections.abc import Mapping

from penzai_shard.pretrained.configurations import Configuration
from penzai_shard.pretrained.families import Shape
from penzai_shard.pretrained.tensor_views import Reshaped, TensorView, Transposed, stacked

NORMS = {
    "pre_attention_norm": "input_layernorm",
    "pre_ffw_norm": "post_attention_layernorm",
}
"""For each norm of a layer of Gemma 1, its name in Flax and in Hugging Face."""

NORMS_AROUND = {
    "pre_attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""The same of Gemma 2 and 3, which have one before and one after each part."""

NORMS_OF_HEADS = {"attn/_query_norm": "self_attn.q_norm", "attn/_key_norm": "self_attn.k_norm"}
"""The same of those that Gemma 3 has in its attention."""


def shapes(
    configuration: Configuration, norms: Mapping[str, str], of_heads: bool
) -> dict[str, Shape]:
    """The tensors of Hugging Face, with their shapes."""
    hidden, inner = configuration["hidden_size"], configuration["intermediate_size"]
    queries = configuration["num_attention_heads"] * configuration["head_dim"]
    keys = configuration["num_key_value_heads"] * configuration["head_dim"]
    found: dict[str, Shape] = {
        "model.embed_tokens.weight": (configuration["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    of_layer: dict[str, Shape] = {
        **{f"{name}.weight": (hidden,) for name in norms.values()},
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    if of_heads:
        of_head = {
            f"{name}.weight": (configuration["head_dim"],) for name in NORMS_OF_HEADS.values()
        }
        of_layer |= of_head
    for layer in range(configuration["num_hidden_layers"]):
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return found


def as_in_flax(
    configuration: Configuration, tensors: Mapping[str, TensorView], norms: Mapping[str, str]
) -> dict[str, TensorView]:
    """The arrays of Google's checkpoints, by layer and name, as views of Hugging Face's tensors."""
    arrays = {
        "embedder/input_embedding": tensors["model.embed_tokens.weight"],
        "final_norm/scale": tensors["model.norm.weight"],
    }
    for layer in range(configuration["num_hidden_layers"]):
        own = f"model.layers.{layer}."
        of_layer = {
            name.removeprefix(own).removesuffix(".weight"): view
            for name, view in tensors.items()
            if name.startswith(own)
        }
        arrays |= {
            f"layer_{layer}/{name}": view
            for name, view in _layer_as_in_flax(configuration, of_layer, norms).items()
        }
    return arrays


def _layer_as_in_flax(
    configuration: Configuration, tensors: Mapping[str, TensorView], norms: Mapping[str, str]
) -> dict[str, TensorView]:
    size, hidden = configuration["head_dim"], configuration["hidden_size"]

    def heads(name: str) -> TensorView:
        """Weights into heads, by head, embedding and projection."""
        weights = tensors[f"self_attn.{name}_proj"]
        count = weights.shape[0] // size
        return Transposed(Reshaped(weights, (count, size, hidden)), (0, 2, 1))

    from_heads = Transposed(tensors["self_attn.o_proj"], (1, 0))
    arrays: dict[str, TensorView] = {
        **{f"{flax}/scale": tensors[name] for flax, name in norms.items()},
        **{
            f"{flax}/scale": tensors[name]
            for flax, name in NORMS_OF_HEADS.items()
            if name in tensors
        },
        # By gate and value, neurons and embedding, as in those of Google's that are transposed.
        "mlp/gating_einsum/w": stacked([tensors["mlp.gate_proj"], tensors["mlp.up_proj"]], 0),
        "mlp/linear/w": Transposed(tensors["mlp.down_proj"], (1, 0)),
        "attn/attn_vec_einsum/w": Reshaped(from_heads, (from_heads.shape[0] // size, size, hidden)),
    }
    if configuration["num_attention_heads"] == configuration["num_key_value_heads"]:
        arrays["attn/qkv_einsum/w"] = stacked([heads("q"), heads("k"), heads("v")], 0)
    else:
        arrays["attn/q_einsum/w"] = heads("q")
        arrays["attn/kv_einsum/w"] = stacked([heads("k"), heads("v")], 0)
    return arrays
