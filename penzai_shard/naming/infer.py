"""Infers the logical axes of a function's weights, and says why each is called so.

Classes of dimensions get their names in ``roles``, by what the program does with them, or
from a person. Here dimensions get theirs from the classes that they are the product of.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from penzai_shard.errors import Problems, RuleTypeError, SelectionError
from penzai_shard.naming.facts import Facts
from penzai_shard.naming.roles import name_classes
from penzai_shard.naming.ties import AxisClass, Parts
from penzai_shard.naming.trace import OF_TOKENS, AxisNames, CalledArray, trace_call
from penzai_shard.paths import fold_key, group_paths, matches
from penzai_shard.planning.name_axes import check_names, match_names
from penzai_shard.reports.report import Column, HasReport, Line, Report

_TIMES = "*"
_UNKNOWN = "not decided by the program"
_UNUSED = "not used by the program"
_NUMBER = re.compile(r"\d+")
_COLUMNS = (
    Column("weight", "path"),
    Column("logical axes"),
    Column("open", "detail"),
    Column("decided", "ok", shown=False),
)


def infer_names(
    function: Callable[..., Any],
    params: Any,
    *inputs: Any,
    input_names: Sequence[AxisNames | None] = OF_TOKENS,
    overrides: Mapping[str, AxisNames] | None = None,
) -> "InferredNames":
    """Finds names for the dimensions of weights that have none.

    ``function(params, *inputs)`` is traced; nothing runs. Dimensions are one logical axis where an
    operation ties them, never because they are equally long; the rules of operations are those of
    Shardy, XLA's partitioner (https://openxla.org/shardy). An axis is called by what the program
    does with it, in the words of Penzai's transformers: ``embedding``, ``vocabulary``, ``heads``,
    ``projection``, ``neurons``, ``experts``, ``layers``. What the program does not decide has no
    name: a wrong one is worse than none.

    A dimension that is the product of axes is called by all of them, the major one first, such as
    ``heads*projection``. Rules take that for one name: ``AxisRules({"heads*projection": "model"})``
    splits the dimension, by whole heads where the mesh axis divides their number.

    Args:
        function: Any function that JAX can trace; best one that returns the logits of a model.
        params: Its weights: a tree of arrays or structs of any library. Arrays with names keep
            them, and what the program ties to these gets the same.
        inputs: Its other arguments, arrays or structs.
        input_names: The logical axes of each input, None for one that is not known. By default the
            first input has tokens, batch and seq.
        overrides: Names by path pattern, as ``name_axes`` takes them, for what is to be called
            otherwise; None stands for what is to stay as it was found. All dimensions that the
            program ties to one get its name.

    Returns:
        The names by path, which ``name_axes(params, names)`` gives to the weights, with reasons.

    Raises:
        RuleTypeError: Arguments cannot be read or do not fit; an axis gets two names.
        SelectionError: An override matches no array without names, or not its rank.
        PropagationError: This jaxlib does not say what an operation ties.

    >>> import jax
    >>> def logits(weights, tokens):
    ...     x = weights["embed"][tokens]
    ...     for layer in weights["layers"]:
    ...         x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
    ...     return x @ weights["embed"].T
    >>> embed, up, down, tokens = (
    ...     jax.ShapeDtypeStruct(shape, kind)
    ...     for shape, kind in [((9, 6), "f4"), ((6, 8), "f4"), ((8, 6), "f4"), ((2, 4), "i4")]
    ... )
    >>> weights = {"embed": embed, "layers": [{"up": up, "down": down}] * 2}
    >>> names = infer_names(logits, weights, tokens)
    >>> names["embed"], names["layers/1/up"]
    (('vocabulary', 'embedding'), ('embedding', 'neurons'))
    """
    overrides = {} if overrides is None else overrides
    check_names("infer_names", overrides)
    call = trace_call(function, params, *inputs, input_names=input_names)
    found = name_classes(Facts(call))
    known = {**found.names}
    parts = _find_parts(call.weights)
    for part, name in _read_overrides(overrides, call.weights, parts).items():
        if part not in known or known[part][0] != name:
            known[part] = (name, "an override says so")
    counts = collections.Counter(part for dims in parts.values() for part in {*sum(dims, ())})
    # Numbers below zero are of no class of the program.
    doubts = {part: _UNUSED for part in counts if part.number < 0} | found.reasons
    dims: dict[str, tuple[NamedDim, ...]] = {}
    for weight in call.weights:
        own = _name_dims(parts[weight.path], known, doubts, counts)
        if any(weight.names):
            of_dims = zip(weight.names, parts[weight.path], strict=True)
            own = (NamedDim(name, "its array has this name", each) for name, each in of_dims)
        dims[weight.path] = tuple(own)
    axes: dict[Hashable, dict[str, None]] = {}
    for name, reason in (known[part] for part in counts if part in known):
        axes.setdefault(name, {})[reason] = None
    return InferredNames(dims, axes)


def _find_parts(weights: Sequence[CalledArray]) -> dict[str, tuple[Parts, ...]]:
    """What the dimensions of each weight are products of; of unused ones, of themselves."""
    numbers = itertools.count(-1, -1)
    return {
        each.path: each.parts or tuple((AxisClass(next(numbers), n),) for n in each.shape)
        for each in weights
    }


def _read_overrides(
    overrides: Mapping[str, Any],
    weights: Sequence[CalledArray],
    parts: Mapping[str, tuple[Parts, ...]],
) -> dict[AxisClass, Hashable]:
    """The names that people give to classes."""
    problems = Problems("cannot override these names:")
    # Those that have names keep them, as name_axes has it.
    unnamed = [weight for weight in weights if not any(weight.names)]
    matched = match_names(unnamed, overrides, problems, some=True)
    problems.raise_if_any(SelectionError)
    given: dict[AxisClass, tuple[Hashable, str]] = {}
    for path, names in matched.items():
        for own, name in zip(parts[path], names, strict=True):
            called = name.split(_TIMES) if isinstance(name, str) else [name]
            if name is not None and len(called) != len(own):
                what = f"{name!r} names {len(called)} axes, and this is {_sizes_text(own)}"
                fix = f"Write {_TIMES.join(f'axis_{n}' for n, _ in enumerate(own, 1))!r} or better."
                problems.add(path, what, fix, "misfit")
            elif name is not None:
                for part, axis in zip(own, called, strict=True):
                    first, there = given.setdefault(part, (axis, path))
                    if first != axis:
                        what = f"is called {axis!r}, and the program ties it to {there}: {first!r}"
                        problems.add(path, what, "Give both one name, or None to one.", "tied")
    problems.raise_if_any(RuleTypeError)
    return {part: name for part, (name, _) in given.items()}


# Dimensions


@dataclasses.dataclass(frozen=True)
class NamedDim:
    """A dimension of a weight.

    Attributes:
        name: What it is called; None if that is open, or its length is 1.
        reason: Why it is called so, or has no name.
        parts: The axes that it is the product of.
        open: Of what an override can name the names of the parts, None for those that have none.
    """

    name: Hashable | None
    reason: str
    parts: Parts
    open: tuple[Hashable | None, ...] = ()


def _name_dims(
    dims: Sequence[Parts],
    known: Mapping[AxisClass, tuple[Hashable, str]],
    doubts: Mapping[AxisClass, str],
    counts: Mapping[AxisClass, int],
) -> Iterator[NamedDim]:
    """The dimensions of an array, each called by the names of all that it is a product of."""
    places = {(dim, n): part for dim, parts in enumerate(dims) for n, part in enumerate(parts)}
    named: dict[tuple[int, int], tuple[Hashable | None, str]] = {}
    owners: dict[Hashable, tuple[int, int]] = {}
    repeated = set()
    # An array has each name once: of equal ones the axis keeps it that more weights have.
    for place in sorted(places, key=lambda place: -counts[places[place]]):
        part = places[place]
        name, reason = known.get(part, (None, doubts.get(part, _UNKNOWN)))
        owner = owners.setdefault(part if name is None else name, place)
        if owner != place and places[owner] == part:
            name, reason = None, "another dimension is the same axis"
            repeated.add(place[0])
        elif owner != place:
            name, reason = None, f"it would be {name!r}, as another dimension is"
        named[place] = name, reason

    for dim, parts in enumerate(dims):
        names, reasons = zip(*(named[dim, n] for n, _ in enumerate(parts)), strict=True)
        if None not in names:
            told = map("{}: {}".format, names, reasons) if len(parts) > 1 else reasons
            name = _TIMES.join(map(str, names)) if len(parts) > 1 else names[0]
            yield NamedDim(name, "; ".join(told), parts)
        elif _sizes_text(parts) == "1":
            yield NamedDim(None, "its length is 1", parts)
        else:
            first = names.index(None)
            # No override can name what is the same axis as another dimension.
            yield NamedDim(None, reasons[first], parts, () if dim in repeated else names)


# Results


class InferredNames(Mapping[str, tuple[Hashable | None, ...]], HasReport):
    """The logical axes of the weights of a function by path, with reasons.

    What has no name is None. ``name_axes(params, names)`` gives the names to the weights; ``print``
    and notebooks show them.

    Attributes:
        dims: The dimensions of each weight.
        axes: The name of each axis, with its reasons.
    """

    def __init__(
        self, dims: Mapping[str, tuple[NamedDim, ...]], axes: Mapping[Hashable, Iterable[str]]
    ) -> None:
        self.dims, self.axes = dims, axes

    def __getitem__(self, path: str) -> tuple[Hashable | None, ...]:
        return tuple(dim.name for dim in self.dims[path])

    def __iter__(self) -> Iterator[str]:
        return iter(self.dims)

    def __len__(self) -> int:
        return len(self.dims)

    def reasons(self, path: str) -> tuple[str, ...]:
        """Why each dimension of a weight is called so, or has no name."""
        return tuple(dim.reason for dim in self.dims[path])

    @property
    def undecided(self) -> tuple[tuple[str, int], ...]:
        """Path and number of each dimension that is open; those of length 1 are not."""
        numbered = ((path, enumerate(dims)) for path, dims in self.dims.items())
        return tuple((path, n) for path, dims in numbered for n, dim in dims if dim.open)

    def overrides(self) -> str:
        """The argument that names all that is open; write better names for ``axis_1`` and others.

        Each axis stands in it once; those of equal blocks are one line, and get one name.
        """
        labels, known = self._labels(), set[AxisClass]()
        rows = []
        for path, dims in self.dims.items():
            new = {part for dim in dims if dim.open for part in dim.parts if part in labels}
            if new - known:
                known |= new
                rows.append((path, tuple(_text_of(dim, labels) for dim in dims)))
        text = ""
        for members in group_paths(rows):
            paths, names = [rows[i][0] for i in members], rows[members[0]][1]
            pattern = fold_key(paths[0])
            if [path for path in self.dims if matches(pattern, path)] == paths:
                paths = [pattern]
            text += "".join(f"    {path!r}: {names!r},\n" for path in paths)
        return f"overrides={{\n{text}}}" if text else "overrides={}"

    def _labels(self) -> dict[AxisClass, str]:
        """What each axis that is open can be called; in equal blocks those at one place are one."""
        places: dict[AxisClass, list[tuple[str, int, int]]] = collections.defaultdict(list)
        for path, dims in self.dims.items():
            for number, dim in enumerate(dims):
                for index, name in enumerate(dim.open):
                    if name is None:
                        places[dim.parts[index]].append((path, number, index))
        labels: dict[AxisClass, str] = {}
        by_place: dict[Any, str] = {}
        for part, found in places.items():
            is_of_block = len({tuple(_NUMBER.findall(path)) for path, *_ in found}) == 1
            place = frozenset((fold_key(path), *rest) for path, *rest in found)
            key = (place, part.size) if is_of_block else part
            labels[part] = by_place.setdefault(key, f"axis_{len(by_place) + 1}")
        return labels

    def report(self) -> Report:
        """The names as a table: weights with open dimensions first, and what to write for them."""
        marks = {part: f"{label}?" for part, label in self._labels().items()}
        rows: list[tuple[Any, ...]] = []
        for path, dims in self.dims.items():
            texts = [(_text_of(dim, marks), _sizes_text(dim.parts)) for dim in dims]
            shown = ", ".join(size if text is None else f"{text}={size}" for text, size in texts)
            # The mark itself says that nothing more is known.
            pairs = zip(texts, dims, strict=True)
            told = [(text, dim.reason) for (text, _), dim in pairs if dim.open]
            doubt = "; ".join(f"{text}: {why}" for text, why in told if why != _UNKNOWN)
            rows.append((path, shown, doubt, False if told else None))
        rows.sort(key=lambda row: row[-1] is None)
        verdict = f"{len(rows):,} weights, {sum(row[-1] is None for row in rows):,} with all names"
        lines: list[Line] = []
        if marks:
            verdict += f"; {len({*marks.values()}):,} logical axes are open"
            text = f"Name what has a question mark, and call it again with\n{self.overrides()}"
            lines = [[(line, "")] for line in text.splitlines()]
        return Report(
            "Names",
            verdict,
            _COLUMNS,
            rows,
            notes=[f"{axis}: {'; '.join(reasons)}" for axis, reasons in self.axes.items()],
            ok=not marks,
            facts={"names": dict(self), "reasons": {path: self.reasons(path) for path in self}},
            drawing=lambda width: lines,
        )


def _text_of(dim: NamedDim, labels: Mapping[Any, str]) -> Any:
    """The name of a dimension, made of labels where it is open."""
    if not dim.open:
        return dim.name
    pairs = zip(dim.parts, dim.open, strict=True)
    return _TIMES.join(labels[part] if name is None else str(name) for part, name in pairs)


def _sizes_text(parts: Parts) -> str:
    return _TIMES.join(str(part.size) for part in parts)
