"""Where edits apply, and what they put there."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from penzai import pz
from penzai.models.transformer import model_parts

from penzai_shard.errors import RuleTypeError, SelectionError
from penzai_shard.layers import Checkpointed, InPrecision, Jitted, Scoped
from penzai_shard.surgery import (
    ROOT,
    Inserted,
    InsertedSequence,
    Recipe,
    insert_after,
    insert_before,
    replace,
    strip,
    wrap,
)
from tests.surgery.small_models import Block, features, linear, llama, mlp, mlp_block


def types_of(layers):
    return [type(layer).__name__ for layer in layers]


def count(model, kind):
    return pz.select(model).at_instances_of(kind).count()


class TestPlaces:
    def test_a_type_finds_its_instances(self):
        edited = Recipe(wrap(pz.nn.Linear, Checkpointed, expect=4)).apply(mlp(2))
        assert isinstance(edited.sublayers[0].sublayers[0].delta.sublayers[0], Checkpointed)

    def test_a_tuple_of_types_finds_all_of_them(self):
        recipe = Recipe(wrap((pz.nn.Linear, pz.nn.Elementwise), Checkpointed, expect=6))
        assert count(recipe.apply(mlp(2)), Checkpointed) == 6

    def test_a_predicate_finds_layers(self):
        recipe = Recipe(wrap(lambda node: isinstance(node, Block), Checkpointed, expect=2))
        assert types_of(recipe.apply(mlp(2)).sublayers) == ["Checkpointed", "Checkpointed"]

    def test_a_predicate_may_ask_for_the_path(self):
        recipe = Recipe(wrap(lambda node, path: path == "sublayers/1", Checkpointed, expect=1))
        assert types_of(recipe.apply(mlp(2)).sublayers) == ["Block", "Checkpointed"]

    def test_a_predicate_is_asked_about_layers_alone(self):
        recipe = Recipe(wrap(lambda node: callable(node) and node is not None, Jitted))
        assert isinstance(recipe.apply({"a": [linear("w")]})["a"][0], Jitted)

    def test_a_pattern_finds_keys(self):
        recipe = Recipe(wrap("sublayers/1/**/delta/sublayers/*", Checkpointed, expect=3))
        edited = recipe.apply(mlp(2))
        assert types_of(edited.sublayers[1].sublayers[0].delta.sublayers) == ["Checkpointed"] * 3
        assert count(edited.sublayers[0], Checkpointed) == 0

    def test_a_pattern_finds_the_attention_of_a_transformer_by_its_type(self):
        edited = Recipe(wrap("**/attention/**", Checkpointed, expect=2)).apply(llama(2))
        found = pz.select(edited).at_instances_of(Checkpointed).get_sequence()
        assert types_of(layer.body for layer in found) == ["Attention", "Attention"]

    def test_a_pattern_finds_a_named_group(self):
        recipe = Recipe(wrap("**/gate", Checkpointed, expect=2))
        found = pz.select(recipe.apply(llama(2))).at_instances_of(Checkpointed).get_sequence()
        assert {layer.body.name for layer in found} == {"gate"}

    def test_a_pattern_finds_layers_and_not_the_lists_they_are_in(self):
        model = {"attention": [linear("a"), linear("b")], "mlp": linear("c")}
        edited = Recipe(wrap("**/attention/**", Jitted, expect=2)).apply(model)
        assert types_of(edited["attention"]) == ["Jitted", "Jitted"]
        assert edited["mlp"] is model["mlp"]

    def test_a_reference_finds_a_type(self):
        assert wrap("pz.nn:Linear", Jitted) == wrap(pz.nn.Linear, Jitted)

    def test_the_root_is_found_alone(self):
        model = mlp(1)
        edited = Recipe(wrap(ROOT, Jitted, expect=1)).apply(model)
        assert edited == Jitted(model)
        assert edited.body is model

    def test_within_a_type_means_strictly_inside(self):
        recipe = Recipe(wrap(pz.nn.Sequential, Checkpointed, within=Block, expect=2))
        edited = recipe.apply(mlp(2))
        assert types_of(edited.sublayers) == ["Block", "Block"]
        assert isinstance(edited.sublayers[0].sublayers[0].delta, Checkpointed)

    def test_within_a_pattern_narrows(self):
        recipe = Recipe(wrap(pz.nn.Linear, Checkpointed, within="sublayers/1", expect=2))
        edited = recipe.apply(mlp(2))
        assert count(edited.sublayers[0], Checkpointed) == 0

    def test_within_attention_by_pattern_or_type_is_the_same(self):
        model = llama(2)
        by_type = Recipe(wrap(pz.nn.Linear, Checkpointed, within=pz.nn.Attention))
        by_pattern = Recipe(wrap(pz.nn.Linear, Checkpointed, within="**/attention/**"))
        assert by_type.apply(model) == by_pattern.apply(model)

    def test_outside_leaves_out(self):
        model = llama(2)
        inside = Recipe(wrap(pz.nn.Linear, Checkpointed, within=pz.nn.Attention)).report(model)
        outside = Recipe(wrap(pz.nn.Linear, Checkpointed, outside=pz.nn.Attention)).report(model)
        everywhere = Recipe(wrap(pz.nn.Linear, Checkpointed)).report(model)
        assert inside.rows[0].count == 8
        assert inside.rows[0].count + outside.rows[0].count == everywhere.rows[0].count
        assert not set(inside.rows[0].paths) & set(outside.rows[0].paths)

    def test_outside_a_pattern_leaves_out_the_node_itself(self):
        recipe = Recipe(wrap(Block, Checkpointed, outside="sublayers/0/**", expect=1))
        assert types_of(recipe.apply(mlp(2)).sublayers) == ["Block", "Checkpointed"]

    def test_outside_a_predicate(self):
        recipe = Recipe(
            wrap(pz.nn.Linear, Checkpointed, outside=lambda node, path: path == "sublayers/0")
        )
        assert recipe.report(mlp(2)).rows[0].count == 2

    def test_narrowings_combine(self):
        recipe = Recipe(
            wrap(pz.nn.Linear, Checkpointed, within=Block, outside="sublayers/0", expect=2)
        )
        assert count(recipe.apply(mlp(2)), Checkpointed) == 2


class TestWhatEditsDo:
    def test_outermost_matches_count(self):
        model = pz.nn.Sequential([pz.nn.Sequential([pz.nn.Identity()])])
        assert Recipe(wrap(pz.nn.Sequential, Jitted, expect=1)).apply(model) == Jitted(model)

    def test_nested_matches_count_on_request(self):
        model = pz.nn.Sequential([pz.nn.Sequential([pz.nn.Identity()])])
        edited = Recipe(wrap(pz.nn.Sequential, Jitted, nested=True, expect=2)).apply(model)
        assert edited == Jitted(pz.nn.Sequential([Jitted(pz.nn.Sequential([pz.nn.Identity()]))]))

    def test_an_edit_does_not_enter_what_it_put_in(self):
        def twice(layer):
            return pz.nn.Sequential([layer, pz.nn.Identity()])

        model = pz.nn.Sequential([pz.nn.Identity()])
        assert Recipe(replace(pz.nn.Identity, twice, expect=1)).apply(model) is not model

    def test_each_edit_sees_the_result_of_those_before(self):
        recipe = Recipe(wrap(Block, Checkpointed), wrap(Checkpointed, Jitted, expect=2))
        assert types_of(recipe.apply(mlp(2)).sublayers) == ["Jitted", "Jitted"]

    def test_a_layer_is_inserted_into_the_list_of_sublayers(self):
        model, layer = pz.nn.Sequential([linear("w")]), pz.nn.Identity()
        after = Recipe(insert_after(pz.nn.Linear, layer)).apply(model)
        before = Recipe(insert_before(pz.nn.Linear, layer)).apply(model)
        linears, inserted = pz.select(model).at_instances_of(pz.nn.Linear), Inserted(layer)
        assert after == linears.insert_after(inserted)
        assert before == linears.insert_before(inserted)

    def test_a_tuple_of_sublayers_stays_a_tuple(self):
        model = pz.nn.NamedGroup("group", (pz.nn.Identity(),))
        edited = Recipe(insert_after(pz.nn.Identity, pz.nn.ConstantRescale(by=2.0))).apply(model)
        assert edited.sublayers == (pz.nn.Identity(), Inserted(pz.nn.ConstantRescale(by=2.0)))

    def test_elsewhere_a_sequence_takes_the_place(self):
        model = pz.nn.Residual(linear("w"))
        edited = Recipe(insert_after(pz.nn.Linear, pz.nn.Identity())).apply(model)
        assert isinstance(edited.delta, InsertedSequence)
        assert types_of(edited.delta.sublayers) == ["Linear", "Inserted"]

    def test_branches_that_are_not_run_in_order_are_not_added_to(self):
        model = pz.nn.BranchAndAddTogether([pz.nn.Identity(), pz.nn.Identity()])
        edited = Recipe(insert_after(pz.nn.Identity, pz.nn.ConstantRescale(by=2.0))).apply(model)
        assert types_of(edited.branches) == ["InsertedSequence"] * 2
        assert edited(1.0) == 4.0

    def test_insertion_at_the_root(self):
        model = mlp(1)
        edited = Recipe(insert_before(ROOT, pz.nn.Identity())).apply(model)
        assert types_of(edited.sublayers) == ["Inserted", "Sequential"]

    def test_a_function_may_make_the_layer_to_insert(self):
        recipe = Recipe(
            insert_after(Block, lambda block: pz.nn.NamedGroup(type(block).__name__, []))
        )
        assert recipe.apply(mlp(1)).sublayers[1].name == "Block"

    def test_a_function_may_make_the_layer_to_insert_from_the_path(self):
        recipe = Recipe(insert_after(Block, lambda block, path: pz.nn.NamedGroup(path, [])))
        assert [layer.name for layer in recipe.apply(mlp(2)).sublayers[1::2]] == [
            "sublayers/0",
            "sublayers/1",
        ]

    def test_a_wrapper_that_needs_a_name_gets_the_path(self):
        edited = Recipe(wrap(Block, Scoped)).apply(mlp(2))
        assert [layer.name for layer in edited.sublayers] == ["sublayers/0", "sublayers/1"]

    def test_a_wrapper_with_an_argument_called_path_gets_it(self):
        def named(layer, path=""):
            return Scoped(layer, f"at {path}")

        assert Recipe(wrap(ROOT, named)).apply(mlp(1)).name == "at "

    def test_options_go_to_the_wrapper(self):
        edited = Recipe(wrap(Block, Checkpointed, policy="dots")).apply(mlp(1))
        assert edited.sublayers[0].policy == "dots"

    def test_replace_finds_parameters_too(self):
        edited = Recipe(replace(pz.Parameter, lambda parameter: parameter.freeze())).apply(mlp(1))
        assert pz.unbind_variables(edited)[1] == ()

    def test_the_model_stays_as_it_is(self):
        model = mlp(2)
        before = list(model.sublayers)
        Recipe(insert_after(Block, pz.nn.Identity()), wrap(ROOT, Jitted)).apply(model)
        assert all(one is other for one, other in zip(model.sublayers, before, strict=True))
        assert len(model.sublayers) == 2

    def test_what_no_edit_touches_is_shared(self):
        model = mlp(3)
        edited = Recipe(wrap("sublayers/1", Checkpointed)).apply(model)
        assert edited.sublayers[0] is model.sublayers[0]
        assert edited.sublayers[1].body is model.sublayers[1]
        assert Recipe(replace(Block, lambda block: block)).apply(model) is model

    def test_a_compiled_layer_forgets_its_reading_of_another_body(self):
        x = features()
        model = Jitted(mlp(1))
        model(x)
        edited = Recipe(insert_after(Block, pz.nn.ConstantRescale(by=2.0))).apply(model)
        assert jnp.allclose(
            edited(x).unwrap("batch", "embedding"), 2 * model(x).unwrap("batch", "embedding")
        )


class TestSharing:
    def test_a_shared_layer_stays_shared(self):
        shared = linear("w")
        model = pz.nn.Sequential([shared, pz.nn.Residual(shared)])
        edited = Recipe(wrap(pz.nn.Linear, Checkpointed, expect=2)).apply(model)
        assert edited.sublayers[0] is edited.sublayers[1].delta

    def test_a_shared_group_stays_shared(self):
        shared = mlp_block("b")
        model = pz.nn.Sequential([shared, shared])
        edited = Recipe(wrap(pz.nn.Linear, Checkpointed), wrap(ROOT, Jitted)).apply(model)
        assert edited.body.sublayers[0] is edited.body.sublayers[1]
        stripped = strip(edited)
        assert stripped == model
        assert stripped.sublayers[0] is stripped.sublayers[1]

    def test_a_layer_made_for_a_shared_layer_is_shared(self):
        shared = linear("w")
        model = {"a": shared, "b": shared}
        edited = Recipe(insert_after(pz.nn.Linear, lambda layer: pz.nn.NamedGroup("n", []))).apply(
            model
        )
        assert edited["a"] is edited["b"]

    def test_shared_parameters_stay_shared(self):
        one, other = linear("w"), linear("v")
        model = pz.nn.Sequential([one, dataclasses.replace(other, weights=one.weights)])
        edited = Recipe(wrap(pz.nn.Linear, Checkpointed, expect=2), wrap(ROOT, Jitted)).apply(model)
        (parameter,) = pz.unbind_variables(edited)[1]
        assert parameter is one.weights

    def test_places_that_are_edited_differently_share_their_parameters(self):
        shared = linear("w")
        model = {"a": shared, "b": shared}
        edited = Recipe(wrap("a", Checkpointed)).apply(model)
        assert edited["b"] is shared
        assert edited["a"].body is shared


@dataclasses.dataclass(frozen=True)
class Plain:
    """A registered dataclass that knows nothing of Penzai."""

    inner: object
    factor: float

    def __call__(self, x, **side_inputs):
        return self.inner(x) * self.factor


jax.tree_util.register_dataclass(Plain, ["inner"], ["factor"])
Pair = collections.namedtuple("Pair", ["left", "right"])


class TestOtherTrees:
    def test_registered_dataclasses(self):
        model = Plain(Plain(pz.nn.Identity(), 2.0), 3.0)
        edited = Recipe(wrap(pz.nn.Identity, Checkpointed)).apply(model)
        assert edited == Plain(Plain(Checkpointed(pz.nn.Identity()), 2.0), 3.0)
        assert strip(edited) == model

    def test_a_registered_dataclass_is_a_layer(self):
        model = Plain(Plain(pz.nn.Identity(), 2.0), 3.0)
        edited = Recipe(insert_after("inner/plain/**", pz.nn.Identity()), wrap(ROOT, Jitted))
        with pytest.raises(SelectionError):
            edited.apply(model)
        edited = Recipe(insert_after("inner", pz.nn.Identity()), wrap(ROOT, Jitted)).apply(model)
        assert edited(1.0) == 6.0
        assert strip(edited) == model

    def test_dictionaries_and_named_tuples(self):
        model = {
            "z": Pair(pz.nn.Identity(), [pz.nn.Identity()]),
            "a": collections.OrderedDict(x=pz.nn.Identity()),
        }
        edited = Recipe(wrap(pz.nn.Identity, Jitted, expect=3)).apply(model)
        assert list(edited) == ["z", "a"]
        assert isinstance(edited["z"], Pair)
        assert isinstance(edited["a"]["x"], Jitted)
        assert strip(edited) == model

    def test_paths_of_other_trees(self):
        model = {"z": Pair(pz.nn.Identity(), [pz.nn.Identity()])}
        report = Recipe(wrap(pz.nn.Identity, Jitted)).report(model)
        assert report.rows[0].paths == ("z/left", "z/right/0")


class TestErrors:
    def test_no_match_names_the_nearest_types(self):
        message = (
            r"this recipe does not fit the Sequential:\n  edit 1, "
            r"wrap\('pz.nn:LinearInPlace', Jitted\): nothing matches. "
            r"Nearest in the model: Linear \(4\). Give expect=0 if that is meant"
        )
        with pytest.raises(SelectionError, match=message):
            Recipe(wrap(pz.nn.LinearInPlace, Jitted)).apply(mlp(2))

    def test_no_match_lists_what_there_is_if_nothing_is_near(self):
        with pytest.raises(SelectionError, match=r"The model has: .*Linear \(4\)"):
            Recipe(wrap(pz.nn.Attention, Jitted)).apply(mlp(2))

    def test_another_type_of_the_same_name_is_reported(self):
        from penzai.deprecated.v1 import pz as v1

        message = r"has another type of that name: penzai.nn.linear_and_affine.Linear \(4\)"
        with pytest.raises(SelectionError, match=message):
            Recipe(wrap(v1.nn.Linear, Jitted)).apply(mlp(2))

    def test_no_match_names_the_nearest_paths(self):
        message = (
            r"In the model nothing is called 'atention', nearest is 'attention'. "
            r"Write '\*\*/attention/\*\*', which matches 1. "
            r"Nearest paths: [\w/]*sublayers/1 \(Attention\)"
        )
        with pytest.raises(SelectionError, match=message):
            Recipe(wrap("**/atention/**", Jitted)).apply(llama(1))

    def test_no_match_of_a_predicate(self):
        with pytest.raises(SelectionError, match=r"The predicate is false for all \d+ nodes"):
            Recipe(wrap(lambda node: False, Jitted)).apply(mlp(1))

    def test_a_narrowing_that_leaves_nothing_is_reported(self):
        with pytest.raises(SelectionError, match="Without within= and outside= there would be 4"):
            Recipe(wrap(pz.nn.Linear, Jitted, within=pz.nn.Attention)).apply(mlp(2))

    def test_a_wrong_number_is_reported_with_paths(self):
        message = (
            r"2 places match, and 3 are expected: sublayers/0, sublayers/1. "
            r"Give expect=2, or narrow the edit with within= or outside="
        )
        with pytest.raises(SelectionError, match=message):
            Recipe(wrap(Block, Jitted, expect=3)).apply(mlp(2))

    def test_none_may_be_expected(self):
        model = mlp(1)
        assert Recipe(wrap(pz.nn.Attention, Jitted, expect=0)).apply(model) is model
        with pytest.raises(SelectionError, match="1 place matches, and 0 are expected: the root"):
            Recipe(wrap(ROOT, Jitted, expect=0)).apply(model)

    def test_all_edits_that_do_not_fit_are_reported_at_once(self):
        recipe = Recipe(
            wrap(pz.nn.Attention, Jitted), wrap(Block, Jitted), wrap("**/nothing", Jitted)
        )
        with pytest.raises(SelectionError) as error:
            recipe.apply(mlp(1))
        assert [line[:7] for line in error.value.problems] == ["edit 1,", "edit 3,"]

    def test_a_class_cannot_be_inserted(self):
        with pytest.raises(RuleTypeError, match=r"Identity is a class. Give an instance"):
            insert_after(pz.nn.Linear, pz.nn.Identity)

    def test_what_is_no_place_is_refused(self):
        with pytest.raises(RuleTypeError, match="3 is not a place for an edit"):
            wrap(3, Jitted)
        with pytest.raises(RuleTypeError, match=r"empty path pattern\. Write ROOT"):
            wrap("", Jitted)
        with pytest.raises(RuleTypeError, match=r"has no 'Linaer'. Did you mean 'Linear'"):
            wrap("pz.nn:Linaer", Jitted)
        with pytest.raises(RuleTypeError, match="cannot import 'no_such'"):
            wrap("no_such:Linear", Jitted)

    def test_a_layer_is_no_wrapper(self):
        with pytest.raises(RuleTypeError, match="wrap needs a class or a function of the layer"):
            wrap(pz.nn.Linear, pz.nn.Identity())

    def test_a_wrapper_that_needs_more_is_reported_what(self):
        def gated(layer, *, rate, kind):
            return layer

        with pytest.raises(RuleTypeError, match=r"needs rate, kind beside the layer.*rate=\.\.\."):
            wrap(pz.nn.Linear, gated)
        with pytest.raises(RuleTypeError, match="Jitted takes no argument 'polcy'"):
            wrap(pz.nn.Linear, Jitted, polcy="dots")

    def test_a_misspelt_argument_of_a_wrapper_is_named(self):
        with pytest.raises(RuleTypeError, match=r"'compute_dtyp'\. Did you mean 'compute_dtype'\?"):
            wrap(pz.nn.Linear, InPrecision, compute_dtyp="bfloat16")
        with pytest.raises(RuleTypeError, match=r"no argument 'policies'\. Leave it out\."):
            wrap(pz.nn.Linear, InPrecision, policies="dots")

    def test_expect_is_a_number(self):
        with pytest.raises(RuleTypeError, match=r"expect is the number of places.*not 'two'"):
            wrap(pz.nn.Linear, Jitted, expect="two")

    def test_a_recipe_is_made_of_edits(self):
        with pytest.raises(RuleTypeError, match=r"argument 2 is .*Jitted.*Make edits with wrap"):
            Recipe(wrap(ROOT, Jitted), Jitted)

    def test_a_place_is_narrowed_once(self):
        narrowed = wrap(pz.nn.Linear, Jitted, within=Block).where
        with pytest.raises(RuleTypeError, match="is narrowed already"):
            wrap(narrowed, Jitted, outside=Block)


def test_blocks_of_a_transformer_are_found():
    edited = Recipe(wrap(model_parts.TransformerBlock, Checkpointed, expect=2)).apply(llama(2))
    assert count(edited, Checkpointed) == 2
