"""Flax linen models as they are, initialised, trained and evaluated in a layout."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState as FlaxState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard import build_eval_step_fn, fully_sharded
from penzai_shard.errors import RuleTypeError
from penzai_shard.layouts import Layout
from penzai_shard.meshes import make_mesh
from penzai_shard.placement import sharded_init
from penzai_shard.traced_programs import equations

RULES = {"batch": "data", "hidden": "model"}
LAYOUT = Layout(parameters=RULES, compute=RULES, blocks=())
NAMES = {"neurons": "hidden", "heads": None}
KEY = jax.random.key(0)
X = np.asarray(jax.random.normal(jax.random.key(1), (32, 16)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        width = x.shape[-1]
        normal = nn.initializers.xavier_normal()
        up = nn.with_logical_partitioning(normal, ("embed", "hidden"))
        down = nn.with_logical_partitioning(normal, ("hidden", "embed"))
        y = nn.relu(nn.Dense(4 * width, kernel_init=up, use_bias=False)(x))
        y = nn.with_logical_constraint(y, ("batch", "hidden"))
        y = y @ self.param("down", down, (4 * width, width))
        return nn.with_logical_constraint(x + y, ("batch", "embed")), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            Block,
            length=2,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layers()(x, None)[0]


MODEL = Model()
OPTIMIZER = optax.adam(1e-2)
INIT = jax.jit(MODEL.init)  # Compiled once: one operation at a time would compile each.


def loss_fn(model, rng, state, x):
    x = x.unwrap("batch", "features") if pz.nx.is_namedarray(x) else x
    return jnp.mean((MODEL.apply(model, x) - 1) ** 2), state, {}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 2, "model": 4})


@pytest.fixture(scope="module")
def losses_of_flax():
    """Three steps by Flax's own code, on one device."""
    params = INIT(KEY, X)["params"]
    state = FlaxState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)

    @jax.jit
    def step(state):
        def loss(params):
            return jnp.mean((state.apply_fn({"params": params}, X) - 1) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(3):
        state, loss = step(state)
        losses.append(float(loss))
    return losses


def built(mesh, layout=LAYOUT, **options):
    return layout.build(
        MODEL.init,
        KEY,
        X,
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=OPTIMIZER,
        rng=jax.random.key(2),
        step_metrics="loss",
        **options,
    )


def losses_of(state, step, x=X):
    losses = []
    for _ in range(3):
        state, aux = step(state, x=x)
        losses.append(float(aux["loss"]))
    return state, losses


def specs_in(function, *args, **kwargs):
    """The spec of each constraint in a function's program."""
    program = jax.make_jaxpr(function)(*args, **kwargs)
    return [
        equation.params["sharding"].spec
        for equation in equations(program.jaxpr)
        if equation.primitive.name == "sharding_constraint"
    ]


# Initialising.


def test_sharded_initialisation_gives_the_values_of_init_in_its_boxes(mesh):
    def init(key, x):
        params = MODEL.init(key, x)["params"]
        return FlaxState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)

    state = sharded_init(init, KEY, X, mesh=mesh, rules=RULES)
    expected = jax.jit(init)(KEY, X)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    kernel = state.params["ScanBlock_0"]["Dense_0"]["kernel"]
    assert isinstance(kernel, nn.LogicallyPartitioned)
    assert kernel.names == ("layers", "embed", "hidden")
    assert kernel.value.sharding.spec == P(None, None, "model")
    assert state.opt_state[0].mu["ScanBlock_0"]["down"].value.sharding.spec == P(None, "model")


# Training.


@pytest.mark.parametrize(
    ("layout", "stored"),
    [
        (LAYOUT, P(None, None, "model")),
        (Layout.fully_sharded(blocks=(), min_size=0), P(None, None, "data")),
        (Layout.tensor_parallel(names=NAMES, blocks=()), P(None, None, "model")),
    ],
    ids=["rules", "fully_sharded", "tensor_parallel"],
)
def test_losses_are_those_of_flax_and_boxes_are_kept(mesh, losses_of_flax, layout, stored):
    state, losses = losses_of(*built(mesh, layout))
    np.testing.assert_allclose(losses, losses_of_flax, rtol=1e-5)
    layers = state.model["params"]["ScanBlock_0"]
    kernel = layers["Dense_0"]["kernel"]
    assert type(kernel) is type(layers["down"]) is nn.LogicallyPartitioned
    assert kernel.names == ("layers", "embed", "hidden")
    assert kernel.value.sharding.spec == stored


