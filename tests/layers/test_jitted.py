"""When ``Jitted`` compiles, what it reads anew, what it keeps, and what its calls cost."""

import collections
import concurrent.futures
import dataclasses
import gc
import operator
import sys
import threading
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from tests.models import Counted, counted_mlp

TRACED = collections.Counter()
MESHES = [pzs.make_mesh({"data": 4, "model": 2}, explicit=explicit) for explicit in (False, True)]


def static(default=None):
    return dataclasses.field(default=default, metadata={"pytree_node": False})


@pz.pytree_dataclass
class Traced(pz.nn.Layer):
    """Multiplies by all that it holds, and counts its traces by name."""

    name: str = static()
    held: object = ()

    def __call__(self, x, /, **side_inputs):
        TRACED[self.name] += 1
        for leaf in jax.tree.leaves(self.held):
            x = x * getattr(leaf, "value", leaf)
        return x


def scale(value, name="scale"):
    return Traced(name, pz.Parameter(value=jnp.asarray(value), label="w"))


def named(value, **sizes):
    return pz.nx.wrap(jnp.full(tuple(sizes.values()), value), *sizes)


def assert_identical(output, expected):
    assert jax.tree.structure(output) == jax.tree.structure(expected)
    for own, right in zip(*map(jax.tree.leaves, (output, expected)), strict=True):
        np.testing.assert_array_equal(own, jnp.asarray(right), strict=True)


def run_in_threads(function):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        [*pool.map(function, range(8))]


# Programs


def test_a_program_serves_all_models_of_a_structure():
    def build(value):
        return pzs.Jitted(pz.nn.Sequential([Traced("shared"), scale(value)]))

    model = build(2.0)
    assert [float(m(jnp.ones(()))) for m in (model, build(3.0), model)] == [2, 3, 2]
    model.body.sublayers[1].held.value = jnp.asarray(5.0)
    assert float(model(jnp.ones(()))) == 5
    edited = pz.select(model).at_instances_of(Traced).insert_after(pz.nn.ConstantRescale(by=2.0))
    undone = pz.select(edited).at_instances_of(pz.nn.ConstantRescale).remove_from_parent()
    assert [float(m(jnp.ones(()))) for m in (edited, undone)] == [20, 5]
    assert TRACED["shared"] == 2


@pz.pytree_dataclass
class Shows(pz.nn.Layer):
    """The dtype and the sign that a setting gives."""

    setting: object = static(0)
    held: object = 0

    def __call__(self, x, /, **side_inputs):
        given = [self.setting, *jax.tree.leaves(self.held)]
        return [(x + value, jnp.copysign(1.0, value)) for value in given]


NUMBERS = [0, 0.0, -0.0, False, 1, 1.0, True, *map(np.float32, (0, 1)), *map(np.float16, (0, 1))]


@pytest.mark.parametrize("field", ["setting", "held"])
def test_settings_that_are_equal_and_differ_share_no_program(field):
    for value in [*NUMBERS, *(np.ones(2, dtype) for dtype in ("f4", "f2", "i4"))]:
        layer = Shows(**{field: value})
        assert_identical(pzs.Jitted(layer)(1), layer(1))


# What is read anew


def test_edits_in_place_are_noticed():
    weight = pz.Parameter(value=jnp.asarray(1.0), label="weight")
    held = {"list": [2.0, jnp.asarray(3.0)], "weight": weight}
    layer = pzs.Jitted(Traced("edits", held))
    for change in (
        lambda: None,
        lambda: setattr(weight, "value", jnp.asarray(2.0)),
        lambda: held["list"].append(scale(5.0).held),
        lambda: operator.setitem(held["list"], 0, 4),
        lambda: held["list"].reverse(),
        lambda: held["list"].pop(),
        lambda: held["list"][1].delete() or operator.setitem(held["list"], 1, jnp.asarray(2.0)),
        lambda: held.update(c=7.0),
        lambda: setattr(weight, "value", named(3.0, a=2, b=3)),
        lambda: setattr(weight, "value", named(3.0, b=3, a=2)),
        lambda: setattr(weight, "value", named(5.0, a=2).untag("a")),
        lambda: held.pop("weight"),
    ):
        change()
        for x in (jnp.ones(()), jnp.ones((), int)):
            assert_identical(layer(x), layer.body(x))

    numbers = [None]
    layer = pzs.Jitted(Shows(held=numbers))
    for numbers[0] in NUMBERS:
        assert_identical(layer(1), layer.body(1))


