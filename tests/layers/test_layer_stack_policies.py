"""What rolled stacks keep for the backward pass: the same values, in less memory."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from penzai import pz

from penzai_shard.errors import RuleTypeError, ShardingError
from penzai_shard.layers import (
    Checkpointed,
    ConstrainShardingByName,
    LayerStackPolicy,
    RolledLayerStack,
    ShardMapped,
    resolve_stack_policy,
)
from penzai_shard.layers.remat_policies import POLICIES
from penzai_shard.library_apis.jax_api import UNOPTIMISED_COMPILATION
from penzai_shard.meshes import make_mesh
from tests.layers.quick_programs import result_of, results_together

SHARED, PER_LAYER = pz.nn.LayerStackVarBehavior.SHARED, pz.nn.LayerStackVarBehavior.PER_LAYER
LAYERS = 5
POLICIES_TRIED = {
    **{name: name for name in ("carries", "inputs", "nested", "offload_carries", "dots")},
    "groups of 2": LayerStackPolicy(group_size=2),
    "all at once": LayerStackPolicy("offload", "offload", "dots", 3),
}
MOST_OF_IT = LayerStackPolicy("offload", True, "dots", 2)
X = pz.nx.wrap(jax.random.normal(jax.random.key(1), (8, 8)), "batch", "embedding")
MESH = make_mesh({"data": 8})


@pz.pytree_dataclass
class Counts(pz.nn.Layer):
    """Adds its count, after counting."""

    count: object

    def __call__(self, x, /, **side_inputs):
        self.count.value = self.count.value + 0.25
        return x + self.count.value


def counter(behavior, label):
    value = pz.nx.zeros({"layers": LAYERS}) if behavior is PER_LAYER else jnp.zeros(())
    return Counts(
        pz.StateVariable(value, label=label, metadata={"layerstack_axes": {"layers": behavior}})
    )


def build(layers=LAYERS, embedding=8, neurons=8, extra=(), drop_rate=None):
    def sublayer(init_base_rng):
        return pz.nn.Residual(
            pz.nn.Sequential(
                [
                    pz.nn.Linear.from_config(
                        "up", init_base_rng, {"embedding": embedding}, {"neurons": neurons}
                    ),
                    pz.nn.Elementwise(jnp.tanh),
                    pz.nn.maybe_dropout(drop_rate),
                    pz.nn.Linear.from_config(
                        "down", init_base_rng, {"neurons": neurons}, {"embedding": embedding}
                    ),
                ]
            )
        )

    stack = pz.nn.LayerStack.from_sublayer_builder(
        sublayer, "layers", layers, jax.random.key(0), {}
    )
    if not extra:
        return stack
    return pz.nn.LayerStack(pz.nn.Sequential([stack.stacked_sublayers, *extra]), "layers", layers)


def rolled(stack, policy):
    return RolledLayerStack.from_layer_stack(stack, policy=policy)


def gradient_of(layer, **side_inputs):
    """A function of the input: output, new state and gradient; and the parameters' values."""
    slots, parameters = pz.unbind_params(layer, freeze=True)
    slots, states = pz.unbind_state_vars((slots, side_inputs))
    before = [variable.freeze() for variable in states]

    def loss(parameters, x):
        variables = [value.unfreeze_as_copy() for value in before]
        layer, sides = pz.bind_variables(slots, [*parameters, *variables])
        output = layer(x, **sides)
        value = jnp.mean(jnp.sin(output.unwrap("batch", "embedding")))
        return value, (output, [variable.freeze() for variable in variables])

    return lambda x: jax.grad(loss, has_aux=True)(parameters, x)


@pytest.fixture(scope="module")
def found():
    """What Penzai's stack and ours compute, with dropout and both kinds of state, by policy."""

    def function(make):
        stack = build(extra=[counter(SHARED, "shared"), counter(PER_LAYER, "own")], drop_rate=0.5)
        stream = pz.RandomStream.from_base_key(jax.random.key(5), offset_label="offset")
        return gradient_of(make(stack), random_stream=stream)

    functions = {name: function(lambda s, p=p: rolled(s, p)) for name, p in POLICIES_TRIED.items()}
    return results_together(functions | {"penzai": function(lambda stack: stack)}, X)


