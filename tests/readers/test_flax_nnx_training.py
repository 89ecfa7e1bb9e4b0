"""Flax NNX: modules are trained, and what their calls change is carried from step to step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard import (
    AxesInPlace,
    Checkpointed,
    Jitted,
    Layout,
    Recipe,
    TrainState,
    abstract_model,
    build_eval_step_fn,
    build_train_step_fn,
    shard_batch,
    sharded_init,
)
from penzai_shard.errors import RuleTypeError, ShardingError, ShardingWarning
from penzai_shard.traced_programs import equations

RULES = {"embed": "data", "mlp": "model"}
KEY = jax.random.key(0)


def mesh_of(axis_type=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)


class Block(nnx.Module):
    def __init__(self, rngs):
        embed, mlp = {"out_sharding": ("embed",)}, {"out_sharding": ("mlp",)}
        self.up = nnx.Linear(
            8,
            16,
            rngs=rngs,
            kernel_metadata={"out_sharding": ("embed", "mlp")},
            bias_metadata=mlp,
        )
        self.norm = nnx.BatchNorm(16, rngs=rngs, scale_metadata=mlp, bias_metadata=mlp)
        self.down = nnx.Linear(
            16,
            8,
            rngs=rngs,
            kernel_metadata={"out_sharding": ("mlp", "embed")},
            bias_metadata=embed,
        )
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.dropout(nnx.tanh(self.norm(self.up(x)))))


class Model(nnx.Module):
    """A block that is called twice, once with rematerialisation, and a weight used as its own."""

    def __init__(self, rngs):
        self.block = Block(rngs)
        self.again = self.block
        self.tied = self.block.up.kernel
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        x = nnx.remat(lambda block, x: block(x))(self.block, x)
        return self.again(x) @ self.tied


def squared_error(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def loss_fn(model, rng, state, x, y):
    assert isinstance(model, Model)
    loss = squared_error(model, x, y)
    return loss, state, {"loss": loss}


@pytest.fixture(scope="module")
def batch():
    x, y = jax.random.normal(jax.random.key(1), (2, 8, 16))
    return {"x": x[:, :8], "y": y}


def unsharded(model=Model):
    with nnx.use_eager_sharding(False):
        return model(nnx.Rngs(0))


@pytest.fixture(scope="module")
def steps_of_flax(batch):
    """Losses, and the variables after three steps of NNX' own code."""
    model = unsharded()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        loss, grads = nnx.value_and_grad(squared_error)(model, x, y)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer, **batch)) for _ in range(3)]
    return losses, model


def variables(model):
    return {"/".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(model))}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_steps_are_those_of_flax(axis_type, batch, steps_of_flax):
    mesh = mesh_of(axis_type)
    state, step = Layout(parameters=RULES, compute={"batch": "data"}, blocks=()).build(
        Model,
        nnx.Rngs(0),
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=optax.sgd(0.1, momentum=0.9),
        rng=jax.random.key(0),
        on_unnamed="replicate",
    )
    losses = []
    for _ in range(3):
        state, aux = step(state, **batch)
        losses.append(float(aux["loss"]))
    expected, trained = steps_of_flax
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    model = state.model
    assert type(model) is Model
    assert model.again is model.block
    assert model.tied is model.block.up.kernel
    assert int(model.calls[...]) == 3
    assert variables(model).keys() == variables(trained).keys()
    for path, theirs in variables(trained).items():
        ours = variables(model)[path]
        assert type(ours) is type(theirs)
        a, b = ours.get_raw_value(), theirs.get_raw_value()
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=path)
    assert model.tied.get_raw_value().sharding == NamedSharding(mesh_of(), P("data", "model"))


class Constraining(nnx.Module):
    def __call__(self, x):
        x = nn.with_logical_constraint(x, ("batch", "mlp"))
        return jax.lax.with_sharding_constraint(x, P("model"))

    def __init__(self, rngs):
        self.calls = nnx.Variable(0)


def constraints_of(loss_fn, model, x):
    """The spec of each constraint in a loss function's program."""
    program = jax.make_jaxpr(
        lambda x: loss_fn(model=model, rng=None, state=None, x=x)[0], return_shape=False
    )(x)
    return [
        equation.params["sharding"].spec
        for equation in equations(program)
        if equation.primitive.name == "sharding_constraint"
    ]


