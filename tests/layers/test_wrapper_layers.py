"""What all wrappers have in common: they change how a layer runs, not what it computes."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz
from penzai.core.shapecheck import StructureMismatchError
from penzai.deprecated.v1 import pz as pz_v1

import penzai_shard as pzs
from tests.models import Counted, mlp_v1, penzai_mlp

AUTO = pzs.make_mesh({"data": 4, "model": 2})
EXPLICIT = pzs.make_mesh({"data": 4, "model": 2}, explicit=True)
RULES = {"batch": "data", "features": "model"}
WRAPPERS = {
    "jitted": pzs.Jitted,
    "checkpointed": pzs.Checkpointed,
    "scoped": lambda body: pzs.Scoped(body, "scope"),
    "activations": lambda body: pzs.ConstrainActivations(body, AUTO, (RULES,), (RULES, RULES)),
    "by name": lambda body: pz.nn.Sequential([body, pzs.ConstrainShardingByName(AUTO, RULES)]),
    "nested": lambda body: pzs.Jitted(pzs.Checkpointed(pzs.Jitted(pzs.Scoped(body, "inner")))),
}
MODELS = {
    "plain": lambda: penzai_mlp(sizes=(8, 16, 8)),
    "counting": lambda: Counted(
        penzai_mlp(sizes=(8, 16, 8)), pz.StateVariable(value=jnp.zeros(()), label="count")
    ),
}
X = pz.nx.wrap(jax.random.normal(jax.random.key(1), (8, 8)), "batch", "features")


def assert_same(actual, expected):
    # A product of matrices sums in another order where they are split.
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    jax.tree.map(close, actual, expected)


def pure(model):
    """A model's call as a function of the values of its variables, and these values."""
    unbound, values = pz.unbind_variables(model, freeze=True)

    def call(values, x):
        live = [value.unfreeze_as_copy() for value in values]
        output = pz.bind_variables(unbound, live)(x).order_as(*x.named_shape)
        return output, [variable.freeze() for variable in live]

    return call, values


def gradients(call, values, x):
    def loss(values, x):
        output, state = call(values, x)
        return (output * output).untag(*output.named_shape).sum().unwrap(), (output, state)

    return jax.grad(loss, (0, 1), has_aux=True)(values, x)


def scan(call, values, x):
    def step(carry, _):
        output, state = call(*carry)
        return (tuple(state), output), output

    return jax.lax.scan(step, (tuple(values), x), length=2)


def rows(call, values, x):
    mapped = jax.vmap(call, (None, 0))
    return mapped(values, x.untag("batch").with_positional_prefix())


WAYS = {
    "eager": lambda call, values, x: call(values, x),
    "gradients": gradients,
    "jit": lambda call, *inputs: jax.jit(functools.partial(gradients, call))(*inputs),
    "remat": lambda call, *inputs: gradients(jax.checkpoint(call), *inputs),
    "vmap": rows,
    "scan": scan,
}


@functools.cache
def expected(model, way):
    return WAYS[way](*pure(MODELS[model]()), X)


@pytest.mark.parametrize(
    ("model", "way"), [("plain", "jit"), ("plain", "scan"), *(("counting", way) for way in WAYS)]
)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_output_gradients_and_state_are_those_of_the_layer(wrapper, model, way):
    assert_same(WAYS[way](*pure(WRAPPERS[wrapper](MODELS[model]())), X), expected(model, way))


@pytest.mark.parametrize(
    ("wrapper", "mesh"),
    # A bare layer does not run on an Explicit mesh.
    [(wrapper, EXPLICIT) for wrapper in ("jitted", "checkpointed", "nested")]
    + [(wrapper, AUTO) for wrapper in ("jitted", "checkpointed", "scoped", "activations")],
)
def test_arrays_on_a_mesh(wrapper, mesh):
    call, values = pure(WRAPPERS[wrapper](MODELS["counting"]()))
    values = jax.device_put(values, NamedSharding(mesh, P()))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    assert_same(WAYS["jit"](call, values, x), expected("counting", "jit"))
    for ambient in (AUTO, EXPLICIT) if mesh is AUTO else (AUTO,):
        with jax.set_mesh(ambient):
            output = call(values, x)[0]
        assert_same(output, expected("counting", "eager")[0])
        assert output.data_array.sharding.mesh == AUTO


@pytest.mark.parametrize("wrapper", ["jitted", "checkpointed"])
def test_variables_in_inputs_are_assigned(wrapper):
    @pz.pytree_dataclass
    class Adds(pz.nn.Layer):
        total: pz.StateVariable

        def __call__(self, x, /, *, more, **side_inputs):
            more.value = more.value + 1
            x["held"].value = x["held"].value * 2
            self.total.value = self.total.value + x["held"].value
            return self.total.value + more.value + x["plain"]

    total, more, held = (pz.StateVariable(value=jnp.asarray(1.0), label=label) for label in "tmh")
    layer = WRAPPERS[wrapper](Adds(total))
    assert float(layer({"held": held, "plain": 1.0}, more=more)) == 3 + 2 + 1
    # One variable in the layer and in its input.
    assert float(layer({"held": held, "plain": 1.0}, more=total)) == 8 + 8 + 1
    assert [float(x.value) for x in (total, more, held)] == [8, 2, 4]


