"""Reading the configuration of a Hugging Face model: ``config.json``.

A configuration says what a model computes. Every attribute is either used, or known to change no
value, or has to have the value that Penzai's model assumes; all others are refused by name. Both
forms are read: transformers 5 keeps what it says of rotary positions in ``rope_parameters``, and
the versions before in ``rope_theta`` and ``rope_scaling``.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penzai_shard.errors import CheckpointMismatchError, raise_all

_CHANGE_NO_VALUE = """
    _attn_implementation_autoset _name_or_path architectures bos_token_id cache_implementation
    classifier_dropout decoder_start_token_id do_sample dtype eos_token_id gradient_checkpointing
    id2label initializer_range label2id max_length max_position_embeddings max_sequence_length
    model_type output_attentions output_hidden_states pad_token_id pretraining_tp return_dict
    sep_token_id temperature tokenizer_class top_k top_p torch_dtype transformers_version
    unk_token_id use_cache
"""
CHANGE_NO_VALUE = frozenset(_CHANGE_NO_VALUE.split())
"""Attributes of any model that change none of the values that it computes from its parameters.

Rotary positions of the default kind have no greatest position, and ``pretraining_tp`` is about
sums in another order. ``classifier_dropout`` is for another head than that of a language model."""

TRANSFORMER_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
"""The sizes that every family has."""

ROTARY = ("partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta")
"""Attributes about rotary positions that any family may have."""

_LONGEST = 2**31
_GREATEST = 1e300


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings of a layer.

    Attributes:
        theta: The base of the wavelengths.
        partial: The part of a head's dimension that is rotated.
        factor: By how much positions are divided.
    """

    theta: float
    partial: float = 1.0
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Attributes:
    """What a family says of the attributes in its configurations.

    Attributes:
        sizes: Whole numbers above 0, with what is meant where one is absent; None where it has to
            be there.
        numbers: Numbers above 0, with what is meant where one is absent.
        values: Those of which only some values are right; where one is absent, the first is meant.
        used: Those that the family reads by itself.
    """

    sizes: Mapping[str, int | None]
    numbers: Mapping[str, float]
    values: Mapping[str, tuple[Any, ...]]
    used: tuple[str, ...] = ()


