"""What Shardy has devices send each other, for a program whose layouts are put in afterwards.

A program is lowered once with a mesh axis of size 1 for everything that a layout may be about. It
is a mark: it says of a dimension what it is, and splits nothing. Any layout is then put in place of
the marks. Shardy's own passes propagate it and write down every collective, which takes the time of
these passes alone.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import jax
from jaxlib.mlir import ir

from penzai_shard.errors import PropagationError
from penzai_shard.library_apis.shardy_api import (
    WRITES_FILES,
    MlirObject,
    dictionaries_of,
    passes_from,
    shape_and_dtype,
    sharding_of,
    spec_of,
)
from penzai_shard.library_apis.shardy_forms import bring_to_form_of_xla
from penzai_shard.library_apis.shardy_placed import (
    LOOP,
    TIMES,
    PlacedProgram,
    Spec,
    functions_of,
    read_placed,
)
from penzai_shard.library_apis.shardy_products import lay_out_products_as_xla, sharding_text

# Behind the propagation: what two operations have otherwise is brought over by collectives.
_RESHARDS = "func.func(sdy-insert-explicit-reshards"
# Arguments and results that do not divide are stored padded, and keep their layouts.
_WHOLE_IF_UNEVEN = ",sdy-update-non-divisible-input-output-shardings"
_TO_COLLECTIVES = (
    f"builtin.module({_RESHARDS}{{enable-full-version=true}},sdy-reshard-to-collectives),cse)"
)
_CONSTANT = re.compile(r"dense<(\d+)>")


@dataclasses.dataclass(frozen=True)
class Mark:
    """A layout by marks: the shape of a value, and the marks of each of its dimensions."""

    shape: tuple[int, ...]
    dimensions: Spec


class MarkedProgram:
    """A lowered program whose mesh axes are marks.

    Attributes:
        marks: The different layouts in it.

    Raises:
        PropagationError: This jaxlib does not offer the passes, or the program has layouts in a
            form that cannot be replaced, such as those of ``jax.shard_map``.

    >>> mesh = jax.sharding.AbstractMesh((1, 2), ("rows", "rest"))
    >>> x = jax.ShapeDtypeStruct((4, 4), "float32", sharding=jax.NamedSharding(mesh, jax.P("rows")))
    >>> lowered = jax.jit(lambda x: x.sum(0)).trace(x).lower(lowering_platforms=("cpu",))
    >>> program = MarkedProgram(lowered)
    >>> [mark for mark in program.marks if any(mark.dimensions)]
    [Mark(shape=(4, 4), dimensions=(('rows',), ()))]
    >>> split = {("rows",): ("data",), (): ()}
    >>> specs = [tuple(split[axes] for axes in mark.dimensions) for mark in program.marks]
    >>> placed = program.placed({"data": 4}, specs)
    >>> [each.kind for each in placed.operations if each.mesh_axes]
    ['sdy.all_reduce']
    """

    def __init__(self, lowered: jax.stages.Lowered) -> None:
        module = lowered.compiler_ir("stablehlo")
        assert module is not None
        self._marks: dict[Mark, int] = {}
        self._lowered = lowered
        with module.context:
            self._module = module.operation.clone().operation
            bring_to_form_of_xla(self._module)
            self._propagation = passes_from(_down_to_reshards)
            self._collectives = passes_from(lambda pipeline: _TO_COLLECTIVES)
            for passes in (self._propagation, self._collectives):
                passes.enable_verifier(False)
            # By the order in which operations are walked.
            self._of_operations = list(self._read_operations())
            self._of_functions = list(self._read_functions())
            for each in _walked(self._module):
                if each.name == LOOP:
                    each.attributes[TIMES] = ir.StringAttr.get(str(_trip_count(each)))
        self.marks = tuple(self._marks)

    def placed(self, mesh_shape: Mapping[str, int], specs: Sequence[Spec | None]) -> PlacedProgram:
        """The program in a layout.

        Args:
            mesh_shape: The size of each mesh axis.
            specs: In place of each of ``marks``, the mesh axes of each dimension; None takes out
                the constraints that have the mark, which no argument or result may have.

        Raises:
            PropagationError: Shardy's passes refuse the layout.
        """
        with self._module.context:
            module = self._module.clone().operation
            attributes = [
                None if spec is None else ir.Attribute.parse(sharding_text(spec)) for spec in specs
            ]
            self._put_in(module, mesh_shape, attributes)
            try:
                self._propagation.run(module)
                lay_out_products_as_xla(module)
                self._collectives.run(module)
            except Exception as error:
                raise PropagationError(f"Shardy cannot lay out this program: {error}") from error
            return read_placed(module)

    def _mark(self, value: MlirObject, sharding: MlirObject) -> int:
        shape = shape_and_dtype(value.type)[0]
        spec = spec_of(sharding)[0] if shape else ()
        mark = Mark(shape, (*spec, *((),) * (len(shape) - len(spec))))
        return self._marks.setdefault(mark, len(self._marks))

    def _read_operations(self) -> Iterator[int | None]:
        for each in _walked(self._module):
            attributes = each.attributes
            if "sharding" in attributes:
                yield self._mark(each.results[0], attributes["sharding"])
                continue
            if "in_shardings" in attributes or ("sdy.sharding" in attributes and each.results):
                raise PropagationError(
                    f"{each.name}: its layout is written in a form that cannot be replaced. "
                    "Layouts by jax.shard_map are not priced by propagation."
                )
            yield None

    def _read_functions(self) -> Iterator[tuple[list[int | None], list[int | None]]]:
        for each in functions_of(self._module):
            block = each.regions[0].blocks[0]
            returned = block.operations[len(block.operations) - 1].operation.operands
            found = []
            for name, values in (("arg_attrs", block.arguments), ("res_attrs", returned)):
                given = dictionaries_of(each, name, len(values))
                found.append(
                    [
                        None if (sharding := sharding_of(one)) is None else self._mark(v, sharding)
                        for v, one in zip(values, given, strict=True)
                    ]
                )
            yield found[0], found[1]

    def _put_in(
        self, module: MlirObject, mesh_shape: Mapping[str, int], attributes: Sequence[MlirObject]
    ) -> None:
        axes = ", ".join(f'"{name}"={size}' for name, size in mesh_shape.items())
        marks = iter(self._of_operations)
        left_out: list[MlirObject] = []

        def put(operation: MlirObject) -> ir.WalkResult:
            mark = next(marks)
            if mark is not None and attributes[mark] is None:
                left_out.append(operation)
            elif mark is not None:
                operation.attributes["sharding"] = attributes[mark]
            if operation.name == "sdy.mesh":
                operation.attributes["mesh"] = ir.Attribute.parse(f"#sdy.mesh<[{axes}]>")
            return ir.WalkResult.ADVANCE

        module.walk(put)
        for constraint in left_out:
            constraint.results[0].replace_all_uses_with(constraint.operands[0])
            constraint.erase()
        for function, found in zip(functions_of(module), self._of_functions, strict=True):
            for name, marked in zip(("arg_attrs", "res_attrs"), found, strict=True):
                if any(mark is not None for mark in marked):
                    given = dictionaries_of(function, name, len(marked))
                    changed = [
                        one if mark is None else _with_sharding(one, attributes[mark])
                        for one, mark in zip(given, marked, strict=True)
                    ]
                    function.attributes[name] = ir.ArrayAttr.get(changed)


def _down_to_reshards(pipeline: str) -> str:
    propagation, _, _ = pipeline.partition(_RESHARDS)
    for part in (_RESHARDS, _WHOLE_IF_UNEVEN):
        if part not in pipeline:
            raise ValueError(f"{part!r} is not among them")
    propagation = propagation.replace(_WHOLE_IF_UNEVEN, "")
    return WRITES_FILES.sub("", propagation).rstrip(",") + ")"


def _walked(module: MlirObject) -> list[MlirObject]:
    found: list[MlirObject] = []

    def add(operation: MlirObject) -> ir.WalkResult:
        found.append(operation)
        return ir.WalkResult.ADVANCE

    module.walk(add)
    return found


def _with_sharding(attributes: MlirObject, sharding: MlirObject) -> MlirObject:
    named = (attributes[number] for number in range(len(attributes)))
    return ir.DictAttr.get({each.name: each.attr for each in named} | {"sdy.sharding": sharding})


def _trip_count(loop: MlirObject) -> int:
    """How often a loop of ``jax.lax.scan`` runs: what its counter is compared with."""
    condition = loop.regions[0].blocks[0]
    for each in condition.operations:
        if each.operation.name == "stablehlo.compare":
            limit = each.operation.operands[1].owner
            if not isinstance(limit, ir.Block) and limit.name.endswith(".constant"):
                found = _CONSTANT.search(str(limit.attributes["value"]))
                if found is not None:
                    return int(found[1])
    raise PropagationError(
        "a loop runs an unknown number of times, so that what it sends is not known. Loops of "
        "jax.lax.scan run a known number of times."
    )