def assert_same(found, expected, atol=1e-6):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for have, value in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(have, value, rtol=2e-5, atol=atol)


@pytest.mark.parametrize("name", POLICIES_TRIED)
def test_output_gradient_and_state_are_those_of_penzai_s_stack(found, name):
    gradients, (output, states) = result_of(found[name])
    expected_gradients, (expected_output, expected_states) = result_of(found["penzai"])
    names = [value.label for value in expected_gradients]
    assert [value.label for value in gradients] == names
    for have, expected in zip(gradients, expected_gradients, strict=True):
        order = tuple(expected.value.named_shape)
        np.testing.assert_allclose(
            have.value.unwrap(*order), expected.value.unwrap(*order), rtol=2e-5, atol=1e-6
        )
    np.testing.assert_allclose(output.data_array, expected_output.data_array, rtol=2e-5)
    assert_same(states, expected_states)
    assert {state.label for state in states} == {"shared", "own", "offset"}


def test_policies_hold_inside_and_around_regions_and_constraints():
    rules, activations = {"embedding": "data"}, {"batch": "data"}

    def with_blocks(stack, edit):
        return pz.select(stack).at_instances_of(pz.nn.Residual).apply(edit)

    def mapped(layer):
        return ShardMapped(layer, MESH, rules, activations)

    def constrained(block):
        return pz.nn.Sequential([block, ConstrainShardingByName(MESH, activations)])

    stack = build(5)
    layers = {
        "bare": stack,
        "region around": mapped(rolled(stack, MOST_OF_IT)),
        "regions inside": rolled(with_blocks(stack, mapped), MOST_OF_IT),
        "constraints inside": rolled(with_blocks(stack, constrained), MOST_OF_IT),
    }
    found = results_together({name: gradient_of(layer) for name, layer in layers.items()}, X)
    for name in list(layers)[1:]:
        assert_same(result_of(found[name]), result_of(found["bare"]))


def test_explicit_meshes_mean_their_auto_twins():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    stack = rolled(build(5), MOST_OF_IT)
    with jax.set_mesh(mesh):
        output, pull_back = jax.vjp(stack, x)
        (gradient,) = pull_back(jax.tree.map(jnp.ones_like, output))
    assert output.data_array.sharding.mesh.axis_types == (AxisType.Auto,)
    assert_same(output, build(5)(X))
    assert_same(gradient, jax.vjp(build(5), X)[1](pz.nx.ones(X.named_shape))[0], atol=1e-5)


def test_a_policy_says_how_often_a_layer_runs_forward():
    def products(policy):
        return str(jax.make_jaxpr(gradient_of(rolled(build(9), policy)))(X)).count("dot_general")

    counts = {policy: products(policy) for policy in (False, "dots", "carries", "nested")}
    # A layer has two products, each with two in the backward pass. There a layer needs its first
    # product again, and where only the input of a group is kept, the next layer needs both.
    assert counts == {False: 6, "dots": 6, "carries": 7, "nested": 9}


# A layer's input is 32 KiB, its parameters 1 KiB, what it computes inside a multiple of its input.
ROWS, EMBEDDING = 1024, 8
INPUT = ROWS * EMBEDDING * 4


@pytest.fixture(scope="module")
def temporaries():
    """Bytes of temporaries of the compiled gradient, by policy and number of layers."""
    x = pz.nx.wrap(jnp.zeros((ROWS, EMBEDDING)), "batch", "embedding")
    measured = {}
    within_groups = LayerStackPolicy(save_internals=True, group_size="sqrt")
    for policy, depths in (
        (False, (36,)),
        ("inputs", (36,)),
        ("carries", (9, 36)),
        ("nested", (9, 36)),
        (within_groups, (36,)),
    ):
        for layers in depths:
            gradient = gradient_of(rolled(build(layers, EMBEDDING, 16), policy))
            lowered = jax.jit(lambda x, gradient=gradient: gradient(x)[0]).lower(x)
            compiled = lowered.compile(UNOPTIMISED_COMPILATION)  # Temporaries are the same.
            name = "internals of a group" if policy is within_groups else policy
            measured[name, layers] = compiled.memory_analysis().temp_size_in_bytes
    return measured


