"""Every standard recipe on every family of models: what stays the same, and what it is for."""

import functools

import jax
import jax.numpy as jnp
import pytest
from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock

import penzai_shard as pzs
from penzai_shard import programs
from tests.models import llama

# Two devices are enough to split over, and programs for more take longer to compile.
MESH = pzs.make_mesh({"data": 2}, jax.devices()[:2])
TOKENS = pz.nx.wrap(jnp.arange(24).reshape(4, 6) % 16, "batch", "seq")
FAMILIES = {
    "llama": {"kv_heads": 1, "blocks": 1},
    "gqa": {"blocks": 1},
    "tied": {"multiplier": 1, "tied": True, "blocks": 1},
    "stacked": {"multiplier": 1, "stacked": True},
}
FSDP = {"embedding": "data", "batch": "data"}
RECIPES = {
    "constrain_blocks": pzs.constrain_blocks(TransformerBlock, MESH, {"batch": "data"}),
    "rematerialise_blocks": pzs.rematerialise_blocks(TransformerBlock, "dots"),
    "jit_root": pzs.jit_root(),
    "scope_layers": pzs.scope_layers(),
    "roll_layer_stacks": pzs.roll_layer_stacks(unroll=2, policy="nested"),
    "manual_fsdp": pzs.manual_fsdp(TransformerBlock, MESH, FSDP, min_size=4),
    "keep_axis_order": pzs.keep_axis_order(),
    "mixed_precision": pzs.mixed_precision(keep=(pz.nn.Softmax, pz.nn.RMSLayerNorm)),
}
# Those that change no number go together, which takes a third of the time.
TOGETHER = ("scope_layers", "keep_axis_order", "rematerialise_blocks", "constrain_blocks")
CERTIFIED = {
    "together": sum((RECIPES[name] for name in TOGETHER), pzs.Recipe()) + pzs.jit_root(),
    "rolled": pzs.roll_layer_stacks(policy="carries") + pzs.jit_root(),
    **{name: RECIPES[name] for name in ("manual_fsdp", "mixed_precision")},
}


@functools.cache
def model(family):
    return llama(**FAMILIES[family])


def is_for(name, family):
    return "roll" not in name or family == "stacked"


# Of the family "llama" the guides' claims judge outputs and gradients.
@pytest.mark.parametrize("family", [*FAMILIES][1:])
@pytest.mark.parametrize("name", CERTIFIED)
def test_recipes_keep_what_a_model_computes(name, family):
    if is_for(name, family):
        # Of gradients the guides' claims judge too: here those of the tied model, and of a stack
        # where a recipe changes how it runs.
        gradients = family == "tied" or (family == "stacked" and name != "together")
        report = CERTIFIED[name].check(model(family), TOKENS, gradients=gradients)
        assert report.ok, str(report)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_values(name, family):
    recipe, bare = RECIPES[name], model(family)
    again = pzs.Recipe.from_json(recipe.to_json(), mesh=MESH)
    assert again == recipe
    if not is_for(name, family):
        with pytest.raises(pzs.SelectionError):
            recipe.apply(bare)
        return
    edited = recipe.apply(bare)
    assert again.apply(bare) == edited != bare
    assert pzs.strip(edited) == bare


@pytest.mark.parametrize("family", FAMILIES)
def test_keep_axis_order_moves_no_activations(family):
    rolls = pzs.roll_layer_stacks() if family == "stacked" else pzs.Recipe()
    bare = rolls.apply(model(family))
    for each in (bare, pzs.keep_axis_order().apply(bare)):
        program = jax.make_jaxpr(pz.freeze_variables(each))(TOKENS)
        found = {equation.primitive.name for equation in programs.equations_in(program)}
        assert ("transpose" in found) is (each is bare)
