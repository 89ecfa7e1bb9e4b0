"""A lowered program in the form in which XLA has it when Shardy propagates layouts.

Shardy decides ties by the order of operations and by what calls and loops hand over, so that a
program in another form gets another layout. XLA inlines calls, takes broadcasts of dimensions of
length 1 apart, has what no turn of a loop changes outside of the loop, and hands operations on in
the order in which results need them.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

ORDER = "penzai_shard.order"
"""Where an operation stands in the program that JAX wrote."""


def to_xla_form(module: Any) -> None:
    """Changes a module; its context has to be in force."""
    _inline_calls(module)
    PassManager.parse("builtin.module(symbol-dce)").run(module)
    for operation in list(operations_in(module)):
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


def operations_in(module: Any, kind: str | None = None) -> Iterator[Any]:
    found: list[Any] = []

    def note(operation: Any) -> Any:
        if kind is None or operation.name == kind:
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.walk(note)
    return iter(found)


def main_block(module: Any) -> Any:
    for each in operations_in(module, "func.func"):
        if ir.StringAttr(each.attributes["sym_name"]).value == "main":
            return each.regions[0].blocks[0]
    raise AssertionError("no main")


def _inline_calls(module: Any) -> None:
    functions = {
        ir.StringAttr(each.attributes["sym_name"]).value: each
        for each in operations_in(module, "func.func")
    }
    while calls := list(operations_in(module, "func.call")):
        for call in calls:
            callee = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
            body = functions[callee].regions[0].blocks[0]
            *inner, end = body.operations
            values = dict(zip(body.arguments, call.operands, strict=True))
            for each in inner:
                copied = each.operation.clone(ip=ir.InsertionPoint(call))
                _take_over(copied, each.operation, values, name_of(call))
            for result, value in zip(call.results, end.operation.operands, strict=True):
                result.replace_all_uses_with(values.get(value, value))
            call.erase()


def _take_over(copied: Any, original: Any, values: dict[Any, Any], prefix: str) -> None:
    """Lets a copy take the caller's values, and be named within the call."""
    name = name_of(original)
    copied.location = ir.Location.name(f"{prefix}/{name}" if name else prefix)
    for number, value in enumerate(original.operands):
        if value in values:
            copied.operands[number] = values[value]
    values.update(zip(original.results, copied.results, strict=True))
    for region, of_original in zip(copied.regions, original.regions, strict=True):
        for block, other in zip(region.blocks, of_original.blocks, strict=True):
            values.update(zip(other.arguments, block.arguments, strict=True))
            for one, of_other in zip(block.operations, other.operations, strict=True):
                _take_over(one.operation, of_other.operation, values, prefix)


def name_of(operation: Any) -> str:
    location = operation.location
    return location.name_str if isinstance(location, ir.NameLoc) else ""


def _take_apart(broadcast: Any) -> None:
    if "sdy.sharding" in broadcast.attributes:
        return
    given = ir.RankedTensorType(broadcast.operands[0].type)
    made = ir.RankedTensorType(broadcast.results[0].type)
    into = list(ir.DenseI64ArrayAttr(broadcast.attributes["broadcast_dimensions"]))
    if math.prod(given.shape) == math.prod(made.shape) and into == sorted(into):
        broadcast.results[0].replace_all_uses_with(_reshaped(broadcast, made))
        broadcast.erase()
        return
    lengths = list(made.shape)
    for n, to in zip(given.shape, into, strict=True):
        lengths[to] = n
    if lengths == list(made.shape):
        return
    middle = ir.RankedTensorType.get(lengths, made.element_type, loc=broadcast.location)
    kept = [n for n, (a, b) in enumerate(zip(lengths, made.shape)) if a == b]
    rest = ir.RankedTensorType.get([lengths[n] for n in kept], made.element_type, loc=broadcast.location)
    first = ir.Operation.create("stablehlo.broadcast_in_dim", results=[middle], operands=[broadcast.operands[0]],
        attributes={"broadcast_dimensions": ir.DenseI64ArrayAttr.get(into)}, loc=broadcast.location, ip=ir.InsertionPoint(broadcast)).results[0]
    broadcast.operands[0] = first
    broadcast.operands[0] = _reshaped(broadcast, rest)
    broadcast.attributes["broadcast_dimensions"] = ir.DenseI64ArrayAttr.get(kept)


