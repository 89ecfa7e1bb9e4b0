"""Arithmetic of PartitionSpecs, with JAX's own answers as the oracle."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from penzai_shard import specs

SIZES = {"x": 4, "y": 2, "z": 3}
MESH = AbstractMesh(tuple(SIZES.values()), tuple(SIZES))
AXES = st.permutations([*SIZES]).map(tuple)
ENTRIES = st.one_of(
    AXES.map(lambda axes: (axes[:2], axes[2:])),
    AXES.map(lambda axes: (axes[:1], None, axes[1:])),
    AXES.map(lambda axes: (None, axes[0], (), axes[1:2])),
)


@given(ENTRIES)
def test_parts_are_those_of_jax_and_the_canonical_spec_is_the_same_layout(entries):
    spec, shape = specs.canonical(entries), (24,) * len(entries)
    part = NamedSharding(MESH, P(*entries)).shard_shape(shape)
    assert specs.bytes_per_device(spec, shape, 2, SIZES) == 2 * np.prod(part)
    assert not spec or spec[-1] is not None
    assert not any(isinstance(entry, tuple) and len(entry) < 2 for entry in spec)
    assert specs.canonical(specs.mesh_axes(spec, len(entries))) == spec


def test_canonical_spec_is_that_of_a_compiled_result():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layout = NamedSharding(mesh, P(("x",), None, None))
    given_back = jax.jit(lambda a: a, out_shardings=layout)(np.ones((4, 2, 2), "float32"))
    assert specs.canonical(layout.spec) == P("x") == specs.canonical(given_back.sharding.spec)


def test_what_is_left_to_jax_has_no_mesh_axes():
    spec = P(("x", "y"), P.UNCONSTRAINED, "y")
    with pytest.raises(ValueError, match="mesh axes"):
        specs.mesh_axes(spec, 3)
