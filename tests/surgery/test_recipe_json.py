"""Recipes as JSON: they come back as they were, and a stranger's text imports and runs nothing."""

import json
import random
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz

import penzai_shard as pzs
from penzai_shard.surgery import Ref
from tests.models import Counted
from tests.refusals import problem_paths, problems_of

MESH = pzs.make_mesh({"data": 4, "model": 2})
WIDE = pzs.make_mesh({"data": 64}, abstract=True)


def show_options(layer, option=None):
    return pzs.Scoped(layer, repr(option))


def _hide(layer):
    return pzs.Jitted(layer)


def pin(sharding):
    return pzs.insert_after(pz.nn.Linear, pzs.ConstrainSharding(sharding))


BY_PAIRS = pzs.constrain_blocks("**", MESH, [("a", "data"), (("b", 1), None)])
RECIPES = [
    pzs.Recipe(),
    pzs.Recipe(pzs.wrap((pz.nn.Linear, pz.nn.Attention), pzs.Jitted, expect=4)),
    pzs.Recipe(pzs.wrap("**/attention/**", pzs.Checkpointed, policy="dots")),
    pzs.Recipe(pzs.wrap(Counted, show_options, nested=True)),
    pzs.Recipe(pzs.insert_before(pzs.ROOT, pz.nn.NamedGroup("input", []))),
    pzs.Recipe(pzs.wrap(pz.nn.Linear, pzs.Jitted, within=Counted, outside="**/mlp/**", expect=0)),
    pzs.Recipe(pzs.insert_after("a/b", pz.nn.Elementwise(jnp.tanh))),
    pzs.Recipe(pin(NamedSharding(MESH, PartitionSpec(("data", "model"), None)))),
    pzs.Recipe(pin([NamedSharding(WIDE, PartitionSpec("data")), None])),
    BY_PAIRS,
    pzs.constrain_blocks("**", MESH) + pzs.mixed_precision("float16") + pzs.scope_layers(),
]


def read(text, **options):
    """Recipes here name what the tests define."""
    return pzs.Recipe.from_json(text, allow=("tests", __name__), **options)


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_from_json_gives_the_recipe_back(recipe):
    assert read(recipe.to_json()) == recipe
    assert read(recipe.to_json()).to_json() == recipe.to_json()


KEYS = st.text() | st.sampled_from(["$ref", "$tuple", "math:pi"]) | st.integers()
VALUES = st.recursive(
    KEYS | st.none() | st.booleans() | st.floats(allow_nan=False),
    lambda v: st.lists(v) | st.lists(v).map(tuple) | st.dictionaries(KEYS, v),
    max_leaves=6,
)


@settings(max_examples=25)
@given(VALUES)
def test_from_json_gives_any_option_back(value):
    recipe = pzs.Recipe(pzs.wrap(pzs.ROOT, show_options, option=value))
    again = read(recipe.to_json())
    assert again == recipe
    assert again.apply(pz.nn.Identity()).name == repr(value)


def test_ref_is_found_when_a_recipe_is_applied_or_read():
    by_name = pzs.wrap(Ref("pz.nn:Identity"), Ref("penzai_shard:Scoped"), name="pz.nn:Linear")
    recipe = pzs.Recipe(by_name, pzs.mixed_precision(keep=(Ref("pz.nn:Softmax"),)))
    scoped = pzs.Scoped(pz.nn.Identity(), "pz.nn:Linear")
    expected = pzs.InPrecision(scoped, "bfloat16", keep=(pz.nn.Softmax,))
    assert recipe.apply(pz.nn.Identity()) == expected
    assert read(recipe.to_json()).apply(pz.nn.Identity()) == expected
    absent = pzs.Recipe(pzs.wrap(pzs.ROOT, Ref("no_such_module:Layer")))
    assert json.loads(absent.to_json())["edits"][0]["what"] == {"$ref": "no_such_module:Layer"}
    with pytest.raises(pzs.RuleTypeError):
        absent.apply(pz.nn.Identity())


