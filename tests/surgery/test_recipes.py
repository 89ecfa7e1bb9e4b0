"""Where edits apply, what they put there, and what they refuse."""

import collections
import functools
import itertools

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1
from penzai.models.transformer import model_parts

import penzai_shard as pzs
from penzai_shard.surgery import Inserted, Ref, Where
from tests.models import equinox, llama, mlp_v1, penzai_mlp
from tests.refusals import problem_paths, problems_of

BLOCK = model_parts.TransformerBlock
LINEAR, ATTENTION = pz.nn.Linear, pz.nn.Attention
MESH = pzs.make_mesh({"data": 4, "model": 2})
CONSTRAINT = pzs.ConstrainShardingByName(MESH, {"batch": "data"})
FIRST, SECOND = "body/sublayers/1", "body/sublayers/2"
ATTENTIONS = [f"{block}/sublayers/0/delta/sublayers/1" for block in (FIRST, SECOND)]
DOUBLE = pz.nn.ConstantRescale(by=2.0)


@functools.cache
def model():
    return llama()


def paths(model, where, layers_only=True, **options):
    """The paths that an edit changes."""
    edit = pzs.wrap if layers_only else pzs.replace
    kept = edit(where, (lambda layer: layer), **options)
    return [row[0] for row in pzs.Recipe(kept).report(model).rows]


def apply(model, *edits):
    return pzs.Recipe(*edits).apply(model)


def types(layers):
    return [type(layer).__name__ for layer in layers]


# Places

PLACES = {
    "type": (BLOCK, {}, [FIRST, SECOND]),
    "reference": (Ref("pz.nn:Attention"), {}, ATTENTIONS),
    "predicate": (lambda node: isinstance(node, BLOCK), {}, [FIRST, SECOND]),
    "predicate of the path": (lambda node, path: path == FIRST, {}, [FIRST]),
    "root": (pzs.ROOT, {}, ["(root)"]),
    "path": (FIRST, {}, [FIRST]),
    "path from treescope": (".body.sublayers[1]", {}, [FIRST]),
    "name of a type": ("**/attention", {}, ATTENTIONS),
    "inside of a type": (ATTENTION, {"within": BLOCK}, ATTENTIONS),
    "inside of a path": (ATTENTION, {"within": FIRST}, ATTENTIONS[:1]),
    "strictly inside of a type": (BLOCK, {"within": model_parts.TransformerLM}, [FIRST, SECOND]),
    "at a path": (BLOCK, {"within": FIRST}, [FIRST]),
    "outside of a path": (BLOCK, {"outside": FIRST}, [SECOND]),
    "outside of a list": ("**/attention", {"outside": f"{FIRST}/sublayers"}, ATTENTIONS[1:]),
    "outside of a predicate": (BLOCK, {"outside": lambda x: isinstance(x, BLOCK)}, [FIRST, SECOND]),
}


@pytest.mark.parametrize("name", PLACES)
def test_wrap_finds_its_places(name):
    where, narrowing, expected = PLACES[name]
    assert paths(model(), where, **narrowing) == expected


def test_a_place_is_strictly_inside_of_a_type_of_its_own():
    nested = pz.nn.Sequential([pz.nn.Sequential([pz.nn.Identity()])])
    assert paths(nested, pz.nn.Sequential) == ["(root)"]
    assert paths(nested, pz.nn.Sequential, nested=True) == ["sublayers/0", "(root)"]
    assert paths(nested, pz.nn.Sequential, within=pz.nn.Sequential) == ["sublayers/0"]


WRAPPINGS = {
    "at the root": [pzs.wrap(pzs.ROOT, pzs.Jitted)],
    "everywhere": [pzs.wrap(pz.nn.Layer, pzs.Checkpointed, nested=True)],
    "twice": [pzs.wrap(BLOCK, pzs.Checkpointed), pzs.wrap(BLOCK, pzs.Jitted)],
    "by a layer of others": [pzs.wrap(BLOCK, lambda layer: pz.nn.Sequential([layer]))],
    "by one around another": [
        pzs.wrap(ATTENTION, pz.nn.Residual),
        pzs.wrap(ATTENTION, pzs.Checkpointed),
        pzs.wrap(BLOCK, pz.nn.Residual),
    ],
}


