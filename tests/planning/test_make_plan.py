"""A plan decides for every array of a tree, says why, and reports all that stands in its way."""

import collections
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from tests.models import MODELS
from tests.refusals import problem_paths, problems_of

MESH = pzs.make_mesh({"data": 4, "model": 2})
RULES = {"embed": "data", "mlp": "model"}
ADAFACTOR = optax.adafactor(1e-3, min_dim_size_to_factor=4)


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


def zeros(*shape):
    return jnp.zeros(shape)


def named(make=struct, **axes):
    return pz.nx.NamedArray(collections.OrderedDict(axes), make(*axes.values()))


def lies(leaf, spec):
    """Whether an array lies as a spec says, which may have None at its end."""
    return leaf.sharding.is_equivalent_to(NamedSharding(leaf.sharding.mesh, spec), len(leaf.shape))


# Layouts

axes = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 16), max_size=4)
arrays = axes.map(lambda axes: named(**axes))
trees = st.dictionaries(st.sampled_from("uvw"), arrays | st.lists(arrays, max_size=2), min_size=1)
mesh_sizes = st.fixed_dictionaries({axis: st.integers(1, 5) for axis in ("x", "y", "z")})


@given(trees, st.permutations(["x", "y", ("z",), None]), mesh_sizes)
def test_make_plan_agrees_with_jax_on_drawn_trees(tree, mesh_axes, sizes):
    mesh, rules = pzs.make_mesh(sizes, abstract=True), dict(zip("abcd", mesh_axes, strict=True))
    plan = pzs.make_plan(tree, mesh, rules, on_indivisible="replicate")
    for leaf in plan.leaves:
        pairs = [(rules[name], size) for name, size in zip(leaf.names, leaf.shape, strict=True)]
        assert lies(leaf, P(*(a if a and size % sizes[a[0]] == 0 else None for a, size in pairs)))
        assert leaf.bytes_per_device == 4 * np.prod(leaf.sharding.shard_shape(leaf.shape))
    assert plan.bytes_per_device == sum(leaf.bytes_per_device for leaf in plan.leaves)
    present = {name for leaf in plan.leaves for name in leaf.names}
    assert plan.unused_rules == tuple(name for name in "abcd" if name not in present)
    # Equal layouts are one object, in all trees.
    own = [id(leaf.sharding) for leaf in plan.leaves]
    assert len(set(own)) == len({leaf.spec for leaf in plan.leaves})
    assert [id(x) for x in jax.tree.leaves(plan.sharding_tree())] == own
    assert [id(x.sharding) for x in jax.tree.leaves(plan.restore_structs())] == own


@pytest.mark.parametrize("name", ["counted mlp", "v1 mlp", "nnx optimizer", "haliax linear"])
def test_make_plan_of_shapes_is_that_of_the_arrays(name):
    rules = pzs.fully_sharded(min_size=1, unnamed="largest")
    plan = pzs.make_plan(pzs.abstract_model(MODELS[name]), MESH, rules, on_unnamed="replicate")
    for tree in (plan.restore_structs(), MODELS[name]()):
        assert pzs.make_plan(tree, MESH, rules, on_unnamed="replicate").leaves == plan.leaves


def test_make_plan_treats_arrays_without_names_as_asked():
    tree = {"w": struct(8, 4), "rate": 0.5, "act": jax.nn.relu, "kind": "text", "none": None}
    plan = pzs.make_plan(tree, MESH, {"batch": "data"}, on_unnamed="replicate")
    assert [(leaf.path, leaf.spec) for leaf in plan.leaves] == [("rate", P()), ("w", P())]
    assert plan.others == ("act", "kind")
    assert plan.replicated_bytes == plan.bytes_per_device == 4 + 4 * 32
    left = pzs.make_plan(tree, MESH, {}, on_unnamed="infer").sharding_tree()
    assert left == {**tree, "w": None, "rate": None}
    assert problem_paths(pzs.PlanError, pzs.make_plan, tree, MESH, {}) == ["w"]


