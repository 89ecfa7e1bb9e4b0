"""strip undoes what recipes did, judged by a comparison that knows nothing of surgery."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penzai import pz

from penzai_shard import (
    ROOT,
    Inserted,
    Recipe,
    TrainState,
    constrain_blocks,
    insert_after,
    insert_before,
    jit_root,
    make_mesh,
    mixed_precision,
    name_to_name_device_put,
    rematerialise_blocks,
    roll_layer_stacks,
    scope_layers,
    strip,
    wrap,
)
from penzai_shard.errors import RuleTypeError
from penzai_shard.layers import (
    Checkpointed,
    ConstrainShardingByName,
    Jitted,
    RolledLayerStack,
    Scoped,
    WrapperLayer,
)
from penzai_shard.surgery import InsertedSequence, Original
from tests.surgery.small_models import Block, features, linear, mlp, stacked_mlp

MESH = make_mesh({"data": 4, "model": 2})
RULES = {"batch": "data"}
CONSTRAINT = ConstrainShardingByName(MESH, RULES)


@pz.pytree_dataclass
class Own(pz.nn.Layer):
    """A wrapper of somebody else's, with the layer in a field that is not called body."""

    inside: Any

    def __call__(self, argument, /, **side_inputs):
        return self.inside(argument, **side_inputs)


@pz.pytree_dataclass
class Other(pz.nn.Layer):
    """Another, which has a layer of its own before the one that it is put around."""

    extra: Any
    inside: Any

    def __call__(self, argument, /, **side_inputs):
        return self.inside(self.extra(argument), **side_inputs)


@pz.pytree_dataclass(has_implicitly_inherited_fields=True)
class OwnJitted(Jitted):
    """Somebody's subclass of one of this library's layers."""


@pz.pytree_dataclass(has_implicitly_inherited_fields=True, init=False)
class OwnConstraint(ConstrainShardingByName):
    """Another."""


@pz.pytree_dataclass
class OwnWrapper(WrapperLayer):
    """A wrapper that somebody derived from this library's base class."""

    body: Any

    def __call__(self, argument, /, **side_inputs):
        return self.body(argument, **side_inputs)


class Module(equinox.Module):
    """A wrapper that is an Equinox module."""

    inner: Any
    factor: jax.Array

    def __init__(self, inner):
        self.inner, self.factor = inner, jnp.float32(1)

    def __call__(self, x, **side_inputs):
        return self.inner(x, **side_inputs) * self.factor


@dataclasses.dataclass(frozen=True)
class Plain:
    """A wrapper that only JAX knows."""

    parts: Any

    def __call__(self, x, **side_inputs):
        return self.parts["layer"][0](x, **side_inputs)


jax.tree_util.register_dataclass(Plain, ["parts"], [])


def call(layer, x):
    return layer(x)


def other(layer):
    return Other(pz.nn.Identity(), layer)


def jitted_own(layer):
    return Jitted(Own(layer))


def own_sequential(layer):
    return Own(pz.nn.Sequential([layer]))


