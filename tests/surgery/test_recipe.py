"""Recipes as values: combined, shown, written and read."""

import copy
import functools
import json
import pickle
import re
import sys

import jax
import jax.numpy as jnp
import pytest
import treescope
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from penzai import pz

import penzai_shard
from penzai_shard import AxisRules, fully_sharded, make_mesh, surgery
from penzai_shard import layers as library_layers
from penzai_shard.errors import MeshError, RuleTypeError
from penzai_shard.layers import (
    Checkpointed,
    ConstrainSharding,
    ConstrainShardingByName,
    Jitted,
    LayerStackPolicy,
)
from penzai_shard.surgery import (
    ROOT,
    Recipe,
    constrain_blocks,
    insert_after,
    insert_before,
    jit_root,
    manual_fsdp,
    mixed_precision,
    rematerialise_blocks,
    replace,
    roll_layer_stacks,
    scope_layers,
    wrap,
)
from tests.surgery.small_models import Block, mlp, scaled, shown_by_rich

MESH = make_mesh({"data": 4, "model": 2})
PUBLIC = {
    **vars(penzai_shard),
    **{name: getattr(surgery, name) for name in surgery.__all__},
    **{name: getattr(library_layers, name) for name in library_layers.__all__},
    "pz": pz,
}

RECIPES = {
    "types": Recipe(wrap(pz.nn.Linear, Checkpointed, expect=4)),
    "tuple": Recipe(wrap((pz.nn.Linear, pz.nn.Attention), Jitted)),
    "pattern": Recipe(wrap("**/attention/**", Checkpointed, policy="dots")),
    "own type": Recipe(insert_after(Block, pz.nn.Identity())),
    "own function": Recipe(wrap(Block, scaled, nested=True)),
    "root": Recipe(insert_before(ROOT, pz.nn.NamedGroup("input", []))),
    "narrowed": Recipe(wrap(pz.nn.Linear, Jitted, within=Block, outside="**/mlp/**", expect=0)),
    "predicate": scope_layers(),
    "constraint": constrain_blocks(Block, MESH, {"batch": "data"}),
    "mapping": Recipe(insert_after(Block, ConstrainShardingByName(MESH, {"a": ("data", "model")}))),
    "pairs": Recipe(
        insert_after(Block, ConstrainShardingByName(MESH, [("a", "data"), ("b", None)]))
    ),
    "identity": constrain_blocks(Block, MESH),
    "policy object": Recipe(
        wrap(Block, Checkpointed, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "remat": rematerialise_blocks(Block),
    "stacks": roll_layer_stacks(unroll=2, policy="nested"),
    "stack policy": roll_layer_stacks(policy=LayerStackPolicy(save_internals="dots", group_size=2)),
    "fsdp": manual_fsdp(Block, MESH, {"embedding": "data"}, min_size=16),
    "precision": mixed_precision(keep=(pz.nn.Softmax,)),
    "several": jit_root() + mixed_precision("float16") + rematerialise_blocks(Block, "dots"),
    "empty": Recipe(),
}


def read(text, **options):
    """Recipes here name what the tests define."""
    return Recipe.from_json(text, allow=("tests",), **options)


@pytest.mark.parametrize("name", RECIPES)
def test_the_repr_evaluates_back(name):
    assert eval(repr(RECIPES[name]), PUBLIC) == RECIPES[name]


@pytest.mark.parametrize("name", RECIPES)
def test_json_reads_back(name):
    recipe = RECIPES[name]
    assert read(recipe.to_json()) == recipe
    assert read(recipe.to_json()).to_json() == recipe.to_json()


def test_a_function_inside_of_a_stack_policy_reads_back():
    saveable = jax.checkpoint_policies.dots_saveable
    recipe = roll_layer_stacks(policy=LayerStackPolicy(save_internals=saveable))
    assert read(recipe.to_json()) == eval(repr(recipe), {**PUBLIC, "jax": jax}) == recipe


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ('{"colour": 1}', "is not a policy of layer stacks"),
        ('{"group_size": 0}', "positive number"),
    ],
)
def test_a_written_stack_policy_of_other_fields_is_refused(fields, message):
    text = roll_layer_stacks(policy=LayerStackPolicy(group_size=2)).to_json()
    written = re.sub(r'("\$stack_policy":\s*)\{[^}]*\}', rf"\g<1>{fields}", text)
    assert written != text
    with pytest.raises(RuleTypeError, match=message):
        read(written)


