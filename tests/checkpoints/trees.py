"""Compares trees of arrays to the bit, and makes others like them."""

import jax
import jax.numpy as jnp
import numpy as np

import penzai_shard as pzs
from penzai_shard.arrays.structure import flatten, leaves_of
from tests.refusals import problems_of


def is_key(value):
    return jnp.issubdtype(jnp.asarray(value).dtype, jax.dtypes.prng_key)


def numbers(value):
    """The numbers of an array, with names or without; of random keys those behind them."""
    data = getattr(value, "data_array", value)
    return np.asarray(jax.random.key_data(data) if is_key(data) else jnp.asarray(data))


def pointers(*arrays):
    return [s.data.unsafe_buffer_pointer() for x in arrays for s in x.addressable_shards]


def contents(tree):
    """Names, dtype, shape and bits of every array by its path."""

    def read(leaf):
        dtype = jnp.asarray(leaf.value).dtype
        return leaf.names, dtype, leaf.shape, numbers(leaf.value).tobytes()

    return {leaf.path: read(leaf) for leaf in leaves_of(tree)}


def params(model):
    return contents(pzs.param_dict(model))


def blank(tree):
    """The tree with zeros for numbers."""
    leaves, structure = flatten(tree)
    zeros = [x.value if is_key(x.value) else np.zeros(x.shape, x.dtype) for x in leaves]
    return structure.fill_alike(zeros)


def structs_of(tree, sharding=None):
    leaves, structure = flatten(tree)
    return structure.fill(
        [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for leaf in leaves]
    )


def assert_lies(tree, mesh, rules=None, **options):
    """Every array, also of state variables, lies as planned."""
    plan = pzs.make_plan(tree, mesh, rules, **options)
    assert_lies_as(tree, plan.sharding_tree())


def assert_lies_as(tree, shardings):
    for leaf, wanted in zip(leaves_of(tree), leaves_of(shardings), strict=True):
        assert leaf.value.sharding == wanted.value, leaf.path


def refused_kinds(error, call, *args, **kwargs):
    """The kinds of the problems with which a call is refused, by path."""
    kinds = {}
    for problem in problems_of(error, call, *args, **kwargs):
        kinds[problem.path] = f"{kinds.get(problem.path, '')} {problem.kind}".strip()
    return kinds
