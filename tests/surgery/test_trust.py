"""Text in options stays text, and a recipe's text runs nothing."""

import copy
import functools
import json
import random
import sys

import jax
import pytest
from penzai import pz

from penzai_shard import ROOT, Recipe, Ref, insert_after, replace, wrap
from penzai_shard.errors import RuleTypeError, ShardingError
from penzai_shard.layers import Checkpointed, InPrecision, Jitted, Scoped
from tests.surgery.small_models import Block, mlp
from tests.surgery.test_recipe import PUBLIC, RECIPES

TEXTS = ["math:pi", "this:s", "pz.nn:Linear", "os:system", "a:b", "no_such_module:x"]


def labelled(layer, label, more=None):
    """A wrapper that shows its options."""
    return Scoped(layer, f"{label!r} {more!r}")


class TestOptions:
    @pytest.mark.parametrize("text", TEXTS)
    def test_text_stays_text(self, text):
        recipe = Recipe(
            wrap(Block, Scoped, name=text),
            wrap(ROOT, labelled, label=(text, [text]), more={"more": text}),
            wrap(ROOT, functools.partial(Scoped, name=text)),
        )
        for same in (
            recipe,
            Recipe.from_json(recipe.to_json(), allow=("tests",)),
            eval(repr(recipe), {**PUBLIC, "labelled": labelled}),
        ):
            assert same == recipe
            edited = same.apply(mlp(1))
            assert edited.name == text
            assert edited.body.name == f"{(text, [text])!r} { ({'more': text})!r}"
            assert edited.body.body.sublayers[0].name == text
        assert "this" not in sys.modules

    def test_a_reference_is_a_value_of_its_own(self):
        by_name = wrap(ROOT, InPrecision, compute_dtype="bfloat16", keep=Ref("pz.nn:Softmax"))
        assert by_name == wrap(ROOT, InPrecision, compute_dtype="bfloat16", keep=pz.nn.Softmax)
        assert repr(by_name).endswith("keep=Ref('pz.nn:Softmax'))")
        written = json.loads(Recipe(by_name).to_json())["edits"][0]["options"]
        assert written == {"compute_dtype": "bfloat16", "keep": {"$ref": "pz.nn:Softmax"}}

    def test_references_stand_anywhere_in_an_option(self):
        edit = wrap(ROOT, labelled, label=(Ref("pz.nn:Linear"),), more={"a": [Ref("jax.nn:relu")]})
        assert dict(edit.options) == {"label": (pz.nn.Linear,), "more": {"a": [jax.nn.relu]}}
        recipe = Recipe(edit)
        assert eval(repr(recipe), {**PUBLIC, "labelled": labelled}) == recipe
        assert Recipe.from_json(recipe.to_json(), allow=("tests",)) == recipe

    def test_places_and_functions_take_references_in_both_forms(self):
        expected = wrap(pz.nn.Linear, Checkpointed, within=Block)
        block = "tests.surgery.small_models:Block"
        for form in (str, Ref):
            linear, layer = form("pz.nn:Linear"), form("penzai_shard.layers:Checkpointed")
            assert wrap(linear, layer, within=form(block)) == expected
            assert wrap((linear,), layer, within=Block) == expected

    def test_a_policy_by_name(self):
        edit = wrap(ROOT, Checkpointed, policy=Ref("jax:checkpoint_policies.dots_saveable"))
        assert edit.options == (("policy", jax.checkpoint_policies.dots_saveable),)
        assert "policy=Ref('jax:checkpoint_policies.dots_saveable')" in repr(edit)
        assert Recipe.from_json(Recipe(edit).to_json()) == Recipe(edit)

    @pytest.mark.parametrize("name", ["Linear", "", "a:", ":b", "a b:c", "a:b:c", 3, None])
    def test_what_is_not_a_reference_is_refused(self, name):
        with pytest.raises(RuleTypeError, match=r"is not a reference\. Write module:name"):
            Ref(name)


def text_of(**edit):
    defaults = {
        "edit": "wrap",
        "where": {"root": True},
        "what": {"$ref": "penzai_shard.layers:Scoped"},
    }
    edits = [defaults | edit]
    return json.dumps({"format": "penzai_shard recipe", "version": 1, "edits": edits})


