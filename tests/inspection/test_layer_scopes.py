"""Marks on layers: a marked model is the same program, and its operations have the marks."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1

from penzai_shard import (
    Checkpointed,
    Layout,
    Recipe,
    RolledLayerStack,
    make_mesh,
    mixed_precision,
    wrap,
)
from penzai_shard.inspection.steps.layer_scopes import LayerScopes
from tests.layers.test_first_api_effects import Writes
from tests.model_families import drawn_transformer

MESH = make_mesh({"data": 4, "model": 2})
X = pz.nx.wrap(jnp.ones((8, 4)), "batch", "a")
TOKENS = pz.nx.wrap(jnp.arange(64).reshape(8, 8) % 16, "batch", "seq")


def linear():
    return pz.nn.Linear.from_config("w", jax.random.key(0), {"a": 4}, {"b": 4})


def block(init_base_rng=None):
    return pz.nn.Sequential([linear(), pz.nn.RenameAxes(old="b", new="a")])


@pz.pytree_dataclass
class Adds(pz.nn.Layer):
    weights: Any
    _by: Any

    def __call__(self, one, other, /, **side_inputs):
        return one + other * self.weights.value


@pz.pytree_dataclass
class Asks(pz.nn.Layer):
    """Runs its layer in a way that depends on what the layer is."""

    inner: Any

    def __call__(self, argument, /, **side_inputs):
        factor = self.inner._by if isinstance(self.inner, Adds) else 5.0
        assert not isinstance(self.inner, pz.nn.Linear)
        return self.inner(argument, 2.0) * factor


@pz.pytree_dataclass
class Counts(pz.nn.Layer):
    count: Any

    def __call__(self, argument, /, **side_inputs):
        self.count.value += 1
        return argument * self.count.value


def rolled():
    stack = pz.nn.LayerStack.from_sublayer_builder(block, "layer", 3, jax.random.key(0), {})
    return RolledLayerStack.from_layer_stack(stack)


def picked(model, x):
    (layer,) = pz.select(model).at_instances_of(pz.nn.Linear).get_sequence()
    return layer(x), model.sublayers[0].weights.value.data_array


def outputs_of(model, x):
    value, outputs = model(x)
    return value, [output.value for output in outputs]


def called(model, x):
    return model(x)


LLAMA = drawn_transformer("llama")
BLOCK = block()
# A model, on what it is run, and how.
MODELS = {
    "transformer": (LLAMA, TOKENS, called),
    "half precision": (mixed_precision().apply(LLAMA), TOKENS, called),
    "per device": (
        Layout.two_dimensional(min_size=64, manual=True).recipe(LLAMA, MESH).apply(LLAMA),
        TOKENS,
        called,
    ),
    "each layer computed again": (
        Recipe(wrap(pz.nn.Layer, Checkpointed, nested=True)).apply(BLOCK),
        X,
        called,
    ),
    "rolled stack": (rolled(), X, called),
    "one layer in two places": (pz.nn.Sequential([BLOCK, BLOCK]), X, called),
    "types asked": (Asks(Adds(pz.Parameter(value=jnp.ones(()), label="w"), 7.0)), X, called),
    "state": (
        pz.nn.Sequential([Counts(pz.StateVariable(value=jnp.ones(()), label="n")), linear()]),
        X,
        called,
    ),
    "layers picked by the loss": (BLOCK, X, picked),
    "first API": (
        pz_v1.de.CollectingSideOutputs.handling(pz_v1.nn.Sequential([Writes(), Writes()])),
        jnp.ones(()),
        outputs_of,
    ),
    "Equinox": (
        eqx.nn.MultiheadAttention(2, 4, key=jax.random.key(0)),
        jnp.ones((8, 4)),
        lambda model, x: model(x, x, x),
    ),
    "dictionary": ({"w": jnp.ones((4, 4))}, jnp.ones((8, 4)), lambda model, x: x @ model["w"]),
}


def lowered(model, x, run, mark):
    arrays, rest = eqx.partition(pz.unbind_variables(model, freeze=True), eqx.is_array)

    def step(arrays, x):
        bare, variables = eqx.combine(arrays, rest)
        variables = [variable.unfreeze_as_copy() for variable in variables]
        result = run(mark(pz.bind_variables(bare, variables)), x)
        return result, [variable.freeze() for variable in variables]

    return jax.jit(step).lower(arrays, x)


@pytest.mark.parametrize("name", MODELS)
def test_a_marked_model_is_the_same_program(name):
    scopes = LayerScopes()
    bare = lowered(*MODELS[name], lambda model: model)
    marked = lowered(*MODELS[name], scopes.marked)
    # Functions inside are called by what they were made of.
    programs = [re.sub(r"@\w+", "@function", one.as_text()) for one in (marked, bare)]
    assert programs[0] == programs[1]
    marks = set(re.findall(r"pzs_layer_(\d+)", marked.as_text(debug_info=True)))
    assert bool(marks) == (name != "dictionary")
    assert len(scopes.paths) == len(set(scopes.paths)) >= len(marks)


def test_marks_stand_for_paths_in_the_model_as_it_was_and_stay_when_it_is_marked_again():
    scopes = LayerScopes()
    marked = scopes.marked(Recipe(wrap(pz.nn.Linear, Checkpointed)).apply(BLOCK))
    assert scopes.paths == ["sublayers/0", "sublayers/1", "sequential"]
    assert scopes.unmarked(marked) == Recipe(wrap(pz.nn.Linear, Checkpointed)).apply(BLOCK)
    scopes.marked(BLOCK)
    scopes.marked(BLOCK, "teacher")
    assert scopes.paths[3:] == ["teacher/sublayers/0", "teacher/sublayers/1", "teacher/sequential"]