@pytest.mark.parametrize("wrapper", ["jitted", "checkpointed"])
def test_variables_of_any_form_are_assigned(wrapper):
    """None becomes an array, names come in another order, a value grows, another stays."""

    @pz.pytree_dataclass
    class Keeps(pz.nn.Layer):
        held: tuple

        def __call__(self, x, /, **side_inputs):
            last, named, growing, constant = self.held
            last.value = x
            named.value = named.value.order_as(*reversed(named.value.named_shape))
            growing.value = {**growing.value, str(len(growing.value)): x}
            return x + constant.value

    values = None, pz.nx.ones({"a": 2, "b": 3}), {}, jnp.ones(2)
    layer = WRAPPERS[wrapper](Keeps(tuple(pz.StateVariable(value=value) for value in values)))
    last, named, growing, constant = layer.held
    before = constant.value
    for count in (1, 2):
        np.testing.assert_array_equal(layer(jnp.full(2, count)), jnp.full(2, count + 1))
        np.testing.assert_array_equal(last.value, jnp.full(2, count))
        assert [*named.value.named_shape] == [*("ba" if count == 1 else "ab")]
        assert len(growing.value) == count
    assert constant.value is before


# Around and in other layers


@pytest.mark.parametrize("wrapper", ["jitted", "checkpointed", "by name"])
def test_first_generation_models(wrapper):
    model = mlp_v1()
    edited = pz.select(model).at_instances_of(pz_v1.nn.Affine).apply(WRAPPERS[wrapper])
    for layer in (edited, WRAPPERS[wrapper](model)):
        assert_same(layer(X).order_as("batch", "features"), model(X))
    loss = lambda model: (model(X).untag("batch", "features") ** 2).sum().unwrap()  # noqa: E731
    actual, right = jax.grad(loss)(edited), jax.grad(loss)(model)
    assert_same(jax.tree.leaves(actual), jax.tree.leaves(right))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_selectors_and_treescope_see_through(wrapper):
    model = MODELS["plain"]()
    wrapped = pz.select(model).at_instances_of(pz.nn.Affine).apply(WRAPPERS[wrapper])
    labels = [v.label for v in pz.unbind_variables(wrapped)[1]]
    assert labels == [v.label for v in pz.unbind_variables(model)[1]]
    before = treescope.render_to_text(wrapped)
    wrapped(X)
    assert treescope.render_to_text(wrapped) == before
    assert pz.select(wrapped).at_instances_of(pz.nn.Affine).count() == 2
    frozen = pz.freeze_variables(wrapped)
    frozen(X)
    for duplicate in (copy.deepcopy(frozen), jax.tree.map(jnp.array, frozen)):
        assert_same(duplicate(X), model(X))


@pz.pytree_dataclass
class Reads(pz.nn.Layer):
    """A layer whose attributes are read from outside."""

    scale: float
    name: str = "inner"
    __jax_array__ = None

    def __call__(self, x, /, **side_inputs):
        return x * self.scale


def test_attributes_of_the_body_show_through():
    layer = pzs.Scoped(pzs.Jitted(pzs.Checkpointed(Reads(3.0))), "outer")
    assert (layer.scale, layer.name, layer.body.name) == (3.0, "outer", "inner")
    assert "scale" in dir(layer)
    assert not hasattr(layer, "__jax_array__")
    assert not hasattr(layer, "missing")


# What is refused


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda value: value.data_array.delete() or value, pzs.ShardingError),
        (lambda value: jax.eval_shape(lambda: value), pzs.ShardingError),
        (lambda value: jax.device_put(value, NamedSharding(AUTO, P("model"))), pzs.MeshError),
    ],
    ids=["deleted", "struct", "elsewhere"],
)
@pytest.mark.parametrize("wrapper", ["jitted", "checkpointed", "scoped"])
def test_arrays_that_nothing_runs_on_are_refused_by_path(wrapper, spoil, error):
    model = WRAPPERS[wrapper](MODELS["plain"]())
    parameter = pz.unbind_variables(model)[1][0]
    parameter.__dict__["_raw_value"] = spoil(parameter.value)
    with pytest.raises(error) as caught:
        model(jax.device_put(X, jax.devices()[3]))
    assert [problem.path for problem in caught.value.problems] == [parameter.label]
    assert caught.value.problems[0].fix


@pytest.mark.parametrize("wrapper", ["jitted", "checkpointed", "scoped"])
def test_errors_of_the_layer_pass_through(wrapper):
    with pytest.raises(StructureMismatchError):
        WRAPPERS[wrapper](MODELS["plain"]())(pz.nx.ones({"batch": 8, "other": 3}))


@pytest.mark.parametrize("wrapper", ["jitted", "checkpointed"])
def test_what_a_call_would_lose_is_refused(wrapper):
    @pz.pytree_dataclass
    class Loses(pz.nn.Layer):
        held: list

        def __call__(self, x, /, **side_inputs):
            self.held[0] = x
            return {"w": self.held[1]}

    weight = pz.Parameter(value=jnp.ones(()), label="weight")
    with pytest.raises(pzs.ShardingError) as caught:
        WRAPPERS[wrapper](Loses([jnp.zeros(2), weight]))(jnp.ones(2))
    assert [problem.path for problem in caught.value.problems] == ["body/held/0", "weight"]
