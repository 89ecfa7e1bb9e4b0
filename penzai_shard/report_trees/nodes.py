"""A report as a tree of lines with figures: plain data, for any view to draw."""

import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator

from penzai_shard.report_trees.readable_text import Unit, printable, quantity_text, share_text


@dataclasses.dataclass(frozen=True)
class TreeFigure:
    """One number of a node. Those of one name add up: a node has the sum of what is in it.

    Attributes:
        name: What it is, such as ``"per device"``.
        value: The exact number.
        unit: ``"bytes"`` or ``"count"``.
        share: Its share of the whole report, from 0 to 1; None where there is no whole.

    >>> figure = TreeFigure("per device", 3 * 2**20, "bytes", share=0.25)
    >>> figure.text, figure.share_text
    ('3.0 MiB', '25%')
    """

    name: str
    value: float
    unit: Unit = "bytes"
    share: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))

    @property
    def text(self) -> str:
        """The number in a unit that people read."""
        return quantity_text(self.value, self.unit)

    @property
    def share_text(self) -> str:
        """The share in percent; empty if there is none."""
        return "" if self.share is None else share_text(self.share, 1)

    def each(self, count: int) -> str:
        """What each of several equal blocks has of it, as text."""
        return quantity_text(self.value / count, self.unit)

    def described(self, times: int = 1) -> str:
        """Name, number and share, and of bytes in several equal blocks those of each.

        >>> TreeFigure("per device", 3 * 2**20, share=0.25).described(3)
        'per device 3.0 MiB (25%), each 1.0 MiB'
        """
        share = f" ({self.share_text})" if self.share is not None else ""
        each = f", each {self.each(times)}" if times > 1 and self.unit == "bytes" else ""
        return f"{self.name} {self.text}{share}{each}"


@dataclasses.dataclass(frozen=True)
class TreeNode:
    """One line of a report, and what is in it. Control characters in its texts are written out.

    Attributes:
        label: The part of the path that its parent does not have. Equal blocks are one node, their
            numbers in braces: ``"block_{0-11}"``.
        path: The whole path, as far as it goes; several equal ones are written the same way.
        line: One line of text beside the label; may be empty.
        figures: Its numbers, sums over all that it stands for.
        details: Sentences to show when it is opened.
        ok: False if something is wrong with it or in it, True if it was judged and is good, None
            if it is not judged.
        count: How many equal places of the report it stands for, those around it multiplied in.
        children: What is in it, in the order of the model.
    """

    label: str
    path: str
    line: str = ""
    figures: tuple[TreeFigure, ...] = ()
    details: tuple[str, ...] = ()
    ok: bool | None = None
    count: int = 1
    children: tuple["TreeNode", ...] = ()

    def __post_init__(self) -> None:
        for name in ("label", "path", "line"):
            object.__setattr__(self, name, printable(getattr(self, name)))
        object.__setattr__(self, "details", tuple(map(printable, self.details)))

    def described(self, around: int = 1) -> str:
        """The whole line as text, without its details.

        Args:
            around: How many places the node around it stands for.
        """
        times = self.times(around)
        figures = (figure.described(times) for figure in self.figures)
        return "  ".join(filter(None, (self.title(around), *figures, self.line)))

    def times(self, around: int = 1) -> int:
        """How many of it there are in each of the places that the node around it stands for."""
        return self.count // around

    def title(self, around: int = 1) -> str:
        """The label, and how many there are of it in the node around it."""
        times = self.times(around)
        return f"{self.label} x {times}" if times > 1 else self.label

    def figure(self, name: str) -> TreeFigure | None:
        """The figure of a name; None if it has none."""
        return next((figure for figure in self.figures if figure.name == name), None)

    def walk(self) -> Iterator["TreeNode"]:
        """It and everything in it, as it reads from top to bottom."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children[::-1]


@dataclasses.dataclass(frozen=True, repr=False)
class ReportTree:
    """A report as a tree, which treescope and HTML pages unfold, and ``print`` shows as lines.

    A notebook shows it so that it unfolds if treescope is its default renderer, and as lines if
    not; ``treescope.display(tree)`` unfolds it either way.

    Attributes:
        kind: What it is a tree of, such as ``"ShardingPlan"``.
        verdict: The report in one line.
        children: The outermost nodes.
        figures: The numbers of the whole.
        ok: Whether the verdict is good; None if nothing was judged.
        notes: What else there is to know, in sentences.
    """

    kind: str
    verdict: str
    children: tuple[TreeNode, ...] = ()
    figures: tuple[TreeFigure, ...] = ()
    ok: bool | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", printable(self.verdict))
        object.__setattr__(self, "notes", tuple(map(printable, self.notes)))

    def walk(self) -> Iterator[TreeNode]:
        """Every node, as the tree reads from top to bottom."""
        for child in self.children:
            yield from child.walk()

    def opened(self, lines: int) -> set[int]:
        """The nodes that a view opens at first: the largest, as long as it is not much to read.

        Args:
            lines: How much may be shown at first.

        Returns:
            The identities of the nodes.
        """
        left = lines - len(self.children) - len(self.notes)
        found: set[int] = set()
        numbers = itertools.count()
        waiting: list[tuple[bool, float, int, TreeNode]] = []

        def wait(nodes: Iterable[TreeNode]) -> None:
            for node in nodes:
                # What is bad comes first, then what is large.
                largest = max((figure.share or 0.0 for figure in node.figures), default=0.0)
                heapq.heappush(waiting, (node.ok is not False, -largest, next(numbers), node))

        wait(self.children)
        while waiting:
            *_, node = heapq.heappop(waiting)
            below = len(node.children) + len(node.details)
            # Of what is bad the sentences are what people came for.
            if (node.children or (node.ok is False and below)) and below <= left:
                left -= below
                found.add(id(node))
                wait(node.children)
        return found

    def __str__(self) -> str:
        lines = [self.verdict] if self.verdict else []
        waiting = [(child, 1, 0) for child in self.children[::-1]]
        while waiting:
            node, around, depth = waiting.pop()
            lines.append("  " * depth + node.described(around))
            waiting += [(child, node.count, depth + 1) for child in node.children[::-1]]
        return "\n".join((*lines, *self.notes))

    def __repr__(self) -> str:
        return str(self)
