"""Matrix products laid out as XLA computes them, where operands and result want a mesh axis apart.

Where two dimensions of a product want the same mesh axis, something has to give way. Shardy moves
what is smallest. XLA lays out products by itself: two operands that are split alike along what is
summed are multiplied as they lie, and the result is summed up, however large it is; an operand that
is split as the result is stays where it is, and the other one is gathered.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from penzai_shard.library_apis.shardy_api import (
    dictionaries_of,
    sharding_of,
    shardings_of_results,
    spec_of,
)

# jaxlib has no types for these.
MlirObject: TypeAlias = Any

_Spec: TypeAlias = tuple[tuple[str, ...], ...]
_Factor: TypeAlias = tuple[str, int]
"""What a dimension of a product is: its kind and its number among those of its kind."""

_PRODUCT = "stablehlo.dot_general"
_LEFT, _RIGHT, _SUMMED, _BATCH = "left", "right", "summed", "batch"


def sharding_text(spec: _Spec) -> str:
    """A layout as Shardy writes it."""
    named = [", ".join(f'"{axis}"' for axis in axes) for axes in spec]
    dimensions = ", ".join(f"{{{axes}}}" for axes in named)
    return f"#sdy.sharding<@mesh, [{dimensions}]>"


def lay_out_products_as_xla(module: MlirObject) -> None:
    """Moves operands and results of products as XLA does, where they want a mesh axis apart.

    Args:
        module: The module with layouts, which is changed; its context has to be in force.
    """
    products: list[MlirObject] = []

    def note(operation: MlirObject) -> ir.WalkResult:
        if operation.name == _PRODUCT:
            products.append(operation)
        return ir.WalkResult.ADVANCE

    module.walk(note)
    for product in products:
        _lay_out(product)


def _lay_out(product: MlirObject) -> None:
    values = [*product.operands, product.results[0]]
    specs = [_spec(value) for value in values]
    if not all(any(spec) for spec in specs) or any(":" in a for a in _axes(*specs)):
        # Where one is whole there is one way; parts of mesh axes are left to Shardy.
        return
    changed = as_xla(_factors(product), specs)
    for number, (value, spec) in enumerate(zip(product.operands, changed, strict=False)):
        if spec != specs[number]:
            product.operands[number] = _resharded(value, spec, ir.InsertionPoint(product))
    if changed[2] != specs[2]:
        result = product.results[0]
        text = sharding_text(changed[2]).removeprefix("#sdy.sharding")
        product.attributes["sdy.sharding"] = ir.Attribute.parse(
            f"#sdy.sharding_per_value<[{text}]>"
        )
        moved = _resharded(result, specs[2], ir.InsertionPoint.after(product))
        result.replace_all_uses_except(moved, moved.owner.operation)


def as_xla(factors: Sequence[Sequence[_Factor]], specs: Sequence[_Spec]) -> list[_Spec]:
    """The layouts in which XLA computes a product.

    Args:
        factors: What each dimension of the two operands and of the result is.
        specs: The mesh axes of these dimensions.

    >>> of_x, of_w, of_y = (
    ...     [("left", 0), ("summed", 0)], [("summed", 0), ("right", 0)], [("left", 0), ("right", 0)]
    ... )
    >>> as_xla([of_x, of_w, of_y], [((), ("a",)), (("a",), ()), (("a",), ())])
    [((), ('a',)), (('a',), ()), ((), ())]
    >>> as_xla([of_x, of_w, of_y], [(("a",), ()), ((), ("a",)), (("a",), ())])
    [(('a',), ()), ((), ()), (('a',), ())]
    """
    changed = list(specs)
    for axis in _axes(*specs):
        left, right, result = (
            _split_by(axis, dims, spec) for dims, spec in zip(factors, changed, strict=True)
        )
        if left is None or right is None or result is None or left == right == result:
            continue
        if left == right and left[0] == _SUMMED:
            changed[2] = _without(axis, changed[2])
        elif result == left != right:
            changed[1] = _without(axis, changed[1])
        elif result == right != left:
            changed[0] = _without(axis, changed[0])
    return changed


def _factors(product: MlirObject) -> list[list[_Factor]]:
    numbers = stablehlo.DotDimensionNumbers(product.attributes["dot_dimension_numbers"])
    sides = (
        (_LEFT, numbers.lhs_batching_dimensions, numbers.lhs_contracting_dimensions),
        (_RIGHT, numbers.rhs_batching_dimensions, numbers.rhs_contracting_dimensions),
    )
    found: list[list[_Factor]] = []
    result: list[_Factor] = []
    for value, (kind, batch, summed) in zip(product.operands, sides, strict=True):
        shared: Mapping[int, _Factor] = {
            **{dimension: (_BATCH, number) for number, dimension in enumerate(batch)},
            **{dimension: (_SUMMED, number) for number, dimension in enumerate(summed)},
        }
        rank = len(ir.RankedTensorType(value.type).shape)
        own = [dimension for dimension in range(rank) if dimension not in shared]
        found.append([shared.get(d) or (kind, own.index(d)) for d in range(rank)])
        if kind == _LEFT:
            result += [(_BATCH, number) for number in range(len(batch))]
        result += [(kind, number) for number in range(len(own))]
    return [*found, result]


def _axes(*specs: _Spec) -> Iterator[str]:
    yield from dict.fromkeys(axis for spec in specs for axes in spec for axis in axes)


def _split_by(axis: str, factors: Sequence[_Factor], spec: _Spec) -> _Factor | None:
    return next((f for f, axes in zip(factors, spec, strict=True) if axis in axes), None)


def _without(axis: str, spec: _Spec) -> _Spec:
    return tuple(tuple(each for each in axes if each != axis) for axes in spec)


def _spec(value: MlirObject) -> _Spec:
    """The mesh axes of each dimension of a value."""
    rank = len(ir.RankedTensorType(value.type).shape)
    sharding = _sharding(value)
    return ((),) * rank if sharding is None else spec_of(sharding)[0]


def _sharding(value: MlirObject) -> MlirObject:
    owner = value.owner
    if isinstance(owner, ir.Block):
        number = ir.BlockArgument(value).arg_number
        holder = owner.owner.operation
        if holder.name == "func.func":
            count = len(owner.arguments)
            return sharding_of(dictionaries_of(holder, "arg_attrs", count)[number])
        found = shardings_of_results(holder.attributes)
    else:
        number = ir.OpResult(value).result_number
        found = shardings_of_results(owner.attributes)
    return found[number] if number < len(found) else None


def _resharded(value: MlirObject, spec: _Spec, where: MlirObject) -> MlirObject:
    reshard = ir.Operation.create(
        "sdy.reshard",
        results=[value.type],
        operands=[value],
        attributes={"sharding": ir.Attribute.parse(sharding_text(spec))},
        loc=value.owner.location if not isinstance(value.owner, ir.Block) else value.location,
        ip=where,
    )
    return reshard.results[0]
