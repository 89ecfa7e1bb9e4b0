"""Everything that is restored lies as one plan says; the oracle is ``place`` with the same plan."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz
from penzai.toolshed import lora

from penzai_shard.checkpointing import (
    restore_params,
    restore_structs,
    restore_train_state,
    save_params,
    save_train_state,
)
from penzai_shard.errors import MeshError, PlanError, RuleTypeError, ShardingWarning
from penzai_shard.placement import abstract_model, place
from penzai_shard.planning import make_plan

P = PartitionSpec
RULES = {"embedding": "data", "neurons": "model"}


@pz.pytree_dataclass
class Shift(pz.nn.Layer):
    """Adds a named buffer and a running mean, where a mask says so."""

    offset: pz.nx.NamedArray
    mean: pz.StateVariable
    mask: jax.Array

    def __call__(self, argument, **_):
        return argument + self.offset + self.mean.value


def build(seed=0, neurons=16):
    linear = pz.nn.Linear.from_config(
        "linear", jax.random.key(seed), {"embedding": 8}, {"neurons": neurons}
    )
    shift = Shift(
        pz.nx.arange("neurons", neurons) + 0.5,
        pz.StateVariable(pz.nx.ones({"embedding": 8, "neurons": neurons}), label="mean"),
        jnp.ones((4, 4)),
    )
    return pz.nn.Sequential([linear, shift, linear])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_params(tmp_path_factory.mktemp("layouts") / "params", build())


def layouts(tree):
    """What each array of a tree is and where it lies."""
    leaves = jax.tree_util.tree_leaves_with_path(pz.freeze_variables(tree))
    return [
        (jax.tree_util.keystr(path), array.shape, array.dtype, array.sharding)
        for path, array in leaves
    ]


def test_state_and_constants_follow_the_rules_too(saved, wide):
    restored = restore_params(saved, build(3), wide, RULES, on_unnamed="replicate")
    shift = restored.sublayers[1]
    assert shift.offset.data_array.sharding == NamedSharding(wide, P("model"))
    assert {s.data.shape for s in shift.offset.data_array.addressable_shards} == {(8,)}
    assert shift.mean.value.data_array.sharding == NamedSharding(wide, P("data", "model"))
    assert shift.mask.sharding == NamedSharding(wide, P())
    assert layouts(restored) == layouts(place(build(), wide, RULES, on_unnamed="replicate"))
    np.testing.assert_array_equal(shift.offset.data_array, np.arange(16) + 0.5)
    assert restored.sublayers[0].weights is restored.sublayers[2].weights
    restored.sublayers[0](place(pz.nx.ones({"embedding": 8}), wide, RULES))


def test_constants_on_another_mesh_are_moved_by_the_rules(saved, wide, tall):
    model = place(build(), wide, RULES, on_unnamed="replicate")
    restored = restore_params(saved, model, tall, RULES, on_unnamed="replicate")
    assert layouts(restored) == layouts(place(build(), tall, RULES, on_unnamed="replicate"))


def test_what_was_printed_is_what_happens(tmp_path, wide):
    path = save_params(tmp_path / "params", build(neurons=9))
    abstract = abstract_model(build, neurons=9)
    with pytest.raises(PlanError, match="logical axis 'neurons' \\(9\\) does not divide"):
        restore_params(path, abstract, wide, RULES, on_unnamed="replicate")
    for on_unnamed in ("replicate", "infer"):
        plan = make_plan(abstract, wide, RULES, on_indivisible="replicate", on_unnamed=on_unnamed)
        for restored in (
            restore_params(path, build(2, neurons=9), plan=plan),
            restore_params(path, abstract, plan),
            restore_params(path, abstract, wide, plan=plan),
        ):
            planned = {leaf.path: leaf for leaf in plan.leaves}
            weights = restored.sublayers[0].weights.value.data_array
            assert weights.sharding == planned["linear.weights"].sharding
            assert weights.sharding.spec == P("data")
            assert restored.sublayers[1].offset.data_array.sharding == NamedSharding(wide, P())
    options = {"on_indivisible": "replicate", "on_unnamed": "replicate"}
    restored = restore_params(path, abstract, wide, RULES, **options)
    assert layouts(restored) == layouts(place(build(neurons=9), wide, RULES, **options))


def test_a_plan_of_something_else_is_refused(saved, wide, tall):
    plan = make_plan(build(neurons=32), wide, RULES, on_unnamed="replicate")
    with pytest.raises(PlanError) as caught:
        restore_params(saved, build(), plan=plan)
    assert str(caught.value).startswith("restore_params: the plan was made for another tree.")
    assert any(line.startswith("linear.weights: is") for line in caught.value.problems)
    plan = make_plan(build(), wide, RULES, on_unnamed="replicate")
    with pytest.raises(RuleTypeError, match="a plan is given, and rules or options too"):
        restore_params(saved, build(), rules=RULES, plan=plan)
    with pytest.raises(MeshError, match="the plan was made for another mesh"):
        restore_params(saved, build(), tall, plan=plan)
    with pytest.raises(RuleTypeError, match="restore_params: a mesh is needed"):
        restore_params(saved, build())


def test_arrays_without_names_get_the_answer_they_get_everywhere(saved, wide):
    with pytest.raises(PlanError, match=r"mask: this array of shape \(4, 4\) has no logical"):
        restore_params(saved, build(), wide, RULES)
    restored = restore_params(saved, build(), wide, RULES, on_unnamed="infer")
    assert restored.sublayers[1].mask.sharding == build().sublayers[1].mask.sharding


@pytest.mark.parametrize("function", [restore_params, restore_train_state, restore_structs])
def test_rules_go_by_both_names(tmp_path, wide, function):
    state = {"params": {"w": pz.nx.ones({"a": 8})}}
    if function is restore_structs:
        arguments = (state, wide)
    elif function is restore_params:
        arguments = (save_params(tmp_path / "params", state), state, wide)
    else:
        arguments = (save_train_state(tmp_path / "state", state), state, wide)
    for name in ("rules", "axis_name_to_mesh_name"):
        result = function(*arguments, **{name: {"a": "data"}})
        (array,) = jax.tree.leaves(result)
        assert array.sharding == NamedSharding(wide, P("data"))
    with pytest.raises(RuleTypeError, match="are two names of one argument"):
        function(*arguments, rules={"a": "data"}, axis_name_to_mesh_name={"a": "data"})
    with pytest.warns(ShardingWarning, match=f"{function.__name__} was given no rules"):
        function(*arguments)


def test_a_rule_that_is_nearly_a_name_warns(saved, wide):
    model = build()
    for rules in ({"embeding": "data"}, {"neurons": "model", "embeddings": "data"}):
        with pytest.warns(ShardingWarning, match=r"Did you mean 'embedding'\?"):
            restore_params(saved, model, wide, rules, on_unnamed="replicate")


def test_every_field_of_a_train_state_follows_the_rules(tmp_path, wide, tall):
    state = {
        "step": jnp.int32(1),
        "params": {"w": pz.nx.ones({"a": 8, "b": 8})},
        "state_vars": {"mean": pz.nx.ones({"a": 8})},
        "loss_fn_state": {"history": pz.nx.ones({"b": 8})},
        "root_rng": jnp.zeros(2, jnp.uint32),
    }
    state["opt_state"] = optax.adam(0.1).init(state["params"])
    path = save_train_state(tmp_path / "state", state)
    rules, optimizer_rules = {"a": "data", "b": "model"}, {"a": "model"}
    restored = restore_train_state(path, state, wide, rules, optimizer_rules=optimizer_rules)
    assert restored["state_vars"]["mean"].data_array.sharding == NamedSharding(wide, P("data"))
    assert restored["loss_fn_state"]["history"].data_array.sharding.spec == P("model")
    assert restored["opt_state"][0].mu["w"].data_array.sharding.spec == P("model")
    assert restored["root_rng"].sharding == NamedSharding(wide, P())
    plan = make_plan(state, tall, {"a": "model"}, on_unnamed="replicate")
    for restored in (
        restore_train_state(path, state, plan=plan),
        restore_train_state(path, jax.eval_shape(lambda: state), plan),
    ):
        assert layouts(restored) == layouts(place(state, plan))
    with pytest.raises(RuleTypeError, match="optimizer_rules are part of a plan"):
        restore_train_state(path, state, plan=plan, optimizer_rules={})


def test_an_optimizer_s_unnamed_arrays_are_replicated_when_asked(tmp_path, wide):
    state = {"params": {"w": pz.nx.ones({"a": 8})}, "opt_state": {"square": jnp.ones((8, 8))}}
    path = save_train_state(tmp_path / "state", state)
    with pytest.raises(PlanError, match=r"opt_state/square: this array of shape \(8, 8\) has no"):
        restore_train_state(path, state, wide, {"a": "data"})
    restored = restore_train_state(path, state, wide, {"a": "data"}, on_unnamed="replicate")
    assert restored["opt_state"]["square"].sharding == NamedSharding(wide, P())
    restored = restore_train_state(path, state, wide, {"a": "data"}, on_unnamed="infer")
    assert restored["opt_state"]["square"].sharding == NamedSharding(wide, P())


def test_frozen_stays_frozen_and_shared_stays_shared(tmp_path, wide):
    def with_adapters(seed):
        frozen = pz.freeze_params(build(seed))
        return lora.loraify_linears_in_selection(
            pz.select(frozen).at_instances_of(pz.nn.Linear), rank=2, init_base_rng=jax.random.key(1)
        )

    path = save_params(tmp_path / "lora", with_adapters(0))
    # Transformed, the frozen parameter is two equal objects instead of one.
    for like in (with_adapters(5), jax.tree.map(lambda leaf: leaf, with_adapters(5))):
        restored = restore_params(path, like, wide, RULES, on_unnamed="replicate")
        first, _, last = restored.sublayers
        trained = [variable.label for variable in pz.unbind_params(restored)[1]]
        assert trained == sorted({*trained})
        assert len(trained) == len(pz.unbind_params(with_adapters(0))[1])
        assert all("LoRA" in label for label in trained)
        frozen = [
            leaf
            for leaf in jax.tree.leaves(
                restored, is_leaf=lambda node: isinstance(node, pz.ParameterValue)
            )
            if isinstance(leaf, pz.ParameterValue)
        ]
        assert {value.label for value in frozen} == {"linear.weights"}
        for value in frozen:
            assert value.value.data_array.sharding == NamedSharding(wide, P("data", "model"))
            np.testing.assert_array_equal(
                value.value.data_array, build(0).sublayers[0].weights.value.data_array
            )
        assert jax.tree.structure(first) == jax.tree.structure(last)
    thawed = restore_params(
        path, abstract_model(with_adapters, 3), wide, RULES, on_unnamed="replicate"
    )
    assert "linear.weights" in [variable.label for variable in pz.unbind_params(thawed)[1]]
