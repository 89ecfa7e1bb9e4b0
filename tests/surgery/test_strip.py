"""``strip`` undoes what recipes did: laws over random models and recipes, and cases."""

import dataclasses
import itertools
import pickle

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penzai import pz

import penzai_shard as pzs
from penzai_shard.layers import WrapperLayer
from penzai_shard.surgery import Inserted, Original, Where
from penzai_shard.surgery.inserted import flatten_bare
from tests.models import counted_mlp, equinox, llama, mlp_v1, penzai_mlp
from tests.refusals import problems_of

MESH = pzs.make_mesh({"data": 4, "model": 2})
CONSTRAINT = pzs.ConstrainShardingByName(MESH, {"batch": "data"})
LINEARS = [
    pz.nn.Linear.from_config(f"linear_{i}", jax.random.key(i), {"a": 2}, {"a": 2}) for i in range(4)
]


@pz.pytree_dataclass
class Beside(pz.nn.Layer):
    """A wrapper of somebody else's, which has another layer of its own."""

    extra: pz.nn.Layer
    parts: dict

    def __call__(self, argument, /, **side_inputs):
        return self.parts["layer"][0](self.extra(argument), **side_inputs)


@pz.pytree_dataclass
class Mine(WrapperLayer):
    """A wrapper that somebody derived from the base of the library's."""

    body: pz.nn.Layer

    def _run(self, argument, side_inputs):
        return self.body(argument, **side_inputs)


def beside(layer):
    return Beside(pz.nn.Identity(), {"layer": [layer]})


# Laws

EDITS = [
    pzs.wrap(pz.nn.Linear, pzs.Checkpointed),
    pzs.wrap(pz.nn.Layer, pzs.Scoped, name="x", nested=True),
    pzs.wrap(pz.nn.Layer, beside, nested=True),
    pzs.wrap(pz.nn.Linear, beside),
    pzs.wrap(pz.nn.Residual, lambda layer: pzs.Jitted(beside(pzs.Checkpointed(layer)))),
    pzs.wrap("**/delta", Mine),
    pzs.wrap("sublayers/*", beside),
    pzs.wrap("**/linear/**", pz.nn.Residual),
    pzs.wrap(Inserted, beside),
    pzs.wrap(Original, beside),
    pzs.wrap("**/extra", beside, nested=True),
    pzs.wrap(pzs.ROOT, pzs.Jitted),
    pzs.insert_after(pz.nn.Linear, CONSTRAINT),
    pzs.insert_before(pz.nn.Linear, pz.nn.Identity(), within=pz.nn.Residual),
    pzs.insert_after(pz.nn.Layer, pz.nn.ConstantRescale(by=2.0), nested=True),
    pzs.insert_after(pzs.ROOT, CONSTRAINT),
    pzs.insert_before("**/delta", pzs.Jitted(pz.nn.Identity())),
    pzs.insert_after(Original, CONSTRAINT),
    pzs.insert_before(lambda layer, path: path.count("/") > 2, lambda layer: beside(layer)),
]

# Hypothesis cannot print edits: Penzai's classes refuse to be printed by it.
NUMBERS = st.integers(0, len(EDITS) - 1)


@st.composite
def layers(draw, depth=2):
    kind = draw(st.sampled_from(["linear", "relu", *["residual", "sequence", "sum"] * (depth > 0)]))
    below = layers(depth=depth - 1)
    if kind == "linear":
        return draw(st.sampled_from(LINEARS))
    if kind == "relu":
        return pz.nn.Elementwise(jnp.tanh)
    if kind == "residual":
        return pz.nn.Residual(draw(below))
    parts = draw(st.lists(below, min_size=1, max_size=3))
    # One layer in two places is one object.
    parts += parts[:1] * draw(st.booleans())
    return pz.nn.Sequential(parts) if kind == "sequence" else pz.nn.BranchAndAddTogether(parts)


def nodes(tree):
    """The identity of every node of a tree, in order."""
    found = []
    jax.tree.map(lambda x: None, tree, is_leaf=lambda node: found.append(id(node)))
    return found


def names(model):
    return [variable.label for variable in pz.unbind_params(model)[1]]


