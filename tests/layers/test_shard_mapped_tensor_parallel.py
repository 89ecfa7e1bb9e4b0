"""Fully sharded over one mesh axis by hand, tensor parallel over the other by the compiler."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from penzai import pz

from benchmarks.compiled_collectives import read_collectives
from penzai_shard import AxisRules, data_parallel, fully_sharded, manual_fsdp, placement
from penzai_shard.errors import MeshError, RuleTypeError
from penzai_shard.layers import (
    Checkpointed,
    ConstrainShardingByName,
    ManualRegionError,
    RolledLayerStack,
    ShardMapped,
)
from penzai_shard.layers.manual_region import manual_axes
from penzai_shard.meshes import make_mesh
from tests.model_families import drawn

MESH = make_mesh({"data": 4, "model": 2})
PARAMETERS = {"embedding": "data", "neurons": "model"}
ACTIVATIONS = {"batch": "data"}
BLOCKS = 2
X = pz.nx.wrap(jax.random.normal(jax.random.key(9), (16, 8))).tag("batch", "embedding")


def block(name="block", init_base_rng=None):
    return pz.nn.NamedGroup(
        "block",
        [
            pz.nn.Linear.from_config(
                f"{name}/up", init_base_rng, {"embedding": 8}, {"neurons": 16}
            ),
            pz.nn.Elementwise(jnp.tanh),
            pz.nn.Linear.from_config(
                f"{name}/down", init_base_rng, {"neurons": 16}, {"embedding": 8}
            ),
        ],
    )


LAYER = drawn(lambda key: block("block", key))


def blocks():
    return drawn(lambda key: pz.nn.Sequential([block(f"block_{i}", key) for i in range(BLOCKS)]))


def stack():
    return drawn(
        lambda key: pz.nn.LayerStack.from_sublayer_builder(
            lambda init_base_rng: block("block", init_base_rng), "layers", BLOCKS, key, {}
        )
    )


def at_blocks(wrapper, model):
    return pz.select(model).at_instances_of(pz.nn.NamedGroup).apply(wrapper)


def by_hand(layer):
    return ShardMapped(layer, MESH, PARAMETERS, ACTIVATIONS, manual_axes="data")


def compiled(model):
    """Loss and gradients, parameters and gradients in their layout; with the arguments."""
    slots, parameters = pz.unbind_params(model, freeze=True)
    parameters = placement.name_to_name_device_put(parameters, MESH, PARAMETERS)
    x = placement.name_to_name_device_put(X, MESH, ACTIVATIONS)
    shardings = jax.tree_util.tree_map(lambda leaf: leaf.sharding, parameters)

    def loss(parameters, x):
        output = pz.bind_variables(slots, parameters)(x)
        return jnp.mean(output.unwrap("batch", "embedding") ** 2)

    step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, shardings))
    return step.lower(parameters, x).compile(), (parameters, x)


def values(found):
    loss, gradients = found
    return [float(loss), *(np.asarray(g.value.data_array) for g in gradients)]


@pytest.fixture(scope="module")
def of_compiler():
    constraint = ConstrainShardingByName(MESH, ACTIVATIONS)
    return compiled(at_blocks(lambda layer: pz.nn.Sequential([layer, constraint]), blocks()))


@pytest.fixture(scope="module")
def of_hand():
    return compiled(at_blocks(by_hand, blocks()))


def test_parameters_are_gathered_and_scattered_over_the_data_axis_alone(of_hand):
    found = collections.Counter(
        (one.kind, one.mesh_axes) for one in read_collectives(of_hand[0], MESH)
    )
    over_data = {("all-gather", ("data",)): 2 * BLOCKS, ("reduce-scatter", ("data",)): 2 * BLOCKS}
    assert {key: n for key, n in found.items() if key[0] != "all-reduce"} == over_data
    # Activations: one reduction per block in each direction, but for the first one backward, as
    # nobody asks for the gradient of the input. And the loss.
    assert found["all-reduce", ("model",)] == 2 * BLOCKS - 1


def test_the_devices_compute_no_more_than_the_compiler_would_have_them(of_compiler, of_hand):
    costs = [program.cost_analysis() for program, _ in (of_compiler, of_hand)]
    assert costs[1]["flops"] <= 1.01 * costs[0]["flops"]
    assert costs[1]["bytes accessed"] <= 1.02 * costs[0]["bytes accessed"]


def test_loss_and_gradients_are_the_same(of_compiler, of_hand):
    expected, found = (values(program(*given)) for program, given in (of_compiler, of_hand))
    for want, have in zip(expected, found, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "edit",
    [
        lambda: RolledLayerStack.from_layer_stack(at_blocks(by_hand, stack())),
        lambda: at_blocks(lambda layer: by_hand(Checkpointed(layer)), stack()),
    ],
    ids=["rolled", "remat"],
)
def test_loops_and_rematerialisation_keep_the_split(edit):
    """A stack of parameters has a dimension more, by which the names move."""
    program, given = compiled(edit())
    expected = jax.jit(
        jax.value_and_grad(lambda x: jnp.mean(stack()(x).unwrap(*X.named_shape) ** 2))
    )
    np.testing.assert_allclose(program(*given)[0], expected(X)[0], rtol=1e-5)
    gathers = [one for one in read_collectives(program, MESH) if one.kind == "all-gather"]
    assert gathers
    assert {one.mesh_axes for one in gathers} == {("data",)}


class TestHalfPrecision:
    """XLA's compiler for CPUs aborts on such sums where it has to split something itself."""

    def gradients(self, activation, dtype):
        # The bias is split over the model axis alone: its gradient is a sum over the other.
        bias = pz.nn.AddBias.from_config("bias", jax.random.key(1), {"neurons": 16})
        edited = drawn(lambda key: pz.nn.Sequential([block("block", key).sublayers[0], bias]))
        edited = pz.nn.Sequential([*edited.sublayers, pz.nn.Elementwise(activation)])
        slots, parameters = pz.unbind_params(edited, freeze=True)

        def loss(parameters, x):
            output = by_hand(pz.bind_variables(slots, parameters))(x)
            return jnp.mean(output.unwrap("batch", "neurons").astype(jnp.float32) ** 2)

        given = jax.tree_util.tree_map(lambda array: array.astype(dtype), (parameters, X))
        return jax.tree_util.tree_leaves(jax.jit(jax.grad(loss))(*given))

    def test_gradients_of_parameters_that_are_not_split_are_summed(self):
        half, single = (self.gradients(jnp.tanh, dtype) for dtype in (jnp.bfloat16, jnp.float32))
        assert half[1].dtype == jnp.bfloat16
        for have, want in zip(half, single, strict=True):
            np.testing.assert_allclose(have.astype(jnp.float32), want, atol=0.01)

    def test_where_jax_cannot_tell_what_differs_it_is_refused(self):
        def looping(x):
            start = jnp.zeros(x.shape, x.dtype)
            return jax.lax.fori_loop(0, 2, lambda _, carry: carry + x, start)

        self.gradients(looping, jnp.float32)
        with pytest.raises(ManualRegionError, match="cannot add up gradients of 16 bits") as caught:
            self.gradients(looping, jnp.bfloat16)
        assert caught.value.problems[0] == (
            "sublayers/0/weights/value: is of bfloat16. Take over all mesh axes, "
            "manual_axes=('data', 'model'), or compute in float32."
        )