def test_temporaries_are_ordered_as_the_policies_promise(temporaries):
    sizes = {policy: temporaries[policy, 36] for policy, layers in temporaries if layers == 36}
    assert sizes["nested"] < sizes["carries"] < sizes["inputs"] < sizes[False]
    assert sizes["nested"] < sizes["internals of a group"] < sizes[False] / 3
    parameters = 36 * 2 * EMBEDDING * 16 * 4
    # The slices are a copy of the stack's parameters.
    assert sizes["inputs"] - sizes["carries"] >= parameters


def test_temporaries_grow_with_the_depth_or_with_its_square_root(temporaries):
    def growth(policy):
        return (temporaries[policy, 36] - temporaries[policy, 9]) / INPUT

    assert 27 <= growth("carries") < 29  # One input per layer more.
    assert 6 <= growth("nested") < 8  # 6 + 6 inputs instead of 3 + 3, and few parameters.


def host_shapes(policy):
    text = str(jax.make_jaxpr(gradient_of(rolled(build(6), policy)))(X))
    return set(re.findall(r"f32<host>\[([\d,]+)\]", text))


def test_offloading_moves_what_it_says_to_the_host():
    one, all_layers, groups = "8,8", "6,8,8", "3,8,8"
    assert host_shapes("carries") == host_shapes("nested") == set()
    assert host_shapes("offload_carries") == {one, all_layers}
    assert host_shapes(LayerStackPolicy("offload", group_size=2)) == {one, groups}
    parameters = host_shapes(LayerStackPolicy(save_inputs="offload"))
    assert parameters == {one, all_layers}


@pytest.mark.parametrize(
    "layer",
    [
        lambda: rolled(build(2), "offload_carries"),
        lambda: rolled(build(2), "offload_dots"),
        lambda: Checkpointed(pz.nn.Identity(), "offload_dots"),
    ],
    ids=["carries", "dots in a stack", "dots"],
)
def test_offloading_is_refused_by_name_where_there_is_no_host_memory(layer, monkeypatch):
    layer = layer()
    device = types.SimpleNamespace(
        addressable_memories=lambda: [types.SimpleNamespace(kind="device")]
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    with pytest.raises(
        ShardingError,
        match=rf"{type(layer).__name__}\(policy='{layer.policy}'\) keeps values in the host's "
        r"memory \(pinned_host\), and JAX has none of that kind on this cpu backend, only device\.",
    ):
        layer(X)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("nestd", r"no policy 'nestd' of layer stacks\. Did you mean 'nested'\? .*'offload_carr"),
        (3, "is True, False, a name or a LayerStackPolicy, not 3"),
    ],
)
def test_what_is_not_a_policy_is_refused_where_it_is_written(policy, message):
    with pytest.raises(RuleTypeError, match=message):
        rolled(build(2), policy)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"save_carries": False}, r"cannot run backward .*LayerStackPolicy\(group_size='sqrt'\)"),
        ({"save_inputs": "host"}, "must be True, False or 'offload', not 'host'"),
        ({"save_internals": "dot"}, "Did you mean 'dots'"),
        ({"group_size": 0}, "a positive number of layers, 'sqrt' or None, not 0"),
        ({"group_size": True}, "not True"),
        ({"group_size": "log"}, "not 'log'"),
    ],
)
def test_fields_of_other_values_are_refused(fields, message):
    with pytest.raises(RuleTypeError, match=message):
        LayerStackPolicy(**fields)


def test_names_and_booleans_stand_for_policies():
    assert resolve_stack_policy(False) is resolve_stack_policy("everything") is None
    assert resolve_stack_policy("nothing").internals is resolve_stack_policy(True).internals
    assert resolve_stack_policy(POLICIES["dots"]).internals is POLICIES["dots"]
    assert rolled(rolled(build(2), "nested"), False).policy is False


def test_groups_of_about_the_square_root_keep_about_twice_as_many_inputs():
    for layers in range(4, 200):
        size = resolve_stack_policy("nested").layers_per_group(layers)
        assert 1 < size < layers
        assert -(-layers // size) + size <= 1.5 * (2 * layers**0.5 + 1)