def test_modules_of_other_libraries_are_taken_apart_at_every_call():
    class Running(nnx.Module):
        def __init__(self):
            self.mean, self.scale = nnx.BatchStat(jnp.zeros(())), 1.0

        def __call__(self, x, **side_inputs):
            self.mean[...] = self.mean[...] + 1
            return x * self.scale

    module = Running()
    layer = pzs.Jitted(pz.nn.Sequential([Traced("nnx", module.mean), module]))
    # The variable stands in the list, too, and a module outside of it.
    assert [float(layer(jnp.ones(()))) for _ in range(3)] == [0, 1, 2]
    module.scale = 3.0
    assert float(layer(jnp.ones(()))) == 9
    reading = pzs.Jitted(Traced("nnx", module.mean))
    assert [float(reading(jnp.ones(()))), float(layer(jnp.ones(())))] == [4, 12]
    assert float(reading(jnp.ones(()))) == 5
    mlp = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))
    np.testing.assert_allclose(pzs.Jitted(mlp)(jnp.ones(8)), mlp(jnp.ones(8)), rtol=1e-5)


@jax.tree_util.register_pytree_node_class
class Box:
    """A node that anybody may change, with a new array in its structure whenever it is asked."""

    def tree_flatten(self):
        return (self.factor,), np.ones(2)

    @classmethod
    def tree_unflatten(cls, _, children):
        box = cls()
        box.factor = children[0]
        return box

    def __call__(self, x, **side_inputs):
        return self.factor * x


def test_nodes_of_unknown_types_are_taken_apart_at_every_call():
    layer = pzs.Jitted(Box.tree_unflatten(None, [2.0]))
    assert float(layer(jnp.ones(()))) == 2
    layer.body.factor = 3.0
    assert float(layer(jnp.ones(()))) == 3


def test_what_a_call_assigns_may_depend_on_its_argument():
    @pz.pytree_dataclass
    class CountsLong(pz.nn.Layer):
        count: pz.StateVariable

        def __call__(self, x, /, **side_inputs):
            if len(x) > 1:
                self.count.value = self.count.value + 1
            return x

    layer = pzs.Jitted(CountsLong(pz.StateVariable(value=jnp.zeros(()), label="n")))
    layer(jnp.ones(1))
    run_in_threads(lambda _: layer(jnp.ones(2)))
    layer(jnp.ones(1))
    assert float(layer.body.count.value) == 8


# Costs


def test_python_calls_do_not_grow_with_the_model():
    counts = set()
    for blocks in (2, 12, 48):
        weights = [pz.Parameter(value=named(1.0), label=str(i)) for i in range(blocks)]
        layer = pzs.Jitted(pz.nn.Sequential([Traced("depth", [weight]) for weight in weights]))
        x, events = named(1.0), []
        layer(x)
        sys.setprofile(lambda frame, event, argument, events=events: events.append(event))
        layer(x)
        sys.setprofile(None)
        counts.add(events.count("call"))
    assert len(counts) == 1
    assert max(counts) < 40


def test_eager_wrappers_trace_a_structure_once():
    for value in (1.0, 2.0, 3.0):
        assert float(pzs.Checkpointed(scale(value, "eager"))(jnp.ones(()))) == value
    assert TRACED["eager"] == 1


