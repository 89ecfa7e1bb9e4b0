"""Models that somebody else edited, of Penzai's first API, or of no Penzai at all."""

import equinox
import jax
import jax.numpy as jnp
from penzai import pz
from penzai.deprecated.v1 import pz as v1
from penzai.toolshed import lora, save_intermediates

from penzai_shard import AxisRules, make_mesh, make_plan
from penzai_shard.layers import Checkpointed, Jitted, Scoped
from penzai_shard.surgery import (
    ROOT,
    InsertedSequence,
    Recipe,
    check_equivalent,
    insert_after,
    jit_root,
    replace,
    strip,
    wrap,
)
from tests.surgery.small_models import Block, features, mlp

MESH = make_mesh({"data": 4, "model": 2})
RULES = AxisRules({"embedding": "data", "neurons": "model"})


def with_adapters(layer, path):
    return lora.LowRankAdapter.from_linear(
        layer, f"LoRA:{path}", init_base_rng=jax.random.key(1), rank=3
    )


def layout_by_name(leaf):
    entries = (*leaf.spec, *(None,) * (len(leaf.names) - len(leaf.spec)))
    return dict(zip(leaf.names, entries, strict=True))


class TestLora:
    def model(self):
        return lora.loraify_linears_in_selection(
            pz.select(mlp(1)), rank=3, init_base_rng=jax.random.key(1)
        )

    def test_adapters_get_the_layout_of_the_weight_they_adapt(self):
        leaves = make_plan(self.model(), MESH, RULES).leaves
        layouts = {leaf.path: layout_by_name(leaf) for leaf in leaves}
        adapted = {
            path: (
                layout,
                layouts["block_0/up.weights" if "[0]" in path else "block_0/down.weights"],
            )
            for path, layout in layouts.items()
            if path.startswith("LoRA:")
        }
        assert len(adapted) == 4
        for layout, weight in adapted.values():
            assert layout.pop("lowrank") is None
            ((axis, mesh_axis),) = layout.items()
            assert mesh_axis is not None
            assert weight[axis] == mesh_axis

    def test_a_recipe_puts_adapters_in_with_sharing_of_names(self):
        model = mlp(1)
        edited = Recipe(replace(pz.nn.Linear, with_adapters, expect=2)).apply(model)
        before = {leaf.path: leaf.spec for leaf in make_plan(model, MESH, RULES).leaves}
        after = {leaf.path: leaf.spec for leaf in make_plan(edited, MESH, RULES).leaves}
        assert after.items() >= before.items()
        assert check_equivalent(model, edited, features(), gradients=False).comparisons[1].ok

    def test_recipes_work_on_adapted_models_and_come_off(self):
        model = self.model()
        recipe = Recipe(
            wrap(lora.LowRankAdapter, Checkpointed, expect=2),
            insert_after(pz.nn.Linear, pz.nn.Identity(), within="**/Update/**", expect=4),
            wrap(ROOT, Jitted),
        )
        edited = recipe.apply(model)
        assert strip(edited) == model
        assert check_equivalent(model, edited, features(), gradients=False)


class TestSavedIntermediates:
    def test_recipes_work_and_come_off(self):
        model = save_intermediates.saving_all_intermediates(mlp(1))
        recipe = Recipe(wrap(pz.nn.Linear, Checkpointed), wrap(ROOT, Jitted))
        edited = recipe.apply(model)
        x = features()
        edited(x)
        saved = pz.select(edited).at_instances_of(save_intermediates.SaveIntermediate)
        assert saved.count() > 3
        assert all(layer.saved.value is not None for layer in saved.get_sequence())
        assert strip(edited) == model

    def test_saving_layers_come_off_where_a_recipe_put_them(self):
        model = mlp(1)
        recipe = Recipe(
            insert_after(Block, lambda block: save_intermediates.SaveIntermediate()), jit_root()
        )
        edited = recipe.apply(model)
        edited(features())
        saved = pz.select(edited).at_instances_of(save_intermediates.SaveIntermediate).get()
        assert saved.saved.value is not None
        assert strip(edited) == model

    def test_saving_everything_in_an_edited_model_keeps_it_strippable(self):
        model = mlp(1)
        edited = Recipe(wrap(pz.nn.Linear, Checkpointed), jit_root()).apply(model)
        saving = save_intermediates.saving_all_intermediates(edited)
        stripped = strip(saving, layers=(Checkpointed, Jitted))
        assert pz.select(stripped).at_instances_of(Checkpointed).is_empty()
        assert pz.select(stripped).at_instances_of(save_intermediates.SaveIntermediate).count()


