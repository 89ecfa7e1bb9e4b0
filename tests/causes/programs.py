"""Small programs on a mesh without devices, and programs drawn at random.

Sources of layouts in a drawn program can be taken away one by one.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from penzai_shard.causes.ways import Ways
from penzai_shard.propagation.flat import propagate_lowered
from tests.propagation.programs import array, lower, pinned, undecided


def find_ways(function, *arguments, **options):
    return Ways(propagate_lowered(lower(function, *arguments, keep_unused=True, **options)))


def scanned(x, weights):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)[0]


# Drawn programs

PINNED = "pinned"
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
    "loop": lambda x, y: jax.lax.scan(lambda c, _: (jnp.tanh(c @ y), None), x, length=2)[0],
    "branches": lambda x, y: jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(x), lambda: y),
}
# Each mesh axis is alone on a dimension: taking one away leaves no other order of the rest.
NAMES = (None, "data", "model")
SPECS = [(a, b) for a in NAMES for b in NAMES if a is None or a != b]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The specs of arguments, and operations: kind, two values, the spec of a constraint."""

    arguments: tuple
    operations: tuple

    def sources(self, mesh_axis):
        """Everything that has a mesh axis of its own."""
        specs = {("argument", i): spec or () for i, spec in enumerate(self.arguments)}
        for i, (kind, *_, spec) in enumerate(self.operations):
            specs["constraint", i] = spec if kind == PINNED else ()
        return {source for source, spec in specs.items() if mesh_axis in spec}

    def without(self, mesh_axis, sources):
        """A program like this one, some sources of which have a mesh axis no more."""

        def take(source, spec, instead, *taken):
            has_it = spec and source in sources
            return tuple(instead if x in taken else x for x in spec) if has_it else spec

        arguments = (
            take(("argument", i), spec, None, mesh_axis) for i, spec in enumerate(self.arguments)
        )
        operations = (
            (*one, take(("constraint", i), spec, P.UNCONSTRAINED, None, mesh_axis))
            for i, (*one, spec) in enumerate(self.operations)
        )
        return Drawn(tuple(arguments), tuple(operations))

    def find_ways(self):
        """The ways of its last two values, which come out."""
        return find_ways(
            self._run, [undecided() if s is None else array(*s) for s in self.arguments]
        )

    def _run(self, xs):
        values = list(xs)
        for i, (kind, first, second, spec) in enumerate(self.operations):
            with jax.named_scope(f"constraint_{i}"):
                x, y = values[first], values[second]
                values.append(pinned(x, *spec) if kind == PINNED else KINDS[kind](x, y))
        return values[-1], values[-2]


def draw(rng):
    """A program of 2 to 4 arguments and 2 to 7 operations."""
    arguments = [rng.choice([None, *SPECS]) for _ in range(rng.randint(2, 4))]
    operations = []
    for count in range(len(arguments), len(arguments) + rng.randint(2, 7)):
        kind, first = rng.choice([*KINDS, PINNED, PINNED]), rng.randrange(max(0, count - 4), count)
        operations.append((kind, first, rng.randrange(count), rng.choice(SPECS[1:])))
    return Drawn(tuple(arguments), tuple(operations))


def source_of(ways, cause):
    """What a cause is among the sources of a drawn program."""
    if cause.kind == "argument":
        return cause.kind, ways.program.arguments.index(cause.value)
    return cause.kind, int(re.search(r"constraint_(\d+)", cause.operation.name)[1])
