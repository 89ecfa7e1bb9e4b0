"""The guides that users come from, in their own names, with the import changed.

Penzai's guide on sharding, Flax's on ``pjit``, Haliax's tutorial (of Levanter), and torchax's on
distributed arrays. What they compute is compared with the functions that the guides use.
"""

import itertools
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from penzai.deprecated.v1 import pz
from penzai.deprecated.v1.example_models import gemma
from penzai.deprecated.v1.toolshed import sharding_util as theirs_v1
from penzai.toolshed import sharding_util as theirs

import penzai_shard as sharding_util
from tests.models import hax

pzs = sharding_util
DEVICES = np.array(jax.devices())


def assert_same_shardings(ours, others):
    """Where two trees of arrays or shardings have one structure, and their arrays lie alike."""
    assert jax.tree.structure(ours) == jax.tree.structure(others)
    for a, b in zip(*map(jax.tree.leaves, (ours, others)), strict=True):
        a, b = (getattr(x, "sharding", x) for x in (a, b))
        assert a.is_equivalent_to(b, 4)


# Penzai: Jitting and Sharding Penzai Models

FOO_BAR = Mesh(DEVICES.reshape((4, 2)), axis_names=("foo", "bar"))
ON_DEVICES = Mesh(DEVICES, axis_names=("devices",))


@pytest.fixture(scope="module")
def tiny_transformer_def():
    return gemma.model_core.GemmaTransformer.from_config(
        gemma.model_core.GemmaTransformerConfig(
            num_heads=2,
            embedding_dim=16,
            projection_dim=8,
            single_kv_head=False,
            mlp_hidden_dim=32,
            num_decoder_blocks=1,
            vocab_size=20,
            parameter_dtype=jnp.float32,
            activation_dtype=jnp.float32,
        )
    )


def test_penzai_manually_sharding_named_arrays():
    arr = pz.nx.arange("foo", 1, 5) + pz.nx.arange("bar", 0, 4)
    sharding_for_arr = jax.tree.map(lambda _: NamedSharding(FOO_BAR, P("foo", "bar")), arr)
    sharded_arr = jax.device_put(arr, sharding_for_arr)
    assert_same_shardings(sharding_util.name_to_name_sharding(sharded_arr, FOO_BAR), sharded_arr)


def test_penzai_automatically_building_shardings():
    shapes = {"one": {"a": 4, "b": 8, "c": 6}, "two": {"a": 8}, "three": {"b": 4, "d": 12}}
    some_array_tree = {name: pz.nx.ones(shape) for name, shape in shapes.items()}
    already_matching_mesh = Mesh(DEVICES.reshape((4, 2)), axis_names=("b", "a"))
    rules = {"axis_name_to_mesh_name": {"a": "bar", "b": "foo"}}
    for mesh, given in ((FOO_BAR, rules), (already_matching_mesh, {})):
        shardings = sharding_util.name_to_name_sharding(some_array_tree, mesh, **given)
        expected = theirs.name_to_name_sharding(some_array_tree, mesh, **given)
        assert_same_shardings(shardings, expected)
        assert_same_shardings(jax.device_put(some_array_tree, shardings), expected)
        bundled = sharding_util.name_to_name_device_put(some_array_tree, mesh, **given)
        assert_same_shardings(bundled, expected)


def parameters_of(model):
    return pz.select(model).at_instances_of(pz.nn.Parameter).get_sequence()


def test_penzai_sharding_parameter_initializers(tiny_transformer_def):
    arguments = tiny_transformer_def, jax.random.key(42), ON_DEVICES, {"embedding": "devices"}
    tiny_transformer, expected = (
        parameters_of(library.initialize_parameters_sharded(*arguments))
        for library in (sharding_util, theirs_v1)
    )
    assert_same_shardings(tiny_transformer, expected)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), tiny_transformer, expected)
    # The jitted initialiser of the guide, with its "desired sharding specification".
    abstract = sharding_util.abstract_model(pz.nn.initialize_parameters, *arguments[:2])
    out_shardings = sharding_util.name_to_name_sharding(abstract, *arguments[2:])
    sharded_initializer = jax.jit(pz.nn.initialize_parameters, out_shardings=out_shardings)
    assert_same_shardings(parameters_of(sharded_initializer(*arguments[:2])), expected)


