"""Logical axis names that were inferred, as a mapping and as a report."""

import dataclasses
import json
from collections.abc import Iterator, Mapping

from penzai_shard.choosing.naming.weight_names import DimensionName
from penzai_shard.path_folding import folded_path, folding_key
from penzai_shard.planning import NamesByPath
from penzai_shard.report_trees import ReportTree, TreeRow, count_text, tree_of
from penzai_shard.rule_kinds import LogicalAxis, nearest_name
from penzai_shard.text_tables import FindingsTable, Report

# So many arrays are shown in the example of how to name what is not decided.
_SHOWN = 3


class NamesTable(FindingsTable):
    """Logical axis names by path; ``print`` and notebooks show it."""

    headings = ("array", "count", "shape", "logical axes", "why")
    right_aligned = frozenset({"count"})
    unwrapped = frozenset({"shape"})
    paths = frozenset({"array"})
    below = "why"


@dataclasses.dataclass(frozen=True)
class Undecided:
    """A dimension without a name.

    Attributes:
        path: The path of the array.
        dimension: Which of its dimensions.
        size: The length of the dimension.
        why: Why it has none, as a sentence.
    """

    path: str
    dimension: int
    size: int
    why: str


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class InferredNames(NamesByPath, Report):
    """The logical axes of the arrays of a tree: a mapping from path to names, with reasons.

    The name of a dimension is text; a ``FusedAxes`` where the dimension is a product of logical
    axes; None where it is not decided. ``name_axes(params, inferred)`` gives them to the arrays.

    Attributes:
        dimensions: For each path the name of each dimension, and why it is called so.
        shapes: The shape of each array.
        notes: What else is to be known.
    """

    dimensions: Mapping[str, tuple[DimensionName, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()

    def __getitem__(self, path: str) -> tuple[LogicalAxis | None, ...]:
        if path not in self.dimensions:
            below = [other for other in self.dimensions if other.startswith(f"{path}/")]
            near = nearest_name(path, self.dimensions) or next(iter(below or self.dimensions), None)
            raise KeyError(f"no array has path {path!r}. There is for instance {near!r}.")
        return tuple(each.name for each in self.dimensions[path])

    def __contains__(self, path: object) -> bool:
        return path in self.dimensions

    def __iter__(self) -> Iterator[str]:
        return iter(self.dimensions)

    def __len__(self) -> int:
        return len(self.dimensions)

    @property
    def undecided(self) -> tuple[Undecided, ...]:
        """The dimensions without a name that could be split, and why they have none."""
        return tuple(
            Undecided(path, number, size, each.reason)
            for path, dimensions in self.dimensions.items()
            for number, (each, size) in enumerate(zip(dimensions, self.shapes[path], strict=True))
            if each.name is None and size > 1
        )

    def reasons(self, path: str) -> tuple[str, ...]:
        """Why each dimension of an array is called as it is, or is not decided."""
        return tuple(each.reason for each in self.dimensions[path])

    def table(self, *, collapse: bool = True) -> NamesTable:
        """The names as a table; scalars have none.

        Args:
            collapse: Show the arrays of equal blocks as one row with a count.
        """
        rows: dict[tuple[str, ...], list[str]] = {}
        # Each block has its own of what is not decided, so that numbers would unfold blocks.
        text_of = _name_text if collapse else _numbered_text
        said: set[str] = set()
        for path, dimensions in self.dimensions.items():
            if not dimensions:
                continue
            key = folding_key(path) if collapse else path
            shape = _shape_text(self.shapes[path])
            names = ", ".join(map(text_of, dimensions))
            why = "; ".join(_new_reasons(dimensions, said))
            alike = next((row for row in rows if row[:3] == (key, shape, names)), None)
            rows.setdefault(alike or (key, shape, names, why), []).append(path)
        texts = [
            (folded_path(paths) if collapse else paths[0], str(len(paths)), *row[1:])
            for row, paths in rows.items()
        ]
        return NamesTable(tuple(texts), self._verdict(), self._remarks(), not self.undecided)

    def tree(self, *, collapse: bool = True) -> ReportTree:
        """The names as a tree, each array where it stands, with the reasons.

        Args:
            collapse: Show equal blocks as one.
        """
        rows = [
            TreeRow(
                path,
                line=", ".join(map(_numbered_text, self.dimensions[path])),
                details=tuple(dict.fromkeys(map(_sentence, self.dimensions[path]))),
                ok=None if all(name is not None for name in self[path]) else False,
            )
            for path in self
        ]
        return tree_of(
            "InferredNames",
            self._verdict(),
            rows,
            ok=not self.undecided,
            notes=self._remarks(),
            collapse=collapse,
        )

    def to_json(self) -> str:
        """All of it as JSON text: for each path its shape, names and reasons."""
        return json.dumps(
            {
                path: {
                    "shape": list(self.shapes[path]),
                    "names": [None if name is None else str(name) for name in self[path]],
                    "reasons": list(self.reasons(path)),
                }
                for path in self
            },
            indent=2,
        )

    def _remarks(self) -> tuple[str, ...]:
        """The notes, and how a person decides what the program does not."""
        known: set[int] = set()
        entries = []
        for path, dimensions in self.dimensions.items():
            new = {each.unknown for each in dimensions if each.unknown is not None} - known
            if new:
                known |= new
                names = tuple(
                    each.name if each.unknown is None else f"axis_{each.unknown}"
                    for each in dimensions
                )
                entries.append(f"{path!r}: {names!r}")
        if not entries:
            return self.notes
        more = len(entries) - _SHOWN
        rest = f", and so for {count_text(more, 'more array')}" if more > 0 else ""
        return (
            *self.notes,
            "Dimensions of one number, as table(collapse=False) shows them, are one logical axis "
            "and get one name. Name what is to be split, each number by a name of your own: "
            f"infer_names(..., overrides={{{', '.join(entries[:_SHOWN])}}}){rest}.",
        )

    def _verdict(self) -> str:
        arrays = {each.path for each in self.undecided}
        text = f"{count_text(len(self), 'array')}, {len(self) - len(arrays)} of them with all names"
        if not arrays:
            return text
        return f"{text}; {count_text(len(self.undecided), 'dimension')} not decided"


def _name_text(each: DimensionName) -> str:
    return "?" if each.name is None else str(each.name)


def _numbered_text(each: DimensionName) -> str:
    return _name_text(each) if each.unknown is None else f"?{each.unknown}"


def _new_reasons(dimensions: tuple[DimensionName, ...], said: set[str]) -> Iterator[str]:
    """The reasons that are not said further up."""
    for each in dimensions:
        text = _sentence(each)
        if text not in said:
            said.add(text)
            yield text


def _sentence(each: DimensionName) -> str:
    return f"{'?' if each.name is None else each.name}: {each.reason}"


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