def test_microbatches_and_devices_of_their_own_give_the_losses_of_flax(mesh, losses_of_flax):
    named = pz.nx.wrap(X, "batch", "features")
    for options in ({"accumulate_steps": 2}, {"manual_axes": "data"}):
        _, losses = losses_of(*built(mesh, **options), x=named)
        np.testing.assert_allclose(losses, losses_of_flax, rtol=1e-5)


# The model's own constraints.


def test_constraints_in_the_model_follow_the_layout(mesh):
    variables = INIT(KEY, X)
    in_layout = LAYOUT.computing(loss_fn, mesh)
    found = specs_in(in_layout, model=variables, rng=None, state=None, x=X)
    # Two in the loop over layers, and none of parameters.
    assert found == [P("data", "model"), P("data", None)]
    assert specs_in(loss_fn, model=variables, rng=None, state=None, x=X) == []
    # What a preset calls neurons is called otherwise in the model.
    preset = Layout.tensor_parallel(names=NAMES, blocks=()).computing(loss_fn, mesh)
    assert specs_in(preset, model=variables, rng=None, state=None, x=X) == found


def test_constraints_in_the_model_split_the_computation(mesh):
    """The batch is on every device, and only the model says that its activations are split."""

    def flops(layout):
        state, step = built(mesh, layout)
        return step.lower(state, x=X).compile().cost_analysis()["flops"]

    whole = Layout(parameters={}, compute={}, blocks=())
    split = Layout(parameters={}, compute=RULES, blocks=())
    assert flops(split) < flops(whole) / 4


def test_an_evaluation_step_computes_in_the_layout_too(mesh, losses_of_flax):
    state, _ = built(mesh)
    evaluate = build_eval_step_fn(LAYOUT.computing(loss_fn, mesh))
    assert float(evaluate(state, x=X)[0]) == pytest.approx(losses_of_flax[0], rel=1e-5)
    assert "sdy.sharding_constraint" in evaluate.lower(state, x=X).as_text()
    plain = build_eval_step_fn(loss_fn).lower(state, x=X).as_text()
    assert "sdy.sharding_constraint" not in plain


def test_constraints_are_in_force_without_compilation(mesh):
    def constrained(model, rng, state, x):
        return nn.with_logical_constraint(x, ("batch", "hidden")), state, {}

    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P()))
    in_layout = LAYOUT.computing(constrained, mesh)
    found, _, _ = in_layout(model={"params": {}}, rng=None, state=None, x=x)
    assert found.sharding == NamedSharding(mesh, P("data", "model"))


def test_names_without_rules_are_mesh_axes_in_constraints_too(mesh):
    def constrained(model, rng, state, x):
        return nn.with_logical_constraint(x, ("data", "model")).sum(), state, {}

    in_layout = Layout(parameters=None, compute=None).computing(constrained, mesh)
    box = nn.Partitioned(jnp.ones((8, 8)), ("data", "model"))
    found = specs_in(in_layout, model={"w": box}, rng=None, state=None, x=X)
    assert found == [P("data", "model")]


def test_boxes_of_mesh_axes_that_do_not_exist_are_used_in_a_layout(mesh):
    """Flax would take the names of ``Partitioned`` for mesh axes where a mesh is in force."""

    class Annotated(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.ones, ("embed", "hidden"))
            return x @ self.param("w", init, (16, 4))

    def loss(model, rng, state, x):
        assert model["params"]["w"].names == ("embed", "hidden")
        return Annotated().apply(model, x).sum(), state, {}

    variables = jax.eval_shape(Annotated().init, KEY, X)
    in_layout = LAYOUT.computing(loss, mesh)
    assert specs_in(in_layout, model=variables, rng=None, state=None, x=X) == []


