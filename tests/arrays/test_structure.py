"""Any tree is taken apart into arrays and a static rest, and joined again as it was."""

import collections
import dataclasses
import functools
import itertools
import sys
from typing import Any

import equinox as eqx
import flax.linen as nn
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from penzai_shard.arrays.static_values import same_static
from penzai_shard.arrays.structure import flatten, leaves_of, read_variables
from penzai_shard.errors import ShardingError
from tests import models
from tests.refusals import problem_paths

ROLES = ("parameter", "state")


@pz.pytree_dataclass
class Module(pz.Struct):
    inner: Any
    setting: Any = dataclasses.field(default=None, metadata={"pytree_node": False})


def are_identical(a, b):
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def values_of(tree):
    return [leaf.value for leaf in leaves_of(tree)]


def freeze(tree):
    # Modules of NNX have no frozen form, and Penzai would part the ones that occur twice.
    return tree if isinstance(tree, nnx.Pytree) else pz.freeze_variables(tree)


def assert_laws(tree):
    """What holds for every tree whose labels are unique."""
    frozen = freeze(tree)
    leaves, structure = flatten(tree)
    values = [leaf.value for leaf in leaves]
    filled = structure.fill(values)
    assert not structure.problems
    assert jax.tree.structure(filled) == jax.tree.structure(frozen)
    assert are_identical(jax.tree.leaves(filled), jax.tree.leaves(frozen))

    # JAX knows nothing of these.
    markers = [object() for _ in leaves]
    marked = [x for x in jax.tree.leaves(structure.fill(markers)) if type(x) is object]
    assert [*dict.fromkeys(marked)] == markers

    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    # One sharding for all: which variables are one does not follow from what they hold.
    shardings = [NamedSharding(Mesh(jax.devices(), "data"), P())] * len(leaves)
    for others in (values, structs, shardings):
        for live in ((), ROLES):
            again, of_again = flatten(structure.fill(others, live=live))
            assert are_identical([leaf.value for leaf in again], others)
        assert flatten(structure.fill(others))[1] == flatten(frozen)[1]
        assert hash(of_again) == hash(structure)

    for roles in ((), ("state",), ROLES):
        assert are_identical(structure.read(structure.fill(values, live=roles)), values)
    roles = {variable.role for variable in structure.variables if variable.live}
    assert flatten(structure.fill(values, live=roles))[1] == structure


# Models of all libraries


@pytest.mark.parametrize("name", models.MODELS)
def test_laws_of_a_model(name):
    tree = models.model(name)
    structure, of_another_build = flatten(tree)[1], flatten(models.MODELS[name](1))[1]
    assert structure == of_another_build
    assert hash(structure) == hash(of_another_build)
    if name != "uninitialized v1 mlp":
        assert_laws(tree)


def test_fill_keeps_modules_and_variables_that_occur_twice():
    one, other = models.nnx_block(), models.nnx_block()
    other.first = one.first
    leaves, structure = flatten({"a": one, "b": other, "again": one})
    made = structure.fill([leaf.value for leaf in leaves])
    assert len({leaf.path for leaf in leaves}) == len(leaves)
    assert made["again"] is made["a"]
    assert made["a"].tied is made["a"].first
    assert made["b"].first.kernel is made["a"].first.kernel
    assert made["b"].tied.kernel is not made["a"].tied.kernel


def test_flatten_a_variable_of_shapes_is_one_leaf_after_an_edit():
    model = pzs.abstract_model(models.llama, tied=True)
    blocks = pz.select(model).at_instances_of(pz.nn.Residual)
    paths = [leaf.path for leaf in leaves_of(blocks.insert_after(pz.nn.Identity()))]
    assert paths.count("transformer/embedder.embeddings") == 1
    assert len(paths) == len(leaves_of(model))


# Trees of every form

LABELS = itertools.count()
SHARED = pz.Parameter(label="shared", value=pz.nx.ones({"a": 2, "b": 3}))
SHARED_STATE = pz.StateVariable(value={"x": jnp.zeros(2), "y": jnp.zeros(3)})
ARRAYS = st.sampled_from(
    [
        lambda: jnp.ones((2, 3)),
        lambda: np.ones(4, np.float32),
        lambda: jax.random.key(0),
        lambda: pz.nx.ones({"a": 2, "b": 3}).untag("b"),
        lambda: pz.nx.NamedArray(collections.OrderedDict(a=2), jnp.ones((5, 2))),
        lambda: hax.ones(hax.Axis("a", 2)),
    ]
).map(lambda make: make())
VALUES = st.one_of(ARRAYS, st.none(), st.dictionaries(st.sampled_from("pqr"), ARRAYS))
VARIABLES = st.one_of(
    st.builds(lambda value: pz.StateVariable(value=value), VALUES),
    st.builds(lambda value: pz.Parameter(label=f"label/{next(LABELS)}", value=value), VALUES),
    st.sampled_from([SHARED, SHARED_STATE]),
)
OTHERS = st.one_of(st.none(), st.integers(), st.floats(), st.booleans(), st.just(len), st.just("s"))
TREES = st.recursive(
    st.one_of(ARRAYS, VARIABLES, OTHERS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("uvw"), inner),
        st.builds(Module, inner, st.sampled_from([1, "a", None])),
    ),
    max_leaves=8,
)


