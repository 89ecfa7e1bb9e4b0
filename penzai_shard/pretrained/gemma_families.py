"""Gemma 1, 2 and 3."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from penzai.models.transformer.variants import llamalike_common

from penzai_shard.library_apis.penzai_converters import convert_gemma
from penzai_shard.pretrained import gemma_tensors
from penzai_shard.pretrained.configurations import (
    ROTARY,
    TRANSFORMER_SIZES,
    Attributes,
    Configuration,
    Rotary,
    is_positive,
    is_size,
    rotary,
)
from penzai_shard.pretrained.families import Converter, Family, Options, PartOfModel
from penzai_shard.pretrained.gemma_attention import with_norms_of_heads, with_positions
from penzai_shard.pretrained.tensor_views import TensorView

_SIZES = dict.fromkeys((*TRANSFORMER_SIZES, "num_key_value_heads", "head_dim"))
_NUMBERS = {"rms_norm_eps": 1e-6}
_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (False,),
}
_CAPS = {
    "attn_logit_softcapping": "attn_logits_soft_cap",
    "final_logit_softcapping": "final_logit_softcap",
}
_BY_LAYER = ("layer_types", "sliding_window", "sliding_window_size", *_CAPS)
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
_SLIDING, _FULL = "sliding_attention", "full_attention"


def _layer_types(configuration: Configuration, pattern: int) -> list[str]:
    """What kind of attention each layer has: of every so many, the last attends to all."""
    given = configuration.given.get("layer_types")
    if given is not None:
        return list(given)
    return [
        _SLIDING if (layer + 1) % pattern else _FULL
        for layer in range(configuration["num_hidden_layers"])
    ]


def _types_of_gemma_3(configuration: Configuration) -> list[str]:
    said = (configuration.given.get(name) for name in _PATTERNS)
    return _layer_types(configuration, next((p for p in said if p is not None), 6))


_types_of_gemma_2 = functools.partial(_layer_types, pattern=2)


def _check(configuration: Configuration) -> list[str]:
    queries, keys = configuration["num_attention_heads"], configuration["num_key_value_heads"]
    problems = []
    if queries % keys:
        problems.append(
            f"num_key_value_heads: {keys!r} does not divide num_attention_heads, {queries}."
        )
    if queries == 1:
        problems.append(
            "num_attention_heads: is 1, for which Penzai's converter has two names of one axis. "
            "Build the model, and load it with into=."
        )
    if configuration["head_dim"] % 2:
        problems.append(f"head_dim: is {configuration['head_dim']}, and has to be even.")
    return problems


def _check_positions(positions: Rotary, problems: list[str]) -> list[str]:
    if positions.partial != 1.0:
        problems.append(
            f"partial_rotary_factor: is {positions.partial!r}, and Penzai's Gemma rotates all of "
            "a head."
        )
    return problems


def _check_gemma_1(configuration: Configuration) -> list[str]:
    return _check(configuration) + _check_positions(*rotary(configuration, 10000.0))


def _check_layers(configuration: Configuration, types: Any) -> list[str]:
    problems = []
    given, layers = configuration.given, configuration["num_hidden_layers"]
    of_layers = given.get("layer_types")
    if of_layers is not None and (
        not isinstance(of_layers, list | tuple)
        or len(of_layers) != layers
        or not all(kind in (_SLIDING, _FULL) for kind in of_layers)
    ):
        problems.append(
            f"layer_types: is {of_layers!r}, and has to be a list of {_SLIDING!r} and {_FULL!r}, "
            f"one for each of num_hidden_layers = {layers}."
        )
    problems += [
        f"{name}: is {given[name]!r}, and has to be a whole number above 0."
        for name in _PATTERNS
        if given.get(name) is not None and not is_size(given[name])
    ]
    problems += [
        f"{name}: is {given[name]!r}, and has to be a number above 0, or null for none."
        for name in _CAPS
        if given.get(name) is not None and not is_positive(given[name])
    ]
    window = given.get("sliding_window", 4096)
    if not problems and _SLIDING in types(configuration) and not is_size(window):
        problems.append(f"sliding_window: is {window!r}, and has to be a whole number above 0.")
    if given.get("sliding_window_size", window) != window:
        problems.append(
            f"sliding_window_size: is {given['sliding_window_size']!r}, and sliding_window "
            f"{window!r}. Leave the wrong one out."
        )
    return problems


def _check_gemma_2(configuration: Configuration) -> list[str]:
    return _check_gemma_1(configuration) + _check_layers(configuration, _types_of_gemma_2)


def _check_gemma_3(configuration: Configuration) -> list[str]:
    problems = _check(configuration) + _check_layers(configuration, _types_of_gemma_3)
    for kind in (_FULL, _SLIDING):
        problems += _check_positions(*_positions_of_gemma_3(configuration, kind))
    return problems


def _positions_of_gemma_3(configuration: Configuration, kind: str) -> tuple[Rotary, list[str]]:
    if kind == _FULL:
        return rotary(configuration, 1e6, layer_type=_FULL, scaling=True)
    return rotary(configuration, 1e4, theta_names=("rope_local_base_freq",), layer_type=_SLIDING)


def _preset(configuration: Configuration) -> dict[str, Any]:
    keys = configuration["num_key_value_heads"]
    return {
        "num_decoder_blocks": configuration["num_hidden_layers"],
        "vocab_size": configuration["vocab_size"],
        "num_kv_heads": keys,
        "query_head_multiplier": configuration["num_attention_heads"] // keys,
        "embedding_dim": configuration["hidden_size"],
        "projection_dim": configuration["head_dim"],
        "mlp_hidden_dim": configuration["intermediate_size"],
        "rms_norm_eps": configuration["rms_norm_eps"],
    }


def _preset_by_layer(
    configuration: Configuration, types: list[str], caps: tuple[float | None, float | None]
) -> dict[str, Any]:
    """Of Gemma 2 and 3, given the soft caps where the configuration says nothing of them."""
    window = configuration.given.get("sliding_window", 4096)
    kinds = {
        _SLIDING: llamalike_common.AttentionTypeSlidingWindowCausal(window),
        _FULL: llamalike_common.AttentionTypeGlobalCausal(),
    }
    attention = tuple(kinds[kind] for kind in types)
    soft_caps = {
        field: configuration.given.get(name, default)
        for (name, field), default in zip(_CAPS.items(), caps, strict=True)
    }
    return {
        **_preset(configuration),
        **soft_caps,
        "attention_type": attention[0] if len(set(attention)) == 1 else attention,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "query_scaling_factor": configuration["query_pre_attn_scalar"] ** -0.5,
    }


def _converted(preset: dict[str, Any], arrays: Mapping[str, Any], options: Options) -> Any:
    by_layer: dict[str, dict[str, Any]] = {}
    for name, array in arrays.items():
        layer, _, own = name.rpartition("/")
        by_layer.setdefault(layer, {})[own] = array
    return convert_gemma(preset, True, by_layer, **options.of_penzai())


def _converter_of_gemma_1(configuration: Configuration, options: Options) -> Converter:
    def convert(arrays: dict[str, Any]) -> Any:
        model = _converted(_preset(configuration), arrays, options)
        return with_positions(model, [rotary(configuration, 1e4)[0]])

    return convert


def _converter_of_gemma_2(configuration: Configuration, options: Options) -> Converter:
    preset = _preset_by_layer(configuration, _types_of_gemma_2(configuration), (50.0, 30.0))

    def convert(arrays: dict[str, Any]) -> Any:
        model = _converted(preset, arrays, options)
        return with_positions(model, [rotary(configuration, 1e4)[0]])

    return convert


def _converter_of_gemma_3(configuration: Configuration, options: Options) -> Converter:
    """Gemma 3, of Penzai's Gemma 2: with norms in its attention, and positions by layer."""
    types = _types_of_gemma_3(configuration)
    preset = _preset_by_layer(configuration, types, (None, None))
    positions = [_positions_of_gemma_3(configuration, kind)[0] for kind in types]

    def convert(arrays: dict[str, Any]) -> Any:
        model = _converted(preset, arrays, options)
        scales = {name: array for name, array in arrays.items() if "/attn/_" in name}
        epsilon = configuration["rms_norm_eps"]
        return with_positions(with_norms_of_heads(model, scales, epsilon), positions)

    return convert