def test_penzai_parameter_checkpointing(tiny_transformer_def):
    found = pz.select(tiny_transformer_def).at_instances_of(pz.nn.UninitializedParameter)
    param_dict_structure = {x.name: x.as_empty_parameter().value for x in found.get_sequence()}
    arguments = param_dict_structure, ON_DEVICES, {"embedding": "devices"}
    for as_struct in (False, True):
        ours, expected = (
            library.name_to_name_sharding(*arguments, as_shape_dtype_struct=as_struct)
            for library in (sharding_util, theirs)
        )
        assert_same_shardings(ours, expected)
    unplaced = [x.update(sharding=None) for x in jax.tree.leaves(ours)]
    assert unplaced == jax.tree.leaves(param_dict_structure)
    # Values for the structs, as a checkpoint would give them, into the uninitialised model.
    param_dict = jax.tree.map(lambda s: jax.device_put(np.ones(s.shape), s.sharding), ours)
    restored = found.apply(lambda uninit: uninit.initialize_with_value(param_dict[uninit.name]))
    params = parameters_of(sharding_util.place(restored, *arguments[1:]))
    assert_same_shardings({param.name: param.value for param in params}, param_dict)


# Flax: Scale up Flax Modules on multiple devices with pjit


class DotReluDot(nn.Module):
    depth: int
    logical: bool

    @nn.compact
    def __call__(self, x):
        annotate, constrain = nn.with_partitioning, jax.lax.with_sharding_constraint
        batch, embed, hidden = "data", None, "model"
        if self.logical:
            annotate, constrain = nn.with_logical_partitioning, nn.with_logical_constraint
            batch, embed, hidden = "batch", "embed", "hidden"
        init = nn.initializers.xavier_normal()
        W1 = self.param("W1", annotate(init, (embed, hidden)), (x.shape[-1], self.depth))
        y = constrain(jax.nn.relu(jnp.dot(x, W1)), P(batch, hidden))
        W2 = self.param("W2", annotate(init, (hidden, embed)), (self.depth, x.shape[-1]))
        return constrain(jnp.dot(y, W2), P(batch, embed)), None


class MLP(nn.Module):
    num_layers: int
    depth: int
    logical: bool

    @nn.compact
    def __call__(self, x):
        partition = {nn.PARTITION_NAME: "layer" if self.logical else None}
        options = {"length": self.num_layers, "metadata_params": partition}
        over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(DotReluDot, **over, **options)(self.depth, self.logical)(x)[0]


def init_fn(k, x, model, optimizer):
    params, create = model.init(k, x)["params"], train_state.TrainState.create
    return create(apply_fn=model.apply, params=params, tx=optimizer)


def train_step(state, x):
    def loss_unrolled(params):
        return state.apply_fn({"params": params}, x).sum()

    return state.apply_gradients(grads=jax.grad(loss_unrolled)(state.params))


# Ordered, as Flax reads them: the second rule for "hidden" is not reached.
LOGICAL_RULES = (("batch", "data"), ("hidden", "model"), ("hidden", "data"))


@pytest.mark.parametrize("logical", [False, True], ids=["mesh axes", "logical axes"])
def test_flax_specify_sharding_and_apply_to_the_train_step(logical):
    mesh = Mesh(DEVICES.reshape(2, 4), axis_names=("data", "model"))
    x, k = jnp.ones((8, 16)), jax.random.PRNGKey(0)
    static = MLP(num_layers=3, depth=16, logical=logical), optax.adam(learning_rate=0.001)
    rules = LOGICAL_RULES if logical else None
    x_sharding = NamedSharding(mesh, P("data", None))
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules or ()):
        abstract_variables = jax.eval_shape(lambda k, x: init_fn(k, x, *static), k, x)
        tree = sharding_util.name_to_name_sharding(abstract_variables, mesh, rules)
        jit_init_fn = jax.jit(init_fn, static_argnums=(2, 3), out_shardings=tree)
        jit_step_fn = jax.jit(train_step, in_shardings=(tree, x_sharding), out_shardings=tree)
        initialized_state = jit_init_fn(k, x, *static)
        new_state = jit_step_fn(jit_step_fn(initialized_state, x), x)
    assert (int(new_state.step), jit_step_fn._cache_size()) == (2, 1)

    # Flax's own specs; None, where it says nothing.
    specs = nn.get_partition_spec(abstract_variables)
    specs = nn.logical_to_mesh(specs, rules) if logical else specs
    specs = jax.tree.leaves(specs, is_leaf=lambda x: x is None or isinstance(x, P))
    assert specs.count(P(None, None, "model")) == 3
    for state in (tree, initialized_state, new_state):
        found = [getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(state)]
        expected = [NamedSharding(mesh, spec or P()) for spec in specs]
        assert all(a.is_equivalent_to(b, 3) for a, b in zip(found, expected, strict=True))


