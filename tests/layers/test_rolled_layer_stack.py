"""Stacks that run as a loop: all values are those of Penzai's stack, which shares no code."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz
from penzai.core.shapecheck import StructureMismatchError

import penzai_shard as pzs
from tests.layers.calls import Calls
from tests.refusals import problems_of

SHARED, PER_LAYER = pz.nn.LayerStackVarBehavior.SHARED, pz.nn.LayerStackVarBehavior.PER_LAYER
MESH = pzs.make_mesh({"data": 8})
X = pz.nx.wrap(jax.random.normal(jax.random.key(1), (8, 8)), "batch", "embedding")


def count(state, x, **_):
    state.value = state.value + 0.25
    return x + state.value


def save(state, x, **_):
    state.value = x
    return x


SWAP = Calls(lambda _, x: x.order_as(*reversed(x.named_axes)))


def state(behavior, value=None, label="state"):
    metadata = {"layerstack_axes": {"layers": behavior}} if behavior else {}
    return pz.StateVariable(value, label=label, metadata=metadata)


def build(*extra, layers=5):
    def sublayer(init_base_rng):
        linear, sizes = pz.nn.Linear.from_config, ({"embedding": 8}, {"neurons": 8})
        up, down = linear("up", init_base_rng, *sizes), linear("d", init_base_rng, *sizes[::-1])
        return pz.nn.Residual(pz.nn.Sequential([up, pz.nn.Elementwise(jnp.tanh), down]))

    make = pz.nn.LayerStack.from_sublayer_builder
    block = make(sublayer, "layers", layers, jax.random.key(0), {}).stacked_sublayers
    return pz.nn.LayerStack(pz.nn.Sequential([block, *extra]), "layers", layers)


def roll(stack, **options):
    return pzs.RolledLayerStack.from_layer_stack(stack, **options)


def differentiate(layer, **side_inputs):
    """A function of parameters and input: gradients, output and state; and the parameters."""
    slots, parameters = pz.unbind_params(layer, freeze=True)
    slots, states = pz.unbind_state_vars((slots, side_inputs), freeze=True)

    def loss(parameters, x):
        live = [value.unfreeze_as_copy() for value in states]
        layer, sides = pz.bind_variables(slots, [*parameters, *live])
        output = layer(x, **sides)
        return jnp.sin(output.data_array).mean(), (output, [value.freeze() for value in live])

    return jax.grad(loss, has_aux=True), parameters


def results(layer, **side_inputs):
    gradient, parameters = differentiate(layer, **side_inputs)
    found = jax.jit(gradient)(parameters, X)
    return pz.nx.order_like(found[0], parameters), found[1]


def assert_same(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-5, 1e-6), actual, expected)


def stateful(change):
    """Results of a stack with dropout, and with a state of each kind."""
    own = state(PER_LAYER, pz.nx.zeros({"layers": 5}), "own")
    shared = state(SHARED, jnp.zeros(()), "shared")
    stream = pz.RandomStream.from_base_key(jax.random.key(5), offset_label="offset")
    stack = build(Calls(count, own), Calls(count, shared), pz.nn.StochasticDropout(0.5))
    return results(change(stack), random_stream=stream)


@pytest.fixture(scope="module")
def expected():
    return stateful(lambda stack: stack), results(build())


POLICIES = ("carries", "nested", "dots", "all_but_gathered")
FUNCTION = jax.checkpoint_policies.dots_saveable


@pytest.mark.parametrize("policy", [False, *POLICIES, FUNCTION])
def test_output_gradients_and_state_are_those_of_penzais_stack(policy, expected):
    unroll = 2 if policy is FUNCTION else 1
    assert_same(stateful(lambda stack: roll(stack, policy=policy, unroll=unroll)), expected[0])


def test_layers_in_it_and_around_it(expected):
    pin = pzs.ConstrainShardingByName(MESH, {"batch": "data"})
    jitted = pz.select(build()).at_instances_of(pz.nn.Residual).apply(pzs.Jitted)
    around = pzs.Checkpointed(pzs.Jitted(roll(build(pin), policy="nested")))
    for layer in (around, roll(build(SWAP)), roll(jitted)):
        assert_same(results(layer), expected[1])
    outer = pzs.RolledLayerStack(pz.nn.Sequential([roll(build(), policy="carries")]), "outer", 2)
    assert_same(outer(X), pz.nn.LayerStack(pz.nn.Sequential([build()]), "outer", 2)(X))


def test_it_takes_the_place_of_penzais_stack_and_goes_back():
    stack = build()
    rolled = roll(stack, unroll=2, policy="dots")
    assert isinstance(rolled, pz.nn.LayerStack)
    assert rolled.to_layer_stack() == stack
    assert (roll(rolled).unroll, roll(rolled).policy) == (1, False)
    paths = [[str(path) for path, _ in jax.tree.leaves_with_path(x)] for x in (rolled, stack)]
    assert paths[0] == paths[1]
    build_swap = lambda init_base_rng: SWAP  # noqa: E731
    swaps = pzs.RolledLayerStack.from_sublayer_builder(build_swap, "layers", 3, None, {})
    assert list(swaps(X).named_axes) == list(X.named_axes)


def test_state_of_each_layer_keeps_its_axes_and_may_begin_empty():
    own = state(PER_LAYER, pz.nx.zeros({"embedding": 8, "layers": 5}), "own")
    saved, same = (state(PER_LAYER, label="saved") for _ in range(2))
    roll(build(Calls(count, own), Calls(save, saved)))(X)
    build(Calls(count, state(PER_LAYER, pz.nx.zeros({"layers": 5}))), Calls(save, same))(X)
    assert list(own.value.named_axes) == ["embedding", "layers"]
    assert_same(saved.value.order_like(same.value), same.value)


@pytest.mark.parametrize(
    ("policy", "layers", "arrays"),
    [("carries", 36, 36), ("nested", 36, 6), ("nested", 46, 23), ("dots", 36, 72)],
)
def test_policies_keep_what_they_say_of_each_layer(policy, layers, arrays):
    slots, parameters = pz.unbind_params(roll(build(layers=layers), policy=policy), freeze=True)

    def kept(rows):
        x = pz.nx.ones({"batch": rows, "embedding": 8})
        call = lambda parameters, x: pz.bind_variables(slots, parameters)(x)  # noqa: E731
        pull_back = jax.eval_shape(lambda *inputs: jax.vjp(call, *inputs)[1], parameters, x)
        return sum(leaf.size for leaf in jax.tree.leaves(pull_back))

    assert kept(2) - kept(1) == arrays * 8


ZERO, STACKED = jnp.zeros(()), pz.nx.zeros({"layers": 5})


@pytest.mark.parametrize(
    ("paths", "layers"),
    [
        (["a", "b"], [Calls(count, state(None, ZERO, label)) for label in "ab"]),
        (["state"], [Calls(count, state(SHARED, STACKED))]),
        (["state"], [Calls(count, state(PER_LAYER, ZERO))]),
    ],
)
def test_what_cannot_go_through_a_loop_is_refused_by_path(paths, layers):
    problems = problems_of(pzs.LayerStackError, roll(build(*layers)), X)
    assert ([problem.path for problem in problems], bool(problems[0].fix)) == (paths, True)


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        ([Calls(lambda _, x: (x, x))], {}),
        ([pz.nn.RenameAxes("embedding", "other")], {}),
        ([Calls(lambda _, x: x.astype("bfloat16"))], {}),
        ([], {"stack_axis_size": 4, "policy": "nested"}),
        ([], {"stack_axis": "layer"}),
        ([], {"unroll": "nested"}),
    ],
)
def test_what_is_no_stack_is_refused_as_by_jax_and_penzai(layers, options):
    stack = dataclasses.replace(roll(build(*layers)), **options)
    with pytest.raises((TypeError, ValueError, StructureMismatchError)):
        stack(X)
