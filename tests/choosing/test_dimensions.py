"""Dimensions are one logical axis where operations tie them, and nowhere else."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penzai_shard.choosing.dimensions import ProgramDimensions
from penzai_shard.choosing.dimensions.splittable_classes import SplittableClasses
from penzai_shard.sharding_propagation import PropagatedProgram


class Classes:
    """The classes of a function's arguments and results, as letters."""

    def __init__(self, function, **arguments):
        structs = {
            name: jax.ShapeDtypeStruct(shape, jnp.int32 if name == "index" else jnp.float32)
            for name, shape in arguments.items()
        }
        traced = jax.jit(function).trace(**structs)
        self.program = PropagatedProgram.of(traced.lower(lowering_platforms=("cpu",)))
        self.dimensions = ProgramDimensions.of(self.program)

    def __getitem__(self, name):
        if isinstance(name, int):
            return self.dimensions.of_value(self.program.results[name])
        return self.dimensions.of_value(self.program.arguments[name])

    def sizes(self, name):
        return [tuple(part.size for part in parts) for parts in self[name]]


def test_products_tie_what_they_contract_and_nothing_of_equal_length():
    found = Classes(
        lambda x, first, second: x @ first @ second, x=(3, 8), first=(8, 8), second=(8, 8)
    )
    (rows, inner), (before, hidden), (contracted, after) = (
        found["x"],
        found["first"],
        found["second"],
    )
    assert inner == before
    assert hidden == contracted
    assert len({rows, inner, hidden, after}) == 4
    assert found[0] == (rows, after)


def test_a_reshape_splits_a_dimension_wherever_it_goes():
    def attention_output(x, query, output):
        heads = (x @ query).reshape(3, 2, 4)
        return heads.reshape(3, 8) @ output

    found = Classes(attention_output, x=(3, 8), query=(8, 8), output=(8, 8))
    assert found.sizes("query") == [(8,), (2, 4)]
    assert found["query"][1] == found["output"][0]
    assert found["query"][0] == found["x"][1]
    assert not found.dimensions.conflicts


def test_a_dimension_is_split_differently_by_several_reshapes():
    found = Classes(lambda x: (x.reshape(4, 6), x.reshape(12, 2)), x=(24,))
    assert found.sizes("x") == [(4, 3, 2)]
    assert found[0][1] == found["x"][0][1:]
    assert found[1][0] == found["x"][0][:2]


def test_lengths_that_are_not_parts_of_one_another_are_noted_and_tie_nothing():
    found = Classes(lambda x: x.reshape(6, 4, 2), x=(4, 6, 2))
    assert [conflict.lengths for conflict in found.dimensions.conflicts] == [((4, 6), (6, 4))]
    assert found.sizes("x") == [(4,), (6,), (2,)]
    assert found["x"][2] == found[0][2]


def test_a_second_reshape_that_contradicts_the_first_is_noted():
    found = Classes(lambda x: (x.reshape(4, 3), x.reshape(3, 4)), x=(12,))
    assert found.sizes("x") == [(4, 3)]
    assert [conflict.lengths for conflict in found.dimensions.conflicts] == [((12,), (3, 4))]


def test_broadcasting_from_length_one_ties_nothing():
    found = Classes(lambda x, y: x[:, None] + y[None, :] * jnp.ones((1, 1)), x=(8,), y=(8,))
    assert found["x"] != found["y"]
    assert found[0] == (*found["x"], *found["y"])
    single = Classes(lambda x, y: x + y, x=(8, 1), y=(8, 5))
    assert single["x"][1] != single["y"][1]
    assert single["x"][0] == single["y"][0]


def test_each_call_of_a_function_has_classes_of_its_own():
    layer = jax.jit(lambda x, kernel: jax.nn.relu(x @ kernel))
    found = Classes(lambda x, a, b: layer(layer(x, a), b), x=(3, 8), a=(8, 8), b=(8, 8))
    assert found["a"][1] == found["b"][0]
    assert len({found["x"][1], found["a"][1], found["b"][1]}) == 3


@pytest.fixture(scope="module")
def scanned():
    def body(x, weights):
        hidden = jax.nn.relu(x @ weights["up"])
        return x + hidden @ weights["down"], hidden.sum(0)

    def loss(up, down, x):
        return jax.lax.scan(jax.checkpoint(body), x, {"up": up, "down": down})

    return Classes(loss, up=(6, 6, 8), down=(6, 8, 6), x=(6, 6))