EVERYWHERE = {
    "wrapper": lambda ref: text_of(what={"$ref": ref}),
    "function": lambda ref: text_of(edit="replace", what={"$ref": ref}),
    "layer": lambda ref: text_of(edit="insert_after", what={"$layer": ref, "fields": {}}),
    "inserting function": lambda ref: text_of(edit="insert_after", what={"$ref": ref}),
    "option": lambda ref: text_of(options={"name": {"$ref": ref}}),
    "deep in an option": lambda ref: text_of(
        options={"name": [{"$tuple": [{"$dict": [["a", {"$ref": ref}]]}]}]}
    ),
    "key": lambda ref: text_of(options={"name": {"$dict": [[{"$ref": ref}, 1]]}}),
    "type": lambda ref: text_of(where={"types": ["pz.nn:Linear", ref]}),
    "predicate": lambda ref: text_of(where={"predicate": ref}),
    "within": lambda ref: text_of(where={"root": True, "within": {"types": [ref]}}),
    "outside": lambda ref: text_of(where={"root": True, "outside": {"predicate": ref}}),
    "field": lambda ref: text_of(
        edit="insert_after", what={"$layer": "pz.nn:Elementwise", "fields": {"fn": {"$ref": ref}}}
    ),
    "path": lambda ref: text_of(where={"path": ref}),
    "bare wrapper": lambda ref: text_of(what=ref),
}

# Each with how its refusal begins; where several fit, the place decides.
HOSTILE = [
    "this:s",
    "antigravity:webbrowser",
    "os:system",
    "builtins:eval",
    "subprocess:Popen",
    "jaxtyping:Float",
    "jaxlib.xla_client:Client",
    "penzai_shard_evil:run",
    "numpy:save",
    "tests.surgery.small_models:Block",
    "penzai_shard.errors:importlib.import_module",
    "penzai_shard.errors:importlib",
    "penzai_shard.text_tables:sys.exit",
    "penzai_shard.text_tables:io.open",
    "penzai_shard.layers.jitted:np.save",
    "penzai_shard.layers.jitted:jax.numpy.tanh",
    "penzai_shard.cli.main:main",
    "penzai_shard.__main__:main",
    "penzai_shard:save_params",
    "penzai_shard.checkpointing:restore_params",
    "penzai_shard.layers:Jitted.__call__",
    "penzai_shard.layers:Jitted.__init__.__globals__",
    "penzai_shard.layers:Jitted.__class__",
    "penzai_shard.surgery.standard_recipes:scoped_by_path.__globals__",
    "penzai_shard.surgery.standard_recipes:scoped_by_path.__call__",
    "jax:checkpoint_policies.__class__",
    "jax:checkpoint_policies",
    "jax._src.util:safe_zip",
    "jax._src.xla_bridge:backends",
    "jax.numpy:save",
    "jax.numpy:pi",
    "jax:numpy.tanh",
    "pz:nn.Linear",
    "penzai.pz:nn",
    "jax.no_such:x",
    "pz.nn:NoSuch",
    "not a reference",
    "",
    7,
    None,
    ["pz.nn:Linear"],
]


@pytest.mark.parametrize("reference", HOSTILE, ids=str)
def test_what_a_text_may_not_name_is_refused_everywhere_and_not_imported(reference):
    loaded = set(sys.modules)
    for place, text in EVERYWHERE.items():
        if place == "path" and not (isinstance(reference, str) and ":" in reference):
            continue
        with pytest.raises(RuleTypeError, match=r"this recipe cannot be read(.|\n)*edit 1"):
            Recipe.from_json(text(reference))
    known = ("penzai_shard", "penzai", "jax")
    new = {name for name in set(sys.modules) - loaded if name.partition(".")[0] not in known}
    assert not new & {"this", "antigravity", "jaxtyping", "penzai_shard_evil", "subprocess"}
    assert "penzai_shard.__main__" not in sys.modules


HARMLESS = [
    ("wrapper", "penzai_shard:Jitted"),
    ("wrapper", "penzai_shard.layers:Checkpointed"),
    ("wrapper", "penzai_shard.layers.jitted:Jitted"),
    ("wrapper", "penzai_shard.surgery.standard_recipes:scoped_by_path"),
    ("wrapper", "pz.nn:Residual"),
    ("wrapper", "penzai.nn.combinators:Residual"),
    ("function", "penzai_shard.layers:RolledLayerStack.from_layer_stack"),
    ("function", "penzai_shard:RolledLayerStack.from_layer_stack"),
    ("inserting function", "penzai_shard.surgery.standard_recipes:scoped_by_path"),
    ("option", "jax:checkpoint_policies.dots_saveable"),
    ("option", "jax:checkpoint_policies.everything_saveable"),
    ("option", "jax.numpy:tanh"),
    ("option", "jax.nn:relu"),
    ("option", "jax.lax:exp"),
    ("option", "pz.nn:Softmax"),
    ("option", "penzai_shard.layers.in_precision:is_sensitive"),
    ("deep in an option", "jax.numpy:float32"),
    ("field", "jax.numpy:tanh"),
    ("field", "jax.nn:silu"),
    ("type", "pz.nn:Attention"),
    ("type", "penzai.models.transformer.model_parts:TransformerBlock"),
    ("within", "pz.nn:LayerStack"),
    ("predicate", "penzai_shard.surgery.standard_recipes:is_model_layer"),
    ("outside", "penzai_shard.layers.in_precision:is_sensitive"),
]


