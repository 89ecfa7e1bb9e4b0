"""Models as the guides of their libraries write them have the names that they were given."""

import collections
import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx, struct
from flax.core import meta
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard.arrays.structure import Named, flatten, leaves_of
from penzai_shard.errors import RuleTypeError
from penzai_shard.readers import Content, reader, register_reader
from penzai_shard.readers.penzai import make_named
from tests import models

INIT = nn.initializers.lecun_normal()
MESH = AbstractMesh((2, 4), ("data", "model"))


def names_in(tree):
    return {leaf.path: leaf.names for leaf in leaves_of(tree)}


def shapes_of(init):
    return jax.eval_shape(init, jax.random.key(0), jnp.ones((2, 8)))


# Flax linen


def dense(partition, *names, **options):
    return nn.Dense(16, use_bias=False, kernel_init=partition(INIT, names, **options))


class ScannedLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        init = nn.with_partitioning(INIT, ("embed", "embed_out"))
        return nn.Dense(8, use_bias=False, kernel_init=init)(x), None


def scanned(layer_axis):
    return nn.scan(
        ScannedLayer,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        length=3,
        metadata_params={nn.PARTITION_NAME: layer_axis},
    )()


class SpecBox(struct.PyTreeNode, meta.AxisMetadata):
    """A box of a user, which gives its names by the method that Flax asks."""

    content: jax.Array

    def unbox(self):
        return self.content

    def replace_boxed(self, val):
        return self.replace(content=val)

    def add_axis(self, index, params):
        return self

    def remove_axis(self, index, params):
        return self

    def get_partition_spec(self):
        return P("embed", "mlp")


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (dense(nn.with_partitioning, "embed", "mlp"), ("embed", "mlp")),
        (dense(nn.with_logical_partitioning, "embed", "mlp"), ("embed", "mlp")),
        (dense(nn.with_logical_partitioning, None, "mlp"), (None, "mlp")),
        (dense(nn.with_partitioning, ("data", "model"), ("seq",)), (("data", "model"), "seq")),
        (dense(nn.with_partitioning, "embed"), ("embed", None)),
    ],
)
def test_linen_dense_has_the_names_of_its_initializer(module, names):
    assert names_in(shapes_of(module.init)) == {"params/kernel": names}


@pytest.mark.parametrize("layer_axis", ["layers", None])
def test_linen_scan_adds_the_axis_of_layers(layer_axis):
    module = scanned(layer_axis)
    tree = jax.eval_shape(lambda key: module.init(key, jnp.ones((2, 8)), None), jax.random.key(0))
    assert [*names_in(tree).values()] == [(layer_axis, "embed", "embed_out")]


@pytest.mark.parametrize("data", [jnp.ones((2, 3)), jax.ShapeDtypeStruct((2, 3), "float32")])
def test_linen_box_of_a_user_is_read_and_made_again(data):
    leaves, structure = flatten({"w": SpecBox(data)})
    assert leaves[0].names == ("embed", "mlp")
    made = structure.fill([data])
    assert isinstance(made["w"], SpecBox)
    assert made["w"].content is data


def test_linen_mesh_of_a_box_is_noted():
    box = nn.Partitioned(jnp.ones((2, 3)), ("data", None), mesh=MESH)
    leaves, structure = flatten({"w": box})
    assert leaves[0].names == ("data", None)
    assert structure.notes.keys() == {"w"}
    assert structure.fill([leaves[0].value])["w"].mesh is MESH


@pytest.mark.parametrize(
    "box",
    [
        lambda data: nn.Partitioned(data, "embed"),
        lambda data: nn.LogicallyPartitioned(data, ("embed", P.UNCONSTRAINED)),
        lambda data: nn.LogicallyPartitioned(data, ("embed", {"mlp": 1})),
        lambda data: nn.Partitioned(nn.Partitioned(data, ("embed", "mlp")), ("a", "b")),
    ],
)
def test_linen_names_that_cannot_be_read_are_a_problem(box):
    _, structure = flatten({"a": box(jnp.ones((2, 3))), "b": jnp.ones(2)})
    (problem,) = structure.problems
    assert (problem.path, problem.kind) == ("a", "unreadable")
    assert problem.fix


# Flax NNX


def param(**metadata):
    with nnx.use_eager_sharding(False):
        return nnx.Param(jnp.ones((2, 3)), **metadata)


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        (param(), None),
        (param(out_sharding=("embed", "mlp")), ("embed", "mlp")),
        (param(out_sharding=P("embed", None)), ("embed", None)),
        (param(out_sharding=NamedSharding(MESH, P("data"))), ("data", None)),
    ],
)
def test_nnx_variable_has_the_names_of_its_metadata(variable, names):
    assert names_in({"v": variable}) == {"v": names}


