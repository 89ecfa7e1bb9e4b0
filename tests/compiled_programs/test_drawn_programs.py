"""Programs drawn at random, against a reader that shares no code with the package's."""

import collections

import hypothesis
import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import compiled_collectives as oracle
from penzai_shard.compiled_programs import (
    Module,
    read_collectives,
)
from penzai_shard.meshes import make_mesh

MESH = make_mesh({"data": 2, "model": 2, "extra": 2})
# As which mesh the devices are read: theirs, and such of which their groups go over parts.
SIZES = (dict(MESH.shape), {"data": 4, "model": 2}, {"all": 8}, {"a": 2, "one": 1, "b": 4})
# The axes of a matrix' two dimensions.
SPECS = st.permutations([*MESH.axis_names, None]).flatmap(
    lambda names: st.sampled_from(
        [
            PartitionSpec(names[0], names[1]),
            PartitionSpec(tuple(name for name in names[:2] if name), names[2]),
            PartitionSpec(None, tuple(name for name in names[:3] if name)),
        ]
    )
)


def laid_out(spec):
    return NamedSharding(MESH, spec)


def program(specs, turns):
    """Some matrices multiplied one after the other, each laid out in some way; turn by turn."""

    def function(x, *matrices):
        def turn(x, _):
            for matrix, spec in zip(matrices, specs[1:], strict=True):
                x = jax.lax.with_sharding_constraint(jnp.tanh(x @ matrix), laid_out(spec))
            return x, x.sum()

        return jax.lax.scan(turn, x, None, length=turns) if turns else turn(x, None)

    structs = [jax.ShapeDtypeStruct((16, 16), "float32", sharding=laid_out(spec)) for spec in specs]
    return jax.jit(function).lower(*structs).compile()


def axes(one, sizes):
    found = one.axes(sizes)
    is_exact = found is not None and (found.is_whole or one.kind == "collective-permute")
    return found.mesh_axes if is_exact else None


@hypothesis.settings(max_examples=10)
@hypothesis.given(st.lists(SPECS, min_size=3, max_size=3), st.sampled_from([0, 0, 3]))
def test_a_reader_that_shares_no_code_finds_the_same(specs, turns):
    text = program(specs, turns).as_text()
    for sizes in SIZES:
        assert_readers_agree(text, sizes)


def assert_readers_agree(text, sizes):
    expected = collections.Counter(
        (one.kind, one.mesh_axes, one.payload_bytes, one.times, one.name)
        for one in oracle.read_collectives(text, sizes)
    )
    found = collections.Counter(
        (one.kind, axes(one, sizes), one.payload_bytes, one.times, one.name)
        for one in read_collectives(Module.from_text(text), 8)
    )
    assert found == expected
