"""Names of dimensions that are the product of several logical axes."""

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Self

from penzai_shard.errors import RuleTypeError, raise_all

_TIMES = "*"


class FusedAxes(str):
    """The name of a dimension that is the product of several logical axes, major first.

    Weights that do several projections at once have such dimensions: the first third of the
    outputs of GPT-2's ``c_attn`` are queries, and the first 64 of these belong to the first head.
    The name is text wherever names are text, in rules, tables and files, and equal to it. Beside
    that it knows the length of each logical axis, so that a rule for one of them splits the
    dimension where that is right: where equal parts of the dimension are whole parts of the
    logical axis, because it is the major one and its own length divides. Where that length does not
    divide and ``on_indivisible="pad"``, the whole dimension is split into equal parts, as compilers
    do, and models that take it apart again move some of it between devices.

    The lengths survive pickling, copying and the flattening of trees. Where a name goes through
    text, as in a file, they do not; rules for the whole name still apply then, those for one of
    its logical axes leave the dimension whole, and the plan says so. Restored arrays get their
    names from the model, with the lengths. JAX takes two names of equal text for the same one.

    Attributes:
        sizes: The length of each logical axis, major first.

    Args:
        text: The names of the logical axes, with ``*`` between them; ``of`` makes it.
        sizes: Their lengths.

    Raises:
        RuleTypeError: There are fewer than two logical axes, or they are not as many as there are
            lengths, or a length is not a positive number.

    >>> fused = FusedAxes.of({"qkv": 3, "heads": 12, "projection": 64})
    >>> fused, fused.names, fused.sizes
    ('qkv*heads*projection', ('qkv', 'heads', 'projection'), (3, 12, 64))
    >>> fused == "qkv*heads*projection"
    True
    """

    __slots__ = ("sizes",)

    sizes: tuple[int, ...]

    def __new__(cls, text: str, sizes: Iterable[int]) -> Self:
        """Makes a name of its text and lengths."""
        made = super().__new__(cls, text)
        lengths = tuple(sizes)
        problems = _problems(made.names, lengths)
        raise_all(RuleTypeError, f"{text!r} is not a product of logical axes:", problems)
        object.__setattr__(made, "sizes", tuple(map(int, lengths)))
        return made

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Self:
        """The product of some logical axes.

        Args:
            sizes: The length of each, major first; two at least.

        Raises:
            RuleTypeError: There are fewer than two; or a name is not text, or is itself such a
                product; or a length is not a positive number.

        >>> FusedAxes.of({"heads": 12, "projection": 64}).size
        768
        """
        problems = [
            f"the name {name!r} is not the text of one logical axis."
            for name in sizes
            if not isinstance(name, str) or not name or _TIMES in name
        ]
        raise_all(RuleTypeError, f"{dict(sizes)!r} is not a product of logical axes:", problems)
        return cls(_TIMES.join(sizes), sizes.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The logical axes, major first."""
        return tuple(self.split(_TIMES))

    @property
    def size(self) -> int:
        """The length of the dimension."""
        return math.prod(self.sizes)

    @property
    def lengths_text(self) -> str:
        """The lengths as messages show them.

        >>> FusedAxes.of({"heads": 12, "projection": 64}).lengths_text
        '12*64'
        """
        return _TIMES.join(map(str, self.sizes))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"FusedAxes are immutable; {name!r} cannot be set.")

    def __reduce__(self) -> tuple[Any, ...]:
        return FusedAxes, (str(self), self.sizes)


def _problems(names: tuple[str, ...], sizes: tuple[int, ...]) -> list[str]:
    if len(names) < 2:
        return ["it has fewer than two. One logical axis alone is named by its own name."]
    if not all(names) or len(set(names)) < len(names):
        return ["each needs a name of its own."]
    if len(names) != len(sizes):
        return [f"it has {len(names)} names and {len(sizes)} lengths, {sizes}."]
    return [
        f"the length of {name!r} is a positive number, not {size!r}."
        for name, size in zip(names, sizes, strict=True)
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1
    ]


def factors_of(name: object) -> tuple[str, ...]:
    """The logical axes that a name is the product of, whether their lengths are known or not.

    >>> factors_of("qkv*heads"), factors_of("heads")
    (('qkv', 'heads'), ())
    """
    return tuple(name.split(_TIMES)) if isinstance(name, str) and _TIMES in name else ()


def with_factors(names: Iterable[Any]) -> set[Any]:
    """Names and, of those that are fused, the logical axes that they are the product of.

    >>> sorted(with_factors(["embedding", "qkv*heads"]))
    ['embedding', 'heads', 'qkv', 'qkv*heads']
    """
    return {each for name in names for each in (name, *factors_of(name))}


def lengths_of_fused(names: Iterable[object] | None) -> tuple[tuple[int, ...] | None, ...]:
    """For each name the lengths that it was fused of, None if it is not fused.

    What is remembered by names must be remembered by these too: equal names may differ in them.

    >>> lengths_of_fused(["embedding", FusedAxes.of({"qkv": 3, "heads": 12})])
    (None, (3, 12))
    """
    return tuple([name.sizes if type(name) is FusedAxes else None for name in names or ()])


def divided_length(name: object, size: int, asked: object) -> int | None:
    """The length that must divide where a rule for a logical axis is to split a dimension.

    Args:
        name: The name of the dimension.
        size: The length of the dimension.
        asked: The logical axis that the rule is for.

    Returns:
        The dimension's own if it is of that logical axis; that of the logical axis, if that is the
        major one that it is fused of, or all before it have length 1; None if it is not to be
        split by such a rule.

    >>> fused = FusedAxes.of({"qkv": 3, "heads": 12})
    >>> [divided_length(fused, 36, asked) for asked in ("qkv*heads", "qkv", "heads")]
    [36, 3, None]
    """
    if name == asked:
        return size
    if type(name) is not FusedAxes or name.size != size:
        return None
    for factor, length in zip(name.names, name.sizes, strict=True):
        if factor == asked:
            return length
        if length != 1:
            return None
    return None


def why_whole(name: object, size: int, asked: object) -> str:
    """Why a rule for one of the logical axes that a dimension is fused of does not split it.

    Takes the arguments of ``divided_length``, which must be None.

    >>> why_whole(FusedAxes.of({"qkv": 3, "heads": 12}), 36, "heads")
    "'heads' is not the major part of 'qkv*heads' (3*12)"
    """
    if type(name) is not FusedAxes:
        return f"the lengths of the parts of {name!r} ({size}) are not known"
    if name.size != size:
        return f"{name!r} ({name.lengths_text}) is no longer whole in a dimension of {size}"
    return f"{asked!r} is not the major part of {name!r} ({name.lengths_text})"