def test_constraints_in_a_module_are_in_force_in_a_layout():
    def summed(model, rng, state, x):
        return model(x).sum(), state, {}

    layout = Layout(parameters={}, compute={"batch": "data", "mlp": "model"}, blocks=())
    model = Constraining(nnx.Rngs(0))
    specs = constraints_of(layout.computing(summed, mesh_of()), model, jnp.ones((8, 16)))
    assert specs == [P("data", "model"), P("model")]
    with (
        nn.logical_axis_rules((("batch", None),)),
        pytest.raises(
            ShardingError, match=r"in force with other rules, \(\('batch', None\),\), than"
        ),
    ):
        constraints_of(layout.computing(summed, mesh_of()), model, jnp.ones((8, 16)))


class Counting(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(
            nnx.initializers.normal()(rngs.params(), (8, 16)), out_sharding=("embed", "mlp")
        )
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return x @ self.weight


def counting_loss(model, rng, state, x, y):
    x, y = (a.unwrap("batch", "features") for a in (x, y))
    return squared_error(model, x, y), state, {"calls": model.calls[...]}


def changed(change):
    """A loss that does something to the model, too."""

    def loss_fn(model, rng, state, x, y):
        result = counting_loss(model, rng, state, x, y)
        change(model)
        return result

    return loss_fn


@pytest.fixture(scope="module")
def counting(batch):
    """A module on a mesh, its first train state, and a batch of named arrays."""
    mesh = mesh_of()
    model = sharded_init(Counting, nnx.Rngs(0), mesh=mesh, rules=RULES)
    state = TrainState.initial_state(model, optax.sgd(1.0), jax.random.key(0))
    named = {name: pz.nx.wrap(a).tag("batch", "features") for name, a in batch.items()}
    return model, state, shard_batch(named, mesh, {"batch": "data"})


def test_microbatches_and_evaluation(counting, batch):
    model, state, named = counting
    step = build_train_step_fn(counting_loss, accumulate_steps=2, aux_reduction={"calls": "last"})
    weight = model.weight.get_raw_value()
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2))(weight)
    np.testing.assert_allclose(build_eval_step_fn(counting_loss)(state, **named)[0], loss, 1e-5)
    new, _ = step(state, **named)
    assert int(new.model.calls[...]) == 2
    np.testing.assert_allclose(new.model.weight.get_raw_value(), weight - grads, rtol=1e-5)
    # The module that was given is as it was.
    assert int(model.calls[...]) == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda m: m.weight.set_value(m.weight[...] * 2),
            "parameters, .*\n *weight: was",
        ),
        (lambda m: nnx.update(m, {"weight": m.weight[...] + 1}), "weight: was assigned. Keep"),
        (lambda m: m.calls.set_value(jnp.zeros(3)), "state_vars/calls: was int32 of shape ()"),
        (lambda m: setattr(m, "h", nnx.Intermediate(1.0)), "h: this Intermediate was not there be"),
        (lambda m: delattr(m, "calls"), "calls: went missing. Leave it in the model."),
    ],
    ids=["assigned", "updated", "another shape", "new", "gone"],
)
def test_losses_that_change_what_they_may_not_are_refused(counting, change, text):
    _, state, named = counting
    with pytest.raises(ShardingError, match=text.replace("()", r"\(\)")):
        build_train_step_fn(changed(change))(state, **named)


def test_a_variable_that_is_replaced_is_carried_on(counting):
    _, state, named = counting
    step = changed(lambda m: setattr(m, "calls", nnx.Variable(m.calls[...] + 10)))
    assert int(build_train_step_fn(step)(state, **named)[0].model.calls[...]) == 11


