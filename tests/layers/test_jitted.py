"""When ``Jitted`` compiles, what it reads anew, what it keeps, and what its calls cost."""

import collections
import concurrent.futures
import functools
import gc
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from tests.layers.calls import Calls
from tests.models import counted_mlp
from tests.refusals import problem_paths

ONE = jnp.ones(())
TRACED = collections.Counter()
THREADS = concurrent.futures.ThreadPoolExecutor(8)
AS_PURE_FUNCTIONS = pytest.mark.parametrize("wrap", [pzs.Jitted, pzs.Checkpointed])


def multiply(name, held, x, **side_inputs):
    TRACED[name] += 1
    for leaf in jax.tree.leaves((held, side_inputs)):
        x = x * getattr(leaf, "value", leaf)
    return x


def multiplied(name, held=()):
    """A layer that multiplies by all that it gets, and counts its traces by name."""
    return Calls(functools.partial(multiply, name), held)


def scale(value):
    return multiplied("scale", pz.Parameter(value=jnp.asarray(value), label="w"))


def count(held, x):
    """Counts the calls whose input is not empty."""
    held.value = held.value + 1 if x.size else held.value
    return x


def counting():
    return Calls(count, pz.StateVariable(value=jnp.zeros(()), label="count"))


def assert_identical(output, expected):
    equal = functools.partial(np.testing.assert_array_equal, strict=True)
    jax.tree.map(equal, output, jax.tree.map(jnp.asarray, expected))


# Programs


@AS_PURE_FUNCTIONS
def test_a_program_serves_all_models_of_a_structure(wrap):
    name = f"shared {wrap}"
    model, other = (
        wrap(pz.nn.Sequential([multiplied(name), scale(value)])) for value in (2.0, 3.0)
    )
    assert [float(m(ONE)) for m in (model, other, model)] == [2, 3, 2]
    model.body.sublayers[1].held.value = jnp.asarray(5.0)
    assert float(model(ONE)) == 5
    edited = pz.select(model).at_instances_of(Calls).insert_after(pz.nn.ConstantRescale(by=2.0))
    undone = pz.select(edited).at_instances_of(pz.nn.ConstantRescale).remove_from_parent()
    assert [float(m(ONE)) for m in (edited, undone)] == [20, 5]
    assert TRACED[name] == 2


def show(setting, held, x):
    """Shows the dtypes and the signs of numbers."""
    return [(x + n, jnp.copysign(1.0, n)) for n in jax.tree.leaves((setting, held))]


NUMBERS = [0, 0.0, -0.0, False, 1, 1.0, True, *map(np.float32, (0, 1)), *map(np.float16, (0, 1))]


def test_settings_that_are_equal_and_differ_share_no_program():
    for value in [*NUMBERS, *(np.ones(2, dtype) for dtype in ("f4", "f2", "i4"))]:
        for setting, held in ((value, ()), (0, value)):
            layer = Calls(functools.partial(show, setting), held)
            assert_identical(pzs.Jitted(layer)(1), layer(1))


@AS_PURE_FUNCTIONS
def test_settings_edited_in_place_are_those_of_new_layers(wrap):
    setting = {}
    for setting["by"] in (2.0, 3.0):
        for given in (setting, dict(setting)):
            layer = wrap(Calls(functools.partial(show, given)))
            assert_identical(layer(1), layer.body(1))
    layer = wrap(Calls(lambda held, x, by: x * len(by)))
    assert [float(layer(ONE, by=text)) for text in ("a", "ab", "a")] == [1, 2, 1]


# What is read anew


def test_edits_in_place_are_noticed():
    weight = pz.Parameter(value=jnp.asarray(1.0), label="weight")
    frozen = pz.ParameterValue(value=[3.0], label="frozen")
    held = {"list": [2.0, jnp.asarray(3.0)], "weight": weight, "frozen": frozen}
    layer = pzs.Jitted(multiplied("edits", held))
    for change in (
        lambda: None,
        lambda: setattr(weight, "value", jnp.asarray(2.0)),
        lambda: held["list"].append(scale(5.0).held),
        lambda: held["list"].__setitem__(0, 4),
        lambda: held["list"].pop(),
        lambda: held["list"][1].delete() or held["list"].__setitem__(1, jnp.asarray(2.0)),
        lambda: frozen.value.__setitem__(0, 5.0),
        lambda: setattr(weight, "value", pz.nx.ones({"a": 2, "b": 3})),
        lambda: setattr(weight, "value", pz.nx.ones({"b": 3, "a": 2})),
        lambda: setattr(weight, "value", pz.nx.ones({"a": 2}).untag("a")),
        lambda: held.pop("weight"),
    ):
        change()
        for x in (ONE, jnp.ones((), int)):
            assert_identical(layer(x), layer.body(x))

    numbers = [None]
    layer = pzs.Jitted(Calls(functools.partial(show, ()), numbers))
    for numbers[0] in NUMBERS:
        assert_identical(layer(1), layer.body(1))


