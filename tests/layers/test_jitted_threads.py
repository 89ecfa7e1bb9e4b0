"""``Jitted`` called by many threads at once, and what its caches hold on to."""

import collections
import dataclasses
import functools
import gc
import sys
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

from penzai_shard.layers import Jitted, clear_compiled_structures, compiled_structure

THREADS = 8


def in_threads(*functions):
    """Runs the functions at once, switching between them all the time; their results."""
    barrier = threading.Barrier(len(functions))
    results: list[Any] = [None] * len(functions)

    def run(index):
        barrier.wait()
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=600)
            assert not thread.is_alive(), "deadlock"
    finally:
        sys.setswitchinterval(interval)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pz.pytree_dataclass
class Affine(pz.nn.Layer):
    """Multiplies by a parameter and adds a constant; ``depth`` makes it another structure."""

    weight: pz.Parameter
    offset: Any
    depth: int = dataclasses.field(default=0, metadata={"pytree_node": False})

    def __call__(self, value, /, **side_inputs):
        return value * self.weight.value + self.offset


def affine(weight, offset, depth=0):
    return Affine(pz.Parameter(value=jnp.asarray(weight, float), label="w"), offset, depth)


@pz.pytree_dataclass
class Tally(pz.nn.Layer):
    """Counts its calls in two variables that must always agree, and returns both."""

    first: pz.StateVariable
    second: pz.StateVariable

    def __call__(self, value, /, **side_inputs):
        self.first.value = self.first.value + 1
        self.second.value = self.second.value + 1
        return self.first.value, self.second.value


def tally():
    return Tally(*(pz.StateVariable(jnp.asarray(0), label=label) for label in ("first", "second")))


def test_one_model_called_by_eight_threads():
    clear_compiled_structures()
    for _ in range(10):
        jitted = Jitted(affine(3.0, 1.0))
        calls = [functools.partial(jitted, float(value)) for value in range(THREADS)]
        assert in_threads(*calls) == [3.0 * value + 1 for value in range(THREADS)]
    assert compiled_structure._shared.cache_info().currsize == 1


def test_models_of_one_structure_called_at_once_share_a_program_and_not_their_values():
    clear_compiled_structures()
    models = [Jitted(affine(weight, 10.0 * weight)) for weight in range(THREADS)]
    calls = [lambda model=model: float(model(2.0)) for model in models]
    assert in_threads(*calls) == [12.0 * weight for weight in range(THREADS)]
    assert compiled_structure._shared.cache_info().currsize == 1


def test_models_of_more_structures_than_are_kept(monkeypatch):
    # Every call looks a structure up, adds one and drops another.
    monkeypatch.setattr(
        compiled_structure, "_shared", functools.lru_cache(3)(compiled_structure.CompiledStructure)
    )

    def rounds(seed):
        order = np.random.default_rng(seed).integers(0, 5, 15)
        return [float(Jitted(affine(2.0, 1.0, int(depth)))(3.0)) for depth in order]

    calls = [lambda seed=seed: rounds(seed) for seed in range(THREADS)]
    assert in_threads(*calls) == [[7.0] * 15] * THREADS
    assert compiled_structure._shared.cache_info().currsize == 3


@pytest.mark.parametrize("share", ["one layer", "layers around one model", "copies of a layer"])
def test_state_counts_every_call_once(share):
    body = tally()
    one = Jitted(body)
    layers = [one if share == "one layer" else Jitted(body) for _ in range(THREADS)]
    if share == "copies of a layer":
        layers = [dataclasses.replace(one) for _ in range(THREADS)]
    calls = [lambda layer=layer: [layer(0.0) for _ in range(20)] for layer in layers]
    seen = [(int(a), int(b)) for outputs in in_threads(*calls) for a, b in outputs]
    total = 20 * THREADS
    assert sorted(seen) == [(number, number) for number in range(1, total + 1)]
    assert (int(body.first.value), int(body.second.value)) == (total, total)


def test_a_random_stream_gives_each_of_eight_threads_its_own_numbers(small):
    @pz.pytree_dataclass
    class Draw(pz.nn.Layer):
        def __call__(self, value, /, *, stream, **side_inputs):
            return jax.random.uniform(stream.next_key(), value.shape)

    stream = pz.RandomStream.from_base_key(jax.random.key(0))
    jitted = Jitted(Draw())
    calls = [lambda: [jitted(jnp.ones(4), stream=stream) for _ in range(5)]] * THREADS
    drawn = {tuple(np.asarray(row)) for rows in in_threads(*calls) for row in rows}
    assert len(drawn) == int(stream.offset.value) == 5 * THREADS