def test_nnx_module_has_names_roles_and_random_state():
    leaves, structure = flatten(models.nnx_block())
    found = {leaf.path: (leaf.names, leaf.role) for leaf in leaves}
    assert found["first/kernel"] == (("embed", "mlp"), "parameter")
    assert found["first/bias"] == (None, "parameter")
    assert found["norm/mean"] == (None, "state")
    assert found["dropout/rngs/key"] == ((), "state")
    assert structure.notes.keys() == {"dropout/rngs/key", "dropout/rngs/count"}


@pytest.mark.parametrize("given", ["embed", ("embed", P.UNCONSTRAINED)])
def test_nnx_names_that_cannot_be_read_are_a_problem(given):
    _, structure = flatten({"v": param(out_sharding=given)})
    (problem,) = structure.problems
    assert (problem.path, problem.kind) == ("v", "unreadable")
    assert problem.fix


# Penzai and Haliax


def test_haliax_has_the_names_of_its_axes():
    assert names_in(models.haliax_linear()) == {"weight": ("mlp", "embed"), "bias": ("mlp",)}


def test_penzai_names_are_in_the_order_of_the_data():
    positional = pz.nx.NamedArray(collections.OrderedDict(a=2), jnp.ones((5, 2)))
    view = pz.nx.ones({"a": 2, "b": 3, "c": 5}).untag("b")
    assert names_in({"p": positional, "v": view}) == {"p": (None, "a"), "v": ("a", None, "c")}


@pytest.mark.parametrize("names", [("a", "b"), (None, "b"), ("a", None), (None, None)])
def test_make_named_has_the_names_and_computes(names):
    array = make_named(jnp.arange(6.0).reshape(2, 3), names)
    assert names_in({"w": array}) == {"w": names}
    assert dict(array.named_shape) == {
        name: size for name, size in zip(names, (2, 3), strict=True) if name
    }
    assert (array + 1).named_shape == array.named_shape


def test_penzai_statistic_tells_the_array_that_it_belongs_to():
    array = pz.nx.ones({"a": 2, "b": 3})
    rows = jax.tree.map(lambda x: {"row": x[0], "none": None}, array)
    leaves, structure = flatten({"w": rows})
    assert [(leaf.path, leaf.shape) for leaf in leaves] == [("w/row", (3,))]
    assert (leaves[0].statistic.names, leaves[0].statistic.sizes) == (("a", "b"), (2, 3))
    made = structure.fill([leaves[0].value])["w"]
    assert jax.tree.structure(made) == jax.tree.structure(rows)


@pytest.mark.parametrize(
    "tree", [nn.Dense(4), nnx.graphdef(nnx.Dict())], ids=["linen module", "graph definition"]
)
def test_refusal_of_what_holds_no_arrays(tree):
    what, fix = reader.find_refusal(tree)
    assert what
    assert fix
    assert reader.find_refusal({"w": 1.0}) is None


# Readers of anybody


@dataclasses.dataclass
class Field:
    values: jax.Array
    dims: tuple[str, ...]


class FieldReader:
    library = __name__

    def reads(self, kind):
        return kind is Field

    def open(self, node):
        return Content(node.values, template=node.dims, names=node.dims)

    def close(self, template, data):
        return Field(data, template)


@dataclasses.dataclass
class Weights:
    """Arrays in a plain dictionary, as a train state has them."""

    arrays: dict[str, jax.Array]


class WeightsReader(FieldReader):
    def reads(self, kind):
        return kind is Weights

    def open(self, node):
        arrays = {path: Named(x, ("a", "b"), "parameter") for path, x in node.arrays.items()}
        return Content(arrays, template="weights")

    def close(self, template, data):
        return Weights(data)


@pytest.fixture
def registered(monkeypatch):
    def forget():
        reader._reader_of.cache_clear()
        reader._is_module.cache_clear()

    monkeypatch.setattr(reader, "_registered", [])
    register_reader(FieldReader())
    register_reader(WeightsReader())
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.usefixtures("registered")
def test_register_reader_takes_nodes_there_and_back():
    tree = {"f": Field(jnp.ones((8, 2)), ("time", "x")), "w": Weights({"up": jnp.ones((2, 3))})}
    leaves, structure = flatten(tree)
    found = {leaf.path: (leaf.names, leaf.role) for leaf in leaves}
    assert found == {"f": (("time", "x"), ""), "w/up": (("a", "b"), "parameter")}
    assert structure.fill([1, 2]) == {"f": Field(1, ("time", "x")), "w": Weights({"up": 2})}
    assert structure == flatten(structure.fill([x.value for x in leaves]))[1]
    assert structure != flatten(tree | {"f": Field(jnp.ones((8, 2)), ("time", "y"))})[1]


def test_register_reader_is_forgotten_after_the_test():
    assert not leaves_of(Field(jnp.ones((8, 2)), ("time", "x")))


@pytest.mark.parametrize("given", [FieldReader, object()])
def test_register_reader_refuses_what_is_no_reader(given):
    with pytest.raises(RuleTypeError):
        register_reader(given)