def test_a_recipe_reads_well():
    recipe = Recipe(wrap("**/attention/**", Checkpointed, policy="dots"), wrap(ROOT, Jitted))
    assert repr(recipe) == (
        "Recipe(\n"
        "    wrap('**/attention/**', Checkpointed, policy='dots'),\n"
        "    wrap(ROOT, Jitted),\n"
        ")"
    )


def test_recipes_add_up_in_order():
    one, other = Recipe(wrap(Block, Checkpointed)), jit_root()
    assert (one + other).edits == (*one.edits, *other.edits)
    assert Recipe(one, *other) == one + other
    assert len(one + other) == 2
    assert (one + other)[1:] == other
    assert (one + other)[0] == one.edits[0]
    with pytest.raises(TypeError):
        one + other.edits


def test_a_recipe_of_data_is_hashable():
    assert hash(RECIPES["several"]) == hash(eval(repr(RECIPES["several"]), PUBLIC))


def test_partial_functions_are_options():
    recipe = Recipe(wrap(Block, functools.partial(Checkpointed, policy="dots")))
    assert recipe == Recipe(wrap(Block, Checkpointed, policy="dots"))


class TestJson:
    def test_specs_shardings_and_dtypes(self):
        sharding = {
            "x": NamedSharding(MESH, PartitionSpec(("data", "model"), None)),
            "y": NamedSharding(MESH, PartitionSpec()),
        }
        recipe = Recipe(
            insert_after(Block, ConstrainSharding(sharding)),
            mixed_precision(jnp.dtype("bfloat16")),
        )
        made = read(recipe.to_json())
        assert made == recipe
        assert made[0].what.sharding["x"].spec == PartitionSpec(("data", "model"), None)

    def test_rules_of_presets(self):
        recipe = constrain_blocks(Block, MESH, fully_sharded() | AxisRules({"a": None}))
        assert read(recipe.to_json()) == recipe

    def test_meshes_without_devices_and_explicit_ones(self):
        abstract = AbstractMesh((4,), ("data",))
        explicit = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
        recipe = constrain_blocks(Block, abstract) + constrain_blocks(Block, explicit)
        made = read(recipe.to_json())
        assert made[0].what.mesh == abstract
        assert made[1].what.mesh == explicit

    def test_another_mesh_may_be_given(self):
        other = make_mesh({"model": 4, "data": 2})
        made = read(RECIPES["constraint"].to_json(), mesh=other)
        assert made[0].what.mesh == other

    def test_the_mesh_given_must_have_the_axes(self):
        message = r"mesh axis 'model', and the mesh given \(data=8\) does not"
        with pytest.raises(MeshError, match=message):
            read(RECIPES["constraint"].to_json(), mesh=make_mesh({"data": 8}))

    def test_a_mesh_that_cannot_be_made_here_says_what_to_do(self):
        text = constrain_blocks(Block, AbstractMesh((16,), ("data",))).to_json()
        text = text.replace('"abstract": true', '"abstract": false').replace("Explicit", "Auto")
        with pytest.raises(MeshError, match=r"needs 16 devices(.|\n)*from_json\(text, mesh=mesh\)"):
            read(text)

    def test_everything_that_cannot_be_written_is_reported_at_once(self):
        def local(layer):
            return layer

        class Local(pz.nn.Identity):
            pass

        recipe = Recipe(
            wrap(Block, lambda layer: layer),
            wrap(Block, Jitted),
            replace(Local, local),
            insert_after(Block, pz.nn.ConstantRescale(by=jnp.ones(3))),
            wrap(lambda node: True, Jitted),
            wrap(ROOT, Checkpointed, policy=object()),
        )
        with pytest.raises(RuleTypeError, match="cannot be written as JSON") as error:
            recipe.to_json()
        lambda_, class_, array, predicate, other = error.value.problems
        assert "<lambda of tests.surgery.test_recipe, line" in lambda_
        assert "Define the function at the top level of a module." in lambda_
        assert lambda_.startswith("edit 1, wrap(")
        assert "Local cannot be imported by name. Define the class at the top level" in class_
        assert "it holds <array float32[3]>" in array
        assert "cannot be imported by name" in predicate
        assert "of type object has no form in JSON" in other

    def test_what_is_no_recipe_is_refused(self):
        with pytest.raises(RuleTypeError, match="this is not a recipe: Expecting value"):
            read("nothing")
        with pytest.raises(RuleTypeError, match="this JSON is not a recipe"):
            read("[]")
        data = json.loads(jit_root().to_json())
        with pytest.raises(RuleTypeError, match=r"has version 7, and 1 is known"):
            read(json.dumps(data | {"version": 7}))

    def test_every_edit_that_cannot_be_read_is_reported(self):
        data = json.loads((jit_root() + jit_root() + jit_root() + jit_root()).to_json())
        data["edits"][0]["edit"] = "wrp"
        data["edits"][1]["what"] = {"$ref": "penzai_shard.layers:Jited"}
        data["edits"][2]["what"] = {"$unknown": 1}
        del data["edits"][3]["where"]
        with pytest.raises(RuleTypeError) as error:
            read(json.dumps(data))
        kind, name, form, missing = error.value.problems
        assert kind == (
            "edit 1: 'wrp' is not an edit. Use one of wrap, insert_before, insert_after, replace."
        )
        assert "Did you mean 'Jitted'?" in name
        assert "has no known form" in form
        assert missing == "edit 4: 'where' is missing."


