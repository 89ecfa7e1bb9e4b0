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

from penzai_shard.arrays.structure import (
    flatten,
    leaves_of,
    read_variables,
    same_static,
    variables_of,
    with_arrays,
)
from penzai_shard.errors import ShardingError
from tests import models

ROLES = ("parameter", "state")


class Marker:
    """Something in the place of an array that JAX knows nothing of."""


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

    markers = [Marker() for _ in leaves]
    marked = [x for x in jax.tree.leaves(structure.fill(markers)) if isinstance(x, Marker)]
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


@pytest.mark.parametrize("name", sorted(models.MODELS.keys() - {"uninitialized v1 mlp"}))
def test_laws_of_a_model(name):
    assert_laws(models.model(name))


@pytest.mark.parametrize("name", models.MODELS)
def test_flatten_of_two_builds_is_equal(name):
    one, other = flatten(models.model(name))[1], flatten(models.MODELS[name](1))[1]
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize("name", ["stacked llama", "linen state", "nnx", "haliax mlp", "v1 mlp"])
def test_fill_with_shardings_gives_a_tree_that_jax_takes(name):
    tree = freeze(models.model(name))
    leaves, structure = flatten(tree)
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    specs = [P("a") if leaf.shape and leaf.shape[0] % 2 == 0 else P() for leaf in leaves]
    shardings = structure.fill([NamedSharding(mesh, spec) for spec in specs])
    placed = jax.device_put(tree, shardings)
    assert [x.sharding for x in jax.tree.leaves(placed)] == jax.tree.leaves(shardings)
    jax.jit(lambda tree: None, in_shardings=(shardings,)).lower(tree)


@pytest.mark.parametrize("name", ["tied llama", "counted mlp", "linen", "nnx", "haliax linear"])
def test_fill_with_tracers(name):
    leaves, structure = flatten(models.model(name))
    of_frozen = flatten(freeze(models.model(name)))[1]

    def check(values):
        assert flatten(structure.fill(values))[1] == of_frozen
        tree = structure.fill(values, live=ROLES)
        assert are_identical(values_of(tree), values)
        assert are_identical(structure.read(tree), values)

    jax.eval_shape(check, [leaf.value for leaf in leaves])


def test_flatten_nnx_has_the_order_of_its_state():
    tree = models.nnx_block()
    paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(tree))]
    assert [leaf.path for leaf in leaves_of(tree)] == paths


def test_fill_keeps_modules_and_variables_that_occur_twice():
    one, other = models.nnx_block(), models.nnx_block()
    other.first = one.first
    tree = {"a": one, "b": other, "again": one}
    leaves, structure = flatten(tree)
    made = structure.fill([leaf.value for leaf in leaves])
    assert len({leaf.path for leaf in leaves}) == len(leaves)
    assert made["again"] is made["a"]
    assert made["a"].tied is made["a"].first
    assert made["b"].first.kernel is made["a"].first.kernel
    assert made["b"].tied.kernel is not made["a"].tied.kernel


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
        (Module(1, np.float32(1)), Module(1, np.float64(1))),
        (Module(1, np.ones(1, np.float32)), Module(1, np.ones(1, np.float64))),
        (Module(2), Module(2.0)),
        (eqx.nn.Dropout(0.1), eqx.nn.Dropout(0.2)),
    ],
)
def test_flatten_of_unlike_trees_is_unequal(a, b):
    one, other = flatten(a)[1], flatten(b)[1]
    assert one != other
    assert one == flatten(a)[1]


@pytest.mark.parametrize("change", [{"blocks": 3}, {"tied": True}, {"blocks": 3, "stacked": True}])
def test_flatten_of_unlike_models_is_unequal(change):
    def structure_of(**kind):
        return flatten(jax.eval_shape(lambda: pz.freeze_variables(models.llama(**kind))))[1]

    assert structure_of(**change) != structure_of(stacked="stacked" in change)