def test_from_json_with_another_mesh():
    other = pzs.make_mesh({"data": 8})
    edit = read(BY_PAIRS.to_json(), mesh=other)[0]
    assert (edit.what.mesh, edit.where) == (other, BY_PAIRS[0].where)
    with pytest.raises(pzs.RuleTypeError) as error:
        read(BY_PAIRS.to_json().replace('"data": 4', '"data": 512'))
    assert error.value.problems[0].fix == "Give another mesh: Recipe.from_json(text, mesh=mesh)."


# What a stranger's text may name


def text_of(*more, **edit):
    edits = []
    for changed in more or [edit]:
        wrapper = "penzai_shard:Scoped" if "options" in changed else "penzai_shard:Jitted"
        defaults = {"verb": "wrap", "where": {"$root": []}, "what": {"$ref": wrapper}}
        edits.append(defaults | changed)
    return json.dumps({"format": "penzai_shard recipe 1", "edits": edits})


def place(what, within=None, outside=None):
    return {"$where": [what, within, outside]}


INSERT = {"verb": "insert_after"}
LINEAR, ELEMENTWISE = {"$ref": "pz.nn:Linear"}, {"$ref": "pz.nn:Elementwise"}
EVERYWHERE = {
    "wrapper": lambda ref: {"what": ref},
    "function": lambda ref: {"verb": "replace", "what": ref},
    "layer": lambda ref: INSERT | {"what": {"$layer": [ref, {}]}},
    "maker": lambda ref: INSERT | {"what": ref},
    "option": lambda ref: {"options": {"name": ref}},
    "deep": lambda ref: {"options": {"name": [{"$tuple": [{"$dict": [["a", {"b": ref}]]}]}]}},
    "key": lambda ref: {"options": {"name": {"$dict": [[ref, 1]]}}},
    "type": lambda ref: {"where": place({"$tuple": [LINEAR, ref]})},
    "predicate": lambda ref: {"where": ref},
    "within": lambda ref: {"where": place("**", place({"$tuple": [ref]}))},
    "outside": lambda ref: {"where": place("**", None, place(ref))},
    "field": lambda ref: INSERT | {"what": {"$layer": [ELEMENTWISE, {"fn": ref}]}},
}

HOSTILE = [
    "this:s", "antigravity:webbrowser", "os:system", "builtins:eval", "subprocess:Popen",
    "jaxtyping:Float", "jaxlib.xla_client:Client", "penzai_shard_evil:run", "numpy:save",
    "tests.models:Counted", "penzai_shard.surgery.references:importlib.import_module",
    "penzai_shard.surgery.references:importlib", "penzai_shard.errors:sys.exit",
    "penzai_shard.cli.commands:os.system", "penzai_shard.layers.independence:np.save",
    "penzai_shard.layers.axis_order:jax.numpy.tanh", "penzai_shard.cli.main:main",
    "penzai_shard.__main__:main", "penzai_shard:save_params", "penzai_shard:check_equivalent",
    "penzai_shard.checkpoints.parameters:restore_params", "penzai_shard:Recipe.from_json",
    "penzai_shard.surgery:Ref", "penzai_shard.surgery.references:resolve",
    "penzai_shard.layers:Jitted.__call__", "penzai_shard.layers:Jitted.__init__.__globals__",
    "penzai_shard.layers:Jitted.__class__",
    "penzai_shard.surgery.standard_recipes:scope_by_path.__globals__",
    "penzai_shard.surgery.standard_recipes:scope_by_path.__call__",
    "jax:checkpoint_policies.__class__", "jax:checkpoint_policies", "jax._src.util:safe_zip",
    "jax._src.xla_bridge:backends", "jax.numpy:save", "jax.numpy:pi", "jax:numpy.tanh",
    "pz:nn.Linear", "penzai.pz:nn", "jax.no_such:x", "pz.nn:NoSuch", "not a reference", "", 7,
    None, ["pz.nn:Linear"],
]  # fmt: skip