@pytest.mark.parametrize("name", WRAPPINGS)
@pytest.mark.parametrize(
    "path", [FIRST, ATTENTIONS[1], "**/attention", "**/transformer_block/sublayers/0/delta"]
)
def test_patterns_of_the_bare_model_fit_the_wrapped_one(name, path):
    edited = apply(model(), *WRAPPINGS[name])
    found = paths(edited, path)
    assert len(found) == len(paths(model(), path))
    # What stands at the places is what stands there in the bare model.
    found, expected = ([], [])
    for tree, seen in ((edited, found), (model(), expected)):
        note = lambda layer, seen=seen: seen.append(pzs.strip(layer)) or layer  # noqa: E731
        apply(tree, pzs.replace(path, note))
    assert found == expected


@pytest.mark.parametrize("name", WRAPPINGS)
def test_every_path_of_a_view_finds_its_node(name):
    edited = apply(model(), *WRAPPINGS[name])
    selection = pz.select(edited).at_instances_of((LINEAR, ATTENTION, BLOCK))
    for keypath, node in list(selection.selected_by_path.items())[:6]:
        shown = jax.tree_util.keystr(keypath)
        seen = []
        apply(edited, pzs.replace(shown, lambda layer, seen=seen: seen.append(layer) or layer))
        assert any(one is node for one in seen), shown


# What edits do


def test_wrap_puts_layers_of_the_library_around_as_they_are():
    edited = apply(model(), pzs.wrap(BLOCK, pzs.Checkpointed, policy="dots", expect=2))
    before, after = (m.body.sublayers[1:3] for m in (model(), edited))
    assert after == [pzs.Checkpointed(block, "dots") for block in before]
    assert after[0].body is before[0]


def test_insert_puts_a_layer_into_the_list():
    for sequence in ([identity()], (identity(),)):
        group = pz.nn.NamedGroup("group", sequence)
        for insert in (pzs.insert_before, pzs.insert_after):
            edited = apply(group, insert(pz.nn.Identity, DOUBLE))
            order = ["Inserted", "Identity"][:: 1 if insert is pzs.insert_before else -1]
            assert types(edited.sublayers) == order
            assert type(edited.sublayers) is type(sequence)


def test_insert_makes_a_sequence_where_no_list_is():
    branches = pz.nn.BranchAndAddTogether([pz.nn.Identity(), pz.nn.Residual(pz.nn.Identity())])
    edited = apply(branches, pzs.insert_after(pz.nn.Identity, DOUBLE, expect=2))
    assert types(edited.branches) == ["InsertedSequence", "Residual"]
    assert edited(1.0) == 2 + 3
    assert apply(branches, pzs.insert_before(pzs.ROOT, DOUBLE))(1.0) == 6


def test_replace_finds_what_is_no_layer():
    frozen = apply(model(), pzs.replace(pz.Parameter, lambda parameter: parameter.freeze()))
    assert pz.unbind_variables(frozen)[1] == ()


def test_recipes_and_edits_are_values():
    first, second = pzs.wrap(BLOCK, pzs.Jitted), pzs.insert_after(LINEAR, DOUBLE)
    recipe = pzs.Recipe(first) + second
    assert recipe == pzs.Recipe(first, pzs.Recipe(second))
    assert [*recipe] == [recipe[0], recipe[1]] == [first, second]
    assert recipe[1:] == pzs.Recipe(second)
    assert len(recipe) == 2
    assert hash(first) == hash(pzs.wrap(BLOCK, pzs.Jitted))
    for text in (repr(recipe), treescope.render_to_text(recipe)):
        assert "wrap(TransformerBlock, Jitted)" in text
    assert pzs.Recipe().apply(model()) is model()


