"""Running a layer per device: the same values and gradients, and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from penzai import pz
from penzai.deprecated.v1 import pz as pz_v1

from penzai_shard.errors import MeshError, PlanError
from penzai_shard.layers import (
    Checkpointed,
    ConstrainShardingByName,
    InPrecision,
    Jitted,
    ManualRegionError,
    RolledLayerStack,
    ShardMapped,
)
from penzai_shard.meshes import make_mesh
from tests.model_families import drawn

PARAMETER_RULES = {"embedding": "data", "neurons": "model"}
ACTIVATION_RULES = {"batch": "data"}
# Values are the same to the bit.
FEWER_PASSES = {"xla_backend_optimization_level": "1"}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 4, "model": 2})


@pz.pytree_dataclass
class Counter(pz.nn.Layer):
    """Counts its calls."""

    count: pz.StateVariable

    def __call__(self, x, /, **side_inputs):
        self.count.value = self.count.value + 1
        return x


@pz.pytree_dataclass
class Keeps(pz.nn.Layer):
    """Keeps what a function gives for its input in a variable."""

    function: Any
    kept: pz.StateVariable

    def __call__(self, x, /, **side_inputs):
        self.kept.value = self.function(x)
        return x


@pz.pytree_dataclass
class Calls(pz.nn.Layer):
    """Calls a function of the input and the side inputs."""

    function: Any

    def __call__(self, x, /, **side_inputs):
        return self.function(x, **side_inputs)


def over(function):
    """A function along the batch."""
    return Calls(lambda x: pz.nx.nmap(function)(x.untag("batch")).tag("batch"))


def linear(name, inputs="embedding", outputs="neurons", sizes=(8, 16)):
    return pz.nn.Linear.from_config(
        name, jax.random.key(len(name)), {inputs: sizes[0]}, {outputs: sizes[1]}
    )


def block(name="block", base_rng=None):
    return pz.nn.Residual(
        pz.nn.Sequential(
            [
                pz.nn.RMSLayerNorm.from_config(f"{name}/norm", base_rng, {"embedding": 8}),
                pz.nn.Linear.from_config(f"{name}/up", base_rng, {"embedding": 8}, {"neurons": 16}),
                pz.nn.Elementwise(jnp.tanh),
                pz.nn.Linear.from_config(
                    f"{name}/down", base_rng, {"neurons": 16}, {"embedding": 8}
                ),
            ]
        )
    )


def model():
    return drawn(lambda key: pz.nn.Sequential([block(f"block_{i}", key) for i in range(2)]))


X = pz.nx.wrap(jax.random.normal(jax.random.key(9), (8, 8))).tag("batch", "embedding")


def fsdp(layer, mesh, **options):
    return ShardMapped(layer, mesh, PARAMETER_RULES, ACTIVATION_RULES, **options)


def at(kind, wrapper):
    return pz.select(model()).at_instances_of(kind).apply(wrapper)


def output_and_gradients(layer, x=X, **side_inputs):
    """Under one jit: the output, and the gradients of a loss by parameter and by input."""
    slots, parameters = pz.unbind_params(layer, freeze=True)

    def loss(parameters, x):
        output = pz.bind_variables(slots, parameters)(x, **side_inputs)
        names = sorted(output.named_shape)
        return jnp.mean(jnp.sin(output.unwrap(*names)) ** 2), output

    value_and_grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    compiled = jax.jit(value_and_grad, compiler_options=FEWER_PASSES)
    (_, output), (by_parameter, by_input) = compiled(parameters, x)
    return {"output": output, "input": by_input, **{p.label: p.value for p in by_parameter}}


def check_same(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        names = tuple(value.named_axes)
        assert found[name].named_shape == value.named_shape
        want, have = value.unwrap(*names), found[name].unwrap(*names)
        assert jnp.abs(want - have).max() <= tolerance * jnp.abs(want).max(), name


@pytest.fixture(scope="module")
def expected():
    return output_and_gradients(model())


def rolled(mesh, inside):
    stack = drawn(
        lambda key: pz.nn.LayerStack.from_sublayer_builder(
            lambda init_base_rng: block("block", init_base_rng), "layers", 2, key, {}
        )
    )
    edited = pz.select(stack).at_instances_of(pz.nn.Residual).apply(inside)
    return stack, RolledLayerStack.from_layer_stack(edited)


WHOLE = {"whole model": lambda wrap: wrap(model())}
PARTS = {
    "per block": lambda wrap: at(pz.nn.Residual, wrap),
    "per linear layer": lambda wrap: at(pz.nn.Linear, wrap),
    "jitted, remat inside": lambda wrap: Jitted(
        at(pz.nn.Residual, lambda layer: wrap(Checkpointed(layer)))
    ),
    "remat outside": lambda wrap: at(pz.nn.Residual, lambda layer: Checkpointed(wrap(layer))),
}


@pytest.mark.parametrize("edit", (WHOLE | PARTS).values(), ids=WHOLE | PARTS)
def test_output_and_gradients_are_those_of_the_bare_model(mesh, expected, edit):
    check_same(output_and_gradients(edit(lambda layer: fsdp(layer, mesh))), expected)


@pytest.mark.parametrize("part", ["per block", "per linear layer"])
def test_mesh_axes_may_be_left_to_the_compiler(mesh, expected, part):
    edited = PARTS[part](lambda layer: fsdp(layer, mesh, manual_axes="data"))
    check_same(output_and_gradients(edited), expected)


def test_small_parameters_stay_replicated_with_the_same_gradients(mesh, expected):
    layer = fsdp(model(), mesh, min_size=100)
    check_same(output_and_gradients(layer), expected)
    jaxpr = str(jax.make_jaxpr(lambda x: layer(x))(X))
    gathers = 2 * 2 * 2  # two dimensions, two linear layers, two blocks; norms stay whole
    assert jaxpr.count(" = all_gather") == gathers


def test_eager_calls_give_the_same_and_compile_once(mesh):
    layer = fsdp(model(), mesh)
    output = layer(X)
    assert jnp.allclose(output.data_array, model()(X).data_array, rtol=1e-6, atol=1e-6)
    assert output.data_array.sharding.is_equivalent_to(
        NamedSharding(mesh, PartitionSpec("data")), 2
    )
    weights = layer.body.sublayers[0].delta.sublayers[1].weights
    weights.value = weights.value * 2
    with jax.no_tracing():
        changed = layer(X)
    assert not jnp.array_equal(changed.data_array, output.data_array)


@pytest.mark.parametrize("around", [True, False], ids=["around a stack", "inside a stack"])
def test_it_goes_in_and_around_a_rolled_stack(mesh, around):
    if around:
        stack, edited = rolled(mesh, lambda layer: layer)
        edited = fsdp(edited, mesh)
    else:
        stack, edited = rolled(mesh, lambda layer: fsdp(layer, mesh))
    check_same(output_and_gradients(edited), output_and_gradients(stack))


def test_a_carried_value_that_starts_the_same_everywhere_may_vary_after_a_turn(mesh):
    add = Calls(lambda x, *, mask, **_: x + pz.nx.nmap(jnp.sum)(mask.untag("part")))
    stack = RolledLayerStack(add, "layers", 3)
    x, mask = pz.nx.ones({"embedding": 8}), pz.nx.ones({"part": 4})

    def sum_of_parts(x, **side_inputs):
        return jax.lax.psum(stack(x, **side_inputs), "data")

    layer = ShardMapped(Calls(sum_of_parts), mesh, {}, {"part": "data"}, per_device=True)
    assert jnp.array_equal(layer(x, mask=mask).data_array, jnp.full(8, 4 + 3 * 4.0))


def test_mixed_precision_goes_around_it(mesh):
    found = output_and_gradients(InPrecision(fsdp(model(), mesh), "bfloat16"))
    check_same(found, output_and_gradients(InPrecision(model(), "bfloat16")), 3e-2)


def test_constraint_layers_inside_step_aside(mesh, expected):
    constraint = ConstrainShardingByName(mesh, {"batch": "data", "neurons": "model"})
    edited = pz.select(model()).at_instances_of(pz.nn.Linear).insert_after(constraint)
    found = output_and_gradients(fsdp(edited, mesh, manual_axes="data"))
    check_same(found, expected, 3e-6)
    check_same({"output": fsdp(edited, mesh)(X)}, {"output": expected["output"]})


@pytest.mark.parametrize("ambient", [False, True], ids=["", "set_mesh"])
def test_explicit_meshes_mean_their_auto_twins(ambient):
    expected = jax.jit(lambda x: model()(x))(X)
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    data = jax.device_put(
        np.asarray(X.data_array), NamedSharding(explicit, PartitionSpec("data", None))
    )
    x = pz.nx.NamedArray(named_axes=X.named_axes, data_array=data)
    layer = fsdp(model(), explicit)
    with (
        jax.set_mesh(explicit)
        if ambient
        else jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())
    ):
        outputs = [layer(x), jax.jit(lambda x: layer(x))(x)]
    for output in outputs:
        assert output.data_array.sharding.mesh.axis_types == (AxisType.Auto,) * 2
        assert jnp.allclose(output.data_array, expected.data_array, rtol=1e-6)


def test_one_inside_another_steps_aside(mesh, expected):
    by_linear = at(pz.nn.Linear, lambda layer: fsdp(layer, mesh))
    check_same({"output": fsdp(by_linear, mesh)(X)}, {"output": expected["output"]})
    check_same(output_and_gradients(fsdp(by_linear, mesh, manual_axes="data")), expected)


def test_side_inputs_are_split_by_name_too(mesh):
    shapes = []

    def add(x, *, mask, plain, rate):
        shapes.append((dict(x.named_shape), dict(mask.named_shape), plain.shape, rate))
        return x + mask * plain.sum() * rate

    layer = fsdp(Calls(add), mesh)
    mask = pz.nx.wrap(jnp.arange(8.0)).tag("batch")
    output = layer(X, mask=mask, plain=jnp.ones(3), rate=2.0)
    assert ({"batch": 2, "embedding": 8}, {"batch": 2}, (3,), 2.0) in shapes
    assert jnp.allclose(
        output.unwrap("batch", "embedding"), X.data_array + 6 * jnp.arange(8.0)[:, None]
    )


def test_positional_dimensions_and_views_come_through(mesh):
    layer = fsdp(Calls(lambda x: {"view": x.tag("embedding").untag("embedding"), "same": x}), mesh)
    x = X.untag("embedding")
    output, bare = layer(x), layer.body(x)
    assert jax.tree_util.tree_structure(output) == jax.tree_util.tree_structure(bare)
    assert jnp.array_equal(output["view"].data_array, bare["view"].data_array)


def test_a_split_axis_that_loses_its_name_is_refused(mesh):
    layer = fsdp(Calls(lambda x: x.untag("batch")), mesh)
    with pytest.raises(ManualRegionError, match=r"output: positional dimension 0 .* keep its name"):
        layer(X)


def test_an_output_dimension_that_each_device_computes_whole_is_split_afterwards(mesh):
    rules = {"batch": "data", "neurons": "model"}
    layer = ShardMapped(linear("up"), mesh, PARAMETER_RULES, rules)
    found = output_and_gradients(layer)
    check_same(found, output_and_gradients(linear("up")))
    assert layer(X).data_array.sharding.shard_shape((8, 16)) == (2, 8)


def test_an_output_that_depends_on_no_split_input_needs_no_split_axis(mesh):
    @pz.pytree_dataclass
    class Norm(pz.nn.Layer):
        inner: Any

        def __call__(self, x, /, **side_inputs):
            weights = self.inner.weights.value
            norm = pz.nx.nmap(jnp.linalg.norm)(weights.untag("embedding", "neurons"))
            return self.inner(x), norm

    layer = Norm(linear("up"))
    found, norm = fsdp(layer, mesh)(X)
    expected, expected_norm = layer(X)
    assert jnp.allclose(found.data_array, expected.data_array, rtol=1e-6)
    assert jnp.allclose(norm.data_array, expected_norm.data_array, rtol=1e-6)

    def loss(weights, layer):
        slots, _ = pz.unbind_params(layer)
        output, norm = pz.bind_variables(slots, [weights])(X)
        return jnp.sum(output.data_array**2) + norm.unwrap()

    weights = layer.inner.weights.freeze()
    gradients = [
        jax.grad(loss)(weights, one).value.data_array for one in (layer, fsdp(layer, mesh))
    ]
    assert jnp.allclose(*gradients, rtol=1e-5)


def test_models_of_the_first_api_are_gathered_too(mesh):
    definition = pz_v1.nn.Linear.from_config({"embedding": 8}, {"neurons": 16})
    layer = pz_v1.nn.initialize_parameters(definition, jax.random.key(0))
    sharded = fsdp(layer, mesh)
    found, expected = sharded(X), layer(X)
    assert jnp.allclose(found.data_array, expected.data_array, rtol=1e-6)
    jaxpr = str(jax.make_jaxpr(lambda x: sharded(x))(X))
    assert jaxpr.count(" = all_gather") == 2


# What is refused.


def test_a_reduced_output_is_refused_by_name_before_running(mesh):
    ran = []

    def loss(x):
        jax.debug.callback(lambda: ran.append(1))
        return {"logits": x, "loss": pz.nx.nmap(jnp.sum)(x.untag("batch", "embedding"))}

    layer = fsdp(Calls(loss), mesh)
    with pytest.raises(
        ManualRegionError,
        match=r"independently \(split: 'batch' \(8\) over mesh axis 'data' \(4\)\):\n  'reduce_sum'"
        r" of Calls \(test_shard_mapped\.py:\d+\): it reduces logical axis 'batch', which is split "
        r"over mesh axis 'data'\. Needed for output/loss\. Do it outside of the layer, or map the "
        r"logical axis to None in activation_rules; .*assume_independent=\('reduce_sum',\)",
    ) as caught:
        jax.jit(lambda x: layer(x))(X)
    assert "logits" not in str(caught.value)
    jax.effects_barrier()
    assert not ran


def test_state_that_is_the_same_on_all_devices_is_updated(mesh):
    layer = fsdp(
        pz.nn.Sequential([block("b", jax.random.key(0)), Counter(pz.StateVariable(0))]), mesh
    )
    count = layer.body.sublayers[1].count
    layer(X)
    layer(X)
    assert int(count.value) == 2


def test_state_with_the_split_axis_is_updated_in_parts(mesh):
    kept = pz.StateVariable(None, label="kept")
    layer = fsdp(Keeps(lambda x: x * 2, kept), mesh)
    layer(X)
    assert jnp.array_equal(kept.value.data_array, X.data_array * 2)
    layer(X)
    assert kept.value.data_array.sharding.shard_shape((8, 8)) == (2, 8)


def test_state_that_differs_between_devices_is_refused_by_name(mesh):
    kept = pz.StateVariable(jnp.zeros(()), label="running mean")
    layer = fsdp(Keeps(lambda x: jnp.mean(x.data_array), kept), mesh)
    with pytest.raises(ManualRegionError, match=r"Needed for StateVariable 'running mean'\."):
        layer(X)
    assert float(kept.value) == 0.0


def test_all_offenders_are_told_at_once(mesh):
    def reduce(x):
        x = x.untag("batch", "embedding")
        return {"a": pz.nx.nmap(jnp.sum)(x), "b": pz.nx.nmap(jnp.max)(x) * 2}

    with pytest.raises(ManualRegionError) as caught:
        fsdp(Calls(reduce), mesh)(X)
    assert len(caught.value.problems) == 2


def test_an_indivisible_activation_is_refused_in_the_usual_words(mesh):
    with pytest.raises(
        PlanError,
        match=r"argument: logical axis 'batch' \(6\) does not divide over mesh axis 'data' \(4\)",
    ):
        fsdp(model(), mesh)(pz.nx.ones({"batch": 6, "embedding": 8}))


def test_an_indivisible_parameter_is_refused_by_its_name(mesh):
    layer = linear("odd", sizes=(6, 16))
    with pytest.raises(PlanError, match=r"odd\.weights: logical axis 'embedding' \(6\)"):
        fsdp(layer, mesh)(pz.nx.ones({"batch": 8, "embedding": 6}))


def test_unknown_mesh_axes_are_refused(mesh):
    with pytest.raises(MeshError, match=r"no mesh axis 'dat'\. Did you mean 'data'"):
        fsdp(model(), mesh, manual_axes=("dat",))(X)
    with pytest.raises(MeshError, match="no mesh axis 'modle'"):
        ShardMapped(model(), mesh, {"neurons": "modle"}, ACTIVATION_RULES)(X)


def test_a_contraction_over_a_split_axis_says_what_the_device_sees(mesh):
    layer = ShardMapped(linear("up"), mesh, {}, {"batch": "data", "embedding": "model"})
    with pytest.raises(
        ManualRegionError,
        match=r"works on whole arrays, and fails on one device's part of them:\n  .*embedding.*"
        r"'embedding' \(8\) over mesh axis 'model' \(2\)",
    ):
        layer(X)


# Random numbers.


def dropout_masks(layer, x, **streams):
    output = layer(x, **streams)
    return output.order_as("batch", "embedding").data_array != 0


def test_devices_that_hold_different_parts_draw_different_numbers(mesh):
    stream = pz.RandomStream.from_base_key(jax.random.key(3), "offset")
    x = pz.nx.ones({"batch": 8, "embedding": 64})
    layer = fsdp(pz.nn.StochasticDropout(drop_rate=0.5), mesh)
    masks = np.asarray(dropout_masks(layer, x, random_stream=stream)).reshape(4, 2, 64)
    assert len({mask.tobytes() for mask in masks}) == 4
    assert 0.4 < masks.mean() < 0.6
    assert int(stream.offset.value) == 1
    again = np.asarray(dropout_masks(layer, x, random_stream=stream)).reshape(4, 2, 64)
    assert not np.array_equal(masks, again)


def test_devices_that_hold_the_same_part_draw_the_same_numbers(mesh):
    stream = pz.RandomStream.from_base_key(jax.random.key(3), "offset")
    x = pz.nx.ones({"batch": 8, "embedding": 8})
    layer = ShardMapped(pz.nn.StochasticDropout(drop_rate=0.5), mesh, {}, {"batch": "data"})
    shards = layer(x, random_stream=stream).data_array.addressable_shards
    by_part: dict[Any, set[bytes]] = {}
    for shard in shards:
        by_part.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    assert len(by_part) == 4
    assert all(len(values) == 1 for values in by_part.values())


def test_without_split_activations_the_numbers_are_those_of_the_bare_layer(mesh):
    x = pz.nx.ones({"batch": 8, "embedding": 8})
    dropout = pz.nn.StochasticDropout(drop_rate=0.5)
    streams = [pz.RandomStream.from_base_key(jax.random.key(3), "offset") for _ in range(2)]
    bare = dropout_masks(dropout, x, random_stream=streams[0])
    layer = ShardMapped(dropout, mesh, {}, {})
    assert jnp.array_equal(bare, dropout_masks(layer, x, random_stream=streams[1]))


@pytest.mark.parametrize("option", ["parameter_rules", "activation_rules"])
def test_a_mesh_axis_that_does_not_exist_is_refused_where_it_is_written(option):
    rules = {"parameter_rules": {}, "activation_rules": {}, option: {"embedding": "dat"}}
    with pytest.raises(MeshError, match=r"no mesh axis 'dat'\. Did you mean 'data'"):
        ShardMapped(pz.nn.Identity(), make_mesh({"data": 8}), **rules)
