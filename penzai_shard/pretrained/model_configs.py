"""Reads the configuration of a Hugging Face model, and checks every attribute of it.

A configuration says what a model computes. So each attribute is used, has a value that Penzai's
model computes with, or is known to change no number; all others are refused by name. Both forms
are read: transformers 5 keeps what it says of rotary positions in ``rope_parameters``, the versions
before in ``rope_theta`` and ``rope_scaling``.
"""

import dataclasses
import json
import os
import pathlib
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from penzai_shard.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    Problem,
    Problems,
)
from penzai_shard.paths import join_paths, nearest

FULL, SLIDING = "full_attention", "sliding_attention"
_PUBLISHED = pathlib.Path(__file__).parent / "configurations"
_OWN_MODEL = "Build the model yourself, and load it with into=."
_MOST_LAYERS, _LONGEST, _GREATEST = 10_000, 2**31, 1e300
_MISSING: Any = object()

# ``pretraining_tp`` is about sums in another order; default rotary positions have no greatest one.
_CHANGE_NO_NUMBER = """
    _attn_implementation_autoset _name_or_path architectures bos_token_id cache_implementation
    classifier_dropout decoder_start_token_id do_sample dtype eos_token_id gradient_checkpointing
    id2label initializer_range label2id max_length max_position_embeddings max_sequence_length
    model_type output_attentions output_hidden_states pad_token_id pretraining_tp return_dict
    sep_token_id temperature tokenizer_class top_k top_p torch_dtype transformers_version
    unk_token_id use_cache
"""
_HARMLESS = frozenset(_CHANGE_NO_NUMBER.split())


