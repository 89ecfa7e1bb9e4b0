"""The operations of a propagated program, one after the other, and how mesh axes went at them."""

import dataclasses

from penzai_shard.library_apis.shardy_records import PythonFrame, ShardyBoundary, ShardyRule

FLOW = "flow"
"""The kind of an operation that only hands values on: into and out of calls, loops, branches.

So does one behind each result of the program, which hands it out in the layout of the result.
"""


@dataclasses.dataclass(frozen=True)
class Edge:
    """A mesh axis that was taken from one value to others.

    Attributes:
        step: When, counted over the program.
        mesh_axis: The mesh axis, or a part of one, as ``data:(1)2``.
        source: The value that had it.
        targets: The values that got it.
    """

    step: int
    mesh_axis: str
    source: int
    targets: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation; values go by their numbers in the program.

    Attributes:
        number: Its place in the program.
        kind: Such as ``stablehlo.dot_general``, or ``flow``.
        name: What JAX called it, the calls around it in front.
        frames: Where in Python it was written, the innermost call first.
        operands: What it takes; of a flow, all that may come in.
        results: What it makes.
        rule: Which dimensions belong together; None where that is not known.
        edges: Which mesh axes were taken from where to where at it.
        constraint: What Shardy calls it in origins, if it pins a layout.
        boundary: Of a flow into a manual computation or out of it: the layout outside.
        cuts: Of a ``stablehlo.slice``, what it takes of each dimension: where it starts, where it
            ends, and its stride.
    """

    number: int
    kind: str
    name: str
    frames: tuple[PythonFrame, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: ShardyRule | None
    edges: tuple[Edge, ...]
    constraint: str = ""
    boundary: ShardyBoundary | None = None
    cuts: tuple[tuple[int, int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Hop:
    """One piece of the way that a mesh axis came: at an operation, from one value to the next.

    Attributes:
        operation: Where.
        source: The value that had it.
        target: The value that got it.
        step: When, counted over the program.
    """

    operation: Operation
    source: int
    target: int
    step: int
