"""Llama and Mistral."""

from typing import Any

from penzai_shard.library_apis.penzai_converters import convert_llamalike
from penzai_shard.pretrained.configurations import (
    ROTARY,
    TRANSFORMER_SIZES,
    Attributes,
    Configuration,
    is_size,
    rotary,
)
from penzai_shard.pretrained.families import Converter, Family, Options, Shape

_SIZES = dict.fromkeys(TRANSFORMER_SIZES)
_NUMBERS = {"rms_norm_eps": 1e-6}
_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "hidden_act": ("silu",),
    "is_llama_config": (True,),
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "tie_word_embeddings": (False, True),
}
_USED = ("head_dim", "num_key_value_heads", *ROTARY)


def _heads(configuration: Configuration) -> tuple[int, int, int]:
    """How many query heads there are, how many of keys and values, and the size of one."""
    queries = configuration["num_attention_heads"]
    keys = configuration["num_key_value_heads"]
    return queries, queries if keys is None else keys, configuration["hidden_size"] // queries


def _check(configuration: Configuration) -> list[str]:
    queries, keys, size = _heads(configuration)
    hidden, given = configuration["hidden_size"], configuration["head_dim"]
    problems = []
    if hidden % queries:
        problems.append(f"num_attention_heads: {queries} does not divide hidden_size, {hidden}.")
    elif given not in (None, size):
        problems.append(
            f"head_dim: is {given!r}, and Penzai's {configuration.family} has heads of hidden_size "
            f"/ num_attention_heads = {size}. Build a model of your own, and load it with into=."
        )
    if not is_size(keys) or queries % keys:
        problems.append(
            f"num_key_value_heads: {keys!r} does not divide num_attention_heads, {queries}."
        )
    window = configuration["sliding_window"]
    if window is not None and not is_size(window):
        problems.append(f"sliding_window: is {window!r}, and has to be a whole number above 0.")
    positions, wrong = rotary(configuration, 10000.0)
    if positions.partial != 1.0:
        wrong.append(
            f"partial_rotary_factor: is {positions.partial!r}, and Penzai's "
            f"{configuration.family} rotates all of a head."
        )
    return problems + wrong


def _shapes(configuration: Configuration) -> dict[str, Shape]:
    hidden, inner = configuration["hidden_size"], configuration["intermediate_size"]
    vocabulary = configuration["vocab_size"]
    queries, keys, size = _heads(configuration)
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    of_layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "self_attn.q_proj.weight": (queries * size, hidden),
        "self_attn.k_proj.weight": (keys * size, hidden),
        "self_attn.v_proj.weight": (keys * size, hidden),
        "self_attn.o_proj.weight": (hidden, queries * size),
    }
    for layer in range(configuration["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def _tied(configuration: Configuration) -> dict[str, str]:
    if configuration["tie_word_embeddings"]:
        return {"lm_head.weight": "model.embed_tokens.weight"}
    return {}


def _converter(configuration: Configuration, options: Options) -> Converter:
    config = {
        **{name: configuration[name] for name in (*_SIZES, "hidden_act")},
        "num_key_value_heads": _heads(configuration)[1],
        "rms_norm_eps": configuration["rms_norm_eps"],
        "rope_theta": rotary(configuration, 10000.0)[0].theta,
        "sliding_window": configuration["sliding_window"],
    }

    def convert(arrays: dict[str, Any]) -> Any:
        return convert_llamalike(config, arrays, options.dtype, **options.of_penzai())

    return convert


LLAMA = Family(
    name="Llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    attributes=Attributes(_SIZES, _NUMBERS, {**_VALUES, "sliding_window": (None,)}, _USED),
    check=_check,
    shapes=_shapes,
    tied=_tied,
    harmless=("model.layers.*.self_attn.rotary_emb.inv_freq",),
    converter=_converter,
)

MISTRAL = Family(
    name="Mistral",
    architecture="MistralForCausalLM",
    model_type="mistral",
    attributes=Attributes(
        {**_SIZES, "num_key_value_heads": None},
        _NUMBERS,
        {name: values for name, values in _VALUES.items() if name != "mlp_bias"},
        (*_USED, "sliding_window"),
    ),
    check=_check,
    shapes=_shapes,
    tied=_tied,
    harmless=LLAMA.harmless,
    converter=_converter,
)