def test_only_floating_parameters_are_trained_and_tables_of_equal_models_are_equal(counting):
    _, state, _ = counting
    assert state.variables.trainable_names == {"weight"}
    assert list(state.state_vars) == ["calls"]
    assert (
        state.variables
        == TrainState.initial_state(
            unsharded(Counting), optax.sgd(1.0), jax.random.key(0)
        ).variables
    )
    with pytest.raises(ShardingError, match=r"w: a trainable weight must be floating"):
        TrainState.initial_state(
            {"w": nnx.Param(jnp.ones(2, int))},
            optax.sgd(1.0),
            jax.random.key(0),
            trainable=lambda parameter: True,
        )


@pytest.mark.parametrize("wrapper", [Jitted, Checkpointed, AxesInPlace])
def test_wrapper_layers_refuse_modules_that_change(wrapper):
    module = unsharded(Counting)
    x = jnp.ones((2, 8))
    with pytest.raises(ShardingError, match=r"this Counting changed others: calls. Use the trans"):
        wrapper(module)(x)
    linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(wrapper(linear)(x), linear(x), rtol=1e-6)


def test_layouts_edit_no_layers_of_a_module():
    layout = Layout(parameters=RULES, compute={"batch": "data"})
    with pytest.warns(ShardingWarning, match="the Model has no layers that a layout could edit"):
        recipe = layout.recipe(unsharded(), mesh_of())
    assert recipe == Recipe()


def test_arrays_beside_the_variables_of_a_module_are_not_trained():
    class Shifted(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(rngs.params.normal((8, 8)))
            self.positions = np.ones(8, np.float32)

    with nnx.use_eager_sharding(False):
        module = Shifted(nnx.Rngs(0))
    state = TrainState.initial_state({"module": module, "w": jnp.ones(2)}, optax.sgd(0.1), KEY)
    assert state.variables.trainable_names == {"module/kernel", "w"}
    np.testing.assert_array_equal(state.model["module"].positions, np.ones(8))

    def asked(parameter):
        return True

    state = TrainState.initial_state(module, optax.sgd(0.1), KEY, trainable=asked)
    assert state.variables.trainable_names == {"kernel", "positions"}


def test_arrays_that_nnx_takes_for_static_data_while_they_are_traced_are_refused():
    class Shifted(nnx.Module):
        def __init__(self, rngs, kept):
            self.kernel = nnx.Param(rngs.params.normal((8, 8)))
            self.positions = kept(jnp.arange(8.0))

    def build(kept):
        return {"module": Shifted(nnx.Rngs(0), kept)}

    with pytest.raises(
        RuleTypeError,
        match=r"arrays that would be lost:\n  Shifted\.positions: .* self\.positions = nnx\.data\(",
    ):
        abstract_model(build, lambda array: array)
    for kept in (nnx.data, nnx.Variable):
        positions = sharded_init(build, kept, mesh=mesh_of(), rules={}, on_unnamed="replicate")
        np.testing.assert_array_equal(positions["module"].positions[...], np.arange(8.0))


def test_random_streams_are_not_the_key_of_a_run():
    """An ``nnx.Rngs`` has every attribute that it is asked for."""
    with pytest.raises(
        RuleTypeError, match=r"must be a random key, not the Rngs\. Write jax\.rand"
    ):
        TrainState.initial_state(unsharded(), optax.sgd(0.1), nnx.Rngs(0))


def test_evaluation_with_another_mode_and_captured_values_changes_nothing(counting):
    class Noisy(Counting):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            y = self.dropout(super().__call__(x))
            self.sow(nnx.Intermediate, "hidden", y)
            return y

    def evaluated(model, rng, state, x, y):
        model.eval()
        captured = nnx.capture(lambda model, x: model(x), nnx.Intermediate)
        out, hidden = captured(model, x.unwrap("batch", "features"))
        return out.sum(), state, {"hidden": jax.tree.leaves(hidden)[0].sum()}

    state = TrainState.initial_state(unsharded(Noisy), optax.sgd(1.0), jax.random.key(0))
    batch = jax.tree.map(np.asarray, counting[2])
    loss, aux = build_eval_step_fn(evaluated)(state, **batch)
    weight = state.model.weight[...]
    np.testing.assert_allclose(loss, (batch["x"].unwrap("batch", "features") @ weight).sum(), 1e-4)
    np.testing.assert_allclose(aux["hidden"], loss, 1e-4)
    assert int(state.model.calls[...]) == 0