class TestReport:
    def test_it_counts_places_and_shows_types(self):
        recipe = Recipe(
            wrap(pz.nn.Linear, Checkpointed), insert_after(Block, pz.nn.Identity()), jit_root()
        )
        report = recipe.report(mlp(2))
        assert [row.count for row in report.rows] == [4, 2, 1]
        assert report.rows[0].paths[0] == "sublayers/0/sublayers/0/delta/sublayers/0"
        assert report.rows[0].before_types == ("Linear",) * 4
        assert report.rows[0].after_types == ("Checkpointed(Linear)",) * 4
        assert report.rows[1].after_types == ("Block, Identity",) * 2
        assert report.rows[2].paths == ("",)
        assert report.ok

    def test_it_is_a_table(self):
        report = Recipe(wrap(Block, Checkpointed), jit_root()).report(mlp(2))
        assert report.plain_text().splitlines() == [
            "2 edits of Sequential, 3 places",
            "edit                       count  paths        before      after",
            "-------------------------  -----  -----------  ----------  -------------------",
            "wrap(Block, Checkpointed)      2  sublayers/*  Block       Checkpointed(Block)",
            "wrap(ROOT, Jitted)             1  the root     Sequential  Jitted(Sequential)",
        ]
        assert repr(report) == str(report) == report.plain_text()

    def test_it_unfolds_to_the_places_that_each_edit_changes(self):
        twice = insert_after(Block, pz.nn.Identity())
        report = Recipe(twice, wrap(Block, Checkpointed), twice, jit_root()).report(mlp(2))
        tree = report.tree()
        assert [node.label.partition("(")[0] for node in tree.children] == [
            "1. insert_after",
            "2. wrap",
            "3. insert_after",
            "4. wrap",
        ]
        assert [figure.value for node in tree.children for figure in node.figures] == [2, 2, 2, 1]
        assert tree.figures[0].value == 7
        (block,) = tree.children[1].children
        assert (block.path, block.count, block.line) == (
            "sublayers/{0,2}",
            2,
            "Block -> Checkpointed(Block)",
        )
        (root,) = tree.children[3].children
        assert (root.label, root.line) == ("the root", "Sequential -> Jitted(Sequential)")
        open_paths = {node.path for node in report.tree(collapse=False).walk()}
        assert {path for row in report.rows for path in row.paths} <= open_paths

    def test_an_edit_that_does_not_fit_is_bad_in_the_tree(self):
        report = Recipe(wrap(pz.nn.Attention, Jitted), jit_root()).report(mlp(1))
        tree = report.tree()
        assert [node.ok for node in tree.children] == [False, None]
        assert tree.ok is False
        assert any("nothing matches" in text for text in tree.children[0].details)

    def test_rich_shows_the_same(self):
        report = Recipe(wrap(Block, Checkpointed), jit_root()).report(mlp(2))
        shown = shown_by_rich(report)
        assert "Checkpointed(Block)" in shown
        assert "2 edits of Sequential, 3 places" in shown

    def test_an_edit_that_does_not_fit_is_reported_and_the_rest_is_shown(self):
        report = Recipe(wrap(pz.nn.Attention, Jitted), jit_root()).report(mlp(1))
        assert not report.ok
        assert [row.count for row in report.rows] == [0, 1]
        assert "does not fit: wrap('pz.nn:Attention', Jitted): nothing matches" in str(report)

    def test_wrappers_of_others_are_shown_with_what_they_hold(self):
        report = Recipe(wrap(pz.nn.Elementwise, pz.nn.Residual)).report(mlp(1))
        assert report.rows[0].after_types == ("Residual(Elementwise)",)
        report = Recipe(wrap(pz.nn.Elementwise, scaled)).report(mlp(1))
        assert report.rows[0].after_types == ("Sequential(Elementwise, ConstantRescale)",)
        nested = Recipe(wrap(pz.nn.Elementwise, lambda layer: Jitted(scaled(layer))), jit_root())
        assert nested.report(mlp(1)).rows[0].after_types == (
            "Jitted(Sequential(Elementwise, ConstantRescale))",
        )

    def test_a_notebook_shows_a_small_table_with_the_verdict_first(self):
        recipe = scope_layers() + Recipe(wrap(Block, scaled)) + rematerialise_blocks(Block)
        shown = recipe.report(model := mlp(24))._repr_html_()
        assert len(shown) < 20_000
        count = len(re.findall("Linear|Elementwise|Sequential|Residual|Block", repr(model)))
        assert 0 < shown.index(f"3 edits of Sequential, {count + 48} places") < shown.index("<tr>")
        bad = Recipe(wrap(pz.nn.Attention, Jitted)).report(mlp(1))._repr_html_()
        assert bad.index("does NOT fit") < bad.index("<tr>")
        assert treescope.render_to_text(recipe.report(mlp(1))).startswith("<EditReport: 3 edits of")