# Sharing, and models of others


def test_shared_layers_and_tied_parameters_stay_shared():
    tied = llama(tied=True)
    edited = apply(tied, pzs.wrap(pz.nn.Layer, pzs.Checkpointed, nested=True))
    assert len(pz.unbind_params(edited)[1]) == len(pz.unbind_params(tied)[1])

    shared = pz.nn.Residual(pz.nn.Sequential([pz.nn.Identity()]))
    twice = pz.nn.Sequential([shared, pz.nn.Residual(shared)])
    edits = pzs.wrap(pz.nn.Identity, pzs.Scoped, name="x"), pzs.insert_after(pzs.Scoped, DOUBLE)
    edited = apply(twice, *edits)
    assert edited.sublayers[0] is edited.sublayers[1].delta
    one_of_two = apply(twice, pzs.wrap("sublayers/0", pzs.Jitted))
    assert one_of_two.sublayers[0].body is one_of_two.sublayers[1].delta is shared


Pair = collections.namedtuple("Pair", ["left", "right"])


@flax.struct.dataclass
class FlaxScale:
    inner: object
    by: float = flax.struct.field(pytree_node=False, default=2.0)

    def __call__(self, x, **side_inputs):
        return self.inner(x) * self.by


def identity():
    return pz.nn.Identity()