# Haliax: the tutorial of Levanter

HALIAX_DEPRECATIONS = pytest.mark.filterwarnings("ignore:jax\\..* is deprecated:DeprecationWarning")
Batch, Embed, Mlp = hax.Axis("batch", 16), hax.Axis("embed", 8), hax.Axis("mlp", 32)


class Gpt2Mlp(eqx.Module):
    c_fc: hax.nn.Linear
    c_proj: hax.nn.Linear

    @staticmethod
    def init(Embed, Mlp, *, key):
        k_fc, k_proj = jax.random.split(key)
        c_fc = hax.nn.Linear.init(Out=Mlp, In=Embed, key=k_fc)
        return Gpt2Mlp(c_fc, hax.nn.Linear.init(Out=Embed, In=Mlp, key=k_proj))

    def __call__(self, x):
        return self.c_proj(hax.nn.gelu(self.c_fc(x)))


@HALIAX_DEPRECATIONS
def test_haliax_named_jit_of_functions():
    mesh = Mesh(DEVICES.reshape((4, 2)), ("model", "data"))
    Intermediate = hax.Axis("intermediate", 32)
    inputs, weights = hax.ones((Batch, Embed)), hax.ones((Embed, Intermediate))

    def matmul(weights, inputs):
        return weights.dot(inputs, axis=Embed)

    axis_resources, out = {"intermediate": "model", "batch": "data"}, {"batch": "data"}
    ours, theirs = partial(pzs.named_jit, matmul, mesh), partial(hax.named_jit, matmul)
    theirs_apart = partial(theirs, in_axis_resources=axis_resources, out_axis_resources=out)
    pairs = [(ours(rules), theirs(rules)) for rules in ({"embed": "data"}, axis_resources)]
    pairs.append((ours(in_rules=axis_resources, out_rules=out), theirs_apart()))
    with jax.set_mesh(mesh):
        for compiled, expected in pairs:
            results = compiled(weights, inputs), expected(weights, inputs)
            assert_same_shardings(*results)
            np.testing.assert_array_equal(*(result.array for result in results))


FSDP = {"data": 8}, {"batch": "data"}, {"embed": "data"}
TENSOR_PARALLEL = {"data": 4, "model": 2}, *(m | {"mlp": "model"} for m in FSDP[1:])


@HALIAX_DEPRECATIONS
@pytest.mark.parametrize(("shape", "compute_mapping", "param_mapping"), [FSDP, TENSOR_PARALLEL])
def test_haliax_parameter_and_compute_mappings(shape, compute_mapping, param_mapping):
    mesh, model_key = pzs.make_mesh(shape), jax.random.PRNGKey(0)
    optimizer = optax.adamw(learning_rate=1e-2)
    batch = hax.random.normal(jax.random.key(1), (Batch, Embed))

    def train(named_jit, auto_sharded):
        def compute_loss(model, x):
            return hax.mean((auto_sharded(model(auto_sharded(x))) - x) ** 2).scalar()

        def train_step(model, opt_state, x):
            loss, grads = eqx.filter_value_and_grad(compute_loss)(model, x)
            updates, opt_state = optimizer.update(grads, opt_state, params=model)
            return loss, eqx.apply_updates(model, updates), opt_state

        model = named_jit(Gpt2Mlp.init)(Embed, Mlp, key=model_key)
        opt_state = named_jit(optimizer.init)(model)
        for _ in range(2):
            loss, model, opt_state = named_jit(train_step)(model, opt_state, batch)
        return model, opt_state[0].mu, opt_state[0].nu, loss

    def theirs(x):
        with hax.axis_mapping(compute_mapping):
            return hax.auto_sharded(x)

    ours = train(
        lambda function: pzs.named_jit(function, mesh, param_mapping),
        lambda x: pzs.place(x, mesh, compute_mapping),
    )
    with jax.set_mesh(mesh):
        expected = train(partial(hax.named_jit, axis_resources=param_mapping), theirs)
    assert_same_shardings(ours[:3], expected[:3])
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), ours, expected)


