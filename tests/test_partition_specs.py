"""Specs taken apart and put together, by example and, for whatever specs, by property."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from penzai_shard import make_mesh
from penzai_shard.partition_specs import (
    canonical_spec,
    mesh_axes_by_dimension,
    mesh_axes_used,
    part_count,
    permuted_spec,
    restricted_spec,
)

MESH_SHAPE = {"x": 2, "y": 2, "z": 2}


@st.composite
def axes_per_dimension(draw):
    """Mesh axes per dimension, each mesh axis at most once."""
    rank = draw(st.integers(0, 4))
    dimensions = [[] for _ in range(rank)]
    for axis in draw(st.permutations(list(MESH_SHAPE))):
        if rank and draw(st.booleans()):
            dimensions[draw(st.integers(0, rank - 1))].append(axis)
    return tuple(map(tuple, dimensions))


def is_canonical(spec):
    return not len(spec) or spec[-1] is not None


@hypothesis.given(axes_per_dimension())
def test_a_spec_and_its_mesh_axes_per_dimension_say_the_same(dimensions):
    spec = canonical_spec(dimensions)
    assert is_canonical(spec)
    assert mesh_axes_by_dimension(spec, len(dimensions)) == dimensions
    assert mesh_axes_used(spec) == set(itertools.chain(*dimensions))
    # Whatever trailing None were there, and however it was written.
    assert canonical_spec(P(*dimensions, None)) == canonical_spec(spec) == spec


@hypothesis.given(axes_per_dimension(), st.sets(st.sampled_from(list(MESH_SHAPE))))
def test_restricting_leaves_the_other_mesh_axes_in_their_order(dimensions, wanted):
    spec = restricted_spec(canonical_spec(dimensions), wanted)
    assert is_canonical(spec)
    assert mesh_axes_by_dimension(spec, len(dimensions)) == tuple(
        tuple(axis for axis in axes if axis in wanted) for axes in dimensions
    )


@hypothesis.given(axes_per_dimension(), st.data())
def test_permuting_is_what_numpy_does_to_shapes(dimensions, data):
    order = data.draw(st.permutations(range(len(dimensions))))
    shape = tuple(8 * (i + 1) for i in range(len(dimensions)))
    spec = permuted_spec(canonical_spec(dimensions), order)
    assert is_canonical(spec)
    permuted = np.transpose(np.zeros(shape, np.int8), order).shape
    by_size = dict(zip(shape, dimensions, strict=True))
    assert mesh_axes_by_dimension(spec, len(shape)) == tuple(by_size[size] for size in permuted)


@hypothesis.given(axes_per_dimension())
def test_the_number_of_parts_is_that_of_jax(dimensions):
    sharding = NamedSharding(make_mesh(MESH_SHAPE), canonical_spec(dimensions))
    shape = (8,) * len(dimensions)
    counts = tuple(part_count(axes, MESH_SHAPE) for axes in dimensions)
    assert sharding.shard_shape(shape) == tuple(8 // count for count in counts)


def test_jax_writes_one_mesh_axis_and_none_in_one_way():
    # What ``canonical_spec`` leaves to it.
    assert tuple(P(("x",), (), "y", ("x", "y"))) == ("x", None, "y", ("x", "y"))


def test_a_dimension_that_is_left_to_jax_stays_so():
    spec = P("x", P.UNCONSTRAINED)
    assert canonical_spec(spec) == spec
    assert restricted_spec(spec, {"y"}) == P(None, P.UNCONSTRAINED)
    assert permuted_spec(spec, (1, 0)) == P(P.UNCONSTRAINED, "x")
    assert mesh_axes_used(spec) == {"x"}
    with pytest.raises(ValueError, match="leaves a dimension to JAX"):
        mesh_axes_by_dimension(spec)


def test_a_spec_longer_than_the_rank_is_refused():
    with pytest.raises(ValueError, match="3 entries, more than an array of rank 2"):
        mesh_axes_by_dimension(P("x", None, "y"), 2)


def test_equal_layouts_have_equal_specs_after_jit():
    mesh = make_mesh({"x": 8})
    sharding = NamedSharding(mesh, canonical_spec(P("x", None)))
    array = jax.jit(lambda a: a, out_shardings=sharding)(np.zeros((8, 2)))
    assert array.sharding == sharding