@settings(max_examples=150)
@given(TREES)
def test_laws_of_any_tree(tree):
    assert_laws(tree)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (pz.Parameter(label="a", value=1.0), pz.Parameter(label="b", value=1.0)),
        (pz.Parameter(label="a", value=1.0), pz.StateVariable(label="a", value=1.0)),
        (SHARED, SHARED.freeze()),
        (pz.nx.ones({"a": 2}), pz.nx.ones({"b": 2})),
        ({"act": jax.nn.relu}, {"act": jax.nn.gelu}),
        ([1.0], (1.0,)),
        (Module(1, 2), Module(1, 2.0)),
        (Module(1, 1), Module(1, True)),
        (Module(1, (0.0,)), Module(1, (-0.0,))),
        (Module(1, np.ones(1, np.float32)), Module(1, np.ones(1, np.float64))),
        (eqx.nn.Dropout(0.1), eqx.nn.Dropout(0.2)),
    ],
)
def test_flatten_of_unlike_trees_is_unequal(a, b):
    assert flatten(a)[1] != flatten(b)[1]
    assert flatten(a)[1] == flatten(a)[1]


def test_flatten_python_numbers_are_settings_in_modules_only():
    tree = {"n": 1, "module": Module({"n": 2}), "dropout": eqx.nn.Dropout(0.5)}
    leaves, structure = flatten(tree)
    assert [(leaf.path, leaf.value) for leaf in leaves] == [("n", 1)]
    settings = {"module/inner/n": 2, "dropout/p": 0.5, "dropout/inference": False}
    assert dict(structure.statics) == settings
    assert leaves[0].dtype == jnp.int32


# Variables


@pytest.mark.parametrize(
    ("change", "problems"), [(lambda tree: tree, ["b"]), (pz.freeze_variables, [])]
)
def test_flatten_two_variables_of_one_label_are_two_leaves(change, problems):
    one, other = (pz.Parameter(label="w", value=value) for value in (1.0, 2.0))
    leaves, structure = flatten(change({"a": one, "b": other}))
    # Two mutable ones are a mistake. Frozen ones are what an optimizer keeps of parameters.
    assert [problem.path for problem in structure.problems] == problems
    assert [(leaf.path, leaf.value) for leaf in leaves] == [("w", 1.0), ("b", 2.0)]
    assert values_of(structure.fill([3.0, 4.0])) == [3.0, 4.0]


def test_flatten_automatic_labels_are_no_part_of_the_structure():
    one, other = ([pz.StateVariable(value=jnp.zeros(2))] * 2 for _ in range(2))
    assert flatten(one)[1] == flatten(other)[1]
    assert flatten(one)[1] != flatten([one[0], other[0]])[1]
    # Penzai refuses two variables of one label.
    pz.unbind_variables([one[0], flatten(one)[1].fill_alike([2.0])])


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"a": 1.0}, "b"),
        ({"a": pz.nx.ones({"x": 2}), "b": 1.0}, "a"),
        ({"a": 1.0, "b": 1.0, "act": jax.nn.gelu}, "act"),
    ],
)
def test_read_of_another_tree_names_the_first_path_that_differs(tree, path):
    _, structure = flatten({"a": 1.0, "b": 2.0, "act": jax.nn.relu})
    assert problem_paths(ShardingError, structure.read, {"act": jax.nn.relu} | tree) == [path]


@pytest.mark.parametrize(
    ("before", "assign"),
    [
        ({"x": jnp.ones(2), "y": jnp.ones(3)}, lambda value: {"y": value["x"], "x": value["y"]}),
        (None, lambda value: jnp.ones(2)),
        (pz.nx.ones({"a": 2, "b": 3}), lambda value: value.order_as("b", "a") * 2),
        (jnp.ones(2), lambda value: None),
    ],
)
@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
def test_read_variables_gives_whatever_was_assigned(transform, before, assign):
    leaves, structure = flatten(Module(pz.StateVariable(before, label="n")))

    def call(values):
        tree = structure.fill(values, live=ROLES)
        tree.inner.value = assign(tree.inner.value)
        return read_variables(tree)

    found = transform(call)([leaf.value for leaf in leaves])
    jax.tree.map(np.testing.assert_array_equal, found, [assign(before)])


