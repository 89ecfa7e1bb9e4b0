"""What a compiled step costs, read by code that shares nothing with the library's prices.

The step is compiled for simulated devices. Products, convolutions and collectives are counted in
the text of the program, memory is XLA's own figure for it. A device sends what it sends in a ring
(Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH").

Two things that compilers for GPUs and TPUs do, and the one for CPUs does not, are counted as done:
an all-reduce of which a device keeps its own slice is a reduce-scatter, and what is only added up
afterwards is added up before.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from scipy import optimize

from penzai_shard.choosing.hardware import Hardware
from penzai_shard.jax_internals import compiler

# Nothing runs, so code is made quickly. What compilers for CPUs do otherwise than those for
# accelerators is left out: they join what is to be computed again with what was computed before,
# compute half precision in float32, and sum several gradients in one all-reduce. The order of
# operations is theirs, and so what is held is an estimate.
OPTIONS: Mapping[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,
    "xla_disable_hlo_passes": "cse_barrier_expander,cpu-all-reduce-combiner,change-op-data-type",
}
# What one device sends in a ring of n, as a share of the whole array.
RING_SHARES = {
    "all-gather": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1.0,
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the compiled step of a layout costs one device.

    Attributes:
        flops: Operations of its products and convolutions.
        sent: The bytes that it sends, by mesh axes joined by commas.
        memory: The bytes that it needs at once.
        optimizer: The bytes of the optimizer's state.
    """

    flops: float
    sent: Mapping[str, float]
    memory: int
    optimizer: int

    def price(self, mesh_sizes: Mapping[str, int], hardware: Hardware) -> tuple[float, float]:
        """What takes longest, in seconds, and the sum of what happens at the same time."""
        parts = (
            self.flops / hardware.flops,
            sending_time(self.sent, hardware.bandwidths(mesh_sizes), mesh_sizes),
            2 * self.optimizer / hardware.memory_bandwidth,
        )
        return max(parts), sum(parts)


def judge(workload: Any, candidate: Any) -> Verdict:
    """Compiles a step in a layout, and reads what it costs."""
    step, state, inputs = workload.build(candidate)
    lowered = step.lowerable(state, **inputs).trace().lower(lowering_platforms=("cpu",))
    sizes = dict(candidate.mesh_sizes)
    devices = jax.devices("cpu")[: math.prod(sizes.values())]
    options = compiler.compile_options(len(devices), "cpu", OPTIONS)
    compiled = compiler.compile_bytecode(compiler.write_bytecode(lowered), devices, options)
    memory = compiled.memory
    held = memory.arguments + memory.outputs - memory.aliased + memory.temporaries
    optimizer = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(state.opt_state)
    )
    return Verdict(*read_costs(compiled.text, sizes), held, optimizer)


def sending_time(
    sent: Mapping[str, float], rates: Mapping[str, float], sizes: Mapping[str, int]
) -> float:
    """The least time in which all is sent, each part over the links of its mesh axes.

    Of what goes over several mesh axes each carries a share, the least of which is that of a ring
    along it, of arrays that the other axes have reduced to a device's own part before.

    >>> sending_time({"x": 6.0, "x,y": 3.0}, {"x": 2.0, "y": 2.0}, {"x": 2, "y": 2})
    3.5
    """
    parts = [(axes.split(","), bytes_) for axes, bytes_ in sent.items() if bytes_]
    if not parts:
        return 0.0
    # The unknowns are the share of each part that goes over each of its mesh axes, and the time, in
    # units of what the largest part takes over the slowest axis.
    ways = [(i, axis) for i, (axes, _) in enumerate(parts) for axis in axes]
    unit = max(bytes_ for _, bytes_ in parts) / min(rates.values())
    busy = [
        [(axis == own) * parts[i][1] / rates[axis] / unit for i, own in ways] + [-1.0]
        for axis in rates
    ]
    whole = [[float(i == number) for i, _ in ways] + [0.0] for number in range(len(parts))]
    devices = [math.prod(sizes[axis] for axis in axes) for axes, _ in parts]
    least = [(sizes[axis] - 1) / max(devices[i] - 1, 1) for i, axis in ways]
    solved = optimize.linprog(
        [0.0] * len(ways) + [1.0],
        busy,
        np.zeros(len(busy)),
        whole,
        np.ones(len(whole)),
        bounds=[(share, None) for share in (*least, 0.0)],
    )
    assert solved.success, solved.message
    return float(solved.fun) * unit