def _reshaped(broadcast: Any, into: Any) -> Any:
    return ir.Operation.create(
        "stablehlo.reshape",
        results=[into],
        operands=[broadcast.operands[0]],
        loc=broadcast.location,
        ip=ir.InsertionPoint(broadcast),
    ).results[0]


def _give_rule(operation: Any) -> None:
    """Tells Shardy the rule of an operation that XLA takes apart before it propagates layouts.

    Most of the ``chlo`` dialect, such as ``erf_inv``, acts on each element.
    """
    values = [*operation.operands, *operation.results]
    shapes = [tuple(ir.RankedTensorType(value.type).shape) for value in values]
    if operation.name == "chlo.top_k":
        rule = _rule_text(shapes, ordered=len(shapes[0]) - 1)
        operation.attributes["sdy.sharding_rule"] = ir.Attribute.parse(rule)
    elif len(set(shapes)) == 1:
        operation.attributes["sdy.sharding_rule"] = ir.Attribute.parse(_rule_text(shapes))


def _rule_text(shapes: Sequence[tuple[int, ...]], ordered: int | None = None) -> str:
    """A rule of an operation with one operand or more, each dimension of which is a factor.

    Args:
        shapes: Of the first operand, and of all other operands and results.
        ordered: The dimension along which values are ordered, so that it is needed whole.
    """
    names = [chr(ord("i") + number) for number in range(len(shapes[0]))]
    sizes = dict(zip(names, shapes[0], strict=True))
    texts = []
    for shape in shapes:
        factors = list(names)
        if ordered is not None and shape[ordered] != shapes[0][ordered]:
            factors[ordered] = chr(ord("i") + len(names))
            sizes[factors[ordered]] = shape[ordered]
        texts.append(f"[{', '.join(factors)}]")
    text = f"({texts[0]})->({', '.join(texts[1:])})"
    if ordered is None:
        # Which are operands and which results makes no difference to what the factors are.
        text = f"({', '.join(texts[:-1])})->({texts[-1]})"
    text += f" {{{', '.join(f'{name}={size}' for name, size in sizes.items())}}}" if sizes else ""
    text += f" need_replication={{{names[ordered]}}}" if ordered is not None else ""
    return f"#sdy.op_sharding_rule<{text}>"


def _capture_invariants(loop: Any) -> None:
    returned = list(loop.regions[1].blocks[0].operations)[-1].operation.operands
    for number, argument in enumerate(loop.regions[1].blocks[0].arguments):
        if returned[number] == argument:
            outside = loop.operands[number]
            for region in loop.regions:
                region.blocks[0].arguments[number].replace_all_uses_with(outside)
            loop.results[number].replace_all_uses_with(outside)


def _put_in_post_order(block: Any) -> None:
    end = list(block.operations)[-1].operation
    roots = [each.operation for each in block.operations if _has_effect(each.operation)]
    stack, seen, order = [(end, itertools.chain(_needed(end)))], set(), []
    for root in roots:
        seen.add(root)
    stack += [(root, _needed(root)) for root in reversed(roots)]
    while stack:
        operation, left = stack[-1]
        for value in left:
            owner = value.owner
            if isinstance(owner, ir.Block):
                continue
            owner = owner.operation
            if owner.block == block and owner not in seen:
                seen.add(owner)
                stack.append((owner, _needed(owner)))
                break
        else:
            order.append(operation)
            stack.pop()
    dead = [each.operation for each in block.operations if each.operation not in seen]
    for operation in reversed(dead[:-1]):
        operation.erase()
    for operation in order[:-1]:
        operation.move_before(end)
        if operation.name in ("stablehlo.while", "stablehlo.case", "stablehlo.if"):
            for region in operation.regions:
                _put_in_post_order(region.blocks[0])


def _needed(operation: Any) -> Iterator[Any]:
    """What an operation takes, and what is captured by those in its regions."""
    yield from operation.operands
    for region in operation.regions:
        for block in region.blocks:
            for each in block.operations:
                yield from _needed(each.operation)


def _has_effect(operation: Any) -> bool:
    return "has_side_effect" in operation.attributes and bool(
        ir.BoolAttr(operation.attributes["has_side_effect"]).value
    )