class Configuration:
    """Attributes of a configuration, checked, with the values of those that are absent.

    Args:
        given: The attributes in the file.
        attributes: What the family says of them.
        source: What messages call the configuration.
        family: The name of the family.
        rotary: Gives what is said of rotary positions, and what is wrong with it.
        check: Gives what else is wrong.

    Raises:
        CheckpointMismatchError: With one line per attribute that is missing, or that asks for what
            Penzai's model does not do.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        attributes: Attributes,
        source: str,
        family: str,
        check: Callable[["Configuration"], Sequence[str]] = lambda configuration: (),
    ) -> None:
        self.given, self.source, self.family = given, source, family
        firsts = {name: allowed[0] for name, allowed in attributes.values.items()}
        self._absent = {**attributes.sizes, **attributes.numbers, **firsts}
        problems = [
            *self._sizes(attributes.sizes),
            *self._numbers(attributes.numbers),
            *self._others(attributes),
        ]
        if not problems:
            problems += check(self)
        raise_all(
            CheckpointMismatchError,
            f"{source} is not of a {family} that Penzai's model computes:",
            problems,
        )

    def __getitem__(self, name: str) -> Any:
        """The value of an attribute, or what its absence means."""
        value = self.given.get(name)
        return self._absent.get(name) if value is None else value

    def _sizes(self, names: Iterable[str]) -> list[str]:
        return [
            f"{name}: is {self[name]!r}, and has to be a whole number above 0."
            if self.given.get(name) is not None
            else f"{name}: is missing. Give the whole configuration with config=."
            for name in names
            if not is_size(self[name])
        ]

    def _numbers(self, names: Iterable[str]) -> list[str]:
        return _not_positive({name: self[name] for name in names})

    def _others(self, attributes: Attributes) -> list[str]:
        problems = []
        known = {*attributes.sizes, *attributes.numbers, *attributes.used, *CHANGE_NO_VALUE}
        for name, value in self.given.items():
            allowed = attributes.values.get(name)
            # A value of None is none, as if the attribute were absent.
            if name in known or (allowed and (value is None or _is_one_of(value, allowed))):
                continue
            if allowed is None:
                problems.append(
                    f"{name}: is {value!r}, of which it is not known what it changes. If it "
                    "changes no value that the model computes, leave it out: give the others with "
                    "config=."
                )
            else:
                listed = " or ".join(map(repr, allowed))
                problems.append(
                    f"{name}: is {value!r}, and Penzai's {self.family} is the one with {listed}. "
                    "Build a model of your own, and load it with into=."
                )
        return problems


def rotary(
    configuration: Configuration,
    theta: float,
    *,
    partial: float = 1.0,
    theta_names: tuple[str, ...] = ("rope_theta",),
    partial_names: tuple[str, ...] = ("partial_rotary_factor",),
    layer_type: str | None = None,
    scaling: bool = False,
) -> tuple[Rotary, list[str]]:
    """What a configuration says of rotary positions, and what is wrong with it.

    Args:
        configuration: The configuration.
        theta: What ``rope_theta`` is where it is absent.
        partial: What the part that is rotated is where it is absent.
        theta_names: The names of the base before transformers 5.
        partial_names: The names of the part that is rotated before transformers 5.
        layer_type: The layers of which it is asked, in families whose layers differ.
        scaling: Whether positions may be divided.

    Returns:
        What is said, and one line per problem.
    """
    given = configuration.given
    newer, older = given.get("rope_parameters"), given.get("rope_scaling")
    where = "rope_parameters"
    if layer_type is not None and isinstance(newer, Mapping):
        newer, where = newer.get(layer_type), f"rope_parameters[{layer_type!r}]"
    if newer is None:
        newer, where = (older if scaling or layer_type is None else None), "rope_scaling"
    if newer is None:
        newer = {}
    if not isinstance(newer, Mapping):
        return Rotary(theta), [f"{where}: is {newer!r}, and has to be a table of attributes."]
    problems = []
    kind = newer.get("rope_type", newer.get("type", "default"))
    factor = newer.get("factor", 1.0) if kind == "linear" and scaling else 1.0
    if kind != "default" and not (kind == "linear" and scaling):
        problems.append(
            f"{where}: has {kind!r} positions, {dict(newer)!r}, and Penzai's "
            f"{configuration.family} has 'default' ones alone. Build a model of your own, and load "
            "it with into=."
        )
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    known |= {"factor"} if kind == "linear" and scaling else set()
    problems += [
        f"{where}: says {name} = {value!r}, of which it is not known what it changes."
        for name, value in newer.items()
        if name not in known and not problems
    ]
    found = []
    for name, olds, default in (
        ("rope_theta", theta_names, theta),
        ("partial_rotary_factor", partial_names, partial),
    ):
        said = {old: given[old] for old in olds if given.get(old) is not None}
        if newer.get(name) is not None:
            said[f"{where}[{name!r}]"] = newer[name]
        values = list(said.values())
        if any(value != values[0] for value in values):
            listed = ", ".join(f"{old} is {value!r}" for old, value in said.items())
            problems.append(f"{name}: is said several times, {listed}. Leave the wrong ones out.")
        problems += _not_positive(said)
        found.append(values[0] if values else default)
    problems += _not_positive({f"{where}['factor']": factor})
    if problems:
        return Rotary(theta), problems
    return Rotary(float(found[0]), float(found[1]), float(factor)), []


def is_size(value: Any) -> bool:
    """Whether a value is a whole number above 0, as arrays have them."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LONGEST


def is_positive(value: Any) -> bool:
    """Whether a value is a number above 0, and no greater than floating numbers are."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < _GREATEST


def _not_positive(values: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: is {value!r}, and has to be a number above 0."
        for name, value in values.items()
        if not is_positive(value)
    ]


def _is_one_of(value: Any, allowed: Iterable[Any]) -> bool:
    """Whether a value is among others, where ``1`` and ``True`` are not the same."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed
    )
