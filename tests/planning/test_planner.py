"""One planner for every tree: fields under rules of their own, small arrays, where arrays start."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard import make_mesh, make_plan
from penzai_shard.errors import PlanError, RuleTypeError
from penzai_shard.planning import PlacingRequest, Planner, PlanRequest

RULES = {"a": "data"}


@pytest.fixture
def mesh():
    return make_mesh({"data": 4, "model": 2})


def state():
    return {
        "params": {"w": pz.nx.ones({"a": 8, "b": 4})},
        "opt_state": [pz.nx.ones({"a": 8, "b": 4}), None],
        "root_rng": np.zeros(2, np.uint32),
        "step": 3,
    }


def specs(plan):
    return {leaf.path: leaf.spec for leaf in plan.leaves}


def test_each_field_of_a_train_state_has_its_own_rules(mesh):
    plan = PlanRequest.read("test", mesh, RULES).plan_state(state(), {"b": "model"})
    assert specs(plan) == {
        "opt_state/0": P(None, "model"),
        "params/w": P("data"),
        "root_rng": P(),
        "step": P(),
    }
    assert jax.tree.structure(plan.sharding_tree()) == jax.tree.structure(state())


def test_the_arrays_of_all_fields_are_reported_at_once(mesh):
    bad = {name: {"x": np.ones((3, 3))} for name in ("params", "opt_state")}
    with pytest.raises(PlanError) as caught:
        PlanRequest.read("test", mesh, RULES).plan_state(bad, {"b": "model"})
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "opt_state/x",
        "params/x",
    ]


def test_a_tree_without_fields_is_planned_as_before(mesh):
    request = PlanRequest.read("test", mesh, RULES)
    array = np.ones(())
    assert specs(request.plan_state(array)) == specs(make_plan(array, mesh, RULES)) == {"": P()}


def test_a_plan_of_a_state_has_decided_on_the_optimizer_too(mesh):
    plan = PlanRequest.read("test", mesh, RULES).plan_state(state())
    request = PlacingRequest.read("test", plan)
    assert request.plan_state(state()).leaves == plan.leaves
    with pytest.raises(RuleTypeError, match="optimizer_rules are part of a plan"):
        request.plan_state(state(), {"b": "model"})


@pytest.mark.parametrize(("min_size", "spec"), [(8, P("data")), (9, P())])
def test_arrays_under_the_smallest_size_stay_whole(mesh, min_size, spec):
    plan = Planner(mesh, RULES, min_size=min_size).plan(pz.nx.ones({"a": 8}))
    (leaf,) = plan.leaves
    assert leaf.spec == spec
    assert ("under 9 elements" in leaf.reason) == (min_size == 9)


def test_a_small_array_that_does_not_divide_is_still_an_error(mesh):
    with pytest.raises(PlanError, match="does not divide over mesh axis 'data'"):
        Planner(mesh, RULES, min_size=100).plan(pz.nx.ones({"a": 6}))


def test_arrays_that_are_left_to_jax_start_replicated(mesh):
    tree = {"named": pz.nx.ones({"a": 8}), "mask": np.ones((3, 3)), "text": "not an array"}
    plan = Planner(mesh, RULES, on_unnamed="infer").plan(tree, keep_others=True)
    assert plan.sharding_tree()["mask"] is None
    starting = plan.starting_shardings()
    assert starting["mask"].spec == P()
    assert starting["named"].data_array.spec == P("data")
    assert starting["text"] is None
    assert plan.others == ("text",)