@pytest.mark.parametrize("reference", HOSTILE, ids=str)
def test_from_json_refuses_hostile_names_everywhere(reference):
    loaded = set(sys.modules)
    for text in [text_of(**make({"$ref": reference})) for make in EVERYWHERE.values()]:
        assert problem_paths(pzs.RuleTypeError, pzs.Recipe.from_json, text) == ["edits/0"]
    with pytest.raises(pzs.RuleTypeError):
        pzs.Recipe.from_json(text_of(what=reference))
    new = {name.partition(".")[0] for name in set(sys.modules) - loaded}
    assert not new & {"this", "antigravity", "jaxtyping", "penzai_shard_evil", "subprocess"}
    assert "penzai_shard.__main__" not in sys.modules


STANDARD = "penzai_shard.surgery.standard_recipes:is_model_layer"
HARMLESS = {
    "wrapper": f"penzai_shard:Jitted penzai_shard.layers.jitted:Jitted {STANDARD} pz.nn:Residual",
    "function": "penzai_shard:RolledLayerStack.from_layer_stack",
    "maker": STANDARD,
    "option": "jax.numpy:tanh jax.nn:relu penzai_shard.layers.in_precision:is_sensitive",
    "deep": "jax.numpy:float32",
    "field": "jax.nn:silu",
    "type": "penzai.models.transformer.model_parts:TransformerBlock",
    "within": "pz.nn:LayerStack",
    "predicate": STANDARD,
    "outside": "penzai_shard.layers.in_precision:is_sensitive",
}


