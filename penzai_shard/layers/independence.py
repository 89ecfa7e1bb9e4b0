"""Finds where a layer mixes elements of an axis that devices are to hold in parts.

The layer's program is traced with whole lengths and with those of a part, and both traces are
walked in step. They must do the same operations with the same constants. A dimension is split
exactly where the two lengths differ, so nothing has to be followed to know it. An operation passes
if a rule of ``operation_rules`` says so; everything else is refused.

A derivative that JAX makes of an independent program is right without a look at it: derivatives of
these operations are made of these operations, and the transpose of a gathered parameter is a sum
over the devices. Only functions that bring their own derivative must be looked at: the rule of a
``custom_jvp`` is walked too, up to second derivatives; a ``custom_vjp`` is refused. Its backward
pass would get the cotangent of a part, and need not be linear.
"""

import dataclasses
import itertools
import pathlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, TypeAlias

import jax
import numpy as np
from penzai import pz

from penzai_shard.arrays.inputs import run_inputs
from penzai_shard.arrays.structure import Leaf, leaves_of, read_variables
from penzai_shard.errors import PlanError, Problem
from penzai_shard.jax_internals import tracing
from penzai_shard.jax_internals.tracing import ClosedJaxpr, JaxprEqn, Literal
from penzai_shard.layers import operation_rules as rules
from penzai_shard.layers.operation_rules import Mixes, shape_of
from penzai_shard.meshes import auto_context
from penzai_shard.programs import inner_programs, make_program, open_program
from penzai_shard.reports.report import Column, Report

_HIGHEST_DERIVATIVE = 2
_DIFFERENT = "the program depends on the length of a split dimension, and does something else then"

# File, function and line of a call.
_Frame: TypeAlias = tuple[str, str, int]
_OURS, _INSTALLED = pathlib.Path(__file__).parents[1], pathlib.Path(jax.__file__).parents[1]
# Penzai's layers are not among them.
_HIDDEN = [_OURS, *map(_INSTALLED.joinpath, ("jax", "numpy", "opt_einsum", "penzai/core"))]


# An operation that is not known to treat the elements of a split dimension independently is a
# ``Problem``: its path are the layers that do it, the function if it has a name, and the line in
# their source; its kind is the name by which ``assume_independent`` vouches for it.

# Asking for each axis