def test_treescope_shows_a_recipe_as_its_repr():
    recipe = Recipe(insert_after(pz.nn.Linear, pz.nn.Identity()), wrap(ROOT, Jitted))
    shown = treescope.render_to_text([recipe])
    for edit in recipe:
        assert repr(edit) in shown


def test_what_a_script_defines_itself_is_not_written_as_json(monkeypatch):
    def mine(layer):
        return layer

    mine.__module__, mine.__qualname__ = "__main__", "mine"
    monkeypatch.setattr(sys.modules["__main__"], "mine", mine, raising=False)
    recipe = Recipe(replace(pz.nn.Linear, mine))
    assert repr(recipe) == "Recipe(replace('pz.nn:Linear', mine))"
    with pytest.raises(RuleTypeError, match="cannot be written as JSON"):
        recipe.to_json()


@pytest.mark.parametrize(
    "edit",
    [
        insert_after(Block, ConstrainShardingByName(MESH, penzai_shard.tensor_parallel())),
        insert_after(
            Block,
            ConstrainShardingByName(
                MESH, penzai_shard.data_parallel() | fully_sharded(("data", "model"), min_size=64)
            ),
        ),
        insert_after(Block, ConstrainShardingByName(MESH, AxisRules() | {"a": None})),
        insert_after(Block, ConstrainSharding(NamedSharding(MESH, PartitionSpec(None, "data")))),
        insert_after(Block, ConstrainShardingByName(jax.make_mesh((8,), ("data",)))),
        insert_after(Block, pz.nn.Elementwise(jnp.tanh)),
        insert_after(Block, pz.nn.Elementwise(jax.nn.silu)),
        insert_after(Block, pz.nn.ConstantRescale(by=float("inf"))),
    ],
    ids=lambda edit: repr(edit)[:60],
)
def test_what_users_write_evaluates_back_and_goes_through_json(edit):
    recipe = Recipe(edit)
    assert eval(repr(recipe), {**PUBLIC, "jax": jax}) == recipe
    assert read(recipe.to_json()) == recipe