@dataclasses.dataclass(frozen=True)
class Layer:
    """What the layers of one model may differ in.

    Attributes:
        window: How many positions a token attends to; None for all before it.
        theta: The base of the wavelengths of rotary positions.
        factor: By how much positions are divided.
        partial: Which part of a head is rotated.
    """

    window: int | None
    theta: float
    factor: float = 1.0
    partial: float = 1.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A configuration whose attributes have been checked.

    Attributes:
        family: The name of its family, ``"Llama"``.
        values: Every attribute that the family knows; where it was absent, what that means.
        layers: One for each block.
        given: The attributes as they were written.
        source: What messages call the configuration.
    """

    family: str
    values: Mapping[str, Any]
    layers: tuple[Layer, ...]
    given: Mapping[str, Any]
    source: str

    def __getitem__(self, name: str) -> Any:
        """The value of an attribute."""
        return self.values[name]


def read_config(config: Any) -> ModelConfig:
    """Reads and checks a configuration.

    Args:
        config: Its attributes, the path of a ``config.json`` or of its folder, or the name of a
            published configuration.

    Raises:
        CheckpointNotFoundError: There is no such file, folder or name.
        CheckpointDamagedError: The file holds no table of attributes.
        CheckpointMismatchError: Attributes are missing, or ask for what Penzai's model does not
            compute; all of them are in it.

    >>> read_config("llama-3-8b")["hidden_size"]
    4096
    """
    source, given = "config", config
    if not isinstance(config, Mapping):
        source = os.fspath(config)
        given = _read_published(source) or _read_file(source)
    family = _find_family(source, given)
    problems = Problems(f"{source} is no {family.name} that Penzai's model computes:")
    own = given
    if family.part:
        around = _check_attributes(given, family.around, "", problems)
        own = around[family.part] or {}
    values = _check_attributes(own, family.attributes, family.part, problems)
    layers: tuple[Layer, ...] = ()
    # What cannot be read is compared with nothing.
    if not any(problem.kind == "unreadable" for problem in problems):
        layers = family.read_layers(_Reading(values, own, family.part, problems))
    problems.raise_if_any(CheckpointMismatchError)
    return ModelConfig(family.name, values, layers, given, source)


# Finding it


def published_names() -> list[str]:
    """The names of the published configurations."""
    return sorted(path.stem for path in _PUBLISHED.glob("*.json"))


def _read_published(name: str) -> Any:
    if name in published_names():
        return json.loads((_PUBLISHED / f"{name}.json").read_text("utf-8"))["config"]
    return None


def _read_file(source: str) -> Any:
    path = pathlib.Path(source)
    if path.is_dir():
        path /= "config.json"
    try:
        given = json.loads(path.read_text("utf-8"))
    except OSError as error:
        known = published_names()
        near = nearest(source.rpartition("/")[2].lower(), known)
        meant = f"Did you mean {near!r}? There are" if near else "Write a path, or one of"
        problem = Problem(
            "", f"{source!r} is no file and no published name", f"{meant} {', '.join(known)}."
        )
        raise CheckpointNotFoundError("there is no such configuration:", [problem]) from error
    except (ValueError, RecursionError) as error:
        problem = Problem(str(path), "it is no JSON", "Download it again.")
        raise CheckpointDamagedError("a configuration cannot be read:", [problem]) from error
    if not isinstance(given, Mapping):
        problem = Problem(str(path), "it holds no table of attributes", "Download it again.")
        raise CheckpointDamagedError("a configuration cannot be read:", [problem])
    return given


def _find_family(source: str, given: Mapping[str, Any]) -> "_Family":
    architectures, model_type = given.get("architectures"), given.get("model_type")
    for family in _FAMILIES:
        is_type = model_type == family.model_type
        if architectures == [family.architecture] and (is_type or model_type is None):
            return family
        if is_type and not architectures:
            return family
    known = ", ".join(family.architecture for family in _FAMILIES)
    what = f"it is {architectures!r} of the type {model_type!r}, and there are {known}"
    raise CheckpointMismatchError(
        f"{source} is of no family that is known:", [Problem("architectures", what, _OWN_MODEL)]
    )


# Checking each attribute


@dataclasses.dataclass(frozen=True)
class _Attribute:
    """What an attribute may be.

    Attributes:
        kind: ``"unreadable"`` if others are no values at all, ``"unsupported"`` if Penzai's model
            does not compute them.
        text: What it has to be, as messages have it.
        fits: Whether a value is so.
        default: What it means if it is absent or null.
        or_none: Whether null means none, and not the default.
    """

    kind: str
    text: str
    fits: Callable[[Any], bool]
    default: Any = None
    or_none: bool = False


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LONGEST


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < _GREATEST


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _size(default: Any = None, **more: Any) -> _Attribute:
    return _Attribute("unreadable", "a whole number above 0", _is_size, default, **more)


def _number(default: Any = None, **more: Any) -> _Attribute:
    return _Attribute("unreadable", "a number above 0", _is_number, default, **more)


def _one_of(*accepted: Any) -> _Attribute:
    """Of these values; the first is the default. ``1`` and ``True`` are not the same."""

    def fits(value: Any) -> bool:
        return any(
            value == other and isinstance(value, bool) == isinstance(other, bool)
            for other in accepted
        )

    return _Attribute("unsupported", " or ".join(map(repr, accepted)), fits, accepted[0])


def _check_attributes(
    given: Mapping[str, Any], table: Mapping[str, _Attribute], path: str, problems: Problems
) -> dict[str, Any]:
    """The value of each attribute of a table; what is wrong is added to the problems."""
    values = {}
    for name, attribute in table.items():
        value, where = given.get(name), join_paths(path, name)
        if value is None and not (name in given and attribute.or_none):
            value = attribute.default
        if value is _MISSING:
            problems.add(where, "it is missing", "Give the whole config.json.", "unreadable")
        elif value is not None and not attribute.fits(value):
            what = f"it is {reprlib.repr(value)}, and has to be {attribute.text}"
            fix = "Correct it." if attribute.kind == "unreadable" else _OWN_MODEL
            problems.add(where, what, fix, attribute.kind)
        values[name] = value
    for name in given.keys() - table.keys() - _HARMLESS:
        what = f"it is {reprlib.repr(given[name])}, and it is not known what that changes"
        fix = "Give config= without it, if it changes no number."
        problems.add(join_paths(path, name), what, fix, "unknown")
    return values


# Rotary positions, heads and layers


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Attributes of a language model that fit one by one, and are now compared with each other."""

    values: Mapping[str, Any]
    given: Mapping[str, Any]
    path: str
    problems: Problems

    def add(self, name: str, what: str, fix: str = "Correct one of the two.") -> None:
        self.problems.add(join_paths(self.path, name), what, fix, "inconsistent")