def same(one, another):
    """Whether two models are built alike of equal parts; the judge of all tests here."""
    if type(one) is not type(another):
        return False
    if isinstance(one, pz.Parameter):
        return one is another or (one.label == another.label and same(one.value, another.value))
    if isinstance(one, np.ndarray | jax.Array):
        return one.dtype == another.dtype and np.array_equal(one, another)
    if dataclasses.is_dataclass(one):
        return all(
            same(getattr(one, field.name), getattr(another, field.name))
            for field in dataclasses.fields(one)
        )
    if isinstance(one, dict):
        return list(one) == list(another) and all(same(one[key], another[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(another) and all(map(same, one, another))
    return one is another or one == another


def check(model, stripped):
    assert same(model, stripped)
    assert jax.tree.structure(model) == jax.tree.structure(stripped)


def nodes(tree):
    """All that is in a tree, by what JAX sees of it."""
    found = []
    jax.tree.map(lambda node: None, tree, is_leaf=lambda node: found.append(node))
    return found


RECIPES = {
    "Jitted around a wrapper": Recipe(wrap(pz.nn.Linear, jitted_own)),
    "a sequence in a wrapper": Recipe(wrap(pz.nn.Linear, own_sequential)),
    "wrapper in wrapper": Recipe(wrap(pz.nn.Linear, lambda layer: Own(other(layer)))),
    "library in library": Recipe(wrap(pz.nn.Linear, lambda layer: Jitted(Checkpointed(layer)))),
    "own, library, own": Recipe(wrap(pz.nn.Linear, lambda layer: Own(Jitted(Own(layer))))),
    "wrapped twice": Recipe(wrap(pz.nn.Linear, Own), wrap(pz.nn.Linear, Own)),
    "wrapper wrapped": Recipe(wrap(pz.nn.Linear, other), wrap(Other, Own)),
    "wrapper wrapped by the library": Recipe(wrap(pz.nn.Linear, Own), wrap(Own, Jitted)),
    "the sign wrapped": Recipe(wrap(pz.nn.Linear, Own), wrap(Inserted, other)),
    "the original wrapped": Recipe(wrap(pz.nn.Linear, own_sequential), wrap(Original, other)),
    "all wrapped": Recipe(wrap(pz.nn.Layer, other, nested=True)),
    "all wrapped twice": Recipe(*[wrap(pz.nn.Layer, other, nested=True)] * 2),
    "all jitted in the wrapped": Recipe(
        wrap(pz.nn.Linear, other), wrap(pz.nn.Layer, Checkpointed, nested=True)
    ),
    "inserted into a wrapper's sequence": Recipe(
        wrap(pz.nn.Linear, own_sequential),
        insert_before(Original, pz.nn.Identity()),
        insert_before(pz.nn.Linear, pz.nn.Identity()),
    ),
    "wrapped inside of what was wrapped": Recipe(wrap(Block, other), wrap(pz.nn.Linear, other)),
    "wrapped around what was wrapped": Recipe(wrap(pz.nn.Linear, other), wrap(Block, other)),
    "a sibling of the original wrapped": Recipe(
        wrap(pz.nn.Linear, other), wrap("**/extra", other, nested=True)
    ),
    "a library wrapper of one's own layer": Recipe(
        insert_after(pz.nn.Linear, Scoped(pz.nn.Identity(), "own"))
    ),
    "a library wrapper inserted where no list is": Recipe(
        insert_after("**/delta", Jitted(pz.nn.Identity()))
    ),
    "an inserted layer wrapped": Recipe(
        insert_after(pz.nn.Linear, pz.nn.Identity()), wrap(pz.nn.Identity, other)
    ),
    "an inserted sign wrapped": Recipe(
        insert_after(pz.nn.Linear, pz.nn.Identity()), wrap(Inserted, Own)
    ),
    "an inserted layer with layers, edited": Recipe(
        insert_after(Block, pz.nn.Sequential([linear("added")])), wrap(pz.nn.Linear, other)
    ),
    "inserts around inserts": Recipe(
        insert_after("**/delta", pz.nn.Identity()),
        insert_before(InsertedSequence, pz.nn.Identity()),
        wrap(InsertedSequence, Own),
    ),
    "a constraint scoped": constrain_blocks(Block, MESH, RULES)
    + Recipe(wrap(ConstrainShardingByName, Scoped), wrap(Scoped, other)),
    "somebody's constraint": Recipe(insert_after(Block, OwnConstraint(MESH))),
    "somebody's subclass": Recipe(wrap(Block, OwnJitted), wrap(pz.nn.Linear, OwnWrapper)),
    "an Equinox module": Recipe(wrap(pz.nn.Linear, Module), jit_root()),
    "an Equinox module inserted": Recipe(
        insert_after(pz.nn.Linear, Module(pz.nn.Identity())), wrap(Module, Own)
    ),
    "a dictionary in a registered class": Recipe(
        wrap(pz.nn.Linear, lambda layer: Plain({"layer": (layer, 1)}))
    ),
    "a partial function": Recipe(
        wrap(pz.nn.Linear, lambda layer: jax.tree_util.Partial(call, layer))
    ),
    "the layer twice": Recipe(wrap(Block, lambda layer: pz.nn.Sequential([layer, layer]))),
    "a recipe in a wrapper": Recipe(
        wrap(Block, lambda block: Recipe(wrap(pz.nn.Linear, other)).apply(block)),
        wrap(Block, lambda block: (jit_root() + rematerialise_blocks(pz.nn.Linear)).apply(block)),
    ),
    "a recipe of recipes": scope_layers() + Recipe(jit_root(), wrap(Block, other)) + scope_layers(),
    "the root": Recipe(wrap(ROOT, other), insert_before(ROOT, pz.nn.Identity()), wrap(ROOT, Own)),
    "everything": scope_layers()
    + Recipe(wrap(pz.nn.Linear, other), insert_after(Block, pz.nn.Identity()))
    + constrain_blocks(Block, MESH, RULES)
    + rematerialise_blocks(Block)
    + mixed_precision()
    + jit_root(),
}


@pytest.mark.parametrize("name", RECIPES)
def test_strip_undoes(name):
    model = mlp(2)
    edited = RECIPES[name].apply(model)
    assert not same(model, edited)
    check(model, strip(edited))
    if name != "all wrapped twice":  # Wrapped four times it is too deep for Python.
        check(model, strip(RECIPES[name].apply(edited)))


@pytest.mark.parametrize(
    "rebuild",
    [
        lambda model: jax.tree.map(lambda leaf: leaf, model),
        lambda model: jax.tree.unflatten(jax.tree.structure(model), jax.tree.leaves(model)),
        lambda model: pz.bind_variables(*pz.unbind_variables(model)),
        lambda model: pickle.loads(pickle.dumps(model)),
        copy.deepcopy,
        lambda model: equinox.combine(*equinox.partition(model, equinox.is_array)),
        lambda model: name_to_name_device_put(model, MESH, {}),
        lambda model: TrainState.initial_state(model, optax.sgd(0.1), jax.random.key(0)).model,
    ],
    ids=["map", "unflatten", "bind", "pickle", "deepcopy", "equinox", "placed", "train state"],
)
def test_strip_undoes_after_every_rebuilding(rebuild):
    recipe = Recipe(
        wrap(pz.nn.Linear, Module),
        insert_after(pz.nn.Linear, pz.nn.ConstantRescale(by=2.0)),
        wrap(Block, jitted_own),
        insert_after("**/delta", Scoped(pz.nn.Identity(), "own")),
    )
    # Copies of what jax.numpy.tanh is are not the same, and cannot be pickled at all.
    model = pz.select(mlp(2)).at_instances_of(pz.nn.Elementwise).set(pz.nn.Softmax("neurons"))
    unbound = pz.unbind_variables(strip(rebuild(recipe.apply(model))))[0]
    check(pz.unbind_variables(model)[0], unbound)


def test_every_type_in_an_edited_model_has_a_name_to_import_it_by():
    for recipe in RECIPES.values():
        for node in nodes(recipe.apply(mlp(1))):
            kind = type(node)
            assert getattr(sys.modules[kind.__module__], kind.__qualname__) is kind


def test_a_model_that_another_process_edited_comes_off_here():
    code = (
        "import pickle, sys\n"
        "from penzai import pz\n"
        "from penzai_shard import Recipe, wrap, insert_after\n"
        "model = pz.nn.Sequential([pz.nn.Residual(pz.nn.Identity()), pz.nn.Softmax('a')])\n"
        "recipe = Recipe(\n"
        "    wrap(pz.nn.Softmax, pz.nn.Residual),\n"
        "    insert_after(pz.nn.Identity, pz.nn.ConstantRescale(by=2.0)),\n"
        "    wrap(pz.nn.Identity, lambda layer: pz.nn.Sequential([layer, pz.nn.Softmax('b')])),\n"
        ")\n"
        "sys.stdout.buffer.write(pickle.dumps((model, recipe.apply(model))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    model, edited = pickle.loads(done.stdout)
    here = Recipe(
        wrap(pz.nn.Softmax, pz.nn.Residual),
        insert_after(pz.nn.Identity, pz.nn.ConstantRescale(by=2.0)),
        wrap(pz.nn.Identity, lambda layer: pz.nn.Sequential([layer, pz.nn.Softmax("b")])),
    ).apply(model)
    check(here, edited)
    check(model, strip(edited))


def test_what_is_inserted_computes_the_same_and_is_visible():
    model, x = mlp(2), features()
    for name in ("all wrapped twice", "everything", "an Equinox module", "the root"):
        edited = RECIPES[name].apply(model)
        assert any(type(node) in (Inserted, Original) for node in nodes(edited))
        if name != "everything":  # That one computes in bfloat16.
            outputs = [run(x).untag("batch", "embedding").unwrap() for run in (edited, model)]
            np.testing.assert_allclose(*outputs, rtol=1e-6, atol=1e-6)


def test_attributes_are_read_through_what_was_inserted():
    edited = Recipe(wrap(pz.nn.Linear, own_sequential)).apply(mlp(1))
    (held,) = pz.select(edited).at_instances_of(Original).get_sequence()[:1]
    assert held.in_axis_names == ("embedding",)
    assert Inserted(pz.nn.ConstantRescale(by=2.0)).by == 2.0


def test_a_layer_replaced_inside_a_wrapper_stays_replaced():
    model = mlp(1)
    edited = Recipe(wrap(pz.nn.Linear, jitted_own), wrap(Block, other)).apply(model)
    for change in (lambda tree: pz.select(tree).at_instances_of(pz.nn.Elementwise),):
        expected = change(model).set(pz.nn.Identity())
        check(expected, strip(change(edited).set(pz.nn.Identity())))
    doubled = lambda layer: dataclasses.replace(layer, in_axis_names=("other",))  # noqa: E731
    expected = pz.select(model).at_instances_of(pz.nn.Linear).apply(doubled)
    check(expected, strip(pz.select(edited).at_instances_of(pz.nn.Linear).apply(doubled)))


def test_layers_put_into_a_wrapper_by_selectors_go_with_it():
    model = mlp(1)
    edited = Recipe(wrap(pz.nn.Linear, own_sequential)).apply(model)
    more = pz.select(edited).at_instances_of(Original).insert_before(pz.nn.Identity())
    check(model, strip(more))


def test_an_original_that_is_gone_is_reported_with_its_path():
    edited = Recipe(wrap(pz.nn.Elementwise, own_sequential)).apply(mlp(1))
    lost = pz.select(edited).at_instances_of(Original).set(pz.nn.Identity())
    message = (
        r"at sublayers/0/sublayers/0/delta/sublayers/1: a recipe put Own around a layer, and that "
        r"layer is not in it any more.*Put penzai_shard\.surgery\.Original\(layer\) around"
    )
    with pytest.raises(RuleTypeError, match=message):
        strip(lost)
    assert strip(lost, layers=Jitted) is lost


def test_a_part_taken_out_of_what_was_around_it_loses_its_sign():
    edited = Recipe(wrap(pz.nn.Linear, Own)).apply(mlp(1))
    (part,) = pz.select(edited).at_instances_of(Own).get_sequence()[:1]
    (layer,) = pz.select(edited).at_instances_of(pz.nn.Linear).get_sequence()[:1]
    assert same(strip(part), Own(layer))


class TestWhatTheUserHad:
    """Kinds of layer that strip must leave, and those it takes off whoever put them in."""

    def test_subclasses_of_library_layers_stay(self):
        model = pz.nn.Sequential(
            [OwnJitted(linear("a")), OwnConstraint(MESH), OwnWrapper(linear("b"))]
        )
        assert strip(model) is model
        edited = Recipe(wrap(pz.nn.Linear, Jitted), insert_after(OwnJitted, CONSTRAINT)).apply(
            model
        )
        check(model, strip(edited))
        assert strip(model, layers=(Jitted, ConstrainShardingByName)) is model

    def test_a_subclass_of_an_inserted_layer_stays(self):
        @pz.pytree_dataclass(has_implicitly_inherited_fields=True)
        class OwnInserted(Inserted):
            pass

        model = pz.nn.Sequential([OwnInserted(linear("a"))])
        assert strip(model) is model

    def test_library_layers_come_off_whoever_put_them_there(self):
        model = pz.nn.Sequential([Jitted(linear("a")), CONSTRAINT])
        check(pz.nn.Sequential([linear("a")]), strip(model))

    def test_named_types_of_others_leave_what_they_were_put_around(self):
        model = mlp(1)
        recipe = Recipe(wrap(pz.nn.Linear, own_sequential), insert_after(Block, other(linear("x"))))
        edited = recipe.apply(model)
        check(recipe[:1].apply(model), strip(edited, layers=Other))
        check(recipe[1:].apply(model), strip(edited, layers=Own))
        check(model, strip(edited, layers=(Own, Other)))
        check(model, strip(edited, layers=Inserted))

    def test_named_types_of_others_leave_the_library_layers_around_them(self):
        edited = Recipe(wrap(pz.nn.Linear, jitted_own)).apply(mlp(1))
        left = strip(edited, layers=Own)
        assert pz.select(left).at_instances_of(Own).is_empty()
        assert pz.select(left).at_instances_of(Jitted).count() == 2
        check(mlp(1), strip(left))
        check(mlp(1), strip(edited, layers=[Own, Jitted]))


def test_a_rolled_stack_that_was_wrapped_becomes_penzais_again():
    model = stacked_mlp()
    recipe = Recipe(wrap(pz.nn.Linear, other)) + roll_layer_stacks()
    edited = (recipe + Recipe(wrap(RolledLayerStack, Own))).apply(model)
    check(model, strip(edited))


WRAPPERS = [
    Own,
    other,
    jitted_own,
    own_sequential,
    Module,
    Jitted,
    OwnWrapper,
    Checkpointed,
    lambda layer: Own(Jitted(other(layer))),
    lambda layer: Plain({"layer": (pz.nn.Sequential([layer]), other(pz.nn.Identity()))}),
]
INSERTED = [
    pz.nn.Identity(),
    CONSTRAINT,
    Scoped(Own(pz.nn.Identity()), "own"),
    Inserted(pz.nn.Identity()),
    OwnConstraint(MESH),
    pz.nn.Sequential([Jitted(linear("added")), CONSTRAINT]),
]
PLACES = [
    pz.nn.Linear,
    pz.nn.Layer,
    Block,
    Inserted,
    Original,
    Own,
    Jitted,
    "**/inside",
    "**/body",
    "**/sublayers/0",
    ROOT,
]


@settings(max_examples=150)
@given(st.data())
def test_any_nesting_of_edits_comes_off(data):
    model = mlp(data.draw(st.integers(1, 2)))
    edited, nested = model, False
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.sampled_from(PLACES))
        # Once, as what is wrapped everywhere several times is too deep for Python.
        nested = not nested and data.draw(st.booleans())
        edit = data.draw(st.sampled_from(["wrap", "before", "after"]))
        if edit == "wrap":
            made = wrap(place, data.draw(st.sampled_from(WRAPPERS)), nested=nested)
        else:
            make = insert_before if edit == "before" else insert_after
            made = make(place, data.draw(st.sampled_from(INSERTED)), nested=nested)
        edited = made.run(edited).model
    check(model, strip(edited))
    rebuilt = jax.tree.map(lambda leaf: leaf, edited)
    check(model, strip(rebuilt))
