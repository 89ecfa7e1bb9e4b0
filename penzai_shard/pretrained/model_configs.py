"""Reads the configuration of a Hugging Face model, and checks every attribute of it.

A configuration says what a model computes. So each attribute is used, has a value that Penzai's
model computes with, or is known to change no number; all others are refused by name. Both forms
are read: transformers 5 keeps what it says of rotary positions in ``rope_parameters``, the versions
before in ``rope_theta`` and ``rope_scaling``.
"""

import dataclasses
import json
import pathlib
import reprlib
from collections.abc import Mapping
from typing import Any

from penzai_shard import errors
from penzai_shard.pretrained.families import BANDS, BUILD, COPY, FAMILIES, FULL, SLIDING, Attribute

CONFIG = "config.json"

_PUBLISHED = pathlib.Path(__file__).parent / "configurations"

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
        family: Its architecture, by which ``FAMILIES`` has its family.
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
    # Of a model with images too, the text is a part.
    if FAMILIES[family].prefix:
        source, own = f"{source}/text_config", given.get("text_config")
        _check_table(source, own)
    problems = errors.Problems(f"{source} is no {family} that Penzai's model computes:")
    values = _check_attributes(_flatten_rope(own), FAMILIES[family].attributes, problems)
    # What does not fit by itself is compared with nothing.
    layers = () if problems else _read_layers(values, problems)
    problems.raise_if_any(errors.CheckpointMismatchError)
    return ModelConfig(family, values, layers, given, source)


# Finding it


def _read_json(source: str) -> Mapping[str, Any]:
    known = sorted(path.stem for path in _PUBLISHED.glob("*.json"))
    path = _PUBLISHED / f"{source}.json" if source in known else pathlib.Path(source)
    try:
        text = (path / CONFIG if path.is_dir() else path).read_bytes()
    except (OSError, ValueError) as error:
        fix = f"Write the path of a config.json, or its attributes, or one of {', '.join(known)}."
        # Whoever gives a model is not shown all of it.
        problem = errors.Problem("", f"{source[:100]!r} is no file and no published name", fix)
        raise errors.CheckpointNotFoundError("no such configuration:", [problem]) from error
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    _check_table(source, given)
    return given["config"] if source in known else given  # type: ignore[no-any-return]


def _check_table(source: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        problem = errors.Problem(source, "it is no table of attributes", COPY)
        raise errors.CheckpointDamagedError("a configuration cannot be read:", [problem])


def _find_family(source: str, given: Mapping[str, Any]) -> str:
    written = given.get("architectures"), given.get("model_type")
    for architecture, family in FAMILIES.items():
        # One of the two may be missing.
        is_it = written[0] in ([architecture], None) and written[1] in (family.model_type, None)
        if is_it and written != (None, None):
            return architecture
    what = f"they and model_type are {reprlib.repr(written)}, and there are {', '.join(FAMILIES)}"
    problem = errors.Problem("architectures", what, BUILD)
    raise errors.CheckpointMismatchError(f"{source} is of no family that is known:", [problem])


# Checking each attribute


def _flatten_rope(given: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Attributes with what is said of rotary positions as ``rope_parameters/rope_theta``."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        is_rope = isinstance(value, Mapping) and f"{path}{name}".startswith("rope_")
        flat |= _flatten_rope(value, f"{path}{name}/") if is_rope else {f"{path}{name}": value}
    return flat


def _check_attributes(
    given: Mapping[str, Any], table: Mapping[str, Attribute], problems: errors.Problems
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
        problems.add("num_key_value_heads", f"{keys} does not divide {queries} heads", COPY)
    if size % 1 or rotated % 2 or not 0 < rotated <= size:
        problems.add("head_dim", f"{rotated} of {size} numbers cannot be rotated in pairs", COPY)
    values["head_dim"] = int(size)

    kind, factor = values["rope_type"], values.get("rope_factor", 1.0)
    bands = tuple(values[name] for name in BANDS) if kind == "llama3" else None
    if (kind == "default" and factor != 1.0) or (bands and (None in bands or bands[0] >= bands[1])):
        what = f"it is {kind!r}, with a factor of {factor} and {BANDS} of {bands}"
        problems.add("rope_type", what, "Copy rope_parameters from the published config.json.")

    # Layers are listed, or of every so many the last attends to all positions, or none does.
    count, window = values["num_hidden_layers"], values.get("sliding_window")
    pattern, kinds = values.get("sliding_window_pattern", count + 1), values.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if number % pattern else FULL for number in range(1, count + 1)]
    if len(kinds) != count or not all(each in (FULL, SLIDING) for each in kinds):
        what = f"it is {reprlib.repr(kinds)}, and has to name {FULL} or {SLIDING} {count} times"
        problems.add("layer_types", what, COPY)
    if "layer_types" in values and SLIDING in kinds and window is None:
        problems.add("sliding_window", "it is null, and layers slide", COPY)
    full = Layer(None, float(values["rope_theta"]), factor, bands)
    local = values.get("rope_local_base_freq")
    sliding = Layer(window, float(local)) if local else dataclasses.replace(full, window=window)
    return tuple(sliding if each == SLIDING else full for each in kinds)