def test_the_devices_of_a_mesh_and_their_order_are_kept_in_json():
    turned = jax.sharding.Mesh(MESH.devices[::-1], MESH.axis_names, axis_types=MESH.axis_types)
    some = make_mesh({"data": 2}, jax.devices()[2:4])
    for mesh in (turned, some):
        recipe = Recipe(insert_after(Block, ConstrainShardingByName(mesh)))
        (edit,) = read(recipe.to_json())
        assert edit.what.mesh == mesh
    elsewhere = recipe.to_json().replace("3\n", "99\n")
    with pytest.raises(MeshError, match=r"none with the ids \[99\].*from_json\(text, mesh"):
        read(elsewhere)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edits": 5}, 'has no list of "edits"'),
        ({}, 'has no list of "edits"'),
        ({"edits": [5]}, r"edit 1 is not as to_json\(\) writes it"),
        (
            {"edits": [{"edit": "wrap", "where": {"root": True}, "what": {"$mesh": 3}}]},
            r"edit 1 is not as to_json\(\) writes it",
        ),
        ({"edits": [{"edit": "wrap", "where": {"root": True}}]}, "edit 1: 'what' is missing"),
    ],
)
def test_text_that_was_changed_by_hand_is_refused(change, message):
    text = json.dumps({"format": "penzai_shard recipe", "version": 1, **change})
    with pytest.raises(RuleTypeError, match=message):
        read(text)


@pytest.mark.parametrize("make", [wrap, insert_after])
def test_a_function_that_gives_no_layer_is_refused(make):
    with pytest.raises(RuleTypeError, match="returned None where a layer belongs"):
        Recipe(make(pz.nn.Linear, lambda layer: None)).apply(mlp(1))


def test_a_typo_in_a_policy_is_reported_when_the_recipe_is_applied():
    with pytest.raises(RuleTypeError, match="dots"):
        Recipe(wrap(pz.nn.Linear, Checkpointed, policy="dot")).apply(mlp(1))


def test_edits_and_recipes_add_up_to_recipes_in_any_order():
    edit, recipe = wrap(pz.nn.Linear, Checkpointed), Recipe(wrap(ROOT, Jitted))
    assert edit + recipe == Recipe(edit, *recipe)
    assert recipe + edit == Recipe(*recipe, edit)
    assert edit + edit == Recipe(edit, edit)
    assert copy.deepcopy(edit) == edit == pickle.loads(pickle.dumps(edit))
    for other in (1, [edit], None):
        with pytest.raises(TypeError, match="unsupported operand"):
            edit + other
        with pytest.raises(TypeError, match="unsupported operand"):
            recipe + other


def test_a_report_says_what_is_put_around_its_like():
    twice = Recipe(wrap(ROOT, Jitted), wrap(pz.nn.Linear, Jitted), wrap(ROOT, Jitted))
    notes = twice.report(mlp(1)).text_summary()
    assert notes == [
        "wrap(ROOT, Jitted): is around the layer already, and is put around it once more"
    ]
