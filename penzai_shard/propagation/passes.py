"""Runs on a lowered program what XLA runs, up to the pass that propagates layouts, without devices.

Where two layouts want one mesh axis, Shardy decides by the order of operations and by what calls
and loops hand over; so a program in another form gets other layouts. Before it propagates, XLA

1. inlines all calls;
2. takes broadcasts of dimensions of length 1 apart, and ``chlo`` operations into elementwise ones;
3. lets loops capture what none of their turns changes;
4. hands operations on in post-order: each one just after the last of what it needs.

Of 131 operations of a small loop, 71 are laid out otherwise without the second, 38 without the
third, 3 without the fourth. The tests compare with what XLA itself writes down.

Then come Shardy's own passes. Its options for its own developers leave notes behind: which mesh
axis went from where to where (edges), and which argument, result or constraint it came from at
first (origins). Notes change no layout; the tests compare.

Written for and run on jaxlib 0.10.2 and 0.12.0. https://openxla.org/shardy/propagation
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import jax
from jaxlib import version
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.passmanager import PassManager

from penzai_shard.errors import Problem, Problems, PropagationError

# jaxlib has no types for what its MLIR modules are made of.
Mlir = Any

HEADLINE = "layouts cannot be propagated:"
ORDER = "penzai_shard.order"
"""Attribute of an operation: where it stands in the program that JAX wrote."""
_PIPELINE = "sdy-propagation-pipeline"
_PROPAGATE = "sdy-user-priority-propagate"
# Behind the propagation: how arguments and results are laid out where lengths do not divide.
_AT_THE_ENDS = (
    "sdy-update-non-divisible-input-output-shardings,sdy-remove-sub-axes-in-input-output-shardings"
)


def to_xla_form(lowered: jax.stages.Lowered) -> Mlir:
    """A copy of a lowered program in the form in which XLA has it.

    Each operation keeps its place in JAX's order as the attribute ``ORDER``. The operations of a
    called function are named after the call too: ``call's name/own name``.

    Raises:
        PropagationError: Shapes are unknown, or a mesh axis has two sizes; all of them are in it.
    """
    given: Mlir = lowered.compiler_ir("stablehlo")
    with given.context:
        module = given.operation.clone().operation
        _inline_calls(module)
        PassManager.parse("builtin.module(symbol-dce)").run(module)
        for operation in operations_in(module):
            if operation.name == "stablehlo.broadcast_in_dim":
                _take_apart(operation)
            elif operation.name.startswith("chlo."):
                _give_rule(operation)
            elif operation.name == "stablehlo.while":
                _capture_invariants(operation)
        integer = ir.IntegerType.get_signless(64)
        for number, operation in enumerate(operations_in(module)):
            operation.attributes[ORDER] = ir.IntegerAttr.get(integer, number)
        _put_in_post_order(main_block(module))
        _check(module)
    return module


def _check(module: Mlir) -> None:
    """Refuses shapes that are not known, and a mesh axis of two sizes, all of them at once."""
    problems = Problems(HEADLINE)
    values = [(value.type, name_of(value)) for value in main_block(module).arguments]
    values += [(v.type, name_of(each)) for each in operations_in(module) for v in each.results]
    for kind, name in values:
        if isinstance(kind, ir.ShapedType) and not kind.has_static_shape:
            fix = "Lower the function for arguments whose lengths are numbers."
            problems.add(name, f"is of an unknown shape, {kind}", fix, "unknown shape")
    known = dict(mesh_axes(module))
    for name, size in mesh_axes(module):
        if size != known[name]:
            what = f"mesh axis {name!r} is of {size} and of {known[name]} devices"
            problems.add("", what, "Use one mesh in all of the function.", "several meshes")
    problems.raise_if_any(PropagationError)


def operations_in(module: Mlir, kind: str = "") -> list[Mlir]:
    """All operations of a module, or those of one kind; what is in a region behind its owner."""
    found: list[Mlir] = []

    def note(operation: Mlir) -> ir.WalkResult:
        if kind in ("", operation.name):
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.walk(note, ir.WalkOrder.PRE_ORDER)
    return found


def main_block(module: Mlir) -> Mlir:
    """The block of a module's entry function."""
    return ir.SymbolTable(module)["main"].regions[0].blocks[0]


def name_of(thing: Mlir) -> str:
    """JAX's name of an operation, an argument or the like; empty without one."""
    location = thing.location
    return str(location.name_str) if isinstance(location, ir.NameLoc) else ""