def test_what_a_loop_takes_and_stacks_one_by_one_is_one_class(scanned):
    layers = scanned["up"][0]
    assert scanned["down"][0] == layers == scanned[1][0]
    assert layers not in (scanned["up"][1], *scanned["x"])
    assert scanned.dimensions.stepped == {*layers}


def test_loops_tie_what_they_hand_on(scanned):
    assert scanned["up"][1] == scanned["down"][2] == scanned["x"][1]
    assert scanned["up"][2] == scanned["down"][1] == scanned[1][1]
    assert scanned["x"] == scanned[0]
    assert scanned["x"][0] != scanned["x"][1]


def test_a_reversed_loop_is_no_other():
    def total(first, second):
        def body(carry, pair):
            return carry + pair[0] @ pair[1], None

        return jax.lax.scan(body, jnp.zeros(()), (first, second), reverse=True)[0]

    found = Classes(total, first=(4, 3), second=(4, 3))
    assert found["first"] == found["second"]


def test_branches_tie_what_they_hand_on():
    def either(index, x, y):
        return jax.lax.cond(index > 0, lambda: x * 2, lambda: y)

    found = Classes(either, index=(), x=(4, 4), y=(4, 4))
    assert found["x"] == found["y"] == found[0]
    assert found["x"][0] != found["x"][1]


def rotated(x):
    first, second = jnp.split(x, 2, axis=-1)
    angle = jnp.arange(x.shape[-1] // 2, dtype=x.dtype)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def rotated_in_pairs(x):
    first, second = x[..., ::2], x[..., 1::2]
    return jnp.stack([first - second, second + first], -1).reshape(x.shape)


def partly_rotated(x):
    return jnp.concatenate([rotated(x[..., :4]), x[..., 4:]], -1)


@pytest.mark.parametrize("rotate", [rotated, partly_rotated])
def test_what_is_put_together_of_its_own_parts_is_the_same(rotate):
    found = Classes(
        lambda x, query, key: rotate(x @ query) @ rotate(x @ key).T,
        x=(3, 8),
        query=(8, 6),
        key=(8, 6),
    )
    assert found["query"] == found["key"]
    assert found.sizes("query") == [(8,), (6,)]


def test_what_is_taken_in_turns_is_a_product():
    found = Classes(
        lambda x, query, key: rotated_in_pairs(x @ query) @ rotated_in_pairs(x @ key).T,
        x=(3, 8),
        query=(8, 6),
        key=(8, 6),
    )
    assert found.sizes("query") == [(8,), (3, 2)]
    assert found["query"][1][0] == found["key"][1][0]


def test_put_together_of_two_others_is_neither():
    def halves(x, y):
        (a, b), (c, d) = jnp.split(x, 2), jnp.split(y, 2)
        return jnp.concatenate([a + b + c, d])

    found = Classes(halves, x=(8,), y=(8,))
    assert len({found["x"], found["y"], found[0]}) == 3


def fused_attention(x, fused, output):
    query, key, value = (each.reshape(3, 2, 4) for each in jnp.split(x @ fused, 3, axis=-1))
    weights = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", query, key), -1)
    return jnp.einsum("hqk,khd->qhd", weights, value).reshape(3, 8) @ output


def test_a_fused_projection_is_a_product_of_its_equal_parts():
    found = Classes(fused_attention, x=(3, 8), fused=(8, 24), output=(8, 8))
    assert found.sizes("fused") == [(8,), (3, 2, 4)]
    assert found["fused"][1][1:] == found["output"][0]
    assert found["fused"][0] == found["x"][1] != found["output"][1]


def attention_by_heads(x, fused, output, mix=True):
    both = (x @ fused).reshape(3, 2, 12)
    query, key, value = both[..., :4], both[..., 4:8], both[..., 8:]
    scores = jnp.einsum("qhd,khd->hqk", query, key)
    if not mix:
        return scores, value @ jnp.ones((4, 1)), output
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, -1), value).reshape(3, 8) @ output


