"""The kinds of rule, and how rules, names and sizes are written in messages."""

import dataclasses
import difflib
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from penzai_shard.errors import RuleTypeError
from penzai_shard.partition_specs import part_count

LogicalAxis: TypeAlias = Hashable
MeshAxes: TypeAlias = str | tuple[str, ...] | None
OnIndivisible: TypeAlias = Literal["error", "replicate", "pad"]
OnUnnamed: TypeAlias = Literal["error", "replicate", "infer"]

_OPTIONS = {"on_indivisible": OnIndivisible, "on_unnamed": OnUnnamed}

SEQUENCE_AXES = frozenset(
    {"seq", "sequence", "kv_seq", "tokens", "kv_tokens", "positions", "time", "length"}
)
"""Usual names of the logical axis of activations along which a model's results depend on others."""

# Logical axes that activations of most models have and parameters have not.
_ACTIVATION_AXES = SEQUENCE_AXES | {"batch"}

# A name this similar to one that exists is probably misspelt.
_NEAR = 0.8

# One letter or two begin too many names to stand for one of them.
_SHORTEST = 3


@dataclasses.dataclass(frozen=True)
class PositionalDimension:
    """Stands for the name of a dimension that has none, where every dimension needs one."""

    number: int

    def __str__(self) -> str:
        return f"dimension {self.number}"


def check_option(option: str, value: Any) -> None:
    """Checks the value of the option ``on_indivisible`` or ``on_unnamed``.

    Raises:
        RuleTypeError: It is not one of the option's values.

    >>> check_option("on_indivisible", "replicate")
    """
    allowed = get_args(_OPTIONS[option])
    if not isinstance(value, str) or value not in allowed:
        *most, last = map(repr, allowed)
        raise RuleTypeError(f"{option} must be {', '.join(most)} or {last}, not {value!r}.")


def nearest_name(name: Any, names: Iterable[Any]) -> str | None:
    """The name most like a given one, if any is nearly equal to it.

    >>> nearest_name("neuron", ["neurons", "embedding"])
    'neurons'
    """
    found = difflib.get_close_matches(str(name), [str(other) for other in names], 1, _NEAR)
    return found[0] if found else None


def meant_name(name: Any, names: Iterable[Any]) -> str | None:
    """The name most like a given one, or else the only one that it shortens, or that shortens it.

    A word more or less makes it the name of another thing.

    >>> meant_name("vocab", ["vocabulary", "embedding"]), meant_name("heads", ["heads_of_keys"])
    ('vocabulary', None)
    """
    listed = [str(other) for other in names]
    begun = [
        other
        for other in listed
        for shorter, longer in [sorted((str(name), other), key=len)]
        if len(shorter) >= _SHORTEST and re.match(rf"{re.escape(shorter)}[a-z]", longer)
    ]
    return nearest_name(name, listed) or (begun[0] if len(begun) == 1 else None)


def did_you_mean(name: Any, names: Iterable[Any]) -> str:
    """The end of a message about a name that does not exist; empty if none is nearly equal to it.

    >>> did_you_mean("neuron", ["neurons", "embedding"]), did_you_mean("neuron", [])
    (" Did you mean 'neurons'?", '')
    """
    near = nearest_name(name, names)
    return f" Did you mean {near!r}?" if near else ""


def mesh_axes_text(mesh_axes: Sequence[str]) -> str:
    """How mesh axes are written in rules and messages.

    >>> mesh_axes_text(("model",)), mesh_axes_text(("data", "model")), mesh_axes_text(())
    ("'model'", "('data', 'model')", 'None')
    """
    if not mesh_axes:
        return "None"
    return repr(mesh_axes[0]) if len(mesh_axes) == 1 else repr(tuple(mesh_axes))


def sized_mesh_axes_text(mesh_axes: Sequence[str], mesh_shape: Mapping[str, int]) -> str:
    """Mesh axes with the number of parts that they make.

    >>> sized_mesh_axes_text(("data", "model"), {"data": 4, "model": 2})
    "mesh axes ('data', 'model') (8)"
    """
    noun = "mesh axis" if len(mesh_axes) == 1 else "mesh axes"
    return f"{noun} {mesh_axes_text(mesh_axes)} ({part_count(mesh_axes, mesh_shape)})"


