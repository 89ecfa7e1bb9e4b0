"""Operations in the form in which XLA has them when Shardy propagates layouts.

JAX adds dimensions of length 1, and stretches them, by broadcasts. XLA takes both apart: a reshape
adds or drops these dimensions, and a broadcast only makes new ones. Shardy lays reshapes out before
broadcasts, so that the form decides which of two layouts wins where both want the same mesh axis.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

# jaxlib has no types for these.
MlirObject = Any

_BROADCAST = "stablehlo.broadcast_in_dim"
_DIMENSIONS = "broadcast_dimensions"


def bring_to_form_of_xla(module: MlirObject) -> None:
    """Makes of each broadcast of dimensions of length 1 a reshape, and a broadcast of the rest.

    Operations that XLA takes apart into those that act on each element get their rule.

    Args:
        module: The module, which is changed; its context has to be in force.
    """
    broadcasts: list[MlirObject] = []

    def note(operation: MlirObject) -> ir.WalkResult:
        if operation.name.startswith("chlo."):
            _give_rule(operation)
        elif operation.name == _BROADCAST and "sdy.sharding" not in operation.attributes:
            broadcasts.append(operation)
        return ir.WalkResult.ADVANCE

    module.walk(note)
    for each in broadcasts:
        _take_apart(each)


def _take_apart(broadcast: MlirObject) -> None:
    result = broadcast.results[0]
    given, made = ir.RankedTensorType(broadcast.operands[0].type), ir.RankedTensorType(result.type)
    dimensions = list(ir.DenseI64ArrayAttr(broadcast.attributes[_DIMENSIONS]))
    if math.prod(given.shape) == math.prod(made.shape) and dimensions == sorted(dimensions):
        result.replace_all_uses_with(_reshaped(broadcast, made))
        broadcast.erase()
        return
    lengths = list(zip(given.shape, dimensions, strict=True))
    kept = [(length, into) for length, into in lengths if length == made.shape[into]]
    if len(kept) < len(lengths):
        shape = [length for length, _ in kept]
        rest = ir.RankedTensorType.get(shape, given.element_type, loc=broadcast.location)
        broadcast.operands[0] = _reshaped(broadcast, rest)
        broadcast.attributes[_DIMENSIONS] = ir.DenseI64ArrayAttr.get([into for _, into in kept])


def _reshaped(broadcast: MlirObject, into: MlirObject) -> MlirObject:
    """What a broadcast takes, in another shape."""
    reshape = ir.Operation.create(
        "stablehlo.reshape",
        results=[into],
        operands=[broadcast.operands[0]],
        loc=broadcast.location,
        ip=ir.InsertionPoint(broadcast),
    )
    return reshape.results[0]


def _give_rule(operation: MlirObject) -> None:
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
