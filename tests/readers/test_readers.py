"""Models as the guides of their libraries write them have the names that they were given."""

import collections
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard.arrays.structure import Named, flatten, leaves_of
from penzai_shard.readers import Content, register_reader
from tests import models

INIT = nn.initializers.lecun_normal()
MESH = AbstractMesh((2, 4), ("data", "model"))


def make_param(**metadata):
    with nnx.use_eager_sharding(False):
        return nnx.Param(jnp.ones((2, 3)), **metadata)


# Names that are given


def make_dense(partition, *names):
    layer = nn.Dense(16, use_bias=False, kernel_init=partition(INIT, names))
    variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((2, 8)))
    return variables["params"]["kernel"]


@pytest.mark.parametrize(
    ("array", "names"),
    [
        (make_dense(nn.with_partitioning, "embed", "mlp"), ("embed", "mlp")),
        (make_dense(nn.with_logical_partitioning, None, "mlp"), (None, "mlp")),
        (make_dense(nn.with_partitioning, ("data", "model"), ("seq",)), (("data", "model"), "seq")),
        (make_dense(nn.with_partitioning, "embed"), ("embed", None)),
        (make_param(), None),
        (make_param(out_sharding=("embed", "mlp")), ("embed", "mlp")),
        (make_param(out_sharding=P("embed", None)), ("embed", None)),
        (make_param(out_sharding=NamedSharding(MESH, P("data"))), ("data", None)),
        (models.model("haliax linear").weight, ("mlp", "embed")),
        (pz.nx.NamedArray(collections.OrderedDict(a=2), jnp.ones((5, 2))), (None, "a")),
        # Names are in the order of the data.
        (pz.nx.ones({"a": 2, "b": 3, "c": 5}).untag("b"), ("a", None, "c")),
    ],
)
def test_array_has_the_names_that_it_was_given(array, names):
    assert leaves_of(array)[0].names == names


@pytest.mark.parametrize(
    "array",
    [
        nn.Partitioned(jnp.ones((2, 3)), "embed"),
        nn.LogicallyPartitioned(jnp.ones((2, 3)), ("embed", P.UNCONSTRAINED)),
        nn.LogicallyPartitioned(jnp.ones((2, 3)), ("embed", {"mlp": 1})),
        nn.Partitioned(nn.Partitioned(jnp.ones((2, 3)), ("embed", "mlp")), ("a", "b")),
        make_param(out_sharding="embed"),
        make_param(out_sharding=("embed", P.UNCONSTRAINED)),
    ],
)
def test_names_that_cannot_be_read_are_a_problem(array):
    (problem,) = flatten({"a": array, "b": jnp.ones(2)})[1].problems
    assert (problem.path, problem.kind) == ("a", "unreadable")
    assert problem.fix


# What else readers tell


def test_nnx_module_has_names_and_roles():
    found = {leaf.path: (leaf.names, leaf.role) for leaf in leaves_of(models.nnx_block())}
    assert found["first/kernel"] == (("embed", "mlp"), "parameter")
    assert found["norm/mean"] == (None, "state")
    assert found["dropout/rngs/key"] == ((), "state")


def test_penzai_statistic_tells_the_array_that_it_belongs_to():
    rows = jax.tree.map(lambda x: {"row": x[0], "none": None}, pz.nx.ones({"a": 2, "b": 3}))
    leaves, structure = flatten({"w": rows})
    assert [(leaf.path, leaf.shape) for leaf in leaves] == [("w/row", (3,))]
    assert (leaves[0].statistic.names, leaves[0].statistic.sizes) == (("a", "b"), (2, 3))
    made = structure.fill([leaves[0].value])["w"]
    assert jax.tree.structure(made) == jax.tree.structure(rows)


# A reader of anybody. The example of ``register_reader`` is one of an array with names.


@dataclasses.dataclass
class Weights:
    """Arrays in a plain dictionary, as a train state has them."""

    arrays: dict[str, jax.Array]
    step: str


class WeightsReader:
    library = __name__

    def reads(self, kind):
        return kind is Weights

    def open(self, node):
        arrays = {path: Named(x, ("a", "b"), "parameter") for path, x in node.arrays.items()}
        return Content(arrays, template=node.step)

    def close(self, template, data):
        return Weights(data, template)


def test_register_reader_takes_nodes_there_and_back():
    register_reader(WeightsReader())
    weights = Weights({"up": jnp.ones((2, 3))}, "last")
    (leaf,), structure = flatten({"w": weights})
    assert (leaf.path, leaf.names, leaf.role) == ("w/up", ("a", "b"), "parameter")
    assert structure.fill([2]) == {"w": Weights({"up": 2}, "last")}
    assert structure == flatten(structure.fill([leaf.value]))[1]
    assert structure != flatten({"w": dataclasses.replace(weights, step="first")})[1]