_TABLE = _Attribute("unreadable", "a table of attributes", _is_table)
_ROTARY = {
    "rope_theta": _number(),
    "rope_scaling": _TABLE,
    "rope_parameters": _TABLE,
    "partial_rotary_factor": _one_of(1.0),
}
_ROPE = {
    "rope_theta": _number(),
    "rope_type": _one_of("default"),
    "type": _one_of("default"),
    "partial_rotary_factor": _one_of(1.0),
}
_KIND = _one_of("default", "linear")
_SCALED_ROPE = {**_ROPE, "rope_type": _KIND, "type": _KIND, "factor": _number(1.0)}
_PARTIAL_ROPE = {**_ROPE, "partial_rotary_factor": _number()}


def _read_layer(
    reading: _Reading,
    window: int | None = None,
    *,
    rope: Mapping[str, _Attribute] = _ROPE,
    theta: float = 1e4,
    theta_names: tuple[str, ...] = ("rope_theta",),
    partial: float = 1.0,
    partial_names: tuple[str, ...] = (),
    kind: str = "",
) -> Layer:
    """A layer with what is said of its rotary positions, or those of its kind."""
    name, said = "rope_parameters", reading.values["rope_parameters"]
    if kind and said is not None:
        name, said = f"{name}/{kind}", said.get(kind)
    if said is None and kind != SLIDING:
        name, said = "rope_scaling", reading.values["rope_scaling"]
    if said is not None and not _is_table(said):
        reading.add(name, f"it is {reprlib.repr(said)}, and has to be {_TABLE.text}", "Correct it.")
        said = None
    path = join_paths(reading.path, name)
    values = _check_attributes(said or {}, rope, path, reading.problems)
    factor = values.get("factor", 1.0)
    if factor != 1.0 and "linear" not in (values["rope_type"], values["type"]):
        reading.add(f"{name}/factor", f"it is {factor}, and the type is no 'linear'")

    def pick(names: tuple[str, ...], own: str, default: float) -> Any:
        every = {each: reading.values[each] for each in names} | {f"{name}/{own}": values[own]}
        given = {each: value for each, value in every.items() if value is not None}
        if len(set(given.values())) > 1:
            *others, last = (f"{each} is {value}" for each, value in given.items())
            reading.add(names[0], f"{', '.join(others)} and {last}")
        return next(iter(given.values()), default)

    theta = pick(theta_names, "rope_theta", theta)
    if partial_names:
        partial = pick(partial_names, "partial_rotary_factor", partial)
    return Layer(window, theta, factor, partial)


def _check_heads(reading: _Reading) -> None:
    """Compares the numbers of heads, and their size where there is one of its own."""
    values = reading.values
    queries, hidden = values["num_attention_heads"], values["hidden_size"]
    keys = values.get("num_key_value_heads") or queries
    if queries % keys:
        what = f"{keys} does not divide num_attention_heads, {queries}"
        reading.add("num_key_value_heads", what)
    if values.get("head_dim") is None and hidden % queries:
        reading.add("num_attention_heads", f"{queries} does not divide hidden_size, {hidden}")
    elif head_size(values) % 2:
        what = f"it is {head_size(values)}, and has to be even for rotary positions"
        reading.add("head_dim", what, "Correct it.")


def head_size(values: Mapping[str, Any] | ModelConfig) -> int:
    """The size of a head: half of it are sines, half of it cosines."""
    own: int = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    return own


def _read_llama(reading: _Reading) -> tuple[Layer, ...]:
    _check_heads(reading)
    layer = _read_layer(reading, reading.values["sliding_window"])
    return (layer,) * reading.values["num_hidden_layers"]


def _read_gemma_2(reading: _Reading) -> tuple[Layer, ...]:
    _check_heads(reading)
    layer = _read_layer(reading)
    return _read_mixed_layers(reading, 2, {FULL: layer, SLIDING: layer})


