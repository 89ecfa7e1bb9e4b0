"""Stacks that run as a loop: everything as Penzai's, but one body instead of many."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from penzai import pz
from penzai.nn.layer_stack import LayerStackGetAttrKey, layerstack_axes_from_keypath

from penzai_shard.layers import (
    Checkpointed,
    ConstrainShardingByName,
    Jitted,
    LayerStackError,
    RolledLayerStack,
)
from penzai_shard.meshes import make_mesh

SHARED, PER_LAYER = pz.nn.LayerStackVarBehavior.SHARED, pz.nn.LayerStackVarBehavior.PER_LAYER


@pz.pytree_dataclass
class Counts(pz.nn.Layer):
    """Adds its count, after counting."""

    count: Any

    def __call__(self, x, /, **side_inputs):
        self.count.value = self.count.value + 1
        return x + self.count.value


@pz.pytree_dataclass
class Saves(pz.nn.Layer):
    """Keeps its input in a variable."""

    saved: Any

    def __call__(self, x, /, **side_inputs):
        self.saved.value = x
        return x


@pz.pytree_dataclass
class Swaps(pz.nn.Layer):
    """Gives its input with the order of its logical axes reversed."""

    def __call__(self, x, /, **side_inputs):
        return x.order_as(*reversed(x.named_axes))


def state(behavior, value=None, label="count"):
    default = pz.nx.zeros({"layers": 3}) if behavior is PER_LAYER else jnp.zeros(())
    return pz.StateVariable(
        default if value is None else value,
        label=label,
        metadata={"layerstack_axes": {"layers": behavior}},
    )


def build(extra=(), layers=3, drop_rate=None):
    def sublayer(init_base_rng):
        return pz.nn.Residual(
            pz.nn.Sequential(
                [
                    pz.nn.RMSLayerNorm.from_config("norm", init_base_rng, {"embedding": 8}),
                    pz.nn.Linear.from_config(
                        "mix", init_base_rng, {"embedding": 8}, {"embedding": 8}
                    ),
                    pz.nn.maybe_dropout(drop_rate),
                ]
            )
        )

    stack = pz.nn.LayerStack.from_sublayer_builder(
        sublayer, "layers", layers, jax.random.key(0), {}
    )
    if not extra:
        return stack
    return pz.nn.LayerStack(pz.nn.Sequential([stack.stacked_sublayers, *extra]), "layers", layers)


X = pz.nx.wrap(jax.random.normal(jax.random.key(1), (8, 8))).tag("batch", "embedding")


def followed_by(stack, layer):
    """The stack with a layer after each of its blocks."""
    return (
        pz.select(stack)
        .at_instances_of(pz.nn.Residual)
        .apply(lambda block: pz.nn.Sequential([block, layer]))
    )


def rolled(stack, **options):
    return RolledLayerStack.from_layer_stack(stack, **options)


def output_and_gradients(layer, **side_inputs):
    slots, parameters = pz.unbind_params(layer, freeze=True)
    slots, states = pz.unbind_state_vars((slots, side_inputs))

    def loss(parameters, states):
        variables = [value.unfreeze_as_copy() for value in states]
        layer, sides = pz.bind_variables(slots, [*parameters, *variables])
        output = layer(X, **sides)
        value = jnp.mean(jnp.sin(output.unwrap("batch", "embedding")))
        return value, (output, [variable.freeze() for variable in variables])

    gradients, (output, after) = jax.jit(jax.grad(loss, has_aux=True))(
        parameters, [variable.freeze() for variable in states]
    )
    return {
        "output": output,
        **{gradient.label: gradient.value for gradient in gradients},
        **{f"state {variable.label}": variable.value for variable in after},
    }


def check_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        have = found[name]
        if pz.nx.is_namedarray(value):
            names = tuple(value.named_shape)
            value, have = value.unwrap(*names), have.unwrap(*names)
        assert jnp.allclose(have, value, rtol=2e-5, atol=1e-6), name


@pytest.mark.parametrize(
    "edit",
    [
        rolled,
        lambda stack: rolled(stack, unroll=2),
        lambda stack: rolled(stack, unroll=3),
        lambda stack: Jitted(rolled(stack)),
        lambda stack: Checkpointed(rolled(stack)),
        lambda stack: rolled(pz.select(stack).at_instances_of(pz.nn.Residual).apply(Checkpointed)),
        lambda stack: rolled(pz.select(stack).at_instances_of(pz.nn.Residual).apply(Jitted)),
        lambda stack: rolled(followed_by(stack, Swaps())),
        lambda stack: rolled(
            followed_by(stack, ConstrainShardingByName(make_mesh({"data": 8}), {"batch": "data"}))
        ),
    ],
    ids=[
        "alone",
        "unroll=2",
        "unroll=3",
        "jitted",
        "remat outside",
        "remat inside",
        "jitted inside",
        "another order of axes",
        "constrained",
    ],
)
def test_output_and_gradients_are_those_of_penzai_s_stack(edit):
    check_same(output_and_gradients(edit(build())), output_and_gradients(build()))


def test_the_output_keeps_the_order_of_the_input_s_axes():
    stack = followed_by(build(), Swaps())
    assert list(rolled(stack)(X).named_axes) == list(stack(X).named_axes) == list(X.named_axes)


@pytest.mark.parametrize("wrap", [lambda layer: layer, Jitted], ids=["eager", "jitted"])
@pytest.mark.parametrize("behavior", [SHARED, PER_LAYER], ids=["shared", "per layer"])
def test_state_variables_are_updated_as_in_penzai_s_stack(behavior, wrap):
    ours, theirs = state(behavior), state(behavior)
    layer, penzai = wrap(rolled(build([Counts(ours)]))), build([Counts(theirs)])
    for _ in range(2):
        found, expected = layer(X), penzai(X)
    assert jnp.allclose(found.data_array, expected.data_array, rtol=1e-5)
    if behavior is PER_LAYER:
        assert jnp.array_equal(ours.value.unwrap("layers"), theirs.value.unwrap("layers"))
    else:
        assert float(ours.value) == float(theirs.value) == 6.0


def test_state_and_gradients_together():
    extra = [Counts(state(SHARED, label="a")), Counts(state(PER_LAYER, label="b"))]
    check_same(output_and_gradients(rolled(build(extra))), output_and_gradients(build(extra)))


def test_per_layer_state_keeps_the_order_of_its_axes():
    variable = state(PER_LAYER, pz.nx.zeros({"embedding": 8, "layers": 3}))
    rolled(build([Counts(variable)]))(X)
    assert list(variable.value.named_axes) == ["embedding", "layers"]


def test_per_layer_state_may_begin_empty():
    ours, theirs = (
        pz.StateVariable(None, label="saved", metadata={"layerstack_axes": {"layers": PER_LAYER}})
        for _ in range(2)
    )
    rolled(build([Saves(ours)]))(X)
    build([Saves(theirs)])(X)
    names = ("layers", "batch", "embedding")
    assert jnp.allclose(ours.value.unwrap(*names), theirs.value.unwrap(*names), rtol=1e-5)


def test_dropout_draws_other_numbers_in_every_layer_as_penzai_s_stack():
    def stream():
        return pz.RandomStream.from_base_key(jax.random.key(5), offset_label="offset")

    ours, theirs = stream(), stream()
    found = output_and_gradients(rolled(build(drop_rate=0.5)), random_stream=ours)
    check_same(found, output_and_gradients(build(drop_rate=0.5), random_stream=theirs))
    rolled(build(drop_rate=0.5))(X, random_stream=ours)
    assert int(ours.offset.value) == 3


def test_shared_state_may_be_a_side_input_too():
    variable = state(SHARED)
    rolled(build([Counts(variable)]))(X, same=variable)
    assert float(variable.value) == 3.0


def test_a_stack_of_stacks():
    inner = rolled(build())

    @pz.pytree_dataclass
    class Holds(pz.nn.Layer):
        body: Any

        def __call__(self, x, /, **side_inputs):
            return self.body(x, **side_inputs)

    outer = RolledLayerStack(Holds(inner), "outer", 2)
    check_same({"output": outer(X)}, {"output": pz.nn.LayerStack(Holds(build()), "outer", 2)(X)})


def test_it_takes_penzai_s_place_and_goes_back():
    stack = build()
    there = rolled(stack, unroll=2)
    assert isinstance(there, pz.nn.LayerStack)
    assert there.stacked_sublayers is stack.stacked_sublayers
    assert there.unroll == 2
    back = there.to_layer_stack()
    assert type(back) is pz.nn.LayerStack
    assert back == stack
    assert rolled(there).unroll == 1


def test_the_builder_builds_rolled_stacks():
    made = RolledLayerStack.from_sublayer_builder(
        lambda init_base_rng: pz.nn.Linear.from_config(
            "mix", init_base_rng, {"embedding": 8}, {"embedding": 8}
        ),
        "layers",
        2,
        jax.random.key(0),
        {},
    )
    assert type(made) is RolledLayerStack
    assert made(X).named_shape == X.named_shape


def test_key_paths_tell_the_stack_axis():
    stack = rolled(build())
    (path, _), *_ = jax.tree_util.tree_leaves_with_path(stack)
    assert isinstance(path[0], LayerStackGetAttrKey)
    assert layerstack_axes_from_keypath(path) == {"layers": 3}


def test_it_is_a_loop_and_does_not_grow_with_depth():
    def text(make, depth):
        stack = make(build(layers=depth))
        return jax.jit(lambda x: stack(x)).lower(X).as_text()

    assert "stablehlo.while" in text(rolled, 9)
    assert "stablehlo.while" not in text(lambda stack: stack, 9)
    lines = [len(text(rolled, depth).splitlines()) for depth in (2, 9)]
    assert lines[0] == lines[1]


def test_explicit_meshes_mean_their_auto_twins():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("data", None))
    x = pz.nx.NamedArray(
        named_axes=X.named_axes, data_array=jax.device_put(np.asarray(X.data_array), sharding)
    )
    with jax.set_mesh(mesh):
        outputs = [rolled(build())(x), jax.jit(lambda x: rolled(build())(x))(x)]
    for output in outputs:
        assert output.data_array.sharding.mesh.axis_types == (AxisType.Auto,)
        assert jnp.allclose(output.data_array, build()(X).data_array, rtol=1e-5)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (pz.StateVariable(0, label="count"), r"'count': it does not say how .*SHARED"),
        (state(SHARED, pz.nx.zeros({"layers": 3})), r"shared by the layers, and its value has"),
        (state(PER_LAYER, jnp.zeros(())), r"per layer, and its value lacks logical axis 'layers'"),
    ],
    ids=["undeclared", "shared with the axis", "per layer without the axis"],
)
def test_variables_that_contradict_themselves_are_refused_by_name(variable, message):
    with pytest.raises(LayerStackError, match=message):
        rolled(build([Counts(variable)]))(X)


def test_a_per_layer_variable_cannot_be_a_side_input():
    variable = state(PER_LAYER)
    with pytest.raises(LayerStackError, match="it is per layer and cannot be a side input too"):
        rolled(build([Counts(variable)]))(X, same=variable)


def test_variables_in_the_argument_are_refused():
    with pytest.raises(LayerStackError, match=r"StateVariable 'count'.*Pass it as a side input"):
        rolled(build())(state(SHARED))


def test_all_offenders_are_told_at_once():
    bad = [Counts(pz.StateVariable(0, label=label)) for label in "ab"]
    with pytest.raises(LayerStackError) as caught:
        rolled(build(bad))(X)
    assert len(caught.value.problems) == 2