def mesh_axes(module: Mlir) -> list[tuple[str, int]]:
    """Name and size of the axes of all meshes in a module."""
    meshes = [sdy.MeshAttr(each.attributes["mesh"]) for each in operations_in(module, "sdy.mesh")]
    axes = [sdy.MeshAxisAttr(axis) for mesh in meshes for axis in mesh.axes]
    return [(axis.name, axis.size) for axis in axes]


# Calls


def _inline_calls(module: Mlir) -> None:
    """MLIR's own pass does not inline operations of StableHLO."""
    functions = ir.SymbolTable(module)
    while calls := operations_in(module, "func.call"):
        for call in calls:
            callee = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
            body = functions[callee].regions[0].blocks[0]
            *inner, end = body.operations
            values = dict(zip(body.arguments, call.operands, strict=True))
            for each in inner:
                copied = each.operation.clone(ip=ir.InsertionPoint(call))
                _adopt(copied, each.operation, values, name_of(call))
            for result, value in zip(call.results, end.operation.operands, strict=True):
                result.replace_all_uses_with(values.get(value, value))
            call.erase()


def _adopt(copied: Mlir, original: Mlir, values: dict[Mlir, Mlir], prefix: str) -> None:
    """Lets a copy take the caller's values, and be named within the call."""
    if prefix:
        name, location = name_of(original), original.location
        # The child location holds the lines of the user's code.
        child = location.child_loc if isinstance(location, ir.NameLoc) else location
        copied.location = ir.Location.name(f"{prefix}/{name}" if name else prefix, child)
    for number, value in enumerate(original.operands):
        if value in values:
            copied.operands[number] = values[value]
    values.update(zip(original.results, copied.results, strict=True))
    # JAX names what is in a shard_map from there on, in loops and branches from the function on.
    inside = "" if original.name == "sdy.manual_computation" else prefix
    for region, own in zip(copied.regions, original.regions, strict=True):
        for block, other in zip(region.blocks, own.blocks, strict=True):
            values.update(zip(other.arguments, block.arguments, strict=True))
            for each, source in zip(block.operations, other.operations, strict=True):
                _adopt(each.operation, source.operation, values, inside)


# Single operations


def _take_apart(broadcast: Mlir) -> None:
    """Stretches dimensions of length 1 as XLA does: into place, dropped, made anew."""
    given, made = (ir.RankedTensorType(v.type) for v in (*broadcast.operands, *broadcast.results))
    into = list(ir.DenseI64ArrayAttr(broadcast.attributes["broadcast_dimensions"]))
    if math.prod(given.shape) == math.prod(made.shape) and into == sorted(into):
        reshaped = _add("stablehlo.reshape", broadcast, made.shape)
        broadcast.results[0].replace_all_uses_with(reshaped)
        broadcast.erase()
        return
    lengths = dict(enumerate(made.shape)) | dict(zip(into, given.shape, strict=True))
    kept = [dim for dim, length in enumerate(made.shape) if lengths[dim] == length]
    if len(kept) < len(made.shape):
        dimensions = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get(into)}
        placed = _add("stablehlo.broadcast_in_dim", broadcast, lengths.values(), dimensions)
        broadcast.operands[0] = placed
        broadcast.operands[0] = _add("stablehlo.reshape", broadcast, [lengths[d] for d in kept])
        broadcast.attributes["broadcast_dimensions"] = ir.DenseI64ArrayAttr.get(kept)


def _add(kind: str, before: Mlir, shape: Any, attributes: dict[str, Mlir] | None = None) -> Mlir:
    """The result of a new operation on an operation's first operand, just before it."""
    value = before.operands[0]
    made = ir.RankedTensorType.get(
        [*shape], ir.RankedTensorType(value.type).element_type, loc=before.location
    )
    place = {"loc": before.location, "ip": ir.InsertionPoint(before)}
    added = ir.Operation.create(kind, [made], [value], attributes, **place)
    return added.results[0]


def _give_rule(operation: Mlir) -> None:
    """Tells Shardy the rule of a ``chlo`` operation, which it has none for.

    They are elementwise, but for ``top_k``, which needs its last dimension whole.
    """
    operands, results = (
        [tuple(ir.RankedTensorType(value.type).shape) for value in values]
        for values in (operation.operands, operation.results)
    )
    shape, is_top_k = operands[0], operation.name == "chlo.top_k"
    # Without a rule nothing is propagated through it.
    if not is_top_k and {*operands, *results} != {shape}:
        return
    sizes, last = [*shape], len(shape) - 1
    dims = [sdy.DimMappingAttr.get([dim]) for dim in range(len(shape))]
    taken = made = sdy.TensorMappingAttr.get(dims)
    if is_top_k and results[0] != shape:
        sizes.append(results[0][-1])
        made = sdy.TensorMappingAttr.get([*dims[:-1], sdy.DimMappingAttr.get([last + 1])])
    sides = [taken] * len(operands), [made] * len(results)
    whole = [last] if is_top_k else []
    rule = sdy.OpShardingRuleAttr.get(sizes, *sides, need_replication_factors=whole)
    operation.attributes["sdy.sharding_rule"] = rule


