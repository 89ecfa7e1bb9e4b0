"""GPT-NeoX, which Pythia is too."""

import dataclasses
from typing import Any

from penzai import pz

from penzai_shard.library_apis.penzai_converters import convert_gpt_neox
from penzai_shard.pretrained.configurations import (
    ROTARY,
    TRANSFORMER_SIZES,
    Attributes,
    Configuration,
    Rotary,
    rotary,
)
from penzai_shard.pretrained.families import Converter, Family, Options, Shape

_SIZES = dict.fromkeys(TRANSFORMER_SIZES)
_BASES = ("rotary_emb_base", "rope_theta")
# The same approximation, of which Penzai knows one name; GPT-NeoX-20B has the first.
_OTHER_NAMES = dict.fromkeys(("gelu_fast", "gelu_pytorch_tanh"), "gelu_new")
_PARTS = ("rotary_pct", "partial_rotary_factor")


def _rotary(configuration: Configuration) -> tuple[Rotary, list[str]]:
    return rotary(configuration, 10000.0, partial=0.25, theta_names=_BASES, partial_names=_PARTS)


def _check(configuration: Configuration) -> list[str]:
    hidden, heads = configuration["hidden_size"], configuration["num_attention_heads"]
    positions, problems = _rotary(configuration)
    if hidden % heads:
        problems.append(f"num_attention_heads: {heads} does not divide hidden_size, {hidden}.")
    elif not problems:
        rotated, size = int(positions.partial * (hidden // heads)), hidden // heads
        if not 0 < rotated <= size or rotated % 2:
            problems.append(
                f"rotary_pct: {positions.partial!r} rotates {rotated} of the {size} dimensions of "
                "a head, and has to rotate an even number of them."
            )
    return problems


def _shapes(configuration: Configuration) -> dict[str, Shape]:
    hidden, inner = configuration["hidden_size"], configuration["intermediate_size"]
    vocabulary = configuration["vocab_size"]
    shapes: dict[str, Shape] = {
        "gpt_neox.embed_in.weight": (vocabulary, hidden),
        "gpt_neox.final_layer_norm.weight": (hidden,),
        "gpt_neox.final_layer_norm.bias": (hidden,),
        "embed_out.weight": (vocabulary, hidden),
    }
    of_layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "input_layernorm.bias": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "post_attention_layernorm.bias": (hidden,),
        "mlp.dense_h_to_4h.weight": (inner, hidden),
        "mlp.dense_h_to_4h.bias": (inner,),
        "mlp.dense_4h_to_h.weight": (hidden, inner),
        "mlp.dense_4h_to_h.bias": (hidden,),
        "attention.query_key_value.weight": (3 * hidden, hidden),
        "attention.query_key_value.bias": (3 * hidden,),
        "attention.dense.weight": (hidden, hidden),
        "attention.dense.bias": (hidden,),
    }
    for layer in range(configuration["num_hidden_layers"]):
        shapes |= {f"gpt_neox.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def _tied(configuration: Configuration) -> dict[str, str]:
    if configuration["tie_word_embeddings"]:
        return {"embed_out.weight": "gpt_neox.embed_in.weight"}
    return {}


def _converter(configuration: Configuration, options: Options) -> Converter:
    positions, _ = _rotary(configuration)
    epsilon, activation = configuration["layer_norm_eps"], configuration["hidden_act"]
    config = {
        **{name: configuration[name] for name in _SIZES},
        "hidden_act": _OTHER_NAMES.get(activation, activation),
        "layer_norm_eps": epsilon,
        "rotary_emb_base": positions.theta,
        "rotary_pct": positions.partial,
    }

    def convert(arrays: dict[str, Any]) -> Any:
        model = convert_gpt_neox(config, arrays, options.dtype, **options.of_penzai())
        # Penzai gives the configuration's to every norm but the last.
        norms = pz.select(model).at_instances_of(pz.nn.Standardize)
        return norms.apply(lambda norm: dataclasses.replace(norm, epsilon=epsilon))

    return convert


GPT_NEOX = Family(
    name="GPT-NeoX",
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    attributes=Attributes(
        _SIZES,
        {"layer_norm_eps": 1e-5},
        {
            "attention_bias": (True,),
            "attention_dropout": (0.0,),
            "attention_probs_dropout_prob": (0.0,),
            "hidden_act": ("gelu", "gelu_new", "relu", "silu", *_OTHER_NAMES),
            "hidden_dropout": (0.0,),
            "hidden_dropout_prob": (0.0,),
            "is_decoder": (False, True),
            "tie_word_embeddings": (False, True),
            "use_parallel_residual": (True,),
        },
        ("rotary_emb_base", "rotary_pct", *ROTARY),
    ),
    check=_check,
    shapes=_shapes,
    tied=_tied,
    harmless=(
        "gpt_neox.layers.*.attention.bias",
        "gpt_neox.layers.*.attention.masked_bias",
        "gpt_neox.layers.*.attention.rotary_emb.inv_freq",
    ),
    converter=_converter,
)