@pytest.mark.parametrize(("place", "reference"), HARMLESS)
def test_what_recipes_need_is_read(place, reference):
    recipe = Recipe.from_json(EVERYWHERE[place](reference))
    assert Recipe.from_json(recipe.to_json()) == recipe


class TestAllow:
    @pytest.fixture
    def package(self, tmp_path, monkeypatch):
        (tmp_path / "own_layers").mkdir()
        (tmp_path / "own_layers/__init__.py").write_text("from own_layers._parts import Name\n")
        (tmp_path / "own_layers/_parts.py").write_text(
            "import os\n"
            "from penzai_shard.layers import Scoped\n"
            "class Name(Scoped): pass\n"
            "def named(layer): return Scoped(layer, 'own')\n"
            "def _hidden(layer): return layer\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        yield "own_layers"
        for name in [name for name in sys.modules if name.startswith("own_layers")]:
            del sys.modules[name]

    def test_the_error_names_all_modules_and_what_to_paste(self, package):
        data = json.loads(text_of(what={"$ref": "own_layers._parts:named"}))
        data["edits"] += json.loads(
            text_of(
                where={"types": ["other:A", "other:B"]}, options={"name": {"$ref": "os:system"}}
            )
        )["edits"]
        with pytest.raises(RuleTypeError) as error:
            Recipe.from_json(json.dumps(data))
        assert str(error.value).splitlines()[0] == (
            "this recipe cannot be read. If you trust all that it names: "
            "Recipe.from_json(text, allow=('own_layers', 'other', 'os',)):"
        )
        assert [problem.partition(" needs")[0] for problem in error.value.problems] == [
            "edit 1: 'own_layers._parts:named'",
            "edit 2: 'other:A'",
            "edit 2: 'other:B'",
            "edit 2: 'os:system'",
        ]
        assert "own_layers" not in sys.modules

    @pytest.mark.parametrize("allow", ["own_layers", ["own_layers"], {"own_layers._parts": 1}])
    def test_what_is_allowed_is_used(self, package, allow):
        text = text_of(what={"$ref": "own_layers._parts:named"})
        assert Recipe.from_json(text, allow=allow).apply(pz.nn.Identity()).name == "own"

    @pytest.mark.parametrize(
        ("reference", "message"),
        [
            ("own_layers._parts:os.system", "goes through a module"),
            ("own_layers._parts:_hidden", "names something private"),
            ("own_layers._parts:os", "is neither a type nor a function"),
            ("own_layers_too:x", r"give allow=\('own_layers_too',\)"),
        ],
    )
    def test_what_is_allowed_opens_no_more(self, package, reference, message):
        with pytest.raises(RuleTypeError, match=message):
            Recipe.from_json(text_of(what={"$ref": reference}), allow=[package])

    def test_a_known_package_s_other_functions_are_allowed_by_module(self):
        text = text_of(what={"$ref": "jax:checkpoint"})
        with pytest.raises(RuleTypeError, match=r"give allow=\('jax._src.ad_checkpoint',\)"):
            Recipe.from_json(text)
        assert Recipe.from_json(text, allow=("jax",))[0].what is jax.checkpoint

    def test_a_mesh_is_a_mesh(self):
        with pytest.raises(RuleTypeError, match=r"mesh= takes a jax\.sharding\.Mesh, not 3\."):
            Recipe.from_json(RECIPES["constraint"].to_json(), mesh=3)

    @pytest.mark.parametrize("allow", [[3], "a b", ["os;"], [""], 3, None])
    def test_names_of_packages_are_names(self, allow):
        with pytest.raises(RuleTypeError, match="allow takes names of packages"):
            Recipe.from_json(text_of(), allow=allow)


class TestFromNotebooks:
    """What a script or notebook defines cannot be written."""

    def test_classes_and_layers(self, monkeypatch):
        main = sys.modules["__main__"]
        kind = pz.pytree_dataclass(type("Mine", (pz.nn.Identity,), {"__module__": "__main__"}))
        monkeypatch.setattr(main, "Mine", kind, raising=False)
        recipe = Recipe(insert_after(pz.nn.Linear, kind()), replace(kind, Jitted))
        with pytest.raises(RuleTypeError, match="cannot be written as JSON") as error:
            recipe.to_json()
        message = (
            "Mine cannot be imported by name outside of the script or notebook that defines it. "
            "Define the class at the top level of a module."
        )
        assert [problem.endswith(message) for problem in error.value.problems] == [True, True]

    def test_an_object_of_such_a_class(self, monkeypatch):
        kind = type("Settings", (), {"__module__": "__main__"})
        recipe = Recipe(wrap(ROOT, Checkpointed, policy=kind()))
        with pytest.raises(RuleTypeError, match="of type Settings has no form in JSON"):
            recipe.to_json()

    def test_private_names(self):
        with pytest.raises(RuleTypeError, match="_private' is private"):
            Recipe(wrap(Block, _private)).to_json()

    def test_values_that_contain_themselves(self):
        ring = []
        ring.append(ring)
        with pytest.raises(RuleTypeError, match="wrap: an option contains itself"):
            wrap(Block, labelled, label=1, more=ring)
        recipe = Recipe(insert_after(Block, pz.nn.NamedGroup(ring, [])))
        with pytest.raises(RuleTypeError, match=r"edit 1, insert_after: .* contains itself"):
            recipe.to_json()


def _private(layer):
    return Jitted(layer)


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        RECIPES["several"].to_json().encode(),
        3,
        None,
        [],
        {"format": "penzai_shard recipe"},
        "",
        "3",
        "null",
        '"text"',
        "[" * 100_000,
        '{"a":' * 100_000,
        "1" * 10_000,
        "\ud800",
        text_of(options={"name": json.loads("[" * 400 + "]" * 400)}).replace("[" * 400, "[" * 990),
        text_of(expect=True),
        text_of(expect=-1),
        text_of(expect="2"),
        text_of(nested=1),
        text_of(options=3),
        text_of(options=["name"]),
        text_of(options={"no_such": 1}),
        text_of(where=3),
        text_of(where={}),
        text_of(where={"path": ""}),
        text_of(where={"path": 3}),
        text_of(where={"types": []}),
        text_of(where={"types": "pz.nn:Linear"}),
        text_of(edit=["wrap"]),
        text_of(what={}),
        text_of(what={"$tuple": []}),
        text_of(edit="insert_after"),
        text_of(edit="insert_after", what={"$layer": "pz.nn:Identity", "fields": {"no": 1}}),
        text_of(options={"name": {"$mesh": {"axes": [["a", 1e400]]}}}),
        text_of(options={"name": {"$dict": [[[], 1]]}}),
    ],
    ids=lambda text: repr(text)[:40],
)
def test_what_is_not_a_recipe_is_refused(text):
    with pytest.raises(RuleTypeError):
        Recipe.from_json(text)