def _stacks(configuration: Configuration) -> bool:
    return len(set(_types_of_gemma_2(configuration))) == 1


def _no_shared_tensors(_: Configuration) -> dict[str, str]:
    """Penzai's Gemma has one parameter for both."""
    return {}


def _arranged(norms: Mapping[str, str]) -> Any:
    def arranged(
        configuration: Configuration, tensors: Mapping[str, TensorView]
    ) -> dict[str, TensorView]:
        return gemma_tensors.as_in_flax(configuration, tensors, norms)

    return arranged


_HARMLESS = ("model.layers.*.self_attn.rotary_emb.inv_freq",)

GEMMA = Family(
    name="Gemma",
    architecture="GemmaForCausalLM",
    model_type="gemma",
    attributes=Attributes(
        _SIZES,
        _NUMBERS,
        # "gelu" is what the first files said, and transformers 5 reads it as the approximation.
        {**_VALUES, "hidden_act": ("gelu_pytorch_tanh", "gelu")},
        ROTARY,
    ),
    check=_check_gemma_1,
    shapes=functools.partial(gemma_tensors.shapes, norms=gemma_tensors.NORMS, of_heads=False),
    tied=_no_shared_tensors,
    harmless=_HARMLESS,
    converter=_converter_of_gemma_1,
    arranged=_arranged(gemma_tensors.NORMS),
)

