"""Names that were inferred, given to the weights, and planned with."""

import jax
import pytest

import penzai_shard as pzs
from tests.choosing import named_models


@pytest.fixture(scope="module")
def gpt2():
    return named_models.gpt2()


@pytest.fixture(scope="module")
def inferred(gpt2):
    return pzs.infer_names(gpt2.function, gpt2.weights, *gpt2.inputs, input_names=gpt2.input_names)


def _plan(weights, inferred, rules):
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    plan = pzs.make_plan(pzs.name_axes(weights, inferred), mesh, rules)
    return plan, {leaf.path: leaf for leaf in plan.leaves}


def test_rules_for_heads_split_what_they_lead_and_say_what_they_leave(gpt2, inferred):
    rules = {"heads": "model", "neurons": "model", "embedding": "data"}
    plan, leaves = _plan(gpt2.weights, inferred, rules)
    assert {path: leaf.names for path, leaf in leaves.items()} == gpt2.names
    assert leaves["h.0.attn.c_proj.w"].shard_shape == (4, 8)
    assert leaves["h.1.mlp.c_fc.w"].shard_shape == (8, 8)
    fused = leaves["h.0.attn.c_attn.w"]
    assert fused.shard_shape == (8, 48)
    assert "'heads' is not the major part of 'qkv*heads*projection' (3*4*4)" in fused.reason
    assert plan.unused_rules == ()


def test_a_rule_for_the_whole_fused_name_splits_it(gpt2, inferred):
    rules = {"qkv*heads*projection": "model"}
    _, leaves = _plan(gpt2.weights, inferred, rules)
    assert leaves["h.0.attn.c_attn.w"].shard_shape == (16, 12)
    assert leaves["h.0.attn.c_attn.b"].shard_shape == (12,)


def test_named_weights_give_back_the_arrays_that_they_were_made_of(gpt2, inferred):
    named = pzs.name_axes(gpt2.weights, inferred)
    assert pzs.without_names(named) == gpt2.weights
    sizes = {name: name.sizes for name in named["h.0.attn.c_attn.w"].named_shape if "*" in name}
    assert sizes == {"qkv*heads*projection": (3, 4, 4)}


def test_what_is_undecided_is_named_by_the_caller_or_reported_by_the_plan():
    model = named_models.gpt2()
    weights = model.weights | {"unused": named_models.struct(4, 4)}
    inferred = pzs.infer_names(
        model.function, weights, *model.inputs, input_names=model.input_names
    )
    with pytest.raises(pzs.errors.PlanError, match="unused: this array of shape"):
        _plan(weights, inferred, {})
    overridden = pzs.infer_names(
        model.function,
        weights,
        *model.inputs,
        input_names=model.input_names,
        overrides={"unused": ("embedding", None)},
    )
    _, leaves = _plan(weights, overridden, {"embedding": "model"})
    assert leaves["unused"].names == ("embedding", None)
    assert leaves["unused"].shard_shape == (1, 4)