class TestFirstApi:
    def model(self):
        mlp_def = v1.nn.Sequential(
            [
                v1.nn.add_parameter_prefix(
                    "up", v1.nn.Linear.from_config({"embedding": 4}, {"neurons": 8})
                ),
                v1.nn.Elementwise(jnp.tanh),
            ]
        )
        return v1.nn.initialize_parameters(mlp_def, jax.random.key(0))

    def test_recipes_work_and_come_off(self):
        model = self.model()
        recipe = Recipe(
            wrap(v1.nn.Linear, Checkpointed, expect=1),
            insert_after(v1.nn.Elementwise, v1.nn.Identity()),
            wrap(ROOT, Jitted),
        )
        edited = recipe.apply(model)
        assert len(edited.body.sublayers) == 3
        assert strip(edited) == model

    def test_equivalence_goes_by_the_names_of_parameters(self):
        model = self.model()
        report = check_equivalent(
            model, Recipe(wrap(v1.nn.Linear, Checkpointed)).apply(model), features()
        )
        assert report, report
        assert [part.count for part in report.comparisons] == [1, 1, 0, 1]
        wrong = Recipe(insert_after(v1.nn.Linear, v1.nn.Elementwise(jnp.sin))).apply(model)
        report = check_equivalent(model, wrong, features())
        assert not report
        assert report.divergence.path == "sublayers/1"
        assert report.divergence.input_differs


class Unknown:
    """A registered node that only JAX can take apart."""

    def __init__(self, inner, scale):
        self.inner, self.scale = inner, scale

    def __call__(self, x):
        return self.inner(x) * self.scale


jax.tree_util.register_pytree_with_keys(
    Unknown,
    lambda node: (
        [
            (jax.tree_util.GetAttrKey("inner"), node.inner),
            (jax.tree_util.GetAttrKey("scale"), node.scale),
        ],
        None,
    ),
    lambda _, children: Unknown(*children),
)


class TestBareArrays:
    def test_arrays_without_names_are_parameters_by_path(self):
        model = Unknown(Unknown(pz.nn.Identity(), jnp.float32(2)), jnp.float32(3))
        edited = Recipe(wrap("inner", Jitted), wrap(ROOT, Checkpointed)).apply(model)
        report = check_equivalent(model, edited, jnp.float32(1))
        assert report, report
        assert [part.count for part in report.comparisons] == [2, 1, 0, 2]

    def test_a_wrong_edit_is_located(self):
        model = Unknown(Unknown(pz.nn.Identity(), jnp.float32(2)), jnp.float32(3))
        edited = Recipe(insert_after("inner", pz.nn.ConstantRescale(by=1.5))).apply(model)
        assert isinstance(edited.inner, InsertedSequence)
        report = check_equivalent(model, edited, jnp.float32(1))
        assert not report
        assert report.divergence.path == "inner"

    def test_edits_come_off(self):
        model = Unknown(Unknown(pz.nn.Identity(), jnp.float32(2)), jnp.float32(3))
        edited = Recipe(insert_after("inner", pz.nn.ConstantRescale(by=1.5))).apply(model)
        stripped = strip(edited)
        assert isinstance(stripped.inner, Unknown)
        assert jax.tree.structure(stripped) == jax.tree.structure(model)


def test_equinox_modules():
    model = equinox.nn.MLP(3, 2, 4, 2, key=jax.random.key(0))
    recipe = Recipe(wrap(equinox.nn.Linear, Checkpointed, expect=3), wrap(ROOT, Scoped))
    edited = recipe.apply(model)
    x = jnp.arange(3.0)
    assert jnp.allclose(edited(x), model(x))
    stripped = strip(edited)
    assert jax.tree.structure(stripped) == jax.tree.structure(model)
    assert all(
        one is other
        for one, other in zip(jax.tree.leaves(stripped), jax.tree.leaves(model), strict=True)
    )
    report = check_equivalent(model, edited, x)
    assert report, report
    assert [part.count for part in report.comparisons] == [6, 1, 0, 6]
    wrong = Recipe(
        insert_after("layers/1", pz.nn.ConstantRescale(by=1.5)), wrap("layers/2", Checkpointed)
    ).apply(model)
    assert check_equivalent(model, wrong, x).divergence.path == "layers/1"


def test_equinox_modules_with_functions_for_leaves_are_jitted_and_rematerialised():
    model = equinox.nn.MLP(3, 2, 4, 2, key=jax.random.key(0))
    assert any(callable(leaf) for leaf in jax.tree.leaves(model))
    x = jnp.arange(3.0)
    for recipe in (jit_root(), Recipe(wrap(ROOT, Checkpointed)) + jit_root()):
        edited = recipe.apply(model)
        assert check_equivalent(model, edited, x)
        again = equinox.tree_at(lambda tree: tree.body, edited, edited.body)
        assert jnp.allclose(again(x), model(x))
        assert strip(edited) is model