GEMMA_2 = Family(
    name="Gemma 2",
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    attributes=Attributes(
        _SIZES,
        {**_NUMBERS, "query_pre_attn_scalar": 256},
        {**_VALUES, "hidden_act": ("gelu_pytorch_tanh",)},
        (*ROTARY, *_BY_LAYER),
    ),
    check=_check_gemma_2,
    shapes=functools.partial(
        gemma_tensors.shapes, norms=gemma_tensors.NORMS_AROUND, of_heads=False
    ),
    tied=_no_shared_tensors,
    harmless=_HARMLESS,
    converter=_converter_of_gemma_2,
    arranged=_arranged(gemma_tensors.NORMS_AROUND),
    stacks=_stacks,
)

GEMMA_3 = Family(
    name="Gemma 3",
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    attributes=Attributes(
        _SIZES,
        {**_NUMBERS, "query_pre_attn_scalar": 256},
        _VALUES,
        (*ROTARY, "rope_local_base_freq", *_BY_LAYER, *_PATTERNS),
    ),
    check=_check_gemma_3,
    shapes=functools.partial(gemma_tensors.shapes, norms=gemma_tensors.NORMS_AROUND, of_heads=True),
    tied=_no_shared_tensors,
    harmless=_HARMLESS,
    converter=_converter_of_gemma_3,
    arranged=_arranged(gemma_tensors.NORMS_AROUND),
    stacks=lambda configuration: False,
)

_TOKENS = ("boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image")

GEMMA_3_WITH_IMAGES = dataclasses.replace(
    GEMMA_3,
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    # Such configurations say of the text what is not as transformers has it by default.
    attributes=dataclasses.replace(
        GEMMA_3.attributes,
        sizes={
            **_SIZES,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_208,
        },
    ),
    part=PartOfModel(
        attribute="text_config",
        around=Attributes(
            {}, {}, {"tie_word_embeddings": (True,)}, ("text_config", "vision_config", *_TOKENS)
        ),
        prefix="language_model.",
    ),
)
"""The part of Gemma 3 that reads and writes text, of models that look at images too."""