# torchax: Distributed arrays and automatic parallelization. Arrays of NumPy stand for its tensors.

A_B = jax.make_mesh((4, 2), ("a", "b"))
SPECS = [P("a", "b"), P("b", "a"), P("a", None), P(None, "b"), P(None, "a"), P(("a", "b"), None)]


def lay_out(tensors, name_to_sharding, mesh):
    named = pzs.name_axes(tensors, name_to_sharding)
    return pzs.without_names(pzs.place(named, mesh))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_torchax_sharding_basics(spec):
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    expected = jax.device_put(x, NamedSharding(A_B, spec)).sharding.devices_indices_map(x.shape)
    rules = [*zip(("rows", "columns"), spec, strict=True)]
    for names, given in ((spec, None), (("rows", "columns"), rules)):
        named = pzs.name_axes({"x": x}, {"x": names})
        y = pzs.without_names(pzs.name_to_name_device_put(named, A_B, given))["x"]
        np.testing.assert_array_equal(y, x)
        assert y.sharding.devices_indices_map(x.shape) == expected


def test_torchax_computation_follows_data_sharding():
    def put(spec):
        return lay_out({"x": np.ones((8, 8), np.float32)}, {"x": spec}, A_B)["x"]

    assert jnp.sin(put(P("a", "b"))).sharding.spec == P("a", "b")
    w = put(P("a", None)) @ put(P(None, "b"))
    assert jnp.copy(w).sharding.spec == w.sharding.spec == P("a", "b")


def test_torchax_constraining_intermediates():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    for spec in (P("y", "x"), P()):
        f = jax.jit(lambda x, spec=spec: lay_out({"x": x + 1}, {"x": spec}, mesh)["x"])
        assert f(jnp.ones((8, 8))).sharding.spec == spec


LAYER_SIZES = [16, 32, 32, 32, 8]
NAME_TO_SHARDING = {
    **{f"layers.{i}.{kind}": P() for i in range(4) for kind in ("weight", "bias")},
    "layers.1.weight": P("model"),
    "layers.1.bias": P("model"),
    "layers.2.weight": P(None, "model"),
}
DATA_PARALLEL = jax.make_mesh((8,), ("batch",)), {"**": P()}
MODEL_PARALLEL = jax.make_mesh((4, 2), ("batch", "model")), NAME_TO_SHARDING


@pytest.mark.parametrize(("mesh", "name_to_sharding"), [DATA_PARALLEL, MODEL_PARALLEL])
def test_torchax_neural_networks(mesh, name_to_sharding):
    params, rng = {}, np.random.default_rng(0)
    for i, (n_in, n_out) in enumerate(itertools.pairwise(LAYER_SIZES)):
        params[f"layers.{i}.weight"] = rng.normal(size=(n_out, n_in)).astype(np.float32)
        params[f"layers.{i}.bias"] = rng.normal(size=n_out).astype(np.float32)
    batch = {"inputs": rng.normal(size=(64, LAYER_SIZES[0])).astype(np.float32)}

    @jax.jit
    def predict(params, batch):
        x = batch["inputs"]
        for i in range(4):
            x = jnp.maximum(x @ params[f"layers.{i}.weight"].T + params[f"layers.{i}.bias"], 0)
        return x

    placed = lay_out(params, name_to_sharding, mesh)
    for name, array in placed.items():
        assert array.sharding.spec == name_to_sharding.get(name, P())
        np.testing.assert_array_equal(array, params[name])
    result = predict(placed, lay_out(batch, {"*": P("batch", None)}, mesh))
    assert result.sharding.spec == P("batch")
    np.testing.assert_allclose(result, predict(params, batch), rtol=1e-4)
