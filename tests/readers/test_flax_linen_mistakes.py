"""What people new to this library, or to Flax linen, are told."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.core import freeze
from flax.linen import partitioning
from flax.training.train_state import TrainState as FlaxState
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from penzai import pz

from penzai_shard import (
    TrainState,
    abstract_model,
    build_train_step_fn,
    make_plan,
    name_axes,
    place,
    restore_params,
    save_params,
    sharded_init,
    train_state_sharding,
    with_params,
)
from penzai_shard.errors import (
    CheckpointMismatchError,
    PlanError,
    RuleTypeError,
    ShardingError,
)
from penzai_shard.layouts import Layout
from penzai_shard.meshes import make_mesh

MESH = AbstractMesh((2, 4), ("data", "model"))
RULES = {"hidden": "model"}
KEY = jax.random.key(0)
X = jnp.ones((4, 8))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "hidden"))
        return nn.Dense(8, kernel_init=kernel, use_bias=False)(x)


class WithoutCall(nn.Module):
    def setup(self):
        self.dense = nn.Dense(8)

    def encode(self, x):
        return self.dense(x)


MODEL = Model()


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 2, "model": 4})


@pytest.fixture(scope="module")
def variables():
    return jax.jit(MODEL.init)(KEY, X)


@pytest.mark.parametrize("module", [MODEL, WithoutCall()], ids=["called", "not_called"])
@pytest.mark.parametrize(
    ("called", "given"),
    [
        ("make_plan", lambda module, mesh: make_plan(module, mesh, RULES)),
        ("place", lambda module, mesh: place(module, mesh, RULES)),
        ("restore_params", lambda module, mesh: restore_params("nowhere", module, mesh, RULES)),
        (
            "TrainState.initial_state",
            lambda module, mesh: TrainState.initial_state(module, optax.sgd(1.0), KEY),
        ),
        (
            "sharded_init",
            lambda module, mesh: sharded_init(module, KEY, X, mesh=mesh, rules=RULES),
        ),
        ("abstract_model", lambda module, mesh: abstract_model(module, KEY, X)),
    ],
)
def test_a_module_has_no_arrays_and_its_init_makes_them(mesh, module, called, given):
    message = (
        rf"{re.escape(called)} takes .*, not a {type(module).__name__}, which holds no arrays: its "
        r"init makes them. Give that and its arguments: abstract_model\(module.init, key, x\), "
        r"without memory, to plan or to restore; sharded_init\(module.init, key, x, mesh=mesh, "
    )
    with pytest.raises(RuleTypeError, match=message):
        given(module, mesh)


def test_a_class_of_modules_has_no_arrays_either():
    with pytest.raises(RuleTypeError, match=r"not the class Model.*\(Model\(...\).init, key"):
        make_plan(Model, MESH, RULES)


def test_arrays_without_their_boxes_have_no_names(variables):
    message = (
        r"params/Dense_0/kernel: this array of shape \(8, 8\) has no logical axis names. Annotate "
        r"its initialiser, nn.with_logical_partitioning\(initializer, .*\), and keep what "
        r"module.init returns in its boxes, which nn.unbox takes off; or name it by its path"
    )
    unboxed = nn.unbox(variables)
    state = FlaxState.create(apply_fn=len, params=unboxed["params"], tx=optax.sgd(1.0))
    for tree in (unboxed, freeze(unboxed), state):
        with pytest.raises(PlanError, match=message):
            make_plan(tree, MESH, RULES)


def test_names_beside_the_parameters_are_refused_whatever_the_options(mesh, tmp_path):
    class Older(nn.Module):
        @nn.compact
        def __call__(self, x):
            ones = nn.initializers.ones
            return x @ partitioning.param_with_axes("w", ones, (8, 8), axes=("embed", "hidden"))

    variables = jax.eval_shape(Older().init, KEY, X)
    message = (
        r"params_axes/w_axes: the axis names \('embed', 'hidden'\), which "
        r"nn\.partitioning\.param_with_axes keeps beside its array, are not read\. Annotate the "
        r"initialiser, nn\.with_logical_partitioning\(.*\); or take the collection params_axes "
        r'out, and name the arrays by their paths: name_axes\(\{"params": variables\["params"\]\}'
    )
    for call in (
        lambda: make_plan(variables, MESH, RULES),
        lambda: make_plan(variables, MESH, RULES, on_unnamed="replicate"),
        lambda: make_plan([variables], MESH, RULES, on_unnamed="infer"),
        lambda: sharded_init(Older().init, KEY, X, mesh=mesh, rules=RULES, on_unnamed="replicate"),
        lambda: TrainState.initial_state(variables, optax.sgd(1.0), KEY),
        lambda: save_params(tmp_path / "older", variables),
    ):
        with pytest.raises(ShardingError, match=message):
            call()
    named = name_axes({"params": variables["params"]}, {"params/w": ("embed", "hidden")})
    assert make_plan(named, MESH, {"hidden": "model"}).leaves[0].spec == P(None, "model")


def test_frozen_dictionaries_are_planned_placed_and_restored(variables, mesh, tmp_path):
    frozen = freeze(variables)
    plan = make_plan(frozen, mesh, RULES)
    assert [leaf.spec for leaf in plan.leaves] == [
        leaf.spec for leaf in make_plan(variables, mesh, RULES).leaves
    ]
    assert jax.tree.structure(place(frozen, plan)) == jax.tree.structure(frozen)
    save_params(tmp_path / "saved", variables)
    restored = restore_params(tmp_path / "saved", frozen, mesh, RULES)
    assert jax.tree.structure(restored) == jax.tree.structure(frozen)
    assert restored["params"]["Dense_0"]["kernel"].value.sharding == plan.leaves[0].sharding


def test_parameters_and_variables_that_are_taken_for_each_other(variables, mesh, tmp_path):
    save_params(tmp_path / "variables", {**variables, "batch_stats": {"mean": jnp.ones(3)}})
    message = (
        r"params/Dense_0/kernel: the checkpoint has all names of the model under 'params'. "
        r"Give the model under the same keys: \{'params': model\}"
    )
    with pytest.raises(CheckpointMismatchError, match=message):
        restore_params(tmp_path / "variables", variables["params"], mesh, RULES)
    save_params(tmp_path / "params", variables["params"])
    message = (
        r"params/Dense_0/kernel: the model has all names under 'params', and the checkpoint has "
        r"them without. Give what is in it: model\['params'\]"
    )
    with pytest.raises(CheckpointMismatchError, match=message):
        restore_params(tmp_path / "params", variables, mesh, RULES)
    with pytest.raises(CheckpointMismatchError, match=r"the values given have all names of the"):
        with_params(variables["params"], variables)


def test_a_train_state_of_flax_is_not_a_model(variables, mesh):
    state = FlaxState.create(apply_fn=len, params=variables["params"], tx=optax.sgd(1.0))
    message = r"flax.training.train_state.TrainState has one already. Give .* \{'params': state.par"
    with pytest.raises(RuleTypeError, match=message):
        TrainState.initial_state(state, optax.sgd(1.0), KEY)
    own = TrainState.initial_state(variables, optax.sgd(1.0), KEY)
    with pytest.raises(RuleTypeError, match=r"has one already. Give the model in it: state.model"):
        TrainState.initial_state(own, optax.sgd(1.0), KEY)
    step = build_train_step_fn(lambda model, rng, state, x: (0.0, state, {}))
    with pytest.raises(ShardingError, match=r"got one of another library, flax.training.train_st"):
        step(state, x=X)
    with pytest.raises(RuleTypeError, match=r"cannot restore parameters into this TrainState: it"):
        restore_params("nowhere", state, mesh, RULES)
    with pytest.raises(RuleTypeError, match=r"not a flax.training.train_state.TrainState. For"):
        train_state_sharding(state, MESH, RULES)


def test_a_layout_is_built_with_init_and_not_with_the_module(mesh):
    layout = Layout(parameters=RULES, compute=RULES)
    with pytest.raises(RuleTypeError, match=r"not a Model, which holds no arrays: its init makes"):
        layout.build(MODEL, KEY, X, mesh=mesh, loss_fn=len, optimizer=optax.sgd(1.0), rng=KEY)


def test_what_would_not_be_trained_beside_variables_of_penzai_is_refused():
    model = {
        "own": pz.Parameter(value=pz.nx.ones({"embed": 8}), label="own"),
        "box": nn.Partitioned(jnp.ones(8), ("embed",)),
        "variable": nnx.Param(jnp.ones(8)),
    }
    with pytest.raises(
        ShardingError,
        match=r"(?s)box: this Partitioned is beside variables of Penzai, which alone are trained"
        r".*pz.Parameter\(value=pz.nx.wrap\(array, ...\).*variable: this Param is",
    ):
        TrainState.initial_state(model, optax.sgd(0.1), KEY)
    model["box"] = pz.Parameter(value=pz.nx.wrap(model["box"].value, "embed"), label="box")
    del model["variable"]
    assert set(TrainState.initial_state(model, optax.sgd(0.1), KEY).params) == {"own", "box"}