def _read_gemma_3(reading: _Reading) -> tuple[Layer, ...]:
    _check_heads(reading)
    full = _read_layer(reading, rope=_SCALED_ROPE, theta=1e6, kind=FULL)
    sliding = _read_layer(reading, theta_names=("rope_local_base_freq",), kind=SLIDING)
    return _read_mixed_layers(reading, 6, {FULL: full, SLIDING: sliding})


def _read_mixed_layers(
    reading: _Reading, pattern: int, layers: Mapping[str, Layer]
) -> tuple[Layer, ...]:
    """Layers that are listed, or of which every so many, the last attends to all positions."""
    values = reading.values
    count, window, kinds = (
        values[name] for name in ("num_hidden_layers", "sliding_window", "layer_types")
    )
    said = [values[name] for name in _PATTERNS if values.get(name) is not None]
    pattern = said[0] if said else pattern
    if kinds is None:
        kinds = [SLIDING if number % pattern else FULL for number in range(1, count + 1)]
    if len(kinds) != count or not all(kind in (FULL, SLIDING) for kind in kinds):
        what = f"it is {reprlib.repr(kinds)}, and has to name {FULL!r} or {SLIDING!r} {count} times"
        reading.add("layer_types", what, "Correct it.")
        return ()
    if SLIDING in kinds and window is None:
        reading.add("sliding_window", "it is missing, and layers slide", "Write its length.")
    other = values.get("sliding_window_size")
    if other not in (None, window):
        reading.add("sliding_window_size", f"it is {other}, and sliding_window is {window}")
    own = {**layers, SLIDING: dataclasses.replace(layers[SLIDING], window=window)}
    return tuple(own[kind] for kind in kinds)


def _read_neox(reading: _Reading) -> tuple[Layer, ...]:
    _check_heads(reading)
    layer = _read_layer(
        reading,
        rope=_PARTIAL_ROPE,
        theta_names=("rotary_emb_base", "rope_theta"),
        partial=0.25,
        partial_names=("rotary_pct", "partial_rotary_factor"),
    )
    size = head_size(reading.values)
    rotated = int(layer.partial * size)
    if not 0 < rotated <= size or rotated % 2:
        what = f"{layer.partial} rotates {rotated} of the {size} numbers of a head"
        reading.add("rotary_pct", what, "Let it rotate an even number of them.")
    return (layer,) * reading.values["num_hidden_layers"]


# The families


@dataclasses.dataclass(frozen=True)
class _Family:
    """What configurations of a family say.

    Attributes:
        name: What messages call it.
        architecture: Its class in transformers.
        model_type: Its type there.
        attributes: What each attribute may be.
        read_layers: Compares attributes with each other, and gives the layers.
        part: The attribute that holds the language model's own, of models of several parts.
        around: What the attributes outside of that part may be.
    """

    name: str
    architecture: str
    model_type: str
    attributes: Mapping[str, _Attribute]
    read_layers: Callable[[_Reading], tuple[Layer, ...]]
    part: str = ""
    around: Mapping[str, _Attribute] = dataclasses.field(default_factory=dict)