@pytest.mark.parametrize("annotated", [nn.with_logical_partitioning, nn.with_partitioning])
def test_a_kernel_of_more_than_two_dimensions_has_a_name_for_each(mesh, annotated):
    """Flax takes the kernel of ``DenseGeneral`` out of its box while it is flat."""
    ones = nn.initializers.ones
    heads = nn.DenseGeneral(
        (4, 2),
        kernel_init=annotated(ones, ("embed", "hidden", "kv")),
        bias_init=annotated(ones, ("hidden", "kv")),
    )

    class Model(nn.Module):
        heads: nn.Module  # Two calls of one module: its initialisers are as they were.

        @nn.compact
        def __call__(self, x):
            y = nn.with_logical_constraint(self.heads(x), ("batch", "hidden", None))
            return (y + self.heads(2 * x)).sum()

    def loss(model, rng, state, x):
        return Model(heads).apply(model, x), state, {}

    variables = Model(heads).init(KEY, X)
    assert specs_in(LAYOUT.computing(loss, mesh), model=variables, rng=None, state=None, x=X) == [
        P("data", "model", None)
    ]
    found, _, _ = jax.jit(
        lambda v: LAYOUT.computing(loss, mesh)(model=v, rng=None, state=None, x=X)
    )(variables)
    np.testing.assert_allclose(found, Model(heads).apply(variables, X), rtol=1e-6)


def test_rules_that_flax_does_not_have_are_refused(mesh):
    rules = fully_sharded() | {"batch": "data"}
    in_layout = Layout(parameters=rules, compute=rules).computing(loss_fn, mesh)
    message = (
        r"this model constrains its activations by Flax's logical axis rules, .*\n"
        r"  largest dimension -> 'data' .*: Flax has only rules for names. Leave it out of compute"
    )
    with pytest.raises(RuleTypeError, match=message):
        in_layout(model=INIT(KEY, X), rng=None, state=None, x=X)
    rules = {("a", "b"): "data", ("data", "model"): ("data", "model")}
    in_layout = Layout(parameters={}, compute=rules).computing(loss_fn, mesh)
    with pytest.raises(
        RuleTypeError, match=r"\('a', 'b'\) -> 'data': Flax has only texts"
    ) as caught:
        in_layout(model=INIT(KEY, X), rng=None, state=None, x=X)
    assert len(caught.value.problems) == 1


def test_other_rules_in_force_are_refused(mesh):
    in_layout = LAYOUT.computing(loss_fn, mesh)
    variables = INIT(KEY, X)
    message = r"nn.logical_axis_rules is in force with other rules, \(\('batch', None\),\), than"
    with nn.logical_axis_rules((("batch", None),)), pytest.raises(RuleTypeError, match=message):
        in_layout(model=variables, rng=None, state=None, x=X)
    with nn.logical_axis_rules((("batch", "data"), ("hidden", "model"))):
        found = specs_in(in_layout, model=variables, rng=None, state=None, x=X)
    assert found == [P("data", "model"), P("data", None)]


def test_models_of_others_are_computed_as_they_were(mesh):
    def loss(model, rng, state, x):
        return model, jax.sharding.get_abstract_mesh().empty, nn.get_logical_axis_rules()

    model = {"w": jnp.ones(3)}
    in_layout = LAYOUT.computing(loss, mesh)
    assert in_layout(model=model, rng=None, state=None, x=None) == (model, True, ())


def test_the_documented_example_runs_as_pasted(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "")  # Put back afterwards.
    page = (Path(__file__).parents[2] / "docs" / "models_from_elsewhere.md").read_text("utf-8")
    section = page.partition("## Flax linen\n")[2].partition("\n## ")[0]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    names = {"__name__": "pasted"}
    exec(code, names)
    shown = capsys.readouterr().out
    assert "'hidden' -> 'model'" in shown
    losses = [float(line.split()[1]) for line in shown.splitlines() if line.startswith("loss")]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    kernel = names["variables"]["params"]["ScanBlock_0"]["Dense_0"]["kernel"]
    assert kernel.names == ("layers", "embed", "hidden")