def test_flatten_python_numbers_are_settings_in_modules_only():
    tree = {"n": 1, "module": Module({"n": 2}), "dropout": eqx.nn.Dropout(0.5)}
    leaves, structure = flatten(tree)
    assert [(leaf.path, leaf.value) for leaf in leaves] == [("n", 1)]
    settings = {"module/inner/n": 2, "dropout/p": 0.5, "dropout/inference": False}
    assert dict(structure.statics) == settings
    assert leaves[0].dtype == jnp.int32


# Variables


def test_flatten_variable_that_occurs_twice_is_one_leaf():
    leaves, structure = flatten([SHARED, {"again": SHARED}])
    made = structure.fill([leaf.value for leaf in leaves], live=ROLES)
    assert [(leaf.path, leaf.variable) for leaf in leaves] == [("shared", SHARED)]
    assert made[1]["again"] is made[0] is not SHARED


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


def test_flatten_state_of_penzais_trainer_has_a_path_for_each_array():
    params = pz.unbind_variables(models.penzai_mlp(), freeze=True)[1]
    leaves, structure = flatten({"params": params, "opt_state": optax.adam(1e-3).init(params)})
    structure.check_paths()
    assert all(leaf.names is not None for leaf in leaves if leaf.shape)


def test_check_paths_refuses_two_arrays_of_one_path():
    with pytest.raises(ShardingError) as caught:
        with_arrays({"a/b": 1.0, "a": {"b": 2.0}}, {"a/b": 3.0})
    assert [problem.path for problem in caught.value.problems] == ["a/b"]


def test_flatten_tied_model_of_structs_is_tied():
    leaves, structure = flatten(pz.freeze_variables(models.model("tied llama")))
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    assert flatten(structure.fill(structs))[1] == structure
    assert not structure.problems


def test_flatten_statistics_of_structs_are_leaves_as_those_of_arrays():
    def make_state():
        params = pz.unbind_variables(models.penzai_mlp(), freeze=True)[1]
        return {"params": params, "opt_state": optax.adam(1e-3).init(params)}

    concrete, abstract = (flatten(tree)[0] for tree in (make_state(), jax.eval_shape(make_state)))
    assert [leaf.path for leaf in abstract] == [leaf.path for leaf in concrete]
    labels = [leaf.path for leaf in concrete if leaf.path.startswith("mlp/")]
    assert len(labels) == len(set(labels)) == 4


def test_fill_alike_keeps_frozen_what_was_frozen():
    frozen, live = (
        pz.Parameter(value=1.0, label="base").freeze(),
        pz.Parameter(value=2.0, label="lora"),
    )
    made = flatten({"base": frozen, "lora": live})[1].fill_alike([3.0, 4.0])
    assert (type(made["base"]), type(made["lora"])) == (pz.ParameterValue, pz.Parameter)


def test_fill_gives_a_new_variable_an_automatic_label_of_its_own():
    variable = pz.StateVariable(1.0)
    pz.unbind_variables([variable, flatten(variable)[1].fill_alike([2.0])])


def test_flatten_of_a_reference_is_a_problem():
    (problem,) = flatten({"ref": jax.new_ref(jnp.zeros(2))})[1].problems
    assert (problem.path, problem.kind) == ("ref", "unreadable")


def test_flatten_automatic_labels_are_no_part_of_the_structure():
    one, other = ([pz.StateVariable(value=jnp.zeros(2))] * 2 for _ in range(2))
    assert flatten(one)[1] == flatten(other)[1]
    assert flatten(one)[1] != flatten([one[0], other[0]])[1]


def test_variables_of_is_in_the_order_of_the_structure():
    inner = pz.Parameter(label="inner", value=1.0)
    outer = pz.StateVariable({"x": 2.0, "y": inner.freeze()}, label="outer")
    _, structure = flatten([outer, SHARED])
    assert variables_of([outer, SHARED]) == [outer, inner.freeze(), SHARED]
    assert [(v.role, v.live, v.leaves) for v in structure.variables] == [
        ("state", True, slice(0, 2)),
        ("parameter", False, slice(1, 2)),
        ("parameter", True, slice(2, 3)),
    ]