def test_check_paths_refuses_two_arrays_of_one_path():
    structure = flatten({"a/b": 1.0, "a": {"b": 2.0}})[1]
    assert problem_paths(ShardingError, structure.check_paths) == ["a/b"]


def test_fill_uninitialized_v1_gives_nodes_of_structs_and_parameters_of_arrays():
    tree = models.uninitialized_mlp_v1()
    leaves, structure = flatten(tree)
    again = structure.fill([leaf.value for leaf in leaves])
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    assert flatten(again)[1] == structure
    made = structure.fill([np.zeros(leaf.shape, leaf.dtype) for leaf in leaves])
    assert jax.tree.structure(made) == jax.tree.structure(models.model("v1 mlp"))


def test_fill_plain_leaves_out_boxes_that_code_of_the_library_takes_off():
    penzai, haliax = pz.nx.ones({"a": 2}), hax.ones(hax.Axis("a", 2))
    tree = {"linen": models.model("linen"), "penzai": penzai, "haliax": haliax}
    leaves, structure = flatten(tree)
    made = structure.fill([leaf.value for leaf in leaves], plain=True)
    assert jax.tree.structure(made["linen"]) == jax.tree.structure(nn.unbox(tree["linen"]))
    assert (type(made["penzai"]), type(made["haliax"])) == (pz.nx.NamedArray, hax.NamedArray)


# Static values


@pytest.mark.parametrize("name", models.OPTIMIZERS)
def test_same_static_of_optimizers_made_alike(name):
    make = models.OPTIMIZERS[name]
    assert same_static(make(1e-3), make(1e-3))
    assert not same_static(make(1e-3), make(1e-2))


@pytest.mark.parametrize(
    ("source", "is_same"),
    [
        ("lambda step: jnp.sum(step)", True),
        ("lambda step: rate * step", False),
        ("lambda step: [rate * x for x in step]", False),
        ("lambda step: (lambda: rate)()", False),
    ],
)
def test_same_static_of_functions_of_a_notebook(source, is_same):
    # The cell that sets the rate may have run again since.
    names = {"__name__": "__main__", "jnp": jnp, "rate": jnp.ones(())}
    one, other = (eval(compile(source, "<cell>", "eval"), names) for _ in range(2))
    assert same_static(one, other) == is_same


def test_same_static_of_one_code_in_two_modules_differs():
    code = compile("lambda: rate", "<code>", "eval")
    one, other = (eval(code, {"__name__": "module", "rate": rate}) for rate in (0.1, 0.2))
    assert not same_static(one, other)


def test_same_static_sees_attributes_beside_the_fields_of_a_dataclass():
    settings = dataclasses.make_dataclass("Settings", [("rate", float, 0.1)])
    widened = type("Widened", (settings,), {})
    one, other = widened(), widened()
    assert same_static(one, other)
    other.width = 2
    assert not same_static(one, other)


def test_same_static_of_what_holds_itself_ends():
    one, other = {}, {}
    one[0], other[0] = one, other
    assert not same_static(one, other)


# How a structure is used


def test_fill_inside_shard_map_has_local_lengths():
    leaves, structure = flatten({"x": pz.nx.ones({"batch": 8, "features": 4})})
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def body(values):
        tree = structure.fill(values)
        assert dict(tree["x"].named_shape) == {"batch": 1, "features": 4}
        assert are_identical(structure.read(tree), values)
        return values

    jax.eval_shape(body, [leaf.value for leaf in leaves])


def count_calls(function):
    """Calls of Python functions, which do not depend on the machine."""
    events = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    function()
    sys.setprofile(None)
    return events.count("call")


def test_calls_per_array():
    tree = models.llama()
    leaves, structure = flatten(tree)
    values = [leaf.value for leaf in leaves]
    assert count_calls(lambda: flatten(tree)) / len(leaves) < 120
    assert count_calls(lambda: structure.fill(values)) / len(leaves) < 40


def test_flatten_of_a_reference_is_a_problem():
    (problem,) = flatten({"ref": jax.new_ref(jnp.zeros(2))})[1].problems
    assert (problem.path, problem.kind) == ("ref", "unreadable")


def test_flatten_statistics_of_structs_are_leaves_as_those_of_arrays():
    def make_state():
        params = pz.unbind_variables(models.penzai_mlp(), freeze=True)[1]
        return {"params": params, "opt_state": optax.adam(1e-3).init(params)}

    concrete, abstract = (flatten(tree)[0] for tree in (make_state(), jax.eval_shape(make_state)))
    assert [leaf.path for leaf in abstract] == [leaf.path for leaf in concrete]
    assert all(leaf.names is not None for leaf in concrete if leaf.shape)
    labels = [leaf.path for leaf in concrete if leaf.path.startswith("mlp/")]
    assert len(labels) == len(set(labels)) == 4
    flatten(make_state())[1].check_paths()
