"""Small programs on a mesh without devices, for tests of where layouts come from and get lost."""

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from penzai_shard.sharding_propagation import PropagatedProgram

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def array(*spec, shape=(16, 16), dtype=jnp.float32, mesh=MESH):
    """An argument with a layout of its own, which nothing can change."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def undecided(shape=(16, 16), dtype=jnp.float32):
    """An argument whose layout is what is propagated to it."""
    return jax.ShapeDtypeStruct(shape, dtype)


def pinned(x, *spec, mesh=MESH):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def manual(function, into, out, axes=("data", "model"), mesh=MESH):
    return jax.shard_map(
        function, mesh=mesh, in_specs=into, out_specs=out, axis_names=set(axes), check_vma=False
    )


def propagate(function, *arguments, platform="cpu", **options):
    traced = jax.jit(function, **options).trace(*arguments)
    return PropagatedProgram.of(traced.lower(lowering_platforms=(platform,)))


def spec_of_result(program, number=0):
    return program.values[program.results[number]].spec