@settings(max_examples=100, deadline=None)
@given(layers(), st.lists(NUMBERS, min_size=1, max_size=4))
def test_strip_undoes_every_recipe(model, numbers):
    model = pz.nn.Sequential([model])
    before = nodes(model)
    edited, recipe = model, pzs.Recipe()
    for edit in [EDITS[number] for number in numbers]:
        try:
            edited, recipe = pzs.Recipe(edit).apply(edited), recipe + edit
        except pzs.SelectionError:
            continue
    assert recipe.apply(model) == edited
    assert nodes(model) == before

    stripped = pzs.strip(edited)
    assert stripped == model
    assert jax.tree.structure(stripped) == jax.tree.structure(model)
    pairs = zip(jax.tree.leaves(stripped), jax.tree.leaves(model), strict=True)
    assert all(one is other for one, other in pairs)
    assert sorted(names(edited)) == sorted(names(model)) == sorted(names(stripped))
    assert pzs.strip(stripped) is stripped
    rebuilt = jax.tree.map(lambda leaf: leaf, edited)
    assert pzs.strip(rebuilt) == model


@settings(max_examples=40, deadline=None)
@given(layers(), layers(), NUMBERS)
def test_apply_shares_what_no_edit_touches(touched, untouched, number):
    model = {"touched": pz.nn.Sequential([touched]), "untouched": untouched}
    edit = dataclasses.replace(EDITS[number], where=Where.of(pz.nn.Layer, within="touched"))
    edited = pzs.Recipe(edit).apply(model)
    assert edited["untouched"] is untouched
    assert edited["touched"] is not model["touched"]


# Cases


@pytest.mark.parametrize("make", [llama, penzai_mlp, counted_mlp, mlp_v1, equinox, dict])
def test_strip_gives_the_same_object_where_nothing_comes_off(make):
    model = make()
    assert pzs.strip(model) is model


def test_strip_takes_types_off_and_no_others():
    linear = LINEARS[0]
    edited = pzs.Recipe(
        pzs.insert_after(pz.nn.Linear, CONSTRAINT),
        pzs.wrap(pz.nn.Linear, beside),
        pzs.wrap(pz.nn.Linear, pzs.Checkpointed),
        pzs.insert_before(pz.nn.Linear, pz.nn.ConstantRescale(by=2.0)),
        pzs.wrap(pzs.ROOT, pzs.Jitted),
    ).apply(pz.nn.Residual(linear))

    kinds = (pzs.Jitted, pzs.Checkpointed, Beside, pz.nn.ConstantRescale, type(CONSTRAINT))
    for kind in kinds:
        left = pz.select(pzs.strip(edited, kind))
        counts = [left.at_instances_of(other).count() for other in kinds]
        assert counts == [int(other is not kind) for other in kinds]
    for some in itertools.permutations(kinds, 2):
        assert pzs.strip(pzs.strip(edited, *some)) == pz.nn.Residual(linear)
    assert pzs.strip(edited, *kinds) == pz.nn.Residual(linear)
    assert pzs.strip(edited, pzs.Scoped) is edited


def test_strip_leaves_a_layer_that_does_nothing_where_nothing_else_can_stand():
    for around in (lambda layer: layer, pz.nn.Residual):
        assert pzs.strip(around(CONSTRAINT)) == around(pz.nn.Identity())


def test_strip_works_after_pickling():
    model = pz.nn.Residual(pz.nn.Sequential([pz.nn.ConstantRescale(by=2.0)]))
    edits = pzs.wrap(pz.nn.ConstantRescale, beside), pzs.insert_after("delta", pz.nn.Identity())
    edited = pzs.Recipe(*edits, pzs.wrap(pzs.ROOT, pzs.Jitted)).apply(model)
    assert pzs.strip(pickle.loads(pickle.dumps(edited))) == model


def test_strip_refuses_what_it_cannot_take_off():
    edited = pzs.Recipe(pzs.wrap("**/delta", beside)).apply(pz.nn.Residual(LINEARS[0]))
    broken = pz.select(edited).at_instances_of(Original).apply(lambda original: original.body)
    (problem,) = problems_of(pzs.RuleTypeError, pzs.strip, broken)
    assert (problem.path, "Original(layer)" in problem.fix) == ("delta", True)
    with pytest.raises(TypeError):
        pzs.strip(edited, "Jitted")


@pytest.mark.parametrize("make", [llama, penzai_mlp, counted_mlp, mlp_v1, equinox])
def test_flatten_bare_gives_the_paths_of_the_bare_model(make):
    model = make()
    place = "**/*linear*" if make is equinox else "**/linear"
    edits = pzs.wrap(place, pzs.Checkpointed), pzs.insert_after(place, CONSTRAINT)
    edited = pzs.Recipe(*edits, pzs.wrap(place, pz.nn.Residual)).apply(model)
    (leaves, structure), (own, bare) = map(flatten_bare, (edited, model))
    assert structure.paths == bare.paths
    assert all(one.value is other.value for one, other in zip(leaves, own, strict=True))
