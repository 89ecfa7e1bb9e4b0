"""AxesInPlace: the same values, without moving dimensions."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock

from penzai_shard.layers import AxesInPlace, Checkpointed, Jitted, RolledLayerStack, ShardMapped
from penzai_shard.layers.dimension_orders import OrderedArray, run_in_place
from penzai_shard.layers.dimension_orders.operation_rules import RULES
from penzai_shard.surgery import (
    Recipe,
    axes_in_place,
    check_equivalent,
    rematerialise_blocks,
    roll_layer_stacks,
    strip,
    wrap,
)
from penzai_shard.traced_programs import ELEMENTWISE, equations
from tests.model_families import drawn_transformer


def values(*shape, seed=0):
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)


def _lookup(table, index):
    return table.at[index].get(mode="clip")


A, B = values(2, 3, 4), values(2, 3, 4, seed=1)
OPERATIONS = {
    "elementwise": (lambda a, b: a * b + jnp.where(a > 0, b, -1.0), A, B),
    "a stretched operand": (lambda a, b: a - b, A, values(2, 1, 4)),
    "scalars": (lambda a, b: lax.clamp(jnp.float32(-1), a, b), A, jnp.float32(2)),
    "transpose": (lambda a: lax.transpose(a, (2, 0, 1)) + 1, A),
    "broadcast": (lambda a: lax.broadcast_in_dim(a, (2, 5, 3, 4), (0, 2, 3)), A),
    "broadcast of length one": (lambda a: lax.broadcast_in_dim(a, (5, 3), (0, 1)), values(1, 3)),
    "squeeze": (lambda a: lax.squeeze(a, (1,)), values(2, 1, 4)),
    "reshape of ones": (lambda a: lax.reshape(a, (1, 2, 3, 1)), values(2, 1, 3)),
    "reshape": (lambda a: lax.reshape(a, (6, 4)), A),
    "reshape in another order": (lambda a: lax.reshape(a, (4, 6), (2, 0, 1)), A),
    "sum": (lambda a: jnp.sum(a, (0, 2)), A),
    "max": (lambda a: jnp.max(a, 1), A),
    "argmax": (lambda a: jnp.argmax(a, 1), A),
    "all": (lambda a: jnp.all(a > -4, 0), A),
    "cumulative": (lambda a: lax.cumsum(a, 1, reverse=True), A),
    "concatenate": (lambda a, b: lax.concatenate([a, b], 1), A, values(2, 5, 4)),
    "split": (lambda a: lax.split(a, (1, 3), 2), A),
    "slice": (lambda a: lax.slice(a, (0, 1, 0), (2, 3, 4), (1, 1, 2)), A),
    "reverse": (lambda a: lax.rev(a, (0, 2)), A),
    "sort": (lambda a, b: lax.sort((a, b), dimension=1, num_keys=2), A, B),
    "pad": (lambda a: lax.pad(a, jnp.float32(7), [(0, 1, 0), (2, 0, 1), (0, 0, 0)]), A),
    "matrix product": (lambda a, b: jnp.einsum("abc,dca->bad", a, b), A, values(5, 4, 2)),
    "product moved": (lambda a, b: jnp.einsum("abc,bcd->dab", a, b), A, values(3, 4, 5)),
    "product of nothing": (lambda a, b: jnp.einsum("abc,cb->bca", a, b), A, values(4, 3)),
    "outer product": (lambda a, b: jnp.einsum("ab,cd->abcd", a, b), values(2, 3), values(4, 5)),
    "in another dtype": (
        lambda a, b: lax.dot_general(
            a.astype(jnp.bfloat16),
            b.astype(jnp.bfloat16),
            (((), ()), ((1,), (0,))),
            preferred_element_type=jnp.float32,
        ),
        values(2, 3),
        values(3),
    ),
    "in a narrower dtype": (
        lambda a, b: lax.dot_general(
            jnp.sin(a), jnp.exp(b), (((), ()), ((1,), (0,))), preferred_element_type=jnp.bfloat16
        ),
        values(5, 3),
        values(3),
    ),
    "lookup": (_lookup, values(5, 3, 4), np.array([[1, 4, 0], [2, 2, 9]])),
    "lookup per row": (
        lambda a, i: jnp.take_along_axis(a, i, 1),
        A,
        np.array([[[0, 2, 1, 1]], [[2, 0, 0, 1]]]),
    ),
    "lookup under vmap": (jax.vmap(_lookup, (1, 1), 2), A, np.array([[1, 0, 0], [0, 0, 1]])),
    "without a rule": (lambda a: jax.nn.relu(a) + lax.dynamic_slice(a, (0, 0, 0), (1, 1, 1)), A),
    "a scatter": (lambda a, b: a.at[:, 1].add(b), A, values(2, 4)),
    "a loop": (lambda a: lax.scan(lambda c, x: (c + x.T, c.T), A[0].T, a), A),
    "a loop of no turns": (lambda a: lax.scan(lambda c, x: (c + x, c.T), a[0], a[:0] + 1), A),
    "a loop that swaps": (
        lambda a, b: lax.scan(
            lambda c, x: ((c[1], c[0] + x), c[0]), (a, a + b), b[0, 0, :, None, None]
        ),
        A,
        B,
    ),
    "a loop whose carry is not alike": (
        lambda a, b: lax.scan(lambda c, x: (c * x + b, c.T), a, b[0, 0]),
        A,
        B,
    ),
    "a loop of while": (lambda a: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, a), A),
    "a branch": (lambda a: lax.cond(a[0, 0, 0] > 0, jnp.sin, lambda x: x.at[0].set(1), a), A),
    "rematerialised": (jax.checkpoint(lambda a: jnp.sin(a.T).sum(0)), A),
    "a constant": (lambda a: a + jnp.asarray(B), A),
    "an argument as it is": (lambda a: (a, a), A),
}


def orders(array):
    """The value held in several orders."""
    array = np.asarray(array)
    every = list(itertools.permutations(range(array.ndim)))
    for dims in sorted({every[0], every[-1], every[len(every) // 2]}):
        yield OrderedArray(jnp.asarray(np.transpose(array, dims)), dims, array.shape)


def same_along(array, dim):
    array = np.asarray(array)
    one = jnp.asarray(np.take(array, 0, dim))
    dims = tuple(d for d in range(array.ndim) if d != dim)
    return OrderedArray(one, dims, array.shape)


def assert_run_in_place(function, cases):
    """That each of the cases, a value for each argument, gives the same, all in one program."""

    def in_place_and_whole(arrays):
        both = []
        for case, own in zip(cases, arrays, strict=True):
            held = [
                OrderedArray(array, value.dims, value.shape)
                for array, value in zip(own, case, strict=True)
            ]
            whole = [value.whole() for value in held]
            right = jax.tree.leaves(function(*whole))
            results = run_in_place(jax.make_jaxpr(function)(*whole), held)
            assert [result.shape for result in results] == [one.shape for one in right]
            both.append(([result.whole() for result in results], right))
        return both

    arrays = [[value.array for value in case] for case in cases]
    for results, right in jax.jit(in_place_and_whole)(arrays):
        for result, one in zip(results, right, strict=True):
            assert result.dtype == one.dtype
            np.testing.assert_array_equal(np.asarray(result), np.asarray(one))


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_the_same_in_any_order(name):
    function, first, *others = OPERATIONS[name]
    rest = [list(orders(other))[-1] for other in others]
    cases = [[held, *rest] for held in orders(first)]
    rest = [OrderedArray.of(jnp.asarray(other)) for other in others]
    cases += [[same_along(first, dim), *rest] for dim in range(np.ndim(first))]
    for index, other in enumerate(others):
        for dim in range(np.ndim(other)):
            held = [OrderedArray.of(jnp.asarray(x)) for x in (first, *others)]
            held[1 + index] = same_along(other, dim)
            cases.append(held)
    assert_run_in_place(function, cases)


def test_every_rule_is_tried():
    tried = {"name", "sharding_constraint"}  # Below.
    for function, *arguments in OPERATIONS.values():
        program = jax.make_jaxpr(function)(*arguments)
        tried |= {equation.primitive.name for equation in equations(program)}
    alike = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}
    alike |= {name for name in RULES if name.startswith("reduce_")} | {"argmin", "copy"}
    assert RULES.keys() - ELEMENTWISE - alike - tried == set()


def transposes(function, *arguments):
    return [
        equation
        for equation in equations(jax.make_jaxpr(function)(*arguments))
        if equation.primitive.name == "transpose"
    ]


@pytest.mark.parametrize("family", ["llama", "gemma_3", "gpt_neox"])
def test_no_family_moves_an_activation(family, small):
    bare = pz.freeze_params(drawn_transformer(family))
    assert transposes(bare, small.tokens())
    assert not transposes(AxesInPlace(bare), small.tokens())


@pytest.mark.parametrize(("family", "gradients"), [("gpt_neox", False), ("llama", True)])
def test_a_transformer_computes_the_same(family, gradients, small):
    bare = drawn_transformer(family, num_decoder_blocks=1)
    edited = axes_in_place().apply(bare)
    report = check_equivalent(bare, edited, small.tokens(), gradients=gradients)
    assert report, str(report)
    assert strip(edited) == bare


def test_the_recipe_as_json():
    recipe = axes_in_place() + axes_in_place(TransformerBlock)
    assert Recipe.from_json(recipe.to_json()) == recipe


def test_loops_and_rematerialised_blocks_inside_move_nothing_either(small):
    bare = small.llama(use_layer_stack=True)
    inside = rematerialise_blocks(TransformerBlock) + roll_layer_stacks()
    edited = pz.freeze_params((inside + axes_in_place()).apply(bare))
    assert {"scan", "remat2"} <= {
        equation.primitive.name for equation in equations(jax.make_jaxpr(edited)(small.tokens()))
    }
    program = jax.make_jaxpr(edited)(small.tokens())
    (loop,) = (eqn for eqn in equations(program) if eqn.primitive.name == "scan")
    assert not [eqn for eqn in equations(loop.params["jaxpr"]) if eqn.primitive.name == "transpose"]
    expected = Jitted(bare)(small.tokens())
    np.testing.assert_allclose(
        Jitted(edited)(small.tokens()).order_like(expected).data_array,
        expected.data_array,
        atol=1e-5,
    )


def test_inside_of_a_region_per_device(small):
    model = small.llama()
    rules, split = {"embedding": "data"}, {"batch": "data"}

    def per_device(block):
        return ShardMapped(block, small.AUTO, rules, split)

    edited = (Recipe(wrap(TransformerBlock, per_device)) + axes_in_place(TransformerBlock)).apply(
        model
    )
    (block, _) = pz.select(edited).at_instances_of(ShardMapped).get_sequence()
    assert isinstance(block.body, AxesInPlace)
    expected = Jitted(model)(small.tokens())
    actual = Jitted(edited)(small.tokens()).order_like(expected)
    np.testing.assert_allclose(actual.data_array, expected.data_array, atol=1e-5)


def test_a_constraint_pins_the_same_logical_axes():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def pinned(array):
        return lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec("x", "y")))

    assert_run_in_place(pinned, [[held] for held in orders(values(2, 4))])
    for held in orders(values(2, 4)):
        ((result,),) = (run_in_place(jax.make_jaxpr(pinned)(held.whole()), [held]),)
        entries = ("x", "y")
        expected = PartitionSpec(*(entries[dim] for dim in result.dims))
        assert result.array.sharding.is_equivalent_to(NamedSharding(mesh, expected), 2)


def test_a_named_value_keeps_its_name():
    def named(array):
        return jax.ad_checkpoint.checkpoint_name(array.T, "kept") + 1

    assert_run_in_place(named, [[held] for held in orders(A)])


def test_a_call_that_asks_for_a_layout_is_not_taken_apart():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    layout = NamedSharding(mesh, PartitionSpec("x"))
    asking = jax.jit(lambda x: x.T * 2, out_shardings=layout)
    program = jax.make_jaxpr(lambda x: asking(x.T.T))(jnp.ones((8, 8)))
    traced = jax.make_jaxpr(
        lambda x: [r.whole() for r in run_in_place(program, [OrderedArray.of(x)])]
    )(jnp.ones((8, 8)))
    assert [equation.primitive.name for equation in traced.eqns] == ["jit"]
    assert traced.eqns[0].params["out_shardings"] == (layout,)


def test_the_value_of_a_variable_keeps_the_order_of_its_axes():
    @pz.pytree_dataclass
    class Remember(pz.nn.Layer):
        last: pz.StateVariable

        def __call__(self, value, /, **side_inputs):
            doubled = pz.nx.nmap(lambda row: row * 2)(value.untag("a")).tag("a")
            self.last.value = doubled
            return doubled

    def remembered(wrap):
        layer = wrap(Remember(pz.StateVariable(pz.nx.zeros({"b": 3, "a": 2}))))
        output = layer(pz.nx.wrap(jnp.arange(6.0).reshape(2, 3), "a", "b"))
        return output, pz.unbind_state_vars(layer)[1][0].value

    (bare, expected), (output, value) = remembered(lambda layer: layer), remembered(AxesInPlace)
    np.testing.assert_array_equal(value.data_array, expected.data_array)
    assert list(value.named_shape) == ["b", "a"]
    assert list(output.named_shape) == ["a", "b"]
    np.testing.assert_array_equal(output.order_like(bare).data_array, bare.data_array)


def test_positional_dimensions_stay_in_order():
    array = pz.nx.wrap(jnp.asarray(A)).tag("a", "b", "c").untag("c", "b")
    swap = pz.nn.Elementwise(lambda x: x.T)
    for wrapped in (AxesInPlace(swap), AxesInPlace(AxesInPlace(swap))):
        output = wrapped(array)
        assert output.positional_shape == (3, 4)
        np.testing.assert_array_equal(output.tag("b", "c").unwrap("a", "b", "c"), A)


def test_numbers_and_flags_of_python_stay_what_they_are():
    @pz.pytree_dataclass
    class Repeats(pz.nn.Layer):
        calls: pz.StateVariable

        def __call__(self, value, /, *, times, doubled, **side_inputs):
            self.calls.value = self.calls.value + 1
            factor = 2.0 if doubled else 1.0
            return jnp.tile(value, times) * factor, times

    layer = Repeats(pz.StateVariable(value=0))
    output, times = AxesInPlace(layer)(jnp.ones(2), times=3, doubled=True)
    np.testing.assert_array_equal(output, np.full(6, 2.0))
    assert int(times) == 3
    assert int(layer.calls.value) == 1
    assert isinstance(times, jax.Array)
    assert isinstance(layer.calls.value, jax.Array)


def test_an_effect_happens_once():
    seen = collections.Counter()

    def noisy(x):
        jax.debug.callback(lambda: seen.update(["call"]))
        return x.T + 1

    jax.block_until_ready(jax.jit(AxesInPlace(pz.nn.Elementwise(noisy)))(jnp.asarray(A)))
    jax.effects_barrier()
    assert seen["call"] == 1


def test_checkpointed_around_it_keeps_the_gradient():
    layer = pz.nn.Softmax("a")
    x = pz.nx.wrap(jnp.asarray(A), "a", "b", "c")

    def loss(layer):
        return jax.grad(lambda x: (layer(x)[{"a": 0}] ** 2).untag("b", "c").sum().unwrap())(x)

    expected = loss(layer).data_array
    for wrapped in (Checkpointed(AxesInPlace(layer)), AxesInPlace(Checkpointed(layer))):
        np.testing.assert_allclose(loss(wrapped).data_array, expected, rtol=1e-5)


def test_a_rolled_stack_of_layers_run_in_place(small):
    bare = small.llama(use_layer_stack=True)
    edited = (axes_in_place(TransformerBlock) + roll_layer_stacks()).apply(bare)
    (stack,) = pz.select(edited).at_instances_of(RolledLayerStack).get_sequence()
    assert isinstance(stack.stacked_sublayers, AxesInPlace)
    expected = Jitted(bare)(small.tokens())
    actual = Jitted(edited)(small.tokens()).order_like(expected)
    np.testing.assert_allclose(actual.data_array, expected.data_array, atol=1e-5)
