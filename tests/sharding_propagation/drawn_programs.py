"""Programs drawn at random whose sources of layouts can be taken away one by one."""

import dataclasses
import re

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from tests.sharding_propagation.small_programs import array, pinned, undecided

# Each mesh axis alone on a dimension: taking one away leaves no other order of the rest.
SPECS = st.sampled_from(
    [
        (a, b)
        for a in (None, "data", "model")
        for b in (None, "data", "model")
        if a is None or a != b
    ]
)

KINDS = {
    "sine": lambda x, y: jnp.sin(x),
    "sum": lambda x, y: x + y,
    "product": lambda x, y: x * y,
    "matrix product": lambda x, y: x @ y,
    "transposed": lambda x, y: x.T,
    "split and joined": lambda x, y: jnp.cos(x.reshape(8, 2, 16)).reshape(16, 16),
    "one after the other": lambda x, y: jnp.concatenate([x, y])[:16],
    "added up": lambda x, y: jnp.cumsum(x, 0),
    "column sums": lambda x, y: x.sum(0)[None] + y,
    "loop": lambda x, y: jax.lax.scan(lambda c, _: (jnp.tanh(c @ y), None), x, None, length=2)[0],
    "branches": lambda x, y: jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(x), lambda: y),
}
PINNED = "pinned"


@dataclasses.dataclass(frozen=True)
class DrawnOperation:
    """What it does, to which two values, and the layout that it pins if it is a constraint."""

    kind: str
    first: int
    second: int
    spec: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class DrawnProgram:
    """Arguments, each with its layout or None, and operations; the last two values come out.

    A source is ``("argument", i)`` or ``("constraint", i)``.
    """

    arguments: tuple[tuple[str | None, ...] | None, ...]
    operations: tuple[DrawnOperation, ...]

    def sources(self, mesh_axis):
        """Everything that has a mesh axis of its own."""
        return {
            ("argument", number)
            for number, spec in enumerate(self.arguments)
            if spec and mesh_axis in spec
        } | {
            ("constraint", number)
            for number, operation in enumerate(self.operations)
            if operation.kind == PINNED and mesh_axis in operation.spec
        }

    def without(self, mesh_axis, sources):
        """A program like this one, some sources of which do not have a mesh axis any more."""

        def taken(spec, instead):
            return tuple(instead if each == mesh_axis else each for each in spec)

        return DrawnProgram(
            tuple(
                taken(spec, None) if ("argument", number) in sources else spec
                for number, spec in enumerate(self.arguments)
            ),
            tuple(
                dataclasses.replace(
                    operation,
                    spec=tuple(
                        P.UNCONSTRAINED if each in (None, mesh_axis) else each
                        for each in operation.spec
                    ),
                )
                if ("constraint", number) in sources
                else operation
                for number, operation in enumerate(self.operations)
            ),
        )

    def lowered(self):
        structs = [undecided() if spec is None else array(*spec) for spec in self.arguments]
        return jax.jit(self._run).trace(structs).lower(lowering_platforms=("cpu",))

    def _run(self, xs):
        values = list(xs)
        for number, operation in enumerate(self.operations):
            x, y = values[operation.first], values[operation.second]
            if operation.kind == PINNED:
                with jax.named_scope(f"constraint_{number}"):
                    values.append(pinned(x, *operation.spec))
            else:
                values.append(KINDS[operation.kind](x, y))
        return values[-1], values[-2]


def source_of(cause):
    """What a cause is among a drawn program's sources."""
    pattern = r"constraint_(\d+)" if cause.kind == "constraint" else r"\[(\d+)\]"
    return cause.kind, int(re.search(pattern, cause.name)[1])


@st.composite
def drawn_programs(draw):
    arguments = draw(st.lists(st.none() | SPECS, min_size=2, max_size=4))
    operations = []
    for number in range(draw(st.integers(2, 7))):
        values = len(arguments) + number
        operations.append(
            DrawnOperation(
                draw(st.sampled_from([*KINDS, PINNED, PINNED])),
                draw(st.integers(max(0, values - 4), values - 1)),
                draw(st.integers(0, values - 1)),
                draw(SPECS.filter(any)),
            )
        )
    return DrawnProgram(tuple(arguments), tuple(operations))