class Box(types.SimpleNamespace):
    """A node that anybody may change, with a new array in its structure whenever it is asked."""


jax.tree_util.register_pytree_node(
    Box, lambda box: ([box.by], np.ones(2)), lambda _, children: Box(by=children[0])
)


def test_what_anybody_may_change_is_taken_apart_at_every_call():
    layer = pzs.Jitted(multiplied("box", Box(by=2.0)))
    for layer.held.by in (2.0, 3.0):
        assert float(layer(ONE)) == layer.held.by

    class Running(nnx.Module):
        def __init__(self):
            self.mean, self.scale = nnx.BatchStat(jnp.zeros(())), 1.0

        def __call__(self, x, **side_inputs):
            self.mean[...] = self.mean[...] + 1
            return x * self.scale

    module = Running()
    layer = pzs.Jitted(pz.nn.Sequential([multiplied("nnx", module.mean), module]))
    # The variable stands in the list, too, and a module outside of it.
    assert [float(layer(ONE)) for _ in range(3)] == [0, 1, 2]
    module.scale = 3.0
    assert float(layer(ONE)) == 9
    reading = pzs.Jitted(multiplied("nnx", module.mean))
    assert [float(reading(ONE)), float(layer(ONE)), float(reading(ONE))] == [4, 12, 5]
    running = pzs.Jitted(Calls(lambda held, x, module: module(x)))
    assert [float(running(ONE, module=module)), float(reading(ONE))] == [3, 6]


# Variables


@AS_PURE_FUNCTIONS
def test_variables_are_assigned_as_by_the_layer(wrap):
    """None becomes an array, names come in another order, a value grows, another stays."""

    def change(held, x, *, more):
        last, named, growing, constant, total = held
        last.value = x["plain"] * 2
        named.value = named.value.order_as(*reversed(named.value.named_shape))
        growing.value = {**growing.value, str(len(growing.value)): x["plain"]}
        x["held"].value = x["held"].value * 2
        more.value = more.value + 1
        total.value = total.value + x["held"].value
        return total.value + more.value + constant.value

    def run(wrap):
        values = None, pz.nx.ones({"a": 2, "b": 3}), {}, jnp.ones(2), *jnp.ones(3)
        *held, more, other = (pz.StateVariable(v, label=str(i)) for i, v in enumerate(values))
        layer, x = wrap(Calls(change, held)), {"held": other, "plain": jnp.ones(2)}
        # At last one variable is in the layer and in its input.
        outputs = [layer(x, more=variable) for variable in (more, more, held[-1])]
        assert held[3].value is values[3]
        return outputs, [variable.value for variable in (*held, more, other)]

    assert_identical(run(wrap), run(lambda layer: layer))


@AS_PURE_FUNCTIONS
def test_what_a_call_would_lose_is_refused(wrap):
    def lose(held, x):
        held[0] = x
        return {"w": held[1]}

    layer = wrap(Calls(lose, [ONE, scale(2.0).held]))
    assert problem_paths(pzs.ShardingError, layer, ONE) == ["body/held/0", "w"]


@AS_PURE_FUNCTIONS
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_that_fails_assigns_nothing_and_lets_others_in(wrap, error):
    def fail(held, x):
        if count(held, x).ndim:
            raise error
        return x

    layer = wrap(Calls(fail, counting().held))
    for shape in (1, 2):
        with pytest.raises(error):
            layer(jnp.ones(shape))
        THREADS.submit(layer, ONE).result(60)
        assert float(layer.body.held.value) == shape


# Costs


def test_python_calls_do_not_grow_with_the_model():
    counts = set()
    for blocks in (2, 12, 48):
        weights = [pz.Parameter(value=pz.nx.ones({}), label=str(i)) for i in range(blocks)]
        layer = pzs.Jitted(pz.nn.Sequential([multiplied("depth", [weight]) for weight in weights]))
        x, events = pz.nx.ones({}), []
        layer(x)
        sys.setprofile(lambda frame, event, argument, events=events: events.append(event))
        layer(x)
        sys.setprofile(None)
        counts.add(events.count("call"))
    assert len(counts) == 1
    assert max(counts) < 40