@pytest.mark.parametrize("where", HARMLESS)
def test_from_json_reads_what_recipes_need(where):
    for reference in HARMLESS[where].split():
        recipe = pzs.Recipe.from_json(text_of(**EVERYWHERE[where]({"$ref": reference})))
        assert pzs.Recipe.from_json(recipe.to_json()) == recipe


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose functions and constructors say so when they run."""
    (tmp_path / "own_layers").mkdir()
    (tmp_path / "own_layers/__init__.py").write_text("from own_layers._parts import Name\n")
    (tmp_path / "own_layers/_parts.py").write_text(
        "import os; from penzai import pz; from penzai_shard import Scoped; RAN = []\n"
        "@pz.pytree_dataclass\n"
        "class Name(pz.nn.Identity):\n"
        "    def __post_init__(self): RAN.append(self)\n"
        "def named(layer): return RAN.append(layer) or Scoped(layer, 'own')\n"
        "def _hidden(layer): return layer\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_layers"
    for name in [name for name in sys.modules if name.startswith("own_layers")]:
        del sys.modules[name]


def test_from_json_names_what_would_have_to_be_allowed_of_each_edit(package):
    first = {"what": {"$ref": "own_layers._parts:named"}}
    second = {"options": {"name": {"$ref": "os:system"}}}
    text = text_of(first, second)
    problems = problems_of(pzs.RuleTypeError, pzs.Recipe.from_json, text, allow="other")
    assert [problem.path for problem in problems] == ["edits/0", "edits/1"]
    for problem, name in zip(problems, ("own_layers", "os"), strict=True):
        assert f"Recipe.from_json(text, allow=('other', '{name}'))" in problem.fix
    assert "own_layers" not in sys.modules


@pytest.mark.parametrize("allow", ["own_layers", ["own_layers"], {"own_layers._parts": 1}])
def test_from_json_runs_nothing_of_what_is_allowed(package, allow):
    layer = {"$layer": [{"$ref": "own_layers._parts:Name"}, {}]}
    inserting = pzs.Recipe.from_json(text_of(verb="insert_after", what=layer), allow=allow)
    recipe = pzs.Recipe.from_json(text_of(what={"$ref": "own_layers._parts:named"}), allow=allow)
    ran = sys.modules["own_layers._parts"].RAN
    assert (len(inserting), ran) == (1, [])
    assert recipe.apply(pz.nn.Identity()).name == "own"
    assert len(ran) == 1


def test_from_json_opens_no_more_than_what_is_allowed(package):
    for name in ("._parts:os.system", "._parts:_hidden", "._parts:os", "_too:x"):
        with pytest.raises(pzs.RuleTypeError):
            pzs.Recipe.from_json(text_of(what={"$ref": package + name}), allow=[package])
    text = text_of(what={"$ref": "jax:checkpoint"})
    problems = problems_of(pzs.RuleTypeError, pzs.Recipe.from_json, text)
    assert "allow=('jax._src.ad_checkpoint',)" in problems[0].fix
    assert pzs.Recipe.from_json(text, allow=("jax",))[0].what is jax.checkpoint


# What has no form


def test_to_json_refuses_what_others_cannot_name(monkeypatch):
    kind = pz.pytree_dataclass(type("Mine", (pz.nn.Identity,), {"__module__": "__main__"}))
    monkeypatch.setattr(sys.modules["__main__"], "Mine", kind, raising=False)
    wanting = [
        pzs.insert_after(pz.nn.Linear, kind()),
        pzs.replace(kind, pzs.Jitted),
        pzs.wrap(pz.nn.Linear, _hide),
        pzs.wrap(pz.nn.Linear, lambda layer: layer),
        pzs.wrap(pz.nn.Linear, show_options, option=jnp.ones(2)),
        pzs.wrap(pz.nn.Linear, show_options, option=object()),
    ]
    paths = problem_paths(pzs.RuleTypeError, pzs.Recipe(pzs.jit_root(), *wanting).to_json)
    assert paths == [f"edits/{number}" for number in range(1, 1 + len(wanting))]


NO_RECIPES = [
    3, None, [], {"format": "penzai_shard recipe 1"}, "", "3", "null", '"text"', "[" * 100_000,
    '{"a":' * 100_000, "1" * 10_000, "\ud800", text_of().replace("recipe 1", "recipe 2"),
    text_of(options={"name": "deep"}).replace('"deep"', "[" * 990 + "]" * 990),
]  # fmt: skip
NO_EDITS = [
    {"options": 3}, {"options": ["name"]}, {"options": {"no_such": 1}}, {"where": 3},
    {"where": {}}, {"where": ""},
    {"where": place(3)}, {"where": {"$where": []}}, {"verb": ["wrap"]}, {"verb": "cut"},
    {"what": {}}, {"colour": 1},
    {"what": {"$tuple": []}}, {"what": LINEAR | {"more": 1}}, INSERT,
    INSERT | {"what": {"$layer": [{"$ref": "pz.nn:Identity"}, {"no": 1}]}},
    INSERT | {"what": {"$layer": [{"$ref": "jax.numpy:float32"}, {}]}},
    {"options": {"name": {"$mesh": [{"a": 1e400}, True]}}}, {"options": {"name": {"$new": []}}},
    {"options": {"name": {"$dict": [[[], 1]]}}},
]  # fmt: skip


def test_from_json_refuses_what_is_no_recipe():
    for text in (*NO_RECIPES, *map(text_of, NO_EDITS)):
        with pytest.raises(pzs.RuleTypeError):
            pzs.Recipe.from_json(text)


JUNK = [
    None, True, -1, 1e308, 10**30, "", "a/b", "pz.nn:Linear", [], [[]], {}, LINEAR, {"$mesh": 3},
    {"$tuple": [1]}, {"$layer": [{"$ref": "pz.nn:Identity"}, {}]}, {"$dict": [[1, 2]]},
]  # fmt: skip


def find_places(part):
    """Each list or object in data, with each of its keys."""
    if isinstance(part, dict | list):
        for key in range(len(part)) if isinstance(part, list) else part:
            yield part, key
            yield from find_places(part[key])


def test_from_json_reads_or_refuses_texts_that_were_changed():
    draw, counts = random.Random(0), {True: 0, False: 0}
    texts = [recipe.to_json() for recipe in RECIPES[1:]]
    for _ in range(250):
        data = json.loads(draw.choice(texts))
        part, key = draw.choice([*find_places(data)])
        part[key] = draw.choice(JUNK)
        text = json.dumps(data)
        at = draw.randrange(4 * len(text))  # One letter of each fourth text is dropped.
        try:
            recipe = read(text[:at] + text[at + 1 :])
        except pzs.RuleTypeError:
            counts[False] += 1
            continue
        counts[True] += 1
        assert repr(recipe)
        assert read(recipe.to_json()).to_json() == recipe.to_json()
    assert min(counts.values()) > 20