def test_read_differs_where_a_call_assigned():
    leaves, structure = flatten(models.counted_mlp())
    values = [leaf.value for leaf in leaves]
    tree = structure.fill(values, live=("state",))
    tree(pz.nx.ones({"features": 8}))
    after = zip(structure.paths, structure.read(tree), values, strict=True)
    assert {path: new for path, new, old in after if new is not old} == {"count": 1}


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"a": 1.0, "c": 1.0}, "b"),
        ({"a": 1.0}, "b"),
        ({"a": pz.nx.ones({"x": 2}), "b": 1.0}, "a"),
        ({"a": 1.0, "b": 1.0, "act": jax.nn.gelu}, "act"),
    ],
)
def test_read_of_another_tree_names_the_first_path_that_differs(tree, path):
    _, structure = flatten({"a": 1.0, "b": 2.0, "act": jax.nn.relu})
    with pytest.raises(ShardingError) as caught:
        structure.read({"act": jax.nn.relu} | tree)
    assert [problem.path for problem in caught.value.problems] == [path]


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint])
@pytest.mark.parametrize(
    ("before", "assign"),
    [
        ({"x": jnp.ones(2), "y": jnp.ones(3)}, lambda value: {"y": value["x"], "x": value["y"]}),
        (None, lambda value: jnp.ones(2)),
        (pz.nx.ones({"a": 2, "b": 3}), lambda value: value.order_as("b", "a") * 2),
        (jnp.ones(2), lambda value: jnp.concatenate([value, value])),
        (jnp.ones(2), lambda value: None),
        (jnp.ones(2), lambda value: value),
    ],
)
def test_read_variables_gives_whatever_was_assigned(transform, before, assign):
    leaves, structure = flatten(Module(pz.StateVariable(before, label="n")))

    def call(values):
        tree = structure.fill(values, live=ROLES)
        tree.inner.value = assign(tree.inner.value)
        return read_variables(tree)

    found = transform(call)([leaf.value for leaf in leaves])
    jax.tree.map(np.testing.assert_array_equal, found, [assign(before)])


def test_with_arrays_replaces_some_and_keeps_variables_live():
    tree = models.counted_mlp()
    made = with_arrays(tree, {"count": jnp.asarray(5.0)})
    assert (made.count.value, tree.count.value) == (5, 0)
    assert are_identical(values_of(made.body), values_of(tree.body))
    assert flatten(made)[1] == flatten(tree)[1]


def test_with_arrays_unknown_paths_are_all_refused():
    with pytest.raises(ShardingError) as caught:
        with_arrays({"a": 1.0}, {"b": 2.0, "c": 3.0})
    assert {problem.path for problem in caught.value.problems} == {"b", "c"}


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


# How a structure is used


def test_equal_structures_are_one_key_of_jit():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def call(structure, values):
        traces.append(structure)
        return structure.fill(values, live=ROLES)(pz.nx.ones({"features": 8}))

    for seed in range(3):
        leaves, structure = flatten(models.counted_mlp(seed))
        call(structure, [leaf.value for leaf in leaves])
    assert len(traces) == 1


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
    tree = models.llama(blocks=6)
    leaves, structure = flatten(tree)
    values = [leaf.value for leaf in leaves]
    assert count_calls(lambda: flatten(tree)) / len(leaves) < 120
    assert count_calls(lambda: structure.fill(values)) / len(leaves) < 40


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
    modules = [{"__name__": f"module_{rate}", "rate": rate} for rate in (0.1, 0.2)]
    one, other = (eval(compile("lambda: rate", "<code>", "eval"), names) for names in modules)
    assert not same_static(one, other)


def test_same_static_sees_attributes_beside_fields_and_slots():
    @dataclasses.dataclass
    class Settings:
        rate: float = 0.1

    class Widened(Settings):
        def __init__(self, width):
            self.width = width

    class Slotted:
        __slots__ = ("__dict__", "width")

        def __init__(self, width):
            self.width = width

    assert same_static(Widened(2), Widened(2))
    assert not same_static(Widened(2), Widened(3))
    assert not same_static(Slotted(2), Slotted(3))


def test_same_static_of_what_holds_itself_ends():
    one, other = {}, {}
    one[0], other[0] = one, other
    assert not same_static(one, other)