def _capture_invariants(loop: Mlir) -> None:
    body = loop.regions[1].blocks[0]
    returned = list(body.operations)[-1].operation.operands
    for number, argument in enumerate(body.arguments):
        if returned[number] == argument:
            outside = loop.operands[number]
            for region in loop.regions:
                region.blocks[0].arguments[number].replace_all_uses_with(outside)
            loop.results[number].replace_all_uses_with(outside)


# Order


def _put_in_post_order(block: Mlir) -> None:
    """Moves a block's operations behind what they need; takes out those that nothing needs."""
    *inner, end = (each.operation for each in block.operations)
    roots = [each for each in inner if _has_effect(each)]
    seen, order = {end, *roots}, []
    stack = [(root, _needed(root)) for root in (end, *reversed(roots))]
    while stack:
        operation, left = stack[-1]
        for value in left:
            maker = value.owner
            if isinstance(maker, ir.Block):
                continue
            maker = maker.operation
            if maker.block == block and maker not in seen:
                seen.add(maker)
                stack.append((maker, _needed(maker)))
                break
        else:
            order.append(operation)
            stack.pop()
    for operation in reversed(inner):
        if operation not in seen:
            operation.erase()
    for operation in order[:-1]:
        operation.move_before(end)
        for region in operation.regions:
            _put_in_post_order(region.blocks[0])


def _needed(operation: Mlir) -> Iterator[Mlir]:
    """What an operation takes, and what those in its regions capture."""
    yield from operation.operands
    for region in operation.regions:
        for block in region.blocks:
            for each in block.operations:
                yield from _needed(each.operation)


def _has_effect(operation: Mlir) -> bool:
    """Whether an operation is there for more than its results: a callback, a sharding group."""
    marked = operation.attributes.get("has_side_effect")
    return not operation.results or (marked is not None and bool(ir.BoolAttr(marked).value))


# Propagation


def propagate(module: Mlir, *, notes: bool = False) -> None:
    """Lays out all values of a module, which is changed; its context has to be in force.

    Args:
        module: A module in the form of XLA, see ``to_xla_form``.
        notes: Whether Shardy notes where each mesh axis of a layout came from at first, and at each
            operation which mesh axes went from where to where. The former is never done where
            arrays are tied by ``shard_alike``: there it ends the process.

    Raises:
        PropagationError: Shardy refuses the program, or this jaxlib has other passes.
    """
    problems = Problems(HEADLINE)
    origins = notes and not operations_in(module, "sdy.sharding_group")
    passes = _make_passes(notes, origins)
    try:
        passes.run(module)
    except ir.MLIRError as error:
        for each in error.error_diagnostics:
            # A message's location does not know yet that it is one with a name.
            location = ir.Location.from_attr(each.location.attr)
            path = location.name_str if isinstance(location, ir.NameLoc) else ""
            problems.add(path, f"Shardy says: {each.message}", kind="refused")
        raise PropagationError(HEADLINE, problems) from error


def _make_passes(edges: bool, origins: bool) -> PassManager:
    try:
        whole = str(PassManager.parse(f"builtin.module({_PIPELINE})"))
        before, _, behind = whole.partition(_PROPAGATE)
        options = behind.partition("}")[0]
        if edges:
            before = _switch_on(before, "debug-propagation-edge-sharding")
            options = _switch_on(options, "debug-propagation-edge-sharding")
        if origins:
            # Never before: sdy-apply-sharding-constraints puts constraints before a shard_map, and
            # would read their names, which it has not given them. That ends the process.
            options = _switch_on(options, "debug-sharding-origins")
        # sdy-save-module writes files, and cannot be parsed by the name that is printed.
        before = re.sub(r"sdy-save-module(\{[^{}]*\})?,", "", before)
        passes = PassManager.parse(f"{before}{_PROPAGATE}{options}}},{_AT_THE_ENDS})")
    except ValueError as error:
        what = f"jaxlib {version.__version__} has other passes than are known: {error}"
        problem = Problem("", what, "Install jaxlib 0.10.2.", "other jaxlib")
        raise PropagationError(HEADLINE, [problem]) from error
    # It refuses what Shardy notes on loops.
    passes.enable_verifier(False)
    return passes


def _switch_on(passes: str, option: str) -> str:
    if f"{option}=false" not in passes:
        raise ValueError(f"no option {option}")
    return passes.replace(f"{option}=false", f"{option}=true")