def test_dead_models_and_replaced_values_are_let_go():
    layer = pzs.Jitted(pz.nn.Sequential([pzs.Checkpointed(counted_mlp()), scale(1.0)]))
    x = pz.nx.ones({"features": 8})
    layer(x)
    parameter = pz.unbind_variables(layer)[1][0]
    replaced = weakref.ref(parameter.value.data_array)
    parameter.value = jax.tree.map(jnp.zeros_like, parameter.value)
    gc.collect()
    assert replaced() is None
    layer(x)
    arrays = jax.tree.leaves(pz.freeze_variables(layer))
    watched = [*map(weakref.ref, [layer.body, parameter, *arrays])]
    del layer, parameter, arrays
    gc.collect()
    assert not any(reference() is not None for reference in watched)


# Shardings and donation


def test_shardings_hold_and_are_of_the_program():
    x = pz.nx.ones({"batch": 8})
    meshes = [pzs.make_mesh({"data": 8}, explicit=explicit) for explicit in (False, True)]
    for mesh in meshes:
        of_tree = pzs.name_to_name_sharding(x, mesh, {"batch": "data"})
        for shardings in (NamedSharding(mesh, P("data")), of_tree):
            for name in ("in_shardings", "out_shardings"):
                layer = pzs.Jitted(multiplied("shardings"), **{name: shardings})
                assert layer(x).data_array.sharding == NamedSharding(meshes[0], P("data"))
    assert TRACED["shardings"] == 4
    with pytest.raises(TypeError, match="in_shardings"):
        pzs.Jitted(layer, in_shardings={"x": "data"})({"x": x})


def test_a_donated_argument_is_gone_and_what_cannot_be_run_stays():
    held = [jnp.ones(8), pz.Parameter(value=jnp.ones(8), label="w")]
    layer = pzs.Jitted(multiplied("donates", held), donate_argument=True)
    x, y = jnp.ones((2, 8))
    layer(x)
    twice = lambda held, x: [2 * leaf for leaf in jax.tree.leaves(x)]  # noqa: E731
    doubling = pzs.Jitted(Calls(twice), donate_argument=True)
    doubling(pz.ParameterValue(value=y, label="y"))
    assert [x.is_deleted(), y.is_deleted()] == [True, True]
    weight, other = held[1].value, jnp.ones(8)
    for call, path in (
        # Two variables of one label.
        (lambda: pzs.Jitted([scale(1.0), scale(2.0)])(other), "body/1/held"),
        (lambda: layer(pz.StateVariable(value=other)), "argument"),
    ):
        assert problem_paths(pzs.ShardingError, call) == [path]
    # JAX itself refuses to take the memory of what stands in another place too.
    for call in (lambda: layer(weight), lambda: doubling([other, other])):
        with pytest.raises((RuntimeError, ValueError), match="donate"):
            call()
    assert [weight.is_deleted(), other.is_deleted()] == [False, False]


# Threads


def test_threads_count_every_call():
    stream = pz.RandomStream.from_base_key(jax.random.key(0))
    draws = pzs.Jitted(Calls(lambda held, x, stream: jax.random.uniform(stream.next_key())))
    body, drawn = counting(), set()
    layers = pzs.Jitted(body), pzs.Jitted(body)
    # That a call has assigned nothing does not tell what one with another argument does.
    layers[0](jnp.ones(0))

    def call(i):
        layers[i % 2](jnp.ones(3))
        drawn.add(float(draws(ONE, stream=stream)))

    list(THREADS.map(call, range(400)))
    assert float(body.held.value) == len(drawn) == 400


def test_calls_that_only_read_do_not_wait():
    reading = pzs.Jitted(scale(2.0))
    reading(ONE)

    def wait(held, x):
        # The first call of a structure might assign variables.
        return x * float(THREADS.submit(reading, ONE).result(60))

    assert float(pzs.Jitted(Calls(wait))(ONE)) == 2


def test_arrays_over_a_mesh_that_were_donated_are_refused():
    mesh = pzs.make_mesh({"data": 8})
    donated = jax.jit(lambda x: 2 * x, donate_argnums=0)
    held, x = (pzs.place(pz.nx.ones({"a": 8}), mesh, {"a": "data"}) for _ in range(2))
    layer = pzs.Jitted(multiplied("spread", [pz.Parameter(value=held, label="w")]))
    for array, path in ((x, "argument"), (held, "w")):
        argument = pzs.place(pz.nx.ones({"a": 8}), mesh, {"a": "data"}) if array is held else x
        layer(argument)
        donated(array.data_array)
        assert problem_paths(pzs.ShardingError, layer, argument) == [path]