OTHERS = {
    "dict": ({"z": identity(), "a": [identity()]}, pz.nn.Identity, ["z", "a/0"]),
    "named tuple": (Pair(identity(), {"x": identity()}), pz.nn.Identity, ["left", "right/x"]),
    "flax struct": (FlaxScale(FlaxScale(identity())), "inner/inner", ["inner/inner"]),
    "equinox": (equinox().mlp, eqx.nn.Linear, [f"layers/{i}" for i in range(3)]),
    "equinox by name": (equinox(), "mlp/**/linear", [f"mlp/layers/{i}" for i in range(3)]),
    "penzai v1": (mlp_v1(), pz_v1.nn.Linear, None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_other_libraries_are_edited(name):
    tree, where, expected = OTHERS[name]
    if expected is not None:
        assert paths(tree, where) == expected
    edits = pzs.wrap(where, pzs.Checkpointed), pzs.insert_after(where, DOUBLE)
    edited = apply(tree, *edits)
    assert jax.tree.structure(edited) != jax.tree.structure(tree)
    stripped = pzs.strip(edited)
    assert jax.tree.structure(stripped) == jax.tree.structure(tree)
    assert list(stripped) == list(tree) if isinstance(tree, dict) else type(stripped) is type(tree)
    pairs = zip(jax.tree.leaves(stripped), jax.tree.leaves(tree), strict=True)
    assert all(one is other for one, other in pairs)


def test_edited_models_of_others_run():
    x, inserted = jnp.arange(8.0), pzs.insert_after((eqx.nn.Linear, pz_v1.nn.Linear), identity())
    edits = inserted, pzs.scope_layers()[0], pzs.wrap(pzs.ROOT, pzs.Jitted)
    for model, argument, read in (
        (equinox().mlp, x, lambda y: y),
        (mlp_v1(), pz_v1.nx.wrap(x, "features"), lambda y: y.unwrap("features")),
    ):
        found, expected = read(apply(model, *edits)(argument)), read(model(argument))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_places_are_told_apart_though_what_was_made_for_others_is_gone():
    # A shared layer is made anew for its second place. If the first one were let go, that of the
    # next layer could get its id, and be taken for it.
    none, *scales = [pz.nn.ConstantRescale(by=i) for i in range(-1, 200)]
    layers = [pz.nn.Sequential([a, b]) for a, b in itertools.pairwise(scales)]
    model = pz.nn.NamedGroup("pairs", [pz.nn.NamedGroup("pair", [x, x]) for x in layers])

    def is_wanted(layer, path):
        return type(layer) is pz.nn.Sequential or path.split("/")[3::2] in (["0", "0"], ["1", "1"])

    def choose(layer):
        parts = getattr(layer, "sublayers", None)
        return scales[max(part.by for part in parts)] if parts else none

    edited = apply(model, pzs.replace(is_wanted, choose, nested=True))
    found = [[layer.by for layer in pair.sublayers] for pair in edited.sublayers]
    assert found == [[i + 1, i] for i in range(199)]


# Reports


def test_report_has_a_row_for_each_edit_and_place():
    recipe = pzs.Recipe(
        pzs.wrap(BLOCK, pzs.Checkpointed),
        pzs.wrap(ATTENTION, pz.nn.Residual),
        pzs.insert_after(BLOCK, CONSTRAINT),
    )
    report, edits = recipe.report(model()), [*map(repr, recipe)]
    assert report.ok
    block, layer = "TransformerBlock", "sublayers/0/delta/sublayers/1"
    assert [*zip(*report.fold().rows, strict=True)] == [
        tuple(f"body/sublayers/{{1-2}}{below}" for below in ("", f"/{layer}", "")),
        (2, 2, 2),
        tuple(edits),
        (block, "Attention", block),
        (f"Checkpointed({block})", "Residual(Attention)", f"{block}, ConstrainShardingByName"),
    ]
    assert report.verdict in treescope.render_to_text(report)


def test_check_names_the_edit_that_is_to_blame():
    edits = [pzs.insert_after(LINEAR, pz.nn.ConstantRescale(by=by)) for by in (1.0, 1.01, 1.0)]
    recipe, x = pzs.Recipe(*edits), pz.nx.ones({"features": 8})
    report = recipe.check(penzai_mlp(), x, gradients=False)
    assert (report.ok, report.facts["edit"]) == (False, 2)
    assert recipe[:1].check(penzai_mlp(), x, gradients=False).ok


@pytest.mark.parametrize(
    "before",
    [
        pzs.insert_before(pz.nn.Attention, pz.nn.Identity()),
        pzs.insert_before(BLOCK, CONSTRAINT),
        pzs.insert_after(pzs.ROOT, CONSTRAINT),
        pzs.wrap(pzs.ROOT, pzs.Jitted),
        pzs.wrap(BLOCK, pz.nn.Residual),
        pzs.wrap(LINEAR, lambda layer: pz.nn.Sequential([pz.nn.Identity(), layer])),
    ],
)
def test_report_has_the_paths_of_the_bare_model(before):
    kinds = (BLOCK, ATTENTION, LINEAR)
    every = pzs.wrap(kinds, lambda layer: layer, nested=True)
    expected = paths(model(), kinds, nested=True)
    recipe = pzs.Recipe(before, pzs.wrap(LINEAR, pzs.Checkpointed), every)
    rows = [row for row in recipe.report(model()).rows if row[1] == repr(every)]
    assert {row[0] for row in rows} == {*expected}
    # Errors, too.
    found = problem_paths(pzs.RuleTypeError, apply, model(), before, pzs.wrap(LINEAR, raises))
    assert found == paths(model(), LINEAR)


# Refusals


def gives_nothing(layer):
    del layer


def raises(layer):
    raise KeyError(layer)


JIT, CHECKPOINT = pzs.Jitted, pzs.Checkpointed
# What no model is needed to refuse, and a part of the fix.
WRONG = {
    "an empty pattern": (lambda: pzs.wrap("", JIT), "ROOT"),
    "a layer as place": (lambda: pzs.wrap(DOUBLE, JIT), "a type of layers"),
    "no types": (lambda: Where.of(()), "a type of layers"),
    "a place within nothing": (lambda: pzs.wrap(LINEAR, JIT, within=3), "a type of layers"),
    "an unknown option": (lambda: pzs.wrap(LINEAR, CHECKPOINT, polcy="dots"), "body, policy"),
    "an unknown policy": (lambda: pzs.wrap(BLOCK, CHECKPOINT, policy="dotz"), "policy", "'dots'"),
    "a loop's policy": (lambda: pzs.roll_layer_stacks(policy="nestd"), "policy", "'nested'"),
    "an option that is needed": (lambda: pzs.wrap(LINEAR, pzs.Scoped), "name"),
    "no wrapper": (lambda: pzs.wrap(LINEAR, type(CONSTRAINT)), "a class of wrappers"),
    "a mark": (lambda: pzs.wrap(LINEAR, Inserted), "a class of wrappers"),
    "a layer as wrapper": (lambda: pzs.wrap(LINEAR, DOUBLE), "a function of the layer"),
    "a text as wrapper": (lambda: pzs.wrap(LINEAR, "pzs:Jitted"), "Ref('module:name')"),
    "a class to insert": (lambda: pzs.insert_after(LINEAR, pz.nn.Identity), "Identity(...)"),
    "a negative number": (lambda: pzs.wrap(LINEAR, JIT, expect=-1), "None"),
    "a misspelt option of edits": (lambda: pzs.wrap(LINEAR, JIT, witin=BLOCK), "within="),
    "a recipe that is not called": (lambda: pzs.Recipe(pzs.jit_root), "jit_root()"),
    "the same in a sum": (lambda: pzs.Recipe() + pzs.jit_root, "jit_root()"),
    "a class as model": (lambda: pzs.jit_root().apply(pz.nn.Linear), "Linear(...)"),
    "a number as nested": (lambda: pzs.wrap(LINEAR, JIT, nested=1), "nested=True"),
    "a list of edits": (lambda: pzs.Recipe([pzs.wrap(LINEAR, JIT)]), "Recipe(*edits)"),
    "a name of nothing": (lambda: apply(model(), pzs.wrap(Ref("pz.nn:Linar"), JIT)), "Linear"),
}
# What fits no place, or not the expected number, and a part of the fix.
UNFIT = {
    "an unknown type": (pzs.wrap(pz.nn.LinearInPlace, JIT), "Name Linear or"),
    "a misspelt name": (pzs.wrap("**/atention", JIT), "'**/attention'"),
    "a path without its beginning": (pzs.wrap("sublayers/1", JIT), "'body/sublayers/1'"),
    "another number of places": (pzs.wrap(LINEAR, JIT, expect=3), "expect=20"),
    "too narrow a place": (pzs.wrap(BLOCK, JIT, within=ATTENTION), "narrows"),
    "a type of another Penzai": (pzs.wrap(pz_v1.nn.Linear, JIT), "penzai.nn."),
    "a predicate that is never true": (pzs.wrap(lambda layer: False, JIT), "Correct"),
    "a path of a parameter": (pzs.wrap(f"{FIRST}/**/weights", JIT), "Write"),
}
# What cannot be done at a place, which is named, and a part of the fix.
REFUSED = {
    "a function that gives nothing": (pzs.wrap(BLOCK, gives_nothing), FIRST, "Return a layer"),
    "a function that raises": (pzs.replace(BLOCK, raises), FIRST, "outside="),
    "a predicate that raises": (pzs.wrap(lambda layer: layer.heads, JIT), "", "outside="),
    "a wrapper without the layer": (pzs.wrap(BLOCK, lambda layer: DOUBLE), FIRST, "replace"),
    "a sequence without a list": (pzs.wrap(BLOCK, pz.nn.Sequential), FIRST, "[layer]"),
    "a predicate that gives no bool": (pzs.wrap(lambda layer: "no", JIT), "", "bool(...)"),
    "a parameter": (pzs.wrap(pz.Parameter, JIT), "body/sublayers/0/table/embeddings", "replace"),
    "what is no layer": (pzs.insert_after(BLOCK, lambda block: 3), FIRST, "Return a layer"),
}


@pytest.mark.parametrize("name", WRONG | UNFIT | REFUSED)
def test_edits_that_make_no_sense_or_do_not_fit_are_refused(name):
    edit, *path, fix = (WRONG | UNFIT | REFUSED)[name]
    call = edit if name in WRONG else functools.partial(apply, model(), edit)
    first = problems_of(pzs.SelectionError if name in UNFIT else pzs.RuleTypeError, call)[0]
    assert [first.path] == (path or [""])
    assert fix in first.fix


def test_fixes_name_places_of_the_model_at_hand():
    for pattern in ("**/xyz", "mlp/*/w", "wise"):
        problems = problems_of(pzs.SelectionError, apply, penzai_mlp(), pzs.wrap(pattern, JIT))
        place = problems[0].fix.split("'")[1]
        assert paths(penzai_mlp(), place)
    assert place == "**/elementwise"


def test_a_recipe_that_is_applied_twice_is_refused():
    recipe = pzs.Recipe(pzs.wrap(BLOCK, pzs.Checkpointed), pzs.wrap(BLOCK, pzs.Jitted))
    recipe += pzs.jit_root()
    edited = recipe.apply(model())
    problems = problems_of(pzs.SelectionError, recipe.apply, edited)
    assert [problem.path for problem in problems] == [FIRST, SECOND, FIRST, SECOND, ""]
    for problem, kind in zip(problems, ["Checkpointed"] * 2 + ["Jitted"] * 3, strict=True):
        assert f"strip(model, {kind})" in problem.fix
    assert recipe.apply(pzs.strip(edited)) == edited
    # Another setting is another wrapper.
    assert apply(edited, pzs.wrap(BLOCK, pzs.Checkpointed, policy="dots"))


def test_apply_of_a_tree_without_layers():
    problems = problems_of(pzs.SelectionError, apply, {"w": 1.0}, pzs.wrap(LINEAR, JIT))
    assert "a pytree of layers" in problems[0].fix


def test_apply_reports_the_problems_of_all_edits():
    recipe = pzs.Recipe(
        pzs.wrap(pz_v1.nn.Linear, pzs.Jitted),
        pzs.wrap(BLOCK, raises),
        pzs.wrap("**/atention", pzs.Jitted),
    )
    with pytest.raises(pzs.RuleTypeError) as caught:
        recipe.apply(model())
    assert [problem.path for problem in caught.value.problems] == ["", FIRST, SECOND, ""]
    assert isinstance(caught.value.__cause__, KeyError)
    report = recipe.report(model())
    assert not report
    assert len(report.notes) == 4
    # A type of the same name from elsewhere is told apart by its module.
    assert "penzai.nn.linear_and_affine.Linear" in report.notes[0]


HARMLESS = {
    "nothing is expected": pzs.wrap(pz.nn.LayerStack, JIT, expect=0),
    "an edit that changes nothing": pzs.replace(BLOCK, lambda block: block),
    "a pattern with slashes around": pzs.wrap("/body/sublayers/1/", JIT, expect=1),
    "a list of types": pzs.wrap([BLOCK, ATTENTION], JIT, expect=2),
    "a place that is a Where": pzs.wrap(Where.of(BLOCK, outside=FIRST), JIT, expect=1),
    "a reference to a wrapper": pzs.wrap(BLOCK, Ref("penzai_shard:Jitted"), expect=2),
    "a partial function": pzs.wrap(BLOCK, functools.partial(CHECKPOINT, policy="dots")),
    "an option called path": pzs.wrap(BLOCK, lambda layer, path: JIT(layer), path="x"),
    "the layer itself": pzs.wrap(BLOCK, lambda block: block),
    "further options": pzs.wrap(BLOCK, lambda layer, **options: JIT(layer), extra=1),
    "one layer in many places": pzs.insert_before(LINEAR, identity(), expect=20),
    "a wrapper around a wrapper": pzs.wrap(BLOCK, lambda layer: JIT(pz.nn.Residual(layer))),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_edits_are_made(name):
    assert pzs.strip(apply(model(), HARMLESS[name])) == model()
