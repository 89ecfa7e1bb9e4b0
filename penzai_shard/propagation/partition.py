"""Puts one layout after the other into a lowered program, and writes down what devices exchange.

A program is lowered once, over mesh axes of size 1 that stand for what is decided later. They are
marks: wherever a layout of the program names them, the axes of a real mesh are put in.
Shardy then propagates, and inserts a collective wherever an array does not lie as it is needed.

Products are the exception. Where their dimensions want one mesh axis apart, Shardy moves what is
smallest, and XLA lays them out by itself (measured: without this, some steps seem to take 0.03 of
their time). Two operands that are split alike along what is summed are multiplied as they lie, and
the result is summed, however large it is; an operand that is split as the result stays where it is.

Read from and run on jaxlib 0.10.2. https://openxla.org/shardy/sdy_dialect
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.passmanager import PassManager

from penzai_shard.errors import Problems, PropagationError
from penzai_shard.jax_internals.compiler import kept_arguments
from penzai_shard.propagation import flat
from penzai_shard.propagation.passes import (
    Mlir,
    main_block,
    name_of,
    operations_in,
    propagate,
    to_xla_form,
)

_COLLECTIVES = (
    "builtin.module(func.func(sdy-constant-or-scalar-merger,sdy-sink-data-flow-edges),"
    "sdy-remove-sharding-groups,func.func(sdy-sharding-constraint-to-reshard),sdy-close-shardings,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives),"
    "canonicalize{enable-patterns={sdy-collective}},cse)"
)
_CONSTRAINT = "sdy.sharding_constraint"


class Mark(NamedTuple):
    """A layout in a lowered program.

    Attributes:
        axes: The first mesh axis of each dimension, or ``""``.
        shape: The shape of what lies so.
        position: Which argument of the function it is of, or which result; None of a constraint.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    position: int | None


class MarkedProgram:
    """A lowered program in which layouts are replaced.

    Attributes:
        marks: The layouts in it: of its arguments, its results, its constraints.

    Args:
        lowered: What ``jax.jit(f).lower(...)`` returns; it is left as it is.

    Raises:
        PropagationError: Something in it runs per device, by ``jax.shard_map``, or see
            ``to_xla_form``.

    >>> mesh = jax.sharding.AbstractMesh((1, 2), ("rows", "rest"))
    >>> rows = jax.NamedSharding(mesh, jax.P("rows"))
    >>> x = jax.ShapeDtypeStruct((8, 2), "float32", sharding=rows)
    >>> traced = jax.jit(lambda x: x.sum(0)).trace(x)
    >>> program = MarkedProgram(traced.lower(lowering_platforms=("cpu",)))
    >>> program.marks
    [Mark(axes=('rows', ''), shape=(8, 2), position=0)]
    >>> placed = program.place({"data": 4}, [(("data",), ())])
    >>> [each.kind for each in placed.operations if each.mesh_axes]
    ['sdy.all_reduce']
    """

    def __init__(self, lowered: jax.stages.Lowered) -> None:
        self._module = to_xla_form(lowered)
        self._cache: dict[Any, Any] = {}
        with self._module.context:
            problems = Problems("what runs per device cannot be priced by propagation:")
            for each in operations_in(self._module, "sdy.manual_computation"):
                fix = "Leave jax.shard_map out, or compile the step: compile_step(step, ...)."
                problems.add(name_of(each), "it is computed under jax.shard_map", fix)
            problems.raise_if_any(PropagationError)
            main, kept = main_block(self._module), sorted(kept_arguments(lowered))
            returned = main.operations[-1].operands
            # Constants that the function holds come first, and have no layout.
            constants = [None] * (len(main.arguments) - len(kept))
            ends = zip(
                itertools.chain(*flat.read_ends(main)),
                (*main.arguments, *returned),
                (*constants, *kept, *range(len(returned))),
                strict=True,
            )
            found = [(entry.get("sdy.sharding"), value, number) for entry, value, number in ends]
            for each in operations_in(self._module, _CONSTRAINT):
                found.append((each.attributes["sharding"], each.results[0], None))
            self.marks = [_read_mark(*each) for each in found if each[0] is not None]

    def place(self, sizes: Mapping[str, int], specs: Sequence[flat.Spec | None]) -> flat.Propagated:
        """The program in a layout, with its collectives.

        Args:
            sizes: Name and size of each mesh axis.
            specs: A layout for each mark; None if nothing is to be pinned there.

        Raises:
            PropagationError: See ``passes.propagate``.
        """
        with self._module.context:
            # A copy, as the same program is placed many times.
            module = self._module.clone().operation
            axes = [sdy.MeshAxisAttr.get(*each) for each in sizes.items()]
            ir.SymbolTable(module)["mesh"].attributes["mesh"] = sdy.MeshAttr.get(axes)
            shardings = iter([*map(_make_sharding, self.marks, specs)])
            main = main_block(module)
            for key, entries in zip(flat.ENDS, flat.read_ends(main), strict=True):
                for entry in entries:
                    if "sdy.sharding" in entry:
                        entry["sdy.sharding"] = next(shardings)
                main.owner.attributes[key] = ir.ArrayAttr.get([*map(ir.DictAttr.get, entries)])
            for each in operations_in(module, _CONSTRAINT):
                each.attributes["sharding"] = next(shardings)
            propagate(module)
            for product in operations_in(module, "stablehlo.dot_general"):
                _lay_out_as_xla(product)
            passes = PassManager.parse(_COLLECTIVES)
            passes.enable_verifier(False)
            passes.run(module)
            return flat.read(module, self._cache)


