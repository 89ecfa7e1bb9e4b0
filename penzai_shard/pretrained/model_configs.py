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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penzai_shard.errors import (
    CheckpointDamagedError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    Problem,
    Problems,
    RuleTypeError,
)
from penzai_shard.paths import join_paths, nearest

FULL, SLIDING = "full_attention", "sliding_attention"
_PUBLISHED = pathlib.Path(__file__).parent / "configurations"
_OWN_MODEL = "Build the model yourself, and load it with into=."
_COPY = "Copy it from the published config.json."
_LONGEST, _MOST_LAYERS, _GREATEST = 2**31 - 1, 10_000, 1e30
_MISSING: Any = object()

# ``pretraining_tp`` is about sums in another order; default rotary positions have no greatest one.
_CHANGE_NO_NUMBER = """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures bos_token_id
    cache_implementation classifier_dropout decoder_start_token_id do_sample dtype eos_token_id
    gradient_checkpointing id2label initializer_range label2id max_length
    max_position_embeddings max_sequence_length model_type output_attentions
    output_hidden_states pad_token_id pretraining_tp return_dict sep_token_id temperature
    tokenizer_class top_k top_p torch_dtype transformers_version unk_token_id use_cache
"""
_HARMLESS = frozenset(_CHANGE_NO_NUMBER.split())