# The program's text

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(,.*)?$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of the program, or what it is where it stands in place of a call."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False

    def called(self, *words: str) -> list[str]:
        """The computations that it runs, by the words before them."""
        lists = re.findall(
            rf"\b(?:{'|'.join(words)})=\{{?([^,}}]*(?:, ?%[^,}}]*)*)", self.attributes
        )
        return [name for one in lists for name in re.findall(r"%([\w.\-]+)", one)]


def arrays_of(type_: str) -> list[tuple[list[int], int]]:
    """Shape and bytes of each array of a type."""
    found = []
    for dtype, sizes in _ARRAY.findall(re.sub(r"/\*.*?\*/", "", type_)):
        shape = [int(size) for size in sizes.split(",") if size]
        bits = 8 if dtype == "pred" else int("".join(re.findall(r"^[a-z]+(\d+)", dtype)))
        found.append((shape, math.prod(shape) * bits // 8))
    return found


def read_computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The instructions of each computation, and the name of the entry."""
    found: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        if opening := _COMPUTATION.match(line):
            current = opening[2]
            entry = current if opening[1] else entry
            found[current] = []
        elif one := _INSTRUCTION.match(line):
            # A parameter has its number in place of operands.
            operands = [one[5]] if one[4] == "parameter" else re.findall(r"%([\w.\-]+)", one[5])
            made = Instruction(one[2], one[3], one[4], tuple(operands), one[6] or "", bool(one[1]))
            found[current].append(made)
    return found, entry


def inline(computations: Mapping[str, list[Instruction]], name: str) -> dict[str, Instruction]:
    """The instructions of a computation, with those of its fusions in their place.

    Tuples that are taken apart again are gone, and operands are arrays. What several fusions
    compute for themselves, element by element, is there once.
    """
    found: dict[str, Instruction] = {}
    copies: dict[Any, str] = {}

    def add(name: str, prefix: str, arguments: Sequence[Any]) -> Any:
        values: dict[str, Any] = {}
        root: Any = None
        for one in computations[name]:
            if one.opcode == "parameter" and prefix:
                value = arguments[int(one.operands[0])]
            elif one.opcode == "parameter":
                value = one.name
                found[value] = dataclasses.replace(one, operands=())
            else:
                operands = [values[operand] for operand in one.operands]
                index = re.search(r"\bindex=(\d+)", one.attributes)
                if one.opcode in ("fusion", "call"):
                    value = add(*one.called("calls", "to_apply"), f"{prefix}{one.name}/", operands)
                elif one.opcode == "tuple":
                    value = tuple(operands)
                elif one.opcode == "get-tuple-element" and isinstance(operands[0], tuple):
                    value = operands[0][int(index[1])]  # type: ignore[index]
                else:
                    value = prefix + one.name
                    flat = tuple(jax.tree.leaves(operands))
                    made = dataclasses.replace(one, name=value, operands=flat)
                    if _COPIED.fullmatch(one.opcode):
                        attributes = one.attributes.partition(", metadata=")[0]
                        value = copies.setdefault((one.opcode, one.type, flat, attributes), value)
                    found.setdefault(value, made)
            values[one.name] = value
            root = value if one.is_root else root
        return root

    root = add(name, "", ())
    # What leaves the computation is used.
    found["root"] = Instruction("root", "", "root", tuple(jax.tree.leaves(root)), "")
    return found


_COPIED = re.compile("add|bitcast|convert|copy|reshape|transpose")


def read_parts(text: str) -> Iterator[tuple[dict[str, Instruction], int | None]]:
    """The parts of a program, each with how often one run executes it; None if that is not said."""
    computations, entry = read_computations(text)

    def walk(name: str, times: int | None) -> Iterator[tuple[dict[str, Instruction], int | None]]:
        part = inline(computations, name)
        yield part, times
        for one in part.values():
            if one.opcode == "while":
                trips = _TRIPS.search(one.attributes)
                known = int(trips[1]) if trips and times is not None else None
                yield from walk(*one.called("body"), None if known is None else times * known)
            elif one.opcode == "conditional":
                for branch in one.called("branch_computations", "true_computation"):
                    yield from walk(branch, times)

    yield from walk(entry, 1)


def read_costs(text: str, sizes: Mapping[str, int]) -> tuple[float, dict[str, float]]:
    """The operations that one device executes in one run, and the bytes that it sends.

    Args:
        text: The program.
        sizes: The size of each mesh axis.

    >>> text = '''ENTRY %e (a: f32[4,8], b: f32[8,16]) -> f32[4,16] {
    ...   %a = f32[4,8]{1,0} parameter(0)
    ...   %b = f32[8,16]{1,0} parameter(1)
    ...   %c = f32[4,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ...   ROOT %d = f32[4,16]{1,0} all-reduce(%c), replica_groups={{0,1},{2,3}}, to_apply=%add
    ... }'''
    >>> read_costs(text, {"x": 2, "y": 2})
    (1024.0, {'y': 256.0})
    """
    flops, sent = 0.0, collections.defaultdict[str, float](float)
    for part, times in read_parts(text):
        users = collections.defaultdict[str, list[Instruction]](list)
        for one in part.values():
            for operand in dict.fromkeys(one.operands):
                users[operand].append(one)
        for one in part.values():
            if one.opcode in ("dot", "convolution"):
                flops += _known(one, times) * _products(one, part)
            elif one.opcode.endswith("-start"):
                raise ValueError(f"{one.name}: asynchronous operations are not read")
            elif one.opcode in RING_SHARES:
                axes, size = _groups(one, sizes)
                for kind, payload in _payloads(one, size, part, users):
                    share = RING_SHARES[kind](size)
                    sent[",".join(axes)] += _known(one, times) * share * payload
    return flops, {axes: bytes_ for axes, bytes_ in sent.items() if bytes_}


def _known(one: Instruction, times: int | None) -> int:
    if times is None:
        raise ValueError(f"{one.name}: is in a loop whose number of turns the program does not say")
    return times


def _products(one: Instruction, part: Mapping[str, Instruction]) -> float:
    """The operations of a product or a convolution."""
    made = math.prod(arrays_of(one.type)[0][0])
    left, right = (arrays_of(part[operand].type)[0][0] for operand in one.operands[:2])
    if one.opcode == "dot":
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
        assert summed is not None
        return 2.0 * made * math.prod(left[int(i)] for i in re.findall(r"\d+", summed[1]))
    kernel = re.search(r"dim_labels=\w+_(\w+)->", one.attributes)
    assert kernel is not None
    return (
        2.0 * made * math.prod(n for n, label in zip(right, kernel[1], strict=True) if label != "o")
    )


# Collectives

# Operations that treat elements one by one: who keeps a slice of their result could as well have
# taken it before.
_ELEMENTWISE = re.compile(
    "abs|add|bitcast|convert|copy|divide|maximum|minimum|multiply|negate|reshape|select|subtract"
    "|transpose"
)
Users = Mapping[str, list[Instruction]]


def _payloads(
    one: Instruction, size: int, part: Mapping[str, Instruction], users: Users
) -> Iterator[tuple[str, float]]:
    """The kinds of a collective, and the bytes of whole arrays of each."""
    payload = sum(bytes_ for _, bytes_ in arrays_of(one.type))
    if one.opcode != "all-reduce":
        yield one.opcode, payload * (size if one.opcode == "reduce-scatter" else 1)
        return
    is_tuple = one.type.startswith("(")
    for value in users[one.name] if is_tuple else [one]:
        bytes_ = sum(bytes_ for _, bytes_ in arrays_of(value.type))
        if _is_sliced(value, size, users):
            yield "reduce-scatter", bytes_
        elif not _is_added(value, part, users):
            yield "all-reduce", bytes_


def _is_sliced(value: Instruction, size: int, users: Users) -> bool:
    """Whether every device goes on with its own slice of a value, and no other."""

    def is_slice(user: Instruction) -> bool:
        if user.opcode == "dynamic-slice" and user.operands[0] == value.name:
            (whole, _), (own, _) = arrays_of(value.type)[0], arrays_of(user.type)[0]
            return math.prod(own) * size == math.prod(whole)
        return bool(_ELEMENTWISE.fullmatch(user.opcode)) and _is_sliced(user, size, users)

    return bool(users[value.name]) and all(map(is_slice, users[value.name]))


def _is_added(value: Instruction, part: Mapping[str, Instruction], users: Users) -> bool:
    """Whether a value is only added to others that are reduced, and not the first of all these.

    A sum of n such values is reduced once, which the first of them stands for.
    """
    groups = _groups_text(value)
    while [user.opcode for user in users[value.name]] == ["add"]:
        addition = users[value.name][0]
        first, second = (part[operand] for operand in addition.operands)
        if first is second or not all(_is_sum(x, groups, part, users) for x in (first, second)):
            return False
        if value is second:
            return True
        value = addition
    return False


def _is_sum(value: Instruction, groups: str, part: Mapping[str, Instruction], users: Users) -> bool:
    """Whether a value is used once, and an all-reduce in some groups gives it, or a sum of such."""
    if len(users[value.name]) != 1:
        return False
    if value.opcode == "all-reduce":
        return _groups_text(value) == groups
    return value.opcode == "add" and all(
        _is_sum(part[operand], groups, part, users) for operand in value.operands
    )


def _groups_text(one: Instruction) -> str:
    found = re.search(r"replica_groups=(.*?), (?:use_global|to_apply|channel_id)", one.attributes)
    return found[1] if found else ""


# Groups of devices


def _groups(one: Instruction, sizes: Mapping[str, int]) -> tuple[list[str], int]:
    """The mesh axes that a collective goes over, and how many devices exchange with each other.

    All mesh axes, where groups are not those of whole ones. Devices count in the mesh's order.
    """
    shape, axes = tuple(sizes.values()), list(sizes)
    if one.opcode == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", one.attributes)
        ids = np.array(re.findall(r"\d+", pairs[1] if pairs else ""), int).reshape(-1, 2)
    else:
        ids = _replica_groups(one, math.prod(shape))
    along = np.stack(np.unravel_index(ids, shape))
    varying = [i for i, x in enumerate(along) if (x != x[:, :1]).any()]
    is_whole = math.prod(shape[i] for i in varying) == ids.shape[1]
    if one.opcode != "collective-permute" and not is_whole:
        return axes, ids.shape[1]
    return [axes[i] for i in varying], ids.shape[1]


def _replica_groups(one: Instruction, count: int) -> np.ndarray:
    """The groups as rows, from any of the forms in which XLA writes them."""
    text = one.attributes
    order = r"(?:, ?device_ids=\((.*?(?:T\([\d,]+\))?)\))?"
    if found := re.search(rf"replica_groups=mesh\[(.*?)\]{order} ?\{{(.*?)\}}", text):
        return _mesh_groups(*found.groups())
    if found := re.search(r"replica_groups=(\[[^\s]*?\](?:T\([\d,]+\))?)(?:, |$)", text):
        return _iota(found[1])
    if found := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text):
        rows = re.findall(r"\{([\d,]+)\}", found[1])
        return np.array([[int(i) for i in row.split(",")] for row in rows])
    if "replica_groups={}" in text:
        return np.arange(count)[None]
    raise ValueError(f"{one.name}: its groups of devices cannot be read: {text[:200]}")


def _iota(text: str) -> np.ndarray:
    """``[4,2]<=[2,4]T(1,0)``: numbers in order, as an array, transposed, and reshaped.

    Without the last shape, as in ``[2,4]T(1,0)``, they are one row.
    """
    found = re.fullmatch(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert found is not None, text
    shape, counted, order = (
        [int(i) for i in numbers.split(",")] if numbers else [] for numbers in found.groups()
    )
    ids = np.arange(math.prod(counted)).reshape(counted)
    return (ids.transpose(order) if order else ids).reshape(shape or -1)


def _mesh_groups(mesh: str, device_ids: str | None, over: str) -> np.ndarray:
    """``mesh['a'=4,'b'=2] {'a'}``: groups along some axes, or parts of them (``'a':(2)2``)."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    grouped: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", over):
        grouped[name].append((int(before or 1), int(size or sizes[name])))
    # Each axis is cut where a part of it begins or ends, so that groups go over whole pieces.
    pieces: list[int] = []
    inside: list[int] = []
    for name, size in sizes.items():
        cuts = sorted({1, size, *(x for start, n in grouped[name] for x in (start, start * n))})
        for start, end in itertools.pairwise([*cuts, size]):
            if any(own <= start and end <= own * n for own, n in grouped[name]) and end > start:
                inside.append(len(pieces))
            pieces.append(end // start)
    outside = [i for i in range(len(pieces)) if i not in inside]
    ids = _iota(device_ids) if device_ids else np.arange(math.prod(sizes.values()))
    ids = ids.reshape(pieces).transpose(outside + inside)
    return ids.reshape(-1, math.prod(pieces[i] for i in inside))
