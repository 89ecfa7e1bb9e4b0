"""What Shardy says of a program after propagation, as plain values."""

import dataclasses
import re
from typing import NamedTuple

_BITS = re.compile(r"\d+")

PRODUCTS = frozenset({"stablehlo.dot_general", "stablehlo.convolution"})
"""The kinds of operation that multiply and add."""

CONSTANTS = frozenset({"sdy.constant", "stablehlo.constant", "stablehlo.iota"})
"""The kinds of operation that are made of nothing."""

MAKING = frozenset(
    {
        "stablehlo.cholesky",
        "stablehlo.convolution",
        "stablehlo.custom_call",
        "stablehlo.dot_general",
        "stablehlo.fft",
        "stablehlo.gather",
        "stablehlo.reduce",
        "stablehlo.reduce_window",
        "stablehlo.scatter",
        "stablehlo.select_and_scatter",
        "stablehlo.sort",
        "stablehlo.triangular_solve",
    }
)
"""The kinds that give other elements than they take, so that these have to be written down."""


class PythonFrame(NamedTuple):
    """A place in Python: a call, or where an operation was written."""

    file: str
    function: str
    line: int


def itemsize_of(dtype: str) -> int:
    """The bytes of an element, by the dtype as programs write it.

    >>> itemsize_of("bf16"), itemsize_of("i1"), itemsize_of("complex<f32>"), itemsize_of("f8E4M3FN")
    (2, 1, 8, 1)
    """
    bits = _BITS.search(dtype)
    count = 2 if dtype.startswith("complex") else 1
    return count * max(int(bits[0]) // 8, 1) if bits else 1


@dataclasses.dataclass(frozen=True)
class ShardyValue:
    """What Shardy says of a value.

    Attributes:
        shape: Its shape.
        dtype: Its data type, as programs' texts have it.
        spec: The mesh axes of each dimension; None if it has no layout at all.
        is_open: Whether more mesh axes could have been added to each dimension.
        origins: Where each mesh axis comes from, as Shardy says it: ``self``, ``input: 1``.
    """

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...] | None
    is_open: tuple[bool, ...]
    origins: dict[str, str]


@dataclasses.dataclass(frozen=True)
class ShardyEdge:
    """A mesh axis that was taken from one value of an operation to others.

    Attributes:
        step: When, counted over the program.
        mesh_axis: The mesh axis, or a part of one, as ``data:(1)2``.
        source: ``("operand", 0)`` or ``("result", 0)``.
        targets: The same of those that got it.
    """

    step: int
    mesh_axis: str
    source: tuple[str, int]
    targets: tuple[tuple[str, int], ...]


@dataclasses.dataclass(frozen=True)
class ShardyRule:
    """Which dimensions of an operation belong together: each dimension's factors, by number.

    Attributes:
        sizes: The length of each factor.
        operands: The factors of each operand's dimensions.
        results: The factors of each result's dimensions.
        reduced: The factors that are summed up, or reduced in another way.
        replicated: The factors that every device needs whole.
        permuted: The factors along which values are shifted.
        blocked: The factors along which nothing is propagated.
    """

    sizes: tuple[int, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    reduced: frozenset[int]
    replicated: frozenset[int]
    permuted: frozenset[int]
    blocked: frozenset[int]


@dataclasses.dataclass(frozen=True)
class ShardyBoundary:
    """What a value is like outside, where it goes into a manual computation or comes out of it.

    Attributes:
        axes: The mesh axes that the computation handles itself; inside, no layout names them.
        spec: The mesh axes of each dimension.
        is_open: Whether more mesh axes could have been added to each dimension.
        goes_in: Whether the value goes in.
        origin: What Shardy calls it in origins, as ``mc_0_input: 1``.
    """

    axes: frozenset[str]
    spec: tuple[tuple[str, ...], ...]
    is_open: tuple[bool, ...]
    goes_in: bool
    origin: str


@dataclasses.dataclass(frozen=True)
class ShardyOperation:
    """An operation of a program after propagation; values are numbers in ``ShardyProgram.values``.

    Attributes:
        kind: Such as ``stablehlo.dot_general``.
        name: What JAX called it, relative to the call that it is in.
        frames: Where in Python it was written, the innermost call first.
        operands: What it takes.
        results: What it makes.
        blocks: Its regions' blocks: branches, the body of a loop or of a call.
        rule: Which dimensions belong together; None where Shardy has no rule.
        edges: Which mesh axes were taken from where to where at it.
        constraint: What Shardy calls it in origins, if it pins a layout.
        taken: How a manual computation takes each operand.
        given: How it gives each result.
        cuts: Of a ``stablehlo.slice``, what it takes of each dimension: where it starts, where it
            ends, and its stride.
    """

    kind: str
    name: str
    frames: tuple[PythonFrame, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    blocks: tuple["ShardyBlock", ...]
    rule: ShardyRule | None
    edges: tuple[ShardyEdge, ...]
    constraint: str
    taken: tuple[ShardyBoundary, ...] = ()
    given: tuple[ShardyBoundary, ...] = ()
    cuts: tuple[tuple[int, int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class ShardyBlock:
    """Operations in order, and the values that they start with."""

    arguments: tuple[int, ...]
    operations: tuple[ShardyOperation, ...]


@dataclasses.dataclass(frozen=True)
class ShardyProgram:
    """A program after propagation.

    Attributes:
        values: All its values.
        main: Its operations; the last one returns the results.
        argument_names: What JAX calls the arguments.
        laid_out: Which arguments had a layout before propagation, which nothing changes.
        result_values: What Shardy says of the results themselves, behind what is returned.
        result_edges: The edges at the results.
        mesh: The mesh axes with their sizes.
    """

    values: tuple[ShardyValue, ...]
    main: ShardyBlock
    argument_names: tuple[str, ...]
    laid_out: tuple[bool, ...]
    result_values: tuple[ShardyValue, ...]
    result_edges: tuple[tuple[ShardyEdge, ...], ...]
    mesh: dict[str, int]