def independent_axes(layer: Any, *inputs: Any, **side_inputs: Any) -> Report:
    """Says for each logical axis whether devices may hold parts of it without talking.

    Parameters of the layer stay whole; its state, such as a cache, is split like the inputs. Random
    streams give each device other numbers. Nothing runs: shapes and abstract models will do.

    The layer is traced at the length that the inputs have, at lengths that they do not have, so
    that an axis of length 1 gets an answer too, and at the length of a part.

    Args:
        layer: A layer, or any function of trees of arrays with names.
        *inputs: Its inputs.
        **side_inputs: Its side inputs.

    Returns:
        A report with a row for each logical axis of the inputs: whether parts of it are
        independent, and if not the first operation that mixes them, with its layer and source line.

    Raises:
        ShardingError: Arrays are deleted, or something else stands in their place.

    >>> report = independent_axes(pz.nn.Softmax("seq"), pz.nx.ones({"batch": 2, "seq": 8}))
    >>> [row[:3] for row in report.rows]
    [('batch', True, ''), ('seq', False, 'reduce_max')]
    """
    tree = {"body": layer, "inputs": inputs, "side_inputs": side_inputs}
    leaves, structure = run_inputs(tree, "independent_axes", allow_structs=True)
    first_input = len(leaves_of(layer))  # The body comes first, in the order of keys.
    is_split = [i >= first_input or leaf.role == "state" for i, leaf in enumerate(leaves)]
    keys = find_base_keys(tree, leaves)

    def run(values: Sequence[Any]) -> list[Any]:
        call = structure.fill(values, live=("state",))
        output = call["body"](*call["inputs"], **call["side_inputs"])
        return [leaf.value for leaf in leaves_of((output, read_variables(call)))]

    def trace(axis: Any, times: int, divisor: int = 1) -> ClosedJaxpr:
        structs = []
        for leaf, is_part in zip(leaves, is_split, strict=True):
            pairs = itertools.zip_longest(leaf.shape, leaf.names or ())
            shape = [n * times // divisor if is_part and x == axis else n for n, x in pairs]
            structs.append(jax.ShapeDtypeStruct(shape, leaf.dtype))
        with auto_context():
            return jax.make_jaxpr(run)(structs)

    trace(object(), 1)  # If the layer fails as it is, its own error says so.
    lengths: dict[Any, int] = {}
    for leaf in leaves[first_input:]:
        lengths |= zip(leaf.names or (), leaf.shape, strict=False)
    rows = []
    for axis, length in lengths.items():
        if axis is not None:
            whole = (leaf for leaf in leaves[:first_input] if leaf.role != "state")
            holder = next((leaf.path for leaf in whole if axis in (leaf.names or ())), None)
            found = next(_find_mixing_along(axis, length, trace, keys, holder), None)
            first = found or Problem("", "")
            rows.append((axis, found is None, first.kind, first.path, first.what))
    free = ", ".join(repr(row[0]) for row in rows if row[1]) or "no axis"
    verdict = f"devices may hold parts of {free} without talking"
    columns = [Column("axis"), Column("independent", "ok"), Column("operation"), Column("where")]
    columns.append(Column("reason", "detail"))
    return Report("independent axes", verdict, columns, rows)


def find_base_keys(tree: Any, leaves: Sequence[Leaf]) -> list[bool]:
    """Which arrays of a tree are base keys of random streams, and so differ between devices."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, pz.RandomStream))
    keys = {id(node.base_key) for node in nodes if isinstance(node, pz.RandomStream)}
    return [id(leaf.value) in keys for leaf in leaves]


def _find_mixing_along(
    axis: Any,
    length: int,
    trace: Callable[..., ClosedJaxpr],
    keys: Sequence[bool],
    holder: str | None,
) -> Iterator[Problem]:
    """What mixes elements of one axis, or why that cannot be said.

    Args:
        axis: The logical axis.
        length: Its length.
        trace: Traces the layer at a multiple of the length, or a part of it.
        keys: Which inputs are random keys that differ per device.
        holder: The path of an array that has the axis and stays whole.
    """
    # A program may ask for its exact length, as a whole or as a part: all are compared with a
    # longer one, which exists nowhere.
    divisor = next((d for d in range(2, length + 1) if length % d == 0), 1)
    factors = {1: (4, 1), 4: (1, 1), 2: (2, 1), 4 * divisor: (1, divisor), 4 * length: (1, length)}
    whole = None
    for parts, factor in factors.items():
        try:
            part = trace(axis, *factor)
        except PlanError:
            continue  # Constraints in the layer do not divide so short an axis. They mix nothing.
        except Exception as error:
            calls = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
            frames = [(code.co_filename, code.co_qualname, line) for code, line in calls]
            text = str(error).partition("\n")[0]
            reason = f"the layer fails at another length ({type(error).__name__}: {text})"
            if holder is not None:
                reason = f"its {holder!r} has the axis too, and stays whole"
            yield Problem(_write_frames(frames), reason)
            return
        if whole is None:
            whole = part
            continue
        drawn, mixing = find_mixing(whole, part, {parts: (axis,)}, keys, random_axes={axis})
        yield from mixing
        if any(drawn) and not mixing:
            what = "the output differs between devices at random"
            yield Problem("", what, kind="random_bits")


# Walking two traces


def find_mixing(
    whole: ClosedJaxpr,
    part: ClosedJaxpr,
    parts: Mapping[int, tuple[str, ...]],
    keys: Sequence[bool],
    *,
    random_axes: Set[str] | None = None,
    vouched: Set[str] = frozenset(),
) -> tuple[list[bool], list[Problem]]:
    """Walks two traces of one program in step.

    Args:
        whole: The program, traced with whole lengths.
        part: The same with the lengths of one part.
        parts: The mesh axes over which a dimension is split, by the number of its parts.
        keys: Which inputs are random keys that differ per device.
        random_axes: The mesh axes along which these differ; None if it does not matter what is
            drawn.
        vouched: Names of operations and functions that are taken to be independent.

    Returns:
        Which results differ between devices and are no parts of anything, and what mixes.
    """
    walk = _Walk(parts, random_axes, vouched)
    for pair in zip(whole.jaxpr.invars, part.jaxpr.invars, strict=False):
        walk.refuse_if_mixing(None, walk.dims, *pair)
    random = walk.results(whole, part, keys)
    return random, list(dict.fromkeys(walk.found))


@dataclasses.dataclass
class _Walk:
    """Walks two traces of one program in step, and collects what mixes in them.

    Attributes:
        parts, random_axes, vouched: See ``find_mixing``.
        found: What mixes.
        calls: The calls in which the walk is.
        order: Which derivative is walked.
    """

    parts: Mapping[int, tuple[str, ...]]
    random_axes: Set[str] | None
    vouched: Set[str]
    found: list[Problem] = dataclasses.field(default_factory=list)
    calls: list[JaxprEqn] = dataclasses.field(default_factory=list)
    order: int = 0

    def refuse_if_mixing(self, equation: JaxprEqn | None, check: Any, *arguments: Any) -> Any:
        """What a check gives; None and a refused operation if it says that the operation mixes."""
        try:
            return check(*arguments)
        except Mixes as error:
            chain = [*self.calls, *([] if equation is None else [equation])]
            self.found.append(_locate(chain, str(error)))
            return None

    def results(self, whole: Any, part: Any, random: Sequence[bool]) -> list[bool]:
        """Walks a program; which of its inputs and results differ between devices at random."""
        found = self.refuse_if_mixing(None, self._results, whole, part, random)
        return found or [False] * len(open_program(whole)[0].outvars)

    def _results(self, whole: Any, part: Any, random: Sequence[bool]) -> list[bool]:
        (one, constants), (other, own_constants) = map(_read, (whole, part))
        for name in ("invars", "constvars", "outvars"):
            if len(getattr(one, name)) != len(getattr(other, name)):
                raise Mixes(_DIFFERENT)

        # What is known of each variable is a list, for its identity: both traces must read the same
        # value. Numbers that are written into an equation are compared.
        values: dict[Any, list[bool]] = {}

        def assign(variables: Sequence[Any], twins: Sequence[Any], found: Sequence[bool]) -> None:
            for variable, twin, is_random in zip(variables, twins, found, strict=True):
                values[variable] = values[twin] = [is_random]

        def read(atom: Any, twin: Any) -> bool:
            numbers: list[Any] = [x for x in (atom, twin) if isinstance(x, Literal)]
            if len(numbers) == 2:
                is_same = rules.is_same(*(np.asarray(x.val, x.aval.dtype) for x in numbers))
            else:
                is_same = not numbers and values[atom] is values[twin]
            if not is_same:
                raise Mixes(_DIFFERENT)
            return not numbers and values[atom][0]

        assign(one.invars, other.invars, random)
        assign(one.constvars, other.constvars, [False] * len(constants))
        for variable, *pair in zip(other.constvars, constants, own_constants, strict=True):
            if not rules.is_same(*pair):
                values[variable] = [False]  # What reads it is refused.
        equations: Any = itertools.zip_longest(one.eqns, other.eqns)
        for equation, twin in equations:
            found = self.refuse_if_mixing(equation or twin, self._step, equation, twin, read)
            if found is None and _form(equation) != _form(twin):
                return [False] * len(one.outvars)
            assign(equation.outvars, twin.outvars, found or [False] * len(equation.outvars))
        return [read(*pair) for pair in zip(one.outvars, other.outvars, strict=True)]

    def _step(self, whole: Any, part: Any, read: Callable[[Any, Any], bool]) -> list[bool]:
        """Judges one operation; which of its results differ between devices at random."""
        if _form(whole) != _form(part):
            raise Mixes(_DIFFERENT)
        name, operands = str(whole.primitive.name), [*zip(whole.invars, part.invars, strict=True)]
        results = [self.dims(*pair) for pair in zip(whole.outvars, part.outvars, strict=True)]
        if self.vouched & {name, _function_name(whole)} and not rules.is_collective(name):
            return [False] * len(results)
        random = [read(*pair) for pair in operands]
        try:
            dims = [*(self.dims(*pair) for pair in operands), *results]
        except Mixes:
            return [any(random)] * len(results)  # The operation that made it has been refused.
        if name in _WITH_PROGRAMS:
            self.calls.append(whole)
            try:
                return _WITH_PROGRAMS[name](self, whole, part, random)
            finally:
                self.calls.pop()
        rules.check_operation(whole, part, dims)
        if name in ("random_bits", "random_split") and self.random_axes is not None:
            return [self._draw(name, random[0], *dims)]
        return [any(random)] * len(results)

    def dims(self, whole: Any, part: Any) -> rules.Dims:
        """The mesh axes over which each dimension of a value is split; () where it is whole."""
        found = []
        for length, own in zip(shape_of(whole), shape_of(part), strict=True):
            parts = length // own if own and length % own == 0 else 0
            if length != own and parts not in self.parts:
                raise Mixes(f"it gives a length of {length} in the whole and {own} in a part")
            found.append(() if length == own else self.parts[parts])
        split = [axes for axes in found if axes]
        if len(set(split)) < len(split):
            raise Mixes("it combines every element with every other of a split dimension")
        return tuple(found)

    def _draw(self, name: str, is_random: bool, keys: rules.Dims, result: rules.Dims) -> bool:
        """Whether numbers from a random stream differ between devices and are no parts."""
        drawn = rules.axes_in(result)
        if not is_random and drawn - rules.axes_in(keys):
            raise Mixes("it draws the same numbers for all parts; a pz.RandomStream draws others")
        # Split over all axes along which the streams differ, they are parts.
        is_random = is_random and drawn != self.random_axes
        if is_random and name == "random_bits":
            raise Mixes("it draws numbers for all parts from a stream that differs per device")
        return is_random


def _call(walk: _Walk, whole: JaxprEqn, part: JaxprEqn, random: list[bool]) -> list[bool]:
    return walk.results(next(inner_programs(whole)), next(inner_programs(part)), random)


def _custom_jvp(walk: _Walk, whole: JaxprEqn, part: JaxprEqn, random: list[bool]) -> list[bool]:
    if whole.params["symbolic_zeros"]:
        raise Mixes("its derivative depends on which inputs are constants, and is not checked")
    # The rule of a function may call the function, as that of ``jax.nn.softplus`` does.
    if walk.order < _HIGHEST_DERIVATIVE:
        derivatives = _derivative(whole), _derivative(part)
        walk.order += 1
        walk.results(*derivatives, [*random, *[False] * len(random)])
        walk.order -= 1
    return _call(walk, whole, part, random)


def _custom_vjp(walk: _Walk, whole: JaxprEqn, part: JaxprEqn, random: list[bool]) -> list[bool]:
    raise Mixes("its backward pass is a function of its own, which is not checked")


def _scan(walk: _Walk, whole: JaxprEqn, part: JaxprEqn, random: list[bool]) -> list[bool]:
    first, carried = tracing.scan_counts(whole.params)
    # A loop that carries nothing takes each turn by itself, any number of them.
    rules.check_parameters(whole, part, {"jaxpr"} if carried else {"jaxpr", "length"})
    programs, last = (whole.params["jaxpr"], part.params["jaxpr"]), first + carried
    # What differs at random of what is carried and of the results, after any number of turns.
    carry = random[first:last]
    while True:
        found = walk.results(*programs, [*random[:first], *carry, *random[last:]])
        after = [one or other for one, other in zip(carry, found, strict=False)]
        if after == carry:
            return [*after, *found[len(after) :]]
        carry = after


def _cond(walk: _Walk, whole: JaxprEqn, part: JaxprEqn, random: list[bool]) -> list[bool]:
    branches = whole.params["branches"], part.params["branches"]
    if len(branches[0]) != len(branches[1]):
        raise Mixes(_DIFFERENT)
    found = [walk.results(*pair, random[1:]) for pair in zip(*branches, strict=True)]
    return [random[0] or any(values) for values in zip(*found, strict=True)]


_WITH_PROGRAMS = {"closed_call": _call, "jit": _call, "remat2": _call, "cond": _cond, "scan": _scan}
_WITH_PROGRAMS |= {"custom_jvp_call": _custom_jvp, "custom_vjp_call": _custom_vjp}


# Reading programs


def _read(program: Any) -> tuple[tracing.Jaxpr, Sequence[Any]]:
    """A program without what no result needs, and its constants."""
    jaxpr, constants = open_program(program)
    jaxpr = jaxpr.replace(eqns=[*map(_with_known_starts, jaxpr.eqns)])
    return tracing.drop_dead_code(jaxpr), constants


def _with_known_starts(equation: JaxprEqn) -> Any:
    """A slice of a whole dimension starts at zero.

    JAX counts a negative start from the end of the dimension, and so it would differ between the
    traces for no reason.
    """
    first = {"dynamic_slice": 1, "dynamic_update_slice": 2}.get(str(equation.primitive.name))
    if first is None:
        return equation
    atoms: list[Any] = [*equation.invars]
    sizes = shape_of(equation.outvars[0] if first == 1 else atoms[1])
    for number, (size, length) in enumerate(zip(sizes, shape_of(atoms[0]), strict=True), first):
        if size == length:
            atoms[number] = Literal(np.zeros((), atoms[number].aval.dtype), atoms[number].aval)
    return equation.replace(invars=atoms)


def _derivative(equation: JaxprEqn) -> ClosedJaxpr:
    """The program of a function's own JVP rule: of its inputs, and of the direction of each."""
    kinds: list[Any] = [atom.aval for atom in (*equation.invars, *equation.outvars)]
    if not all(jax.numpy.issubdtype(kind.dtype, np.inexact) for kind in kinds):
        raise Mixes("its derivative is a function of its own, also of integers, and is not checked")
    # Variables of their own, as an operand may stand in an equation twice, or be a literal.
    inputs: list[Any] = [tracing.Var(atom.aval) for atom in equation.invars]
    call = equation.replace(invars=inputs)
    run = tracing.jaxpr_as_fun(make_program([call], inputs, equation.outvars, "custom_jvp"))
    structs = [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in kinds[: len(inputs)]]
    return jax.make_jaxpr(lambda *both: jax.jvp(run, *both)[1])(structs, structs)


def _form(equation: JaxprEqn | None) -> Any:
    """Equal for two equations that are one operation on operands of the same ranks."""
    return equation and (
        equation.primitive,
        [len(shape_of(atom)) for atom in equation.invars],
        [len(shape_of(atom)) for atom in equation.outvars],
    )


# Saying where an operation is


def _locate(chain: Sequence[JaxprEqn], reason: str) -> Problem:
    """What is known of an operation, from the calls that lead to it, the operation last."""
    # Those of an operation in a call begin where the function begins that is called.
    frames = [frame for equation in chain for frame in tracing.source_frames(equation)[::-1]]
    functions = [name for equation in chain if (name := _function_name(equation))]
    name = str(chain[-1].primitive.name) if chain else "constant"
    return Problem(_write_frames(frames, functions[-1:]), reason, kind=name)


def _write_frames(frames: Sequence[_Frame], functions: Sequence[str] = ()) -> str:
    """Layers, function and source line, such as ``"Block > Softmax, where (model.py:12)"``.

    Args:
        frames: The calls that led to an operation, outermost first.
        functions: The function, if it has a name.
    """
    # What called this library is not the layer's, and lines in libraries tell a user nothing.
    is_ours = [pathlib.Path(file).is_relative_to(_OURS) for file, *_ in frames]
    inside = frames[is_ours.index(True) :] if any(is_ours) else frames
    shown = [x for x in inside if not any(map(pathlib.Path(x[0]).is_relative_to, _HIDDEN))]
    layers = [name.split(".")[-2] for _, name, _ in shown if name.endswith(".__call__")]
    text = ", ".join(filter(None, (" > ".join(layers), *functions)))
    line = [f"({pathlib.Path(file).name}:{number})" for file, _, number in shown[-1:]]
    return " ".join(filter(None, (text, *line)))


def _function_name(equation: JaxprEqn) -> str:
    """The name of the function under ``jax.jit`` that an operation calls, or nothing."""
    return str(equation.params.get("name", "")).lstrip("_")