_ANY = _Attribute("unreadable", "anything", lambda value: True)
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
_SIZES = {
    "hidden_size": _size(_MISSING),
    "intermediate_size": _size(_MISSING),
    "num_attention_heads": _size(_MISSING),
    "num_hidden_layers": _Attribute(
        "unreadable",
        f"a whole number from 1 to {_MOST_LAYERS:,}",
        lambda value: _is_size(value) and value <= _MOST_LAYERS,
        _MISSING,
    ),
    "vocab_size": _size(_MISSING),
    "head_dim": _size(),
}
_MISTRAL = {
    **_SIZES,
    **_ROTARY,
    "num_key_value_heads": _size(_MISSING),
    "rms_norm_eps": _number(1e-6),
    "sliding_window": _size(4096, or_none=True),
    "hidden_act": _one_of("silu"),
    "tie_word_embeddings": _one_of(False, True),
    "attention_bias": _one_of(False),
    "attention_dropout": _one_of(0.0),
    "is_llama_config": _one_of(True),
    "rope_interleaved": _one_of(False),
}
_LLAMA = {
    **_MISTRAL,
    "num_key_value_heads": _size(),
    "sliding_window": _one_of(None),
    "mlp_bias": _one_of(False),
}
_GEMMA_1_2_3 = {
    **_SIZES,
    **_ROTARY,
    "num_key_value_heads": _size(_MISSING),
    "head_dim": _size(_MISSING),
    "rms_norm_eps": _number(1e-6),
    "hidden_activation": _one_of("gelu_pytorch_tanh"),
    "tie_word_embeddings": _one_of(True),
    "attention_bias": _one_of(False),
    "attention_dropout": _one_of(0.0),
    "use_bidirectional_attention": _one_of(False),
}
_GEMMA = {
    **_GEMMA_1_2_3,
    "sliding_window": _one_of(None),
    # "gelu" is what the first files said, and is read as the approximation.
    "hidden_act": _one_of("gelu_pytorch_tanh", "gelu"),
}
_GEMMA_2_3 = {
    **_GEMMA_1_2_3,
    "query_pre_attn_scalar": _number(256),
    "sliding_window": _size(4096, or_none=True),
    "sliding_window_size": _size(),
    "layer_types": _Attribute("unreadable", "a list", lambda value: isinstance(value, list)),
}
_GEMMA_2 = {
    **_GEMMA_2_3,
    "hidden_act": _one_of("gelu_pytorch_tanh"),
    "attn_logit_softcapping": _number(50.0, or_none=True),
    "final_logit_softcapping": _number(30.0, or_none=True),
}
_GEMMA_3 = {
    **_GEMMA_2_3,
    "attn_logit_softcapping": _number(),
    "final_logit_softcapping": _number(),
    "rope_local_base_freq": _number(),
    **dict.fromkeys(_PATTERNS, _size()),
}
# Such configurations leave out of the text what is as transformers has it by default.
_GEMMA_3_TEXT = {
    **_GEMMA_3,
    "num_attention_heads": _size(8),
    "num_key_value_heads": _size(4),
    "head_dim": _size(256),
    "vocab_size": _size(262_208),
}
_AROUND_TEXT = {
    "text_config": dataclasses.replace(_TABLE, default=_MISSING),
    "tie_word_embeddings": _one_of(True),
    **dict.fromkeys(("vision_config", "mm_tokens_per_image"), _ANY),
    **dict.fromkeys(("boi_token_index", "eoi_token_index", "image_token_index"), _ANY),
}
_NEOX = {
    **_SIZES,
    **_ROTARY,
    "head_dim": _one_of(None),
    "partial_rotary_factor": _number(),
    "rotary_pct": _number(),
    "rotary_emb_base": _number(),
    "layer_norm_eps": _number(1e-5),
    "hidden_act": _one_of("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu"),
    "tie_word_embeddings": _one_of(False, True),
    "use_parallel_residual": _one_of(True),
    "attention_bias": _one_of(True),
    "is_decoder": _one_of(False, True),
    "attention_dropout": _one_of(0.0),
    "attention_probs_dropout_prob": _one_of(0.0),
    "hidden_dropout": _one_of(0.0),
    "hidden_dropout_prob": _one_of(0.0),
}
_FAMILIES = (
    _Family("Llama", "LlamaForCausalLM", "llama", _LLAMA, _read_llama),
    _Family("Mistral", "MistralForCausalLM", "mistral", _MISTRAL, _read_llama),
    _Family("Gemma", "GemmaForCausalLM", "gemma", _GEMMA, _read_llama),
    _Family("Gemma 2", "Gemma2ForCausalLM", "gemma2", _GEMMA_2, _read_gemma_2),
    _Family("Gemma 3", "Gemma3ForCausalLM", "gemma3_text", _GEMMA_3, _read_gemma_3),
    _Family(
        "Gemma 3 with images",
        "Gemma3ForConditionalGeneration",
        "gemma3",
        _GEMMA_3_TEXT,
        _read_gemma_3,
        "text_config",
        _AROUND_TEXT,
    ),
    _Family("GPT-NeoX", "GPTNeoXForCausalLM", "gpt_neox", _NEOX, _read_neox),
)