def test_queries_keys_and_values_of_each_head_are_equal_parts():
    found = Classes(attention_by_heads, x=(3, 8), fused=(8, 24), output=(8, 8))
    assert found.sizes("fused") == [(8,), (2, 3, 4)]
    heads, _, projection = found["fused"][1]
    assert found["output"][0] == (heads, projection)
    apart = Classes(
        functools.partial(attention_by_heads, mix=False), x=(3, 8), fused=(8, 24), output=(8, 8)
    )
    assert apart.sizes("fused") == [(8,), (2, 12)]


def test_a_gate_beside_its_neurons_is_a_product():
    def gated(x, both, down):
        gate, up = jnp.split(x @ both, 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ down

    found = Classes(gated, x=(3, 8), both=(8, 16), down=(8, 8))
    assert found.sizes("both") == [(8,), (2, 8)]
    assert found["both"][1][1:] == found["down"][0]


def test_equal_parts_that_mean_different_things_are_not_tied():
    def features(x, kernel, first, second):
        a, b = jnp.split(x @ kernel, 2, axis=-1)
        return a @ first, b @ second

    found = Classes(features, x=(3, 8), kernel=(8, 8), first=(4, 5), second=(4, 5))
    assert found.sizes("kernel") == [(8,), (8,)]
    assert found["first"][0] != found["second"][0]


def test_parts_at_the_same_place_are_one():
    def joined_then_cut(x, query, key):
        both = x @ jnp.concatenate([query, key], -1)
        return both[:, :4], both[:, 4:]

    found = Classes(joined_then_cut, x=(3, 8), query=(8, 4), key=(8, 4))
    assert found[0][1] == found["query"][1] != found["key"][1] == found[1][1]


def test_repeated_key_heads_are_the_slower_part_of_the_heads():
    def grouped(query, key):
        return jnp.einsum("hd,hd->h", query.reshape(6, 4), jnp.repeat(key.reshape(3, 4), 2, axis=0))

    found = Classes(grouped, query=(24,), key=(12,))
    ((groups, within, projection),) = found["query"]
    assert found["key"] == ((groups, projection),)
    assert (groups.size, within.size) == (3, 2)


def test_ranks_and_frequencies_are_not_what_they_are_of():
    found = Classes(
        lambda x, y: (jnp.sort(x, -1), jnp.fft.fft(x), jax.lax.sort((x, y), dimension=1)),
        x=(2, 6),
        y=(2, 6),
    )
    ranks, frequencies, *both = (found[i] for i in range(4))
    assert {found["x"][0], found["y"][0]} == {ranks[0]} == {frequencies[0]}
    assert len({found["x"][1], ranks[1], frequencies[1], both[0][1]}) == 4
    assert both[0] == both[1]
    assert found["x"][1] == found["y"][1]


def test_a_lookup_ties_the_looked_up_rows_to_nothing():
    found = Classes(
        lambda index, table, head: table[index] @ head, index=(8,), table=(8, 6), head=(6, 8)
    )
    assert len({found["index"][0], found["table"][0], found["head"][1]}) == 3
    assert found["table"][1] == found["head"][0]
    assert found[0] == (found["index"][0], found["head"][1])


def test_classes_are_numbered_as_arguments_come():
    found = Classes(lambda a, b: jnp.sin(a) @ b, a=(2, 3), b=(3, 4))
    numbers = [part.number for parts in (*found["a"], *found["b"]) for part in parts]
    assert numbers == [0, 1, 1, 2]


def test_what_python_computes_ties_nothing():
    def called(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((3,), jnp.float32), x)

    found = Classes(called, x=(3,))
    assert found["x"] != found[0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_any_grouping_of_factors_is_the_product_of_its_factors(factors, data):
    """A dimension that is reshaped in two ways has the parts of both."""
    classes = SplittableClasses()
    length = 1
    for factor in factors:
        length *= factor
    whole = classes.new(length)
    elements = [classes.new(factor) for factor in factors]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(factors)))) | {len(factors)})
    start = 0
    groups = []
    for end in cuts:
        size = 1
        for factor in factors[start:end]:
            size *= factor
        groups.append(classes.new(size))
        start = end
    assert classes.unify([whole], groups)
    assert classes.unify(elements, [whole])
    assert classes.of_all([whole]) == classes.of_all(elements) == classes.of_all(groups)
    assert [classes.sizes[part] for part in classes.of_all([whole])] == [
        f for f in factors if f > 1
    ]
