"""Reads the configuration of a Hugging Face model, and checks every attribute of it.

A configuration says what a model computes. So each attribute is used, has a value that Penzai's
model computes with, or is known to change no number; all others are refused by name. Both forms
are read: transformers 5 keeps what it says of rotary positions in ``rope_parameters``, the versions
before in ``rope_theta`` and ``rope_scaling``.
"""

import dataclasses
import functools
import json
import pathlib
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from penzai_shard import errors
from penzai_shard.paths import nearest

CONFIG = "config.json"

_PUBLISHED = pathlib.Path(__file__).parent / "configurations"
_OWN_MODEL = "Build the model yourself, and load it with into=."
_COPY = "Copy it from the published config.json."

# ``pretraining_tp`` is about sums in another order; default rotary positions have no greatest one.
_CHANGE_NO_NUMBER = """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures bos_token_id
    cache_implementation classifier_dropout dtype eos_token_id gradient_checkpointing id2label
    initializer_range is_decoder label2id max_position_embeddings max_sequence_length model_type
    output_attentions output_hidden_states pad_token_id pretraining_tp sep_token_id tokenizer_class
    torch_dtype transformers_version unk_token_id use_cache
"""


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
    bands: tuple[float, ...] | None = None


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
            published configuration. What was read already stays as it is.

    Raises:
        CheckpointNotFoundError: There is no such file, folder or name.
        CheckpointDamagedError: The file holds no table of attributes.
        CheckpointMismatchError: Attributes are missing, or ask for what Penzai's model does not
            compute; all of them are in it.

    >>> read_config("llama-3-8b")["hidden_size"]
    4096
    """
    if isinstance(config, ModelConfig):
        return config
    source = "config" if isinstance(config, Mapping) else str(config)
    given: Any = config if isinstance(config, Mapping) else _read_json(source)
    family, own = _find_family(source, given), given
    if family == "Gemma 3 with images":
        source, own = f"{source}/text_config", given.get("text_config")
        _check_table(source, own)
    problems = errors.Problems(f"{source} is no {family} that Penzai's model computes:")
    values = _check_attributes(_flatten_rope(own), _FAMILIES[family][2], problems)
    # What does not fit by itself is compared with nothing.
    layers = () if problems else _read_layers(values, problems)
    problems.raise_if_any(errors.CheckpointMismatchError)
    return ModelConfig(family, values, layers, given, source)


# Finding it


def published_names() -> list[str]:
    """The names of the published configurations."""
    return sorted(path.stem for path in _PUBLISHED.glob("*.json"))


def _read_json(source: str) -> Mapping[str, Any]:
    known = published_names()
    path = _PUBLISHED / f"{source}.json" if source in known else pathlib.Path(source)
    try:
        text = (path / CONFIG if path.is_dir() else path).read_bytes()
    except (OSError, ValueError) as error:
        near = nearest(source.rpartition("/")[2].lower(), known)
        meant = repr(near) if near else "the path of a config.json"
        fix = f"Write {meant}; published are {', '.join(known)}."
        # Whoever gives a model is not shown all of it.
        problem = errors.Problem("", f"{source!r:.100} is no file and no published name", fix)
        raise errors.CheckpointNotFoundError("no such configuration:", [problem]) from error
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    _check_table(source, given)
    return given["config"] if source in known else given  # type: ignore[no-any-return]


def _check_table(source: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        problem = errors.Problem(source, "it is no table of attributes", _COPY)
        raise errors.CheckpointDamagedError("a configuration cannot be read:", [problem])


def _find_family(source: str, given: Mapping[str, Any]) -> str:
    written = given.get("architectures"), given.get("model_type")
    for family, (architecture, model_type, _) in _FAMILIES.items():
        # One of the two may be missing.
        is_it = written[0] in ([architecture], None) and written[1] in (model_type, None)
        if is_it and written != (None, None):
            return family
    known = ", ".join(architecture for architecture, *_ in _FAMILIES.values())
    what = f"they and model_type are {reprlib.repr(written)}, and there are {known}"
    problem = errors.Problem("architectures", what, _OWN_MODEL)
    raise errors.CheckpointMismatchError(f"{source} is of no family that is known:", [problem])


# Checking each attribute


@dataclasses.dataclass(frozen=True)
class _Attribute:
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
    fix: str = _COPY


def _number(
    default: Any = None, *also: str, is_whole: bool = False, or_none: bool = False
) -> _Attribute:
    """A number; without a default it has to be given, unless null is a value of it."""
    kind, most = (int, 10**7) if is_whole else (int | float, 1e30)

    def fits(value: Any) -> bool:
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        return (is_number and 0 < value <= most) or (or_none and value is None)

    text = f"a {'whole ' if is_whole else ''}number above 0, up to {most:,}"
    return _Attribute(text, fits, default, also)


_size = functools.partial(_number, is_whole=True)


def _one_of(*accepted: Any, also: tuple[str, ...] = ()) -> _Attribute:
    """Of these values; the first is the default."""
    text = " or ".join(map(repr, accepted))
    return _Attribute(text, lambda x: x in accepted, accepted[0], also, fix=_OWN_MODEL)


def _flatten_rope(given: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Attributes with what is said of rotary positions as ``rope_parameters/rope_theta``."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        is_rope = isinstance(value, Mapping) and f"{path}{name}".startswith("rope_")
        flat |= _flatten_rope(value, f"{path}{name}/") if is_rope else {f"{path}{name}": value}
    return flat


def _check_attributes(
    given: Mapping[str, Any], table: Mapping[str, _Attribute], problems: errors.Problems
) -> dict[str, Any]:
    """The value of each attribute of a table; what is wrong is added to the problems."""
    values, known = {}, {*_CHANGE_NO_NUMBER.split()}
    for name, attribute in table.items():
        names = (name, *attribute.also)
        known.update(names)
        # Null is a value of some, and of the others as if they were absent.
        takes_null = attribute.fits(None)
        present = [x for x in names if x in given and (takes_null or given[x] is not None)]
        written = {x: given[x] for x in present} or {name: attribute.default}
        first, values[name] = next(iter(written.items()))
        for each, value in written.items():
            if not attribute.fits(value):
                what = f"it is {reprlib.repr(value)}, and has to be {attribute.text}"
                problems.add(each, what, attribute.fix)
            elif value != values[name]:
                what = f"it is {reprlib.repr(value)}, and {first} is {reprlib.repr(values[name])}"
                problems.add(each, what, "Leave the wrong one out.")
    for name, value in given.items():
        if name not in known and value is not None:
            what = f"it is {reprlib.repr(value)}, and it is not known what that changes"
            problems.add(name, what, "Leave it out of config=, if it changes no number.")
    return values


# Heads and layers


def _read_layers(values: dict[str, Any], problems: errors.Problems) -> tuple[Layer, ...]:
    """The layers; adds the sizes of heads where these were absent."""
    hidden, queries = values["hidden_size"], values["num_attention_heads"]
    keys = values["num_key_value_heads"] = values.get("num_key_value_heads") or queries
    size = values.get("head_dim") or hidden / queries
    rotated = values["rotated"] = int(values["partial_rotary_factor"] * size)
    if queries % keys:
        problems.add("num_key_value_heads", f"{keys} does not divide {queries} heads", _COPY)
    if size % 1 or rotated % 2 or not 0 < rotated <= size:
        problems.add("head_dim", f"{rotated} of {size} numbers cannot be rotated in pairs", _COPY)
    values["head_dim"] = int(size)

    kind, factor = values["rope_type"], values.get("rope_factor", 1.0)
    bands = tuple(values[name] for name in _BANDS) if kind == "llama3" else None
    if (kind == "default" and factor != 1.0) or (bands and (None in bands or bands[0] >= bands[1])):
        what = f"it is {kind!r}, with a factor of {factor} and {_BANDS} of {bands}"
        problems.add("rope_type", what, "Copy rope_parameters from the published config.json.")

    # Layers are listed, or of every so many the last attends to all positions, or none does.
    count, window = values["num_hidden_layers"], values.get("sliding_window")
    pattern, kinds = values.get("sliding_window_pattern", count + 1), values.get("layer_types")
    if kinds is None:
        kinds = [_SLIDING if number % pattern else _FULL for number in range(1, count + 1)]
    if len(kinds) != count or not all(each in (_FULL, _SLIDING) for each in kinds):
        what = f"it is {reprlib.repr(kinds)}, and has to name {_FULL} or {_SLIDING} {count} times"
        problems.add("layer_types", what, _COPY)
    if "layer_types" in values and _SLIDING in kinds and window is None:
        problems.add("sliding_window", "it is null, and layers slide", _COPY)
    full = Layer(None, float(values["rope_theta"]), factor, bands)
    local = values.get("rope_local_base_freq")
    sliding = Layer(window, float(local)) if local else dataclasses.replace(full, window=window)
    return tuple(sliding if each == _SLIDING else full for each in kinds)


# What attributes may be in each family

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE = ("rope_parameters", f"rope_parameters/{_FULL}", "rope_scaling")


def _in_rope(*names: str) -> tuple[str, ...]:
    return tuple(f"{table}/{name}" for table in _ROPE for name in names)


_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
_OFF = ("attention_bias", "mlp_bias", "rope_interleaved", "use_bidirectional_attention")
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "hidden_dropout")
_BANDS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
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
    **{name: _number(None, *_in_rope(name), or_none=True) for name in _BANDS},
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
    "layer_types": _Attribute("a list", lambda value: isinstance(value, list | None)),
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
    "rope_local_base_freq": _number(1e4, f"rope_parameters/{_SLIDING}/rope_theta"),
    "local_rope_type": _one_of("default", also=(f"rope_parameters/{_SLIDING}/rope_type",)),
}
_NEOX = {
    **_ALL,
    "attention_bias": _one_of(True),
    "layer_norm_eps": _number(1e-5),
    "hidden_act": _one_of("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    "rope_theta": _number(1e4, "rotary_emb_base", *_in_rope("rope_theta")),
    "partial_rotary_factor": _number(0.25, "rotary_pct", *_in_rope("partial_rotary_factor")),
}
# The architecture, the model type, and what each attribute may be.
_FAMILIES: dict[str, tuple[str, str, Mapping[str, _Attribute]]] = {
    "Llama": ("LlamaForCausalLM", "llama", _LLAMA),
    "Mistral": ("MistralForCausalLM", "mistral", _MISTRAL),
    "Gemma": ("GemmaForCausalLM", "gemma", _GEMMA),
    "Gemma 2": ("Gemma2ForCausalLM", "gemma2", _GEMMA_2),
    "Gemma 3": ("Gemma3ForCausalLM", "gemma3_text", _GEMMA_3),
    "Gemma 3 with images": ("Gemma3ForConditionalGeneration", "gemma3", _GEMMA_3),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "gpt_neox", _NEOX),
}