def mutated_text(draw, text):
    """A text with some letters changed, dropped, doubled or moved."""
    letters = list(text)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(max(1, len(letters)))
        match draw.randrange(4):
            case 0:
                letters[at : at + 1] = draw.choice('"{}[]:,0-e \\$_.aZ\x00\xe9')
            case 1:
                del letters[at : at + draw.choice([1, 1, 2, 30])]
            case 2:
                letters[at:at] = letters[at : at + draw.choice([1, 10, 100])]
            case 3:
                letters = letters[: at + 1]
    return "".join(letters)


JUNK = [
    None, True, False, 0, -1, 3, 1e308, float("nan"), 10**30, "", "data", "pz.nn:Linear", "a/b",
    "penzai_shard.layers:Jitted", [], [[]], {}, {"$ref": "pz.nn:Linear"}, {"$tuple": [1]},
    {"$mesh": 3}, {"$layer": "pz.nn:Identity", "fields": {}}, {"$dict": [[1, 2]]}, {"root": True},
]  # fmt: skip


def mutated_data(draw, data):
    """Data with one part exchanged, dropped or doubled."""
    data = copy.deepcopy(data)
    parts = []

    def collect(part):
        for key in range(len(part)) if isinstance(part, list) else list(part):
            parts.append((part, key))
            if isinstance(part[key], dict | list):
                collect(part[key])

    collect(data)
    part, key = draw.choice(parts)
    match draw.randrange(4):
        case 0 | 1:
            part[key] = copy.deepcopy(draw.choice(JUNK))
        case 2:
            del part[key]
        case 3:
            other, place = draw.choice(parts)
            part[key] = copy.deepcopy(other[place])
    return json.dumps(data)


def test_mutations_of_a_valid_text_are_recipes_or_refused():
    draw = random.Random(0)
    texts = [recipe.to_json() for recipe in RECIPES.values() if len(recipe)]
    read = refused = 0
    for number in range(1600):
        text = draw.choice(texts)
        changed = mutated_text(draw, text) if number % 2 else mutated_data(draw, json.loads(text))
        try:
            recipe = Recipe.from_json(changed, allow=("tests",))
        except ShardingError:
            refused += 1
            continue
        read += 1
        assert type(recipe) is Recipe
        assert repr(recipe)
        assert Recipe.from_json(recipe.to_json(), allow=("tests",)).to_json() == recipe.to_json()
    assert read > 100
    assert refused > 800