@dataclasses.dataclass(frozen=True)
class NameRule:
    """One logical axis goes to some mesh axes, or to none.

    Attributes:
        logical_axis: The logical axis.
        mesh_axes: The mesh axes, major first; empty for "leave it unsharded".
        yields: Whether the rule steps aside, instead of being an error, where an earlier rule has
            already given one of its mesh axes to another dimension of the same array.
        for_activations: Whether a preset made the rule for activations, so that parameters are
            not expected to have its logical axis. Says nothing about what the rule does.
    """

    logical_axis: LogicalAxis
    mesh_axes: tuple[str, ...]
    yields: bool = False
    for_activations: bool = dataclasses.field(default=False, compare=False)

    @property
    def is_expected_to_be_unused(self) -> bool:
        """Whether it is as expected that some tree has nothing of this logical axis.

        >>> NameRule("batch", ("data",)).is_expected_to_be_unused
        True
        >>> NameRule("embeding", ("data",)).is_expected_to_be_unused
        False
        """
        # The rules of a preset that yield are alternatives, of which few trees have all.
        return self.yields or self.is_for_activations

    @property
    def is_for_activations(self) -> bool:
        """Whether activations are meant, as a preset says or the name does.

        >>> NameRule("seq", ("model",)).is_for_activations
        True
        """
        return self.for_activations or self.logical_axis in _ACTIVATION_AXES

    def __str__(self) -> str:
        return f"{self.logical_axis!r} -> {mesh_axes_text(self.mesh_axes)}"


@dataclasses.dataclass(frozen=True)
class IdentityRule:
    """Every logical axis goes to the mesh axis of the same name, if the mesh has one.

    One that is a tuple of names, as Flax may write it, goes to all of these.
    """

    mesh_axes: tuple[str, ...] = ()

    @staticmethod
    def mesh_axes_of(logical_axis: LogicalAxis, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
        """The mesh axes of that name; of a tuple of names all, if the mesh has any of them.

        >>> IdentityRule.mesh_axes_of(("data", "model"), {"data": 4, "model": 2})
        ('data', 'model')
        >>> IdentityRule.mesh_axes_of("embed", {"data": 4, "model": 2})
        ()
        """
        parts = logical_axis if isinstance(logical_axis, tuple) else (logical_axis,)
        are_texts = all(isinstance(part, str) for part in parts)
        return parts if are_texts and any(part in mesh_shape for part in parts) else ()

    def __str__(self) -> str:
        return "each logical axis -> the mesh axis of the same name"


@dataclasses.dataclass(frozen=True)
class LargestDimensionRule:
    """Of each large array, the largest dimension that divides and is free is sharded.

    Attributes:
        mesh_axes: The mesh axes it is sharded over.
        min_size: Arrays with fewer elements than this are left alone.
        splits_unnamed: Whether it is for arrays without names too, all of whose dimensions are
            free.
    """

    mesh_axes: tuple[str, ...]
    min_size: int
    splits_unnamed: bool = False

    def __str__(self) -> str:
        also = ", also of arrays without names" if self.splits_unnamed else ""
        return (
            f"largest dimension -> {mesh_axes_text(self.mesh_axes)} "
            f"(from {self.min_size} elements{also})"
        )


Rule: TypeAlias = NameRule | IdentityRule | LargestDimensionRule


def array_text(names: Sequence[LogicalAxis | None], sizes: Sequence[int]) -> str:
    """How an array's dimensions are written in messages.

    >>> array_text((None, "embedding"), (3, 8))
    '[3, embedding=8]'
    """
    return f"[{', '.join(dimension_texts(names, sizes))}]"


def dimension_texts(names: Iterable[LogicalAxis | None], sizes: Iterable[int]) -> list[str]:
    """Each size with its name, if it has one.

    >>> dimension_texts((None, "embedding"), (3, 8))
    ['3', 'embedding=8']
    """
    return [
        str(size) if name is None else f"{name}={size}"
        for name, size in zip(names, sizes, strict=True)
    ]