def test_make_plan_of_random_keys():
    keys = {"typed": jax.random.split(jax.random.key(0), 8), "raw": jax.random.PRNGKey(0)}
    named_keys = pzs.name_axes(keys, {"typed": ("batch",), "raw": None})
    plan = pzs.make_plan(named_keys, MESH, pzs.data_parallel())
    assert [leaf.bytes_per_device for leaf in plan.leaves] == [8, 8 * 8 // 4]


# Optimizers


@pytest.mark.parametrize("kind", ["named", "plain"])
@pytest.mark.parametrize("optimizer", [ADAFACTOR, optax.sm3(1e-3), optax.lbfgs(memory_size=3)])
def test_make_plan_lays_statistics_as_the_dimensions_of_their_parameter(optimizer, kind):
    params = {"w": named(embed=8, other=12, mlp=16), "b": named(mlp=16)}
    given = pzs.without_names(params) if kind == "plain" else params
    state = {"params": params, "opt_state": jax.eval_shape(optimizer.init, given)}
    # Each length stands for one dimension of the parameters.
    over = {8: "data", 16: "model"}
    for leaf in pzs.make_plan(state, MESH, RULES).leaves:
        assert lies(leaf, P(*map(over.get, leaf.shape)))


def test_make_plan_decides_for_the_parameter_of_a_statistic():
    params = {"w": named(embed=8, mlp=16)}
    state = {"params": params, "opt_state": jax.eval_shape(ADAFACTOR.init, params)}
    plan = pzs.make_plan(state, MESH, pzs.fully_sharded(min_size=1))
    found = {leaf.path: leaf.spec for leaf in plan.leaves}
    # The second dimension is the largest, and v_row has the first.
    assert found["opt_state/0/v_row/w"] == P()
    assert found["opt_state/0/v_col/w"] == P("data")


def test_make_plan_refuses_a_statistic_that_is_no_part_of_its_parameter():
    state = {"params": {"w": named(embed=8, mlp=16)}, "opt_state": {"mu": {"w": struct(5, 3)}}}
    (problem,) = problems_of(pzs.PlanError, pzs.make_plan, state, MESH, RULES)
    assert (problem.path, problem.kind) == ("opt_state/mu/w", "misfit")
    assert 'on_unnamed="replicate"' in problem.fix


# Problems


def test_make_plan_finds_all_offenders_and_folds_equal_blocks():
    tree = {f"block_{i}": {"up": named(mlp=7), "bias": struct(7)} for i in range(80)}
    with pytest.raises(pzs.PlanError) as caught:
        pzs.make_plan(tree, MESH, RULES)
    found = {(problem.path, problem.kind) for problem in caught.value.problems}
    kinds = {"up": "indivisible", "bias": "unnamed"}
    assert found == {(f"block_{i}/{key}", kinds[key]) for i in range(80) for key in kinds}
    assert str(caught.value).count("block_{0-79}/up") == str(caught.value).count("/up") == 1


def test_plan_of_another_tree_is_refused_with_all_differences():
    planned = {"gone": named(a=2), "names": named(a=2), "shape": named(a=2), "dtype": struct(2)}
    plan = pzs.make_plan(planned, MESH, {}, on_unnamed="replicate")
    tree = {"new": np.ones(2), "names": named(zeros, b=2), "shape": named(zeros, a=3)}
    tree["dtype"] = np.ones(2, "int32")
    assert {*problem_paths(pzs.PlanError, pzs.place, tree, plan)} == {*planned, "new"}


# Libraries


def test_make_plan_of_an_nnx_optimizer_is_flaxs():
    model, mesh = MODELS["nnx optimizer"](), pzs.make_mesh({"embed": 4, "mlp": 2})
    theirs = jax.tree.leaves(nnx.get_partition_spec(nnx.state(model)))
    leaves = pzs.make_plan(model, mesh, on_unnamed="replicate").leaves
    assert all(itertools.starmap(lies, zip(leaves, theirs, strict=True)))


# Meshes, cost


def test_make_plan_on_an_explicit_mesh_is_on_its_auto_twin():
    mesh = pzs.make_mesh({"data": 4, "model": 2}, explicit=True)
    weight, batch = (named(zeros, embed=8, **other) for other in ({"mlp": 4}, {"batch": 4}))
    plan = pzs.make_plan(weight, mesh, RULES)
    assert plan.mesh == MESH
    # What the remark says to do with inputs makes them fit the model.
    assert plan.remarks[0].endswith(": name_to_name_device_put(batch, mesh, rules)")
    batch = pzs.name_to_name_device_put(batch, mesh, RULES)
    product = jax.jit(lambda w, x: w.data_array.T @ x.data_array)(pzs.place(weight, plan), batch)
    assert product.shape == (4, 4)


def test_make_plan_takes_few_calls_for_a_further_array():
    calls = []
    for blocks in (40, 80):
        block, count = {"up": named(embed=8, mlp=4), "norm": named(embed=8)}, collections.Counter()
        tree = {f"block_{i}": block for i in range(blocks)}
        sys.setprofile(lambda frame, event, _, count=count: count.update([event]))
        try:
            pzs.make_plan(tree, MESH, RULES)
        finally:
            sys.setprofile(None)
        calls.append(count["call"])
    assert calls[1] - calls[0] < 40 * 2 * 90


def test_make_plan_counts_the_dtype_that_a_device_holds():
    tree = pzs.name_axes({"w": np.ones((8, 2))}, {"w": ("a", None)})
    plan = pzs.make_plan(tree, pzs.make_mesh({"data": 8}), {"a": "data"})
    assert plan.bytes_per_device == 8
    assert plan.leaves[0].dtype == pzs.place(tree, plan)["w"].dtype == np.float32


def test_make_plan_warns_where_no_rule_names_an_axis_of_the_tree():
    tree = pz.nx.ones({"embedding": 8})
    with pytest.warns(pzs.ShardingWarning, match="embedding"):
        pzs.make_plan(tree, MESH, {"hidden": "data"})
    for rules in ({}, {"embedding": None}, pzs.data_parallel(), pzs.fully_sharded()):
        pzs.make_plan(tree, MESH, rules)


def test_make_plan_takes_a_name_of_more_words_for_another_axis():
    # One table of rules for the parameters and the batch of Penzai's own MLP.
    rules = {"batch": "data", "features_out": "model", "kv_heads": "model"}
    pzs.make_plan(pz.nx.ones({"batch": 8, "features": 8, "heads": 2}), MESH, rules)
    with pytest.warns(pzs.ShardingWarning, match="features"):
        pzs.make_plan(pz.nx.ones({"batch": 8, "features": 8}), MESH, {"feature": "data"})


def test_make_plan_notes_a_mesh_axis_that_nothing_is_split_over():
    plan = pzs.make_plan(pz.nx.ones({"a": 8}), MESH, {"a": "data"})
    assert any("'model'" in note for note in plan.report().notes)