def _read_mark(sharding: Mlir, value: Mlir, position: int | None) -> Mark:
    axes = tuple(own[0] if own else "" for own in flat.read_spec(sharding)[0])
    return Mark(axes, tuple(ir.ShapedType(value.type).shape), position)


def _make_sharding(mark: Mark, spec: flat.Spec | None) -> Mlir:
    """A layout in the place of a mark; without one what is propagated to it stays."""
    # Closed, Shardy adds no mesh axes.
    dims = [
        sdy.DimensionShardingAttr.get([*map(sdy.AxisRefAttr.get, own)], is_closed=spec is not None)
        for own in spec or ((),) * len(mark.axes)
    ]
    return sdy.TensorShardingAttr.get("mesh", dims)


# Products


def _lay_out_as_xla(product: Mlir) -> None:
    """Moves operands and result of a product as XLA does, where they want a mesh axis apart."""
    shardings = [*map(_find_sharding, product.operands), _find_sharding(product.results[0])]
    if any(sharding is None for sharding in shardings):
        return
    rule = flat.read_rule(product.attributes["sdy.sharding_rule"])
    factors = (*rule.operands, *rule.results)
    specs = [flat.read_spec(sharding)[0] for sharding in shardings]
    moved = list(shardings)
    for axis in dict.fromkeys(axis for spec in specs for axes in spec for axis in axes):
        split = [_find_factor(axis, spec, own) for spec, own in zip(specs, factors, strict=True)]
        if None in split or ":" in axis or len({*split}) == 1:
            # Where one of the three is whole along it there is one way.
            continue
        left, right, result = split
        if left == right:
            number = 2 if rule.reduced.issuperset(left or ()) else None
        else:
            number = 1 if result == left else 0 if result == right else None
        if number is not None:
            moved[number] = _without(moved[number], axis)
    location, value = product.location, product.results[0]
    for number, operand in enumerate(product.operands):
        if moved[number] is not shardings[number]:
            before = ir.InsertionPoint(product)
            added = sdy.ReshardOp(operand, moved[number], loc=location, ip=before)
            product.operands[number] = added.result
    if moved[2] is not shardings[2]:
        product.attributes["sdy.sharding"] = sdy.TensorShardingPerValueAttr.get([moved[2]])
        behind = ir.InsertionPoint.after(product)
        added = sdy.ReshardOp(value, shardings[2], loc=location, ip=behind)
        value.replace_all_uses_except(added.result, added.operation)


def _find_factor(
    axis: str, spec: flat.Spec, factors: Sequence[tuple[int, ...]]
) -> tuple[int, ...] | None:
    return next((own for own, axes in zip(factors, spec, strict=True) if axis in axes), None)


def _find_sharding(value: Mlir) -> Mlir:
    """The layout of a value before edges are sunk: of arguments in blocks only edges take any."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        entries: Mlir = owner.owner.attributes.get("arg_attrs")
        own = entries[ir.BlockArgument(value).arg_number] if entries else ()
        return next((each.attr for each in own if each.name == "sdy.sharding"), None)
    if (several := owner.attributes.get("sdy.sharding")) is not None:
        return sdy.TensorShardingPerValueAttr(several).shardings[ir.OpResult(value).result_number]
    return owner.attributes.get("sharding")


def _without(sharding: Mlir, axis: str) -> Mlir:
    attribute = sdy.TensorShardingAttr(sharding)
    dims = []
    for dim in map(sdy.DimensionShardingAttr, attribute.dimension_shardings):
        kept = [own for own in dim.axes if sdy.AxisRefAttr(own).name != axis]
        dims.append(sdy.DimensionShardingAttr.get(kept, is_closed=True))
    return sdy.TensorShardingAttr.get(attribute.mesh_or_ref, dims)