def test_dead_models_and_replaced_values_are_let_go():
    layer = pzs.Jitted(pz.nn.Sequential([pzs.Checkpointed(counted_mlp()), scale(1.0)]))
    x = pz.nx.ones({"features": 8})
    layer(x)
    parameter = pz.unbind_variables(layer)[1][0]
    watched = [weakref.ref(parameter.value.data_array)]
    parameter.value = jax.tree.map(jnp.zeros_like, parameter.value)
    gc.collect()
    assert watched[0]() is None
    layer(x)
    watched += [weakref.ref(layer.body), weakref.ref(parameter)]
    watched += [weakref.ref(array) for array in jax.tree.leaves(pz.freeze_variables(layer))]
    del layer, parameter
    gc.collect()
    assert not any(reference() is not None for reference in watched)


# Shardings and donation


def test_shardings_hold_and_are_of_the_program():
    x, split = pz.nx.ones({"batch": 8}), NamedSharding(MESHES[0], P("data"))
    for mesh in MESHES:
        of_tree = pzs.name_to_name_sharding(x, mesh, {"batch": "data"})
        for shardings in (NamedSharding(mesh, P("data")), of_tree):
            for name in ("in_shardings", "out_shardings"):
                layer = pzs.Jitted(Traced("shardings"), **{name: shardings})
                assert layer(x).data_array.sharding == split
    assert TRACED["shardings"] == 4
    with pytest.raises(pzs.RuleTypeError) as caught:
        pzs.Jitted(layer, in_shardings={"x": "data"})
    assert caught.value.problems[0].path == "in_shardings"


def test_a_donated_argument_is_gone_and_what_cannot_be_run_stays():
    held = [jnp.ones(8), pz.Parameter(value=jnp.ones(8), label="w")]
    layer = pzs.Jitted(Traced("donates", held), donate_argument=True)
    x = jnp.ones(8)
    layer(x)
    assert x.is_deleted()
    weight, other = held[1].value, jnp.ones(8)
    for call, path in (
        (lambda: layer(weight), "w"),
        (lambda: layer(held[0]), "body/held/0"),
        # Two variables of one label.
        (lambda: pzs.Jitted([scale(1.0), scale(2.0)])(other), "body/1/held"),
        (lambda: layer(other, mask=[other]), "side_inputs/mask/0"),
        (lambda: layer(pz.StateVariable(value=other)), "argument"),
    ):
        with pytest.raises(pzs.ShardingError) as caught:
            call()
        assert [problem.path for problem in caught.value.problems] == [path]
    assert not weight.is_deleted()
    assert not other.is_deleted()


# Threads


def test_threads_count_every_call():
    body = Counted(Traced("threads"), pz.StateVariable(value=jnp.zeros(()), label="count"))
    stream = pz.RandomStream.from_base_key(jax.random.key(0))

    @pz.pytree_dataclass
    class Draws(pz.nn.Layer):
        def __call__(self, x, /, *, random_stream, **side_inputs):
            return jax.random.uniform(random_stream.next_key())

    layers, draws, drawn = [pzs.Jitted(body) for _ in range(2)], pzs.Jitted(Draws()), set()

    def call(_):
        for i in range(50):
            layers[i % 2](jnp.ones(()))
            drawn.add(float(draws(jnp.ones(()), random_stream=stream)))

    run_in_threads(call)
    assert float(body.count.value) == len(drawn) == 400
    assert TRACED["threads"] == 1


def test_calls_that_only_read_do_not_wait():
    reached, may_go_on = threading.Event(), threading.Event()

    @pz.pytree_dataclass
    class Waits(pz.nn.Layer):
        def __call__(self, x, /, **side_inputs):
            reached.set()
            assert may_go_on.wait(60)
            return x

    reading = pzs.Jitted(scale(2.0))
    reading(jnp.ones(()))
    thread = threading.Thread(target=pzs.Jitted(Waits()), args=(jnp.ones(()),))
    thread.start()
    assert reached.wait(60)
    assert float(reading(jnp.ones(()))) == 2
    may_go_on.set()
    thread.join()