@dataclasses.dataclass(frozen=True)
class Layer:
    """What the layers of one model may differ in.

    Attributes:
        window: How many positions a token attends to; None for all before it.
        theta: The base of the wavelengths of rotary positions.
        factor: By how much positions are divided, so that longer texts fit.
        bands: If only those of slow rotations are divided: how often these turn at most, and the
            others at least, in a text of a length, and this length.
    """

    window: int | None
    theta: float
    factor: float = 1.0
    bands: tuple[float, float, float] | None = None


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
        RuleTypeError: It is none of these three.

    >>> read_config("llama-3-8b")["hidden_size"]
    4096
    """
    source, given = "config", config
    if isinstance(config, str | os.PathLike):
        source = os.fspath(config)
        given = _read_json(source)
    if not isinstance(given, Mapping):
        what = f"it is a {type(given).__name__}"
        problem = Problem("config", what, "Write config={...}, a path, or a published name.")
        raise RuleTypeError("read_config:", [problem])
    family = _find_family(source, given)
    problems, own_problems = Problems(f"{source} is no {family.name} of Penzai:"), Problems("")
    own = given
    if family.part:
        own = _check_attributes(given, _AROUND_TEXT, problems)[family.part]
        if not isinstance(own, Mapping):
            problems.raise_if_any(CheckpointMismatchError)
    values = _check_attributes(_flatten_rope(own), family.attributes, own_problems)
    # What cannot be read is compared with nothing.
    is_readable = not any(problem.kind == "unreadable" for problem in own_problems)
    layers = family.read_layers(values, own_problems) if is_readable else ()
    for problem in own_problems:
        path = join_paths(family.part, problem.path)
        problems.extend([dataclasses.replace(problem, path=path)])
    problems.raise_if_any(CheckpointMismatchError)
    return ModelConfig(family.name, values, tuple(layers), given, source)


# Finding it


def published_names() -> list[str]:
    """The names of the published configurations."""
    return sorted(path.stem for path in _PUBLISHED.glob("*.json"))


def _read_json(source: str) -> Mapping[str, Any]:
    known = published_names()
    path = _PUBLISHED / f"{source}.json" if source in known else pathlib.Path(source)
    if path.is_dir():
        path /= "config.json"
    try:
        given = json.loads(path.read_text("utf-8"))
    except OSError as error:
        near = nearest(source.rpartition("/")[2].lower(), known)
        meant = repr(near) if near else "the path of a config.json"
        fix = f"Write {meant}; published are {', '.join(known)}."
        problem = Problem("", f"{source!r} is no file and no published name", fix)
        raise CheckpointNotFoundError("there is no such configuration:", [problem]) from error
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, Mapping):
        problem = Problem(str(path), "it holds no table of attributes as JSON", "Fetch it again.")
        raise CheckpointDamagedError("a configuration cannot be read:", [problem])
    return given["config"] if source in known else given


def _find_family(source: str, given: Mapping[str, Any]) -> "_Family":
    architectures, model_type = given.get("architectures"), given.get("model_type")
    for family in _FAMILIES:
        # One of the two may be missing.
        is_class = architectures == [family.architecture] or not architectures
        is_type = model_type == family.model_type or (model_type is None and architectures)
        if is_class and is_type:
            return family
    known = ", ".join(family.architecture for family in _FAMILIES)
    what = f"they are {architectures!r}, of type {model_type!r}, and there are {known}"
    problem = Problem("architectures", what, _OWN_MODEL)
    raise CheckpointMismatchError(f"{source} is of no family that is known:", [problem])


# Checking each attribute


@dataclasses.dataclass(frozen=True)
class _Attribute:
    """What an attribute may be.

    Attributes:
        kind: Others are ``"unreadable"``, or ``"unsupported"`` by Penzai's model.
        text: What it has to be, as messages have it.
        fits: Whether a value is so.
        default: What it means if it is absent or null.
        also: Its other names, also within ``rope_parameters``; if there are several, they agree.
        or_none: Whether null means none, and not the default.
    """

    kind: str
    text: str
    fits: Callable[[Any], bool]
    default: Any = None
    also: tuple[str, ...] = ()
    or_none: bool = False


def _number(
    default: Any = None, *also: str, kinds: Any = int | float, most: Any = _GREATEST, **more: Any
) -> _Attribute:
    def fits(value: Any) -> bool:
        return isinstance(value, kinds) and not isinstance(value, bool) and 0 < value <= most

    text = f"a {'whole ' if kinds is int else ''}number above 0, up to {most:,}"
    return _Attribute("unreadable", text, fits, default, also, **more)


def _size(default: Any = None, *also: str, most: int = _LONGEST, **more: Any) -> _Attribute:
    return _number(default, *also, kinds=int, most=most, **more)


def _one_of(*accepted: Any, also: tuple[str, ...] = ()) -> _Attribute:
    """Of these values; the first is the default. ``1`` and ``True`` are not the same."""

    def fits(value: Any) -> bool:
        is_bool = isinstance(value, bool)
        return any(value == each and isinstance(each, bool) == is_bool for each in accepted)

    text = " or ".join(map(repr, accepted))
    return _Attribute("unsupported", text, fits, accepted[0], also)


def _instance(kind: type, text: str, default: Any = None) -> _Attribute:
    return _Attribute("unreadable", text, lambda value: isinstance(value, kind), default)


def _flatten_rope(given: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Attributes with what is said of rotary positions as ``rope_parameters/rope_theta``."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        is_rope = isinstance(value, Mapping) and f"{path}{name}".startswith("rope_")
        flat |= _flatten_rope(value, f"{path}{name}/") if is_rope else {f"{path}{name}": value}
    return flat


def _check_attributes(
    given: Mapping[str, Any], table: Mapping[str, _Attribute], problems: Problems
) -> dict[str, Any]:
    """The value of each attribute of a table; what is wrong is added to the problems."""
    values, known = {}, {*_HARMLESS}
    for name, attribute in table.items():
        names = (name, *attribute.also)
        known.update(names)
        said = {each: given[each] for each in names if given.get(each) is not None}
        where, value = next(iter(said.items()), (name, attribute.default))
        if not said and name in given and attribute.or_none:
            value = None
        if value is _MISSING:
            problems.add(name, "it is missing", "Give the whole config.json.", "unreadable")
        for each, one in said.items():
            if not attribute.fits(one):
                what = f"it is {reprlib.repr(one)}, and has to be {attribute.text}"
                fix = _COPY if attribute.kind == "unreadable" else _OWN_MODEL
                problems.add(each, what, fix, attribute.kind)
            elif one != value:
                what = f"it is {reprlib.repr(one)}, and {where} is {reprlib.repr(value)}"
                problems.add(each, what, "Leave the wrong one out.", "inconsistent")
        values[name] = value
    for name, value in given.items():
        if name not in known and value is not None:
            what = f"it is {reprlib.repr(value)}, and it is not known what that changes"
            problems.add(name, what, "Leave it out of config=, if it changes no number.", "unknown")
    return values


# Heads and layers


def _complete_heads(values: dict[str, Any], problems: Problems) -> None:
    """Adds the size of a head and the number of those of keys, where these were absent."""
    hidden, queries = values["hidden_size"], values["num_attention_heads"]
    keys = values["num_key_value_heads"] = values.get("num_key_value_heads") or queries
    if queries % keys:
        what = f"{keys} does not divide num_attention_heads, {queries}"
        problems.add("num_key_value_heads", what, _COPY)
    if values["head_dim"] is None and hidden % queries:
        what = f"{queries} does not divide hidden_size, {hidden}"
        problems.add("num_attention_heads", what, "Write head_dim, or copy both sizes.")
    size = values["head_dim"] = values["head_dim"] or hidden // queries
    rotated = values["rotated"] = int(values["partial_rotary_factor"] * size)
    if not 0 < rotated <= size or rotated % 2:
        name = "head_dim" if rotated == size else "partial_rotary_factor"
        what = f"positions rotate {rotated} of the {size} numbers of a head"
        problems.add(name, what, "Let them rotate an even number.")


def _read_layer(values: dict[str, Any], problems: Problems, window: int | None) -> Layer:
    kind, factor = values["rope_type"], values.get("rope_factor", 1.0)
    if kind == "default" and factor != 1.0:
        what = f"it is 'default', and positions are divided by a factor, {factor}"
        problems.add("rope_type", what, "Leave the factor out.")
    bands = None
    if kind == "llama3":
        bands = tuple(values[name] for name in _BANDS)
        if None in bands or bands[0] >= bands[1]:
            what = f"{', '.join(_BANDS)} are {bands}, and are numbers in rising order"
            problems.add(_BANDS[0], what, _COPY)
    return Layer(window, float(values["rope_theta"]), factor, bands)


def _read_alike_layers(values: dict[str, Any], problems: Problems) -> Sequence[Layer]:
    _complete_heads(values, problems)
    layer = _read_layer(values, problems, values.get("sliding_window"))
    return [layer] * values["num_hidden_layers"]


def _read_mixed_layers(values: dict[str, Any], problems: Problems) -> Sequence[Layer]:
    """Layers that are listed, or of which every so many, the last attends to all positions."""
    _complete_heads(values, problems)
    full = _read_layer(values, problems, None)
    count, window = values["num_hidden_layers"], values["sliding_window"]
    local_theta = values.get("rope_local_base_freq", full.theta)
    kinds = {FULL: full, SLIDING: Layer(window, float(local_theta))}
    pattern = values["sliding_window_pattern"]
    listed = values["layer_types"]
    if listed is None:
        listed = [SLIDING if number % pattern else FULL for number in range(1, count + 1)]
    if len(listed) != count or not all(kind in (FULL, SLIDING) for kind in listed):
        what = f"it is {reprlib.repr(listed)}, and has to name {FULL} or {SLIDING} {count} times"
        problems.add("layer_types", what, _COPY)
        return ()
    if SLIDING in listed and window is None:
        problems.add("sliding_window", "it is null, and layers slide", "Write its length.")
    return [kinds[kind] for kind in listed]


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
        part: The attribute that holds those of the language model, in models of several parts.
    """

    name: str
    architecture: str
    model_type: str
    attributes: Mapping[str, _Attribute]
    read_layers: Callable[[dict[str, Any], Problems], Sequence[Layer]]
    part: str = ""