def test_state_that_changes_form_at_its_first_call():
    # A Python number becomes an array: whoever reads the model meanwhile reads it again.
    for _ in range(5):
        body = Tally(*(pz.StateVariable(0, label=label) for label in ("first", "second")))
        jitted = Jitted(body)
        seen = in_threads(*[lambda jitted=jitted: int(jitted(0.0)[0])] * THREADS)
        assert sorted(seen) == list(range(1, THREADS + 1))


def test_donated_arguments_and_state():
    body = tally()
    jitted = Jitted(body, donate_argument=True)
    calls = [
        functools.partial(lambda values: [jitted(value) for value in values], list(jnp.zeros(5)))
        for _ in range(THREADS)
    ]
    seen = [(int(a), int(b)) for outputs in in_threads(*calls) for a, b in outputs]
    assert sorted(seen) == [(number, number) for number in range(1, 5 * THREADS + 1)]


def test_a_call_that_is_always_overtaken_ends():
    # The layer itself gives its variable a new value, from another thread, at every run.
    body = tally()
    runs = []

    @pz.pytree_dataclass
    class Interferes(pz.nn.Layer):
        inner: Any

        def __call__(self, value, /, **side_inputs):
            def interfere():
                runs.append(1)
                body.first.value = jnp.asarray(10 * len(runs))

            thread = threading.Thread(target=interfere)
            thread.start()
            thread.join()
            return self.inner(value)

    with jax.disable_jit():
        first, second = Jitted(Interferes(body))(0.0)
    assert int(second) == int(body.second.value) == 1
    assert int(first) == int(body.first.value) == 10 * (len(runs) - 1) + 1
    assert 1 < len(runs) < 40


def test_threads_that_trace_one_model_in_their_own_transformations(small):
    model = pz.freeze_variables(Jitted(small.mlp()))
    expected = np.asarray(small.mlp()(small.features()).unwrap("batch", "features"))

    def plain():
        return model(small.features()).unwrap("batch", "features")

    def compiled():
        return jax.jit(lambda m, x: m(x))(model, small.features()).unwrap("batch", "features")

    def mapped():
        rows = small.features().untag("batch").with_positional_prefix()
        return jax.vmap(model)(rows).tag("batch").unwrap("batch", "features")

    for result in in_threads(*[plain, compiled, mapped] * 3):
        np.testing.assert_allclose(result, expected, rtol=2e-5, atol=2e-5)


def test_the_value_of_a_constant_is_no_part_of_a_programs_key(monkeypatch):
    traced = collections.Counter()

    @pz.pytree_dataclass
    class Adds(pz.nn.Layer):
        constants: list

        def __call__(self, value, /, **side_inputs):
            traced["times"] += 1
            return sum(self.constants, start=value)

    def model(number):
        return Jitted(Adds([number, np.float32(number), jnp.asarray(number), np.full((), number)]))

    def refuse(*_):
        raise AssertionError("the value of a constant was compared")

    monkeypatch.setattr(type(jnp.ones(())), "__eq__", refuse)
    monkeypatch.setattr(type(jnp.ones(())), "__bool__", refuse)
    models = [model(float(number)) for number in range(4)]
    outputs = [layer(1.0) for _ in range(2) for layer in models]
    monkeypatch.undo()
    assert list(map(float, outputs)) == [1.0, 5.0, 9.0, 13.0] * 2
    assert traced["times"] == 1


def test_nothing_of_this_library_is_called_by_the_collector(small):
    Jitted(small.mlp())(small.features())
    modules = [getattr(callback, "__module__", "") or "" for callback in gc.callbacks]
    assert not [module for module in modules if module.startswith("penzai_shard")]


def test_dropped_models_are_released_at_once(small):
    gc.collect()
    gc.disable()
    try:
        jitted = Jitted(small.counting_mlp())
        inner = Jitted(pz.nn.Sequential([jitted]))
        inner(small.features())
        jitted(small.features())
        variables = pz.unbind_variables(jitted)[1]
        watched = [weakref.ref(variable) for variable in variables]
        watched += [weakref.ref(jax.tree_util.tree_leaves(v.freeze())[0]) for v in variables]
        del jitted, inner, variables
        assert [reference() for reference in watched] == [None] * len(watched)
    finally:
        gc.enable()


def test_a_layer_that_compiles_itself_in_its_own_call():
    inside = []

    @pz.pytree_dataclass
    class CompilesItself(pz.nn.Layer):
        weight: pz.Parameter

        def __call__(self, value, /, **side_inputs):
            if inside:
                return value * self.weight.value
            inside.append(self)
            try:
                return Jitted(self)(value)
            finally:
                inside.clear()

    layer = CompilesItself(pz.Parameter(value=jnp.asarray(2.0), label="w"))
    # The inner call has the structure and the argument of the outer one, which is being traced.
    assert [float(Jitted(layer)(value)) for value in (3.0, 4.0)] == [6.0, 8.0]
