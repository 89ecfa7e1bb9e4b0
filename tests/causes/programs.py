"""Small programs on a mesh without devices, and programs drawn at random.

Sources of layouts in a drawn program can be taken away one by one.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from penzai_shard.causes.ways import Ways, base
from penzai_shard.propagation.flat import propagate_lowered
from tests.propagation.programs import SHARD_MAPS, array, lower, pinned, undecided


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
# What brings its own layouts is drawn only where none is taken away.
OTHERS = {f"shard_map {name}": each for name, each in SHARD_MAPS.items() if name != "two results"}
ALL_KINDS = KINDS | OTHERS | {"the largest": lambda x, y: jax.lax.top_k(x, 16)[0]}
# Each mesh axis is alone on a dimension: taking one away leaves no other order of the rest.
NAMES = (None, "data", "model")
SPECS = [(a, b) for a in NAMES for b in NAMES if a is None or a != b]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The specs of arguments, and operations: kind, two values, the spec of a constraint."""

    arguments: tuple
    operations: tuple

    def structs(self):
        return [undecided() if spec is None else array(*spec) for spec in self.arguments]

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

    def run(self, number, xs):
        """Its last two values, which come out."""
        values = list(xs)
        for i, (kind, first, second, spec) in enumerate(self.operations):
            with jax.named_scope(f"program_{number}/constraint_{i}"):
                x, y = values[first], values[second]
                values.append(pinned(x, *spec) if kind == PINNED else ALL_KINDS[kind](x, y))
        return values[-1], values[-2]


class SideBySide:
    """Drawn programs in one, which have nothing to do with each other: lowering takes the time."""

    def __init__(self, drawn):
        arguments = [one.structs() for one in drawn]
        self.ways = find_ways(
            lambda every: [drawn[n].run(n, xs) for n, xs in enumerate(every)], arguments
        )
        left = iter(self.ways.program.arguments)
        self._arguments = [[next(left) for _ in every] for every in arguments]

    def spec(self, number):
        """The spec of the last value of a program."""
        return self.ways.values[self.ways.program.results[2 * number]].spec or ((), ())

    def source(self, number, mesh_axis):
        """Which source of a program the mesh axis of its last value comes from."""
        cause = self.ways.cause(self.ways.program.results[2 * number], mesh_axis)
        if cause.kind == "argument":
            return cause.kind, self._arguments[number].index(cause.value)
        name = rf"program_{number}/.*constraint_(\d+)"
        return cause.kind, int(re.search(name, cause.operation.name)[1])

    def is_contested(self, number, mesh_axis):
        """Whether two dimensions want a mesh axis: all sources together then say who wins."""
        return any(
            loss.reason in ("used", "conflict") and base(loss.mesh_axis) == mesh_axis
            for loss in self.ways.losses
            if f"program_{number}/" in loss.operation.name
        )


def draw(rng, kinds=KINDS):
    """A program of 2 to 4 arguments and 2 to 7 operations."""
    arguments = [rng.choice([None, *SPECS]) for _ in range(rng.randint(2, 4))]
    operations = []
    for count in range(len(arguments), len(arguments) + rng.randint(2, 7)):
        kind, first = rng.choice([*kinds, PINNED, PINNED]), rng.randrange(max(0, count - 4), count)
        operations.append((kind, first, rng.randrange(count), rng.choice(SPECS[1:])))
    return Drawn(tuple(arguments), tuple(operations))