def _in_rope(*names: str, tables: tuple[str, ...] = ("parameters", "scaling")) -> tuple[str, ...]:
    return tuple(f"rope_{table}/{name}" for table in tables for name in names)


_BANDS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_ALL = {
    **dict.fromkeys(_NEEDED, _size(_MISSING)),
    "num_hidden_layers": _size(_MISSING, most=_MOST_LAYERS),
    "head_dim": _size(),
    "attention_dropout": _one_of(0.0),
    "rope_theta": _number(1e4, *_in_rope("rope_theta")),
    "rope_type": _one_of("default", also=_in_rope("rope_type", "type")),
    "partial_rotary_factor": _one_of(1.0, also=_in_rope("partial_rotary_factor")),
}
_MISTRAL = {
    **_ALL,
    "num_key_value_heads": _size(_MISSING),
    "rms_norm_eps": _number(1e-6),
    "sliding_window": _size(4096, or_none=True),
    "hidden_act": _one_of("silu"),
    "tie_word_embeddings": _one_of(False, True),
    "is_llama_config": _one_of(True),
    **dict.fromkeys(("attention_bias", "rope_interleaved"), _one_of(False)),
}
_LLAMA = {
    **_MISTRAL,
    "num_key_value_heads": _size(),
    "sliding_window": _one_of(None),
    "mlp_bias": _one_of(False),
    "rope_type": _one_of("default", "linear", "llama3", also=_in_rope("rope_type", "type")),
    "rope_factor": _number(1.0, *_in_rope("factor")),
    **{name: _number(None, *_in_rope(name)) for name in _BANDS},
}
_GEMMA = {
    **_ALL,
    **dict.fromkeys(("num_key_value_heads", "head_dim"), _size(_MISSING)),
    "rms_norm_eps": _number(1e-6),
    # The first files have "gelu" here, which is read as the approximation.
    "hidden_act": _one_of("gelu_pytorch_tanh", "gelu"),
    "hidden_activation": _one_of("gelu_pytorch_tanh"),
    "tie_word_embeddings": _one_of(True),
    **dict.fromkeys(("attention_bias", "use_bidirectional_attention"), _one_of(False)),
}
_GEMMA_2 = {
    **_GEMMA,
    "hidden_act": _one_of("gelu_pytorch_tanh"),
    "sliding_window": _size(4096, "sliding_window_size", or_none=True),
    "sliding_window_pattern": _one_of(2),
    "layer_types": _instance(list, "a list"),
    "query_pre_attn_scalar": _number(256),
    "attn_logit_softcapping": _number(50.0, or_none=True),
    "final_logit_softcapping": _number(30.0, or_none=True),
}
_LOCAL, _GLOBAL = ("parameters/sliding_attention",), ("parameters/full_attention", "scaling")
_GEMMA_3 = {
    **_GEMMA_2,
    "sliding_window_pattern": _size(6, "_sliding_window_pattern"),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _number()),
    "rope_theta": _number(1e6, *_in_rope("rope_theta", tables=_GLOBAL)),
    "rope_type": _one_of("default", "linear", also=_in_rope("rope_type", "type", tables=_GLOBAL)),
    "rope_factor": _number(1.0, *_in_rope("factor", tables=_GLOBAL)),
    "rope_local_base_freq": _number(1e4, *_in_rope("rope_theta", tables=_LOCAL)),
    "local_rope_type": _one_of("default", also=_in_rope("rope_type", "type", tables=_LOCAL)),
    "partial_rotary_factor": _one_of(
        1.0, also=_in_rope("partial_rotary_factor", tables=(*_GLOBAL, *_LOCAL))
    ),
}
# Such configurations leave out of the text what is as transformers has it by default.
_GEMMA_3_TEXT = {
    **_GEMMA_3,
    "num_attention_heads": _size(8),
    "num_key_value_heads": _size(4),
    "head_dim": _size(256),
    "vocab_size": _size(262_208),
}
_TOKENS = ("boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image")
_AROUND_TEXT = {
    "text_config": _instance(Mapping, "a table", _MISSING),
    "vision_config": _instance(Mapping, "a table"),
    "tie_word_embeddings": _one_of(True),
    **dict.fromkeys(_TOKENS, _instance(int, "a whole number")),
}
_NEOX = {
    **_ALL,
    "head_dim": _one_of(None),
    "rope_theta": _number(1e4, "rotary_emb_base", *_in_rope("rope_theta")),
    "partial_rotary_factor": _number(0.25, "rotary_pct", *_in_rope("partial_rotary_factor")),
    "layer_norm_eps": _number(1e-5),
    "hidden_act": _one_of("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu"),
    **dict.fromkeys(("tie_word_embeddings", "is_decoder"), _one_of(False, True)),
    **dict.fromkeys(("use_parallel_residual", "attention_bias"), _one_of(True)),
    **dict.fromkeys(
        ("attention_probs_dropout_prob", "hidden_dropout", "hidden_dropout_prob"), _one_of(0.0)
    ),
}
_FAMILIES = (
    _Family("Llama", "LlamaForCausalLM", "llama", _LLAMA, _read_alike_layers),
    _Family("Mistral", "MistralForCausalLM", "mistral", _MISTRAL, _read_alike_layers),
    _Family("Gemma", "GemmaForCausalLM", "gemma", _GEMMA, _read_alike_layers),
    _Family("Gemma 2", "Gemma2ForCausalLM", "gemma2", _GEMMA_2, _read_mixed_layers),
    _Family("Gemma 3", "Gemma3ForCausalLM", "gemma3_text", _GEMMA_3, _read_mixed_layers),
    _Family(
        "Gemma 3 with images",
        "Gemma3ForConditionalGeneration",
        "gemma3",
        _GEMMA_3_TEXT,
        _read_mixed_layers,
        "text_config",
    ),
    _Family("GPT-NeoX", "GPTNeoXForCausalLM", "gpt_neox", _NEOX, _read_alike_layers),
)