def taken_over(mesh, rules, names=("batch", "embedding"), **options):
    """The mesh axes that a layer under ``manual_fsdp`` takes over when it is called."""
    found = []

    def seen(x):
        found.append(manual_axes())
        return x

    edited = manual_fsdp(pz.nn.NamedGroup, mesh, rules, **options).apply(LAYER)
    edited = pz.select(edited).at_instances_of(pz.nn.Elementwise).set(pz.nn.Elementwise(seen))
    jax.eval_shape(edited, pz.nx.ones(dict.fromkeys(names, 8)))
    return found[0]


@pytest.mark.parametrize(
    ("rules", "manual"),
    [
        ({"embedding": "data", "neurons": "model", "batch": "data"}, {"data"}),
        ({"embedding": "data", "batch": "data"}, {"data"}),
        ({"neurons": "model", "batch": "data"} | fully_sharded("data", 2), {"data"}),
        # Of an axis that this layer has nothing of.
        ({"embedding": "data", "batch": "data", "vocabulary": "model"}, {"data"}),
        # For storage over both, for computation over one.
        ({"embedding": ("data", "model"), "batch": "data"}, {"data", "model"}),
        ({"batch": "data"} | fully_sharded(("data", "model"), 2), {"data", "model"}),
        ({"embedding": "data", "batch": ("data", "model")}, {"data", "model"}),
        ({"embedding": "data", "batch": "data", "seq": "model"}, {"data", "model"}),
        # Nothing is split but the parameters.
        ({"embedding": "data", "neurons": "model"}, {"data", "model"}),
    ],
)
def test_mesh_axes_that_split_parameters_alone_are_left_to_the_compiler(rules, manual):
    names = ("batch", "embedding", "seq") if "seq" in AxisRules.of(rules).logical_axes else ()
    assert taken_over(MESH, rules, names or ("batch", "embedding")) == manual


def test_rules_by_equal_names_leave_those_of_parameters_to_the_compiler():
    assert taken_over(make_mesh({"batch": 4, "neurons": 2}), None) == {"batch"}


def test_mesh_axes_can_be_said():
    rules = PARAMETERS | ACTIVATIONS
    assert taken_over(MESH, rules, manual_axes=("data", "model")) == {"data", "model"}
    with pytest.raises(MeshError, match=r"no mesh axis 'dat'\. Did you mean 'data'"):
        manual_fsdp(pz.nn.NamedGroup, MESH, rules, manual_axes="dat")
    with pytest.raises(RuleTypeError, match="manual_axes must be a name or a sequence of names"):
        manual_fsdp(pz.nn.NamedGroup, MESH, rules, manual_axes=3)
    with pytest.raises(RuleTypeError, match="only_where_split must be bool, not 1"):
        ShardMapped(LAYER, MESH, PARAMETERS, ACTIVATIONS, only_where_split=1)


def test_a_rule_for_the_largest_dimension_splits_parameters_alone():
    rules = data_parallel() | fully_sharded(min_size=1)
    mesh = make_mesh({"data": 8})
    linear = pz.nn.Linear.from_config("w", jax.random.key(0), {"a": 8}, {"b": 8})
    mapped = manual_fsdp(pz.nn.Linear, mesh, rules).apply(linear)
    assert mapped.activation_rules.spec(("batch", "seq"), (8, 64), mesh) == PartitionSpec("data")
    assert mapped.parameter_rules.spec(("a", "b"), (8, 8), mesh) == PartitionSpec("data")
    # Far longer than the batch is large, and yet not split.
    out = mapped(pz.nx.ones({"batch": 8, "seq": 64, "a": 8}))
    np.testing.assert_allclose(
        out.unwrap("batch", "seq", "b"),
        linear(pz.nx.ones({"batch": 8, "seq": 64, "a": 8})).unwrap("batch", "seq", "b"),
        rtol=1e-6,
    )
