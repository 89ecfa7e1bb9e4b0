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
from penzai import pz as pz_v2
from penzai.deprecated.v1 import pz
from penzai.deprecated.v1.example_models import gemma
from penzai.deprecated.v1.toolshed import sharding_util as theirs_v1
from penzai.models.transformer import model_parts
from penzai.toolshed import sharding_util as theirs

import penzai_shard as sharding_util
from tests.models import hax, llama

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


TINY = gemma.model_core.GemmaTransformerConfig(
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
tiny_transformer_def = gemma.model_core.GemmaTransformer.from_config(TINY)


def test_penzai_automatically_building_shardings():
    shapes = {"one": {"a": 4, "b": 8, "c": 6}, "two": {"a": 8}, "three": {"b": 4, "d": 12}}
    some_array_tree = {name: pz.nx.ones(shape) for name, shape in shapes.items()}
    already_matching_mesh = Mesh(DEVICES.reshape((4, 2)), axis_names=("b", "a"))
    for mesh, *rules in ((FOO_BAR, {"a": "bar", "b": "foo"}), (already_matching_mesh,)):
        shardings = sharding_util.name_to_name_sharding(some_array_tree, mesh, *rules)
        expected = theirs.name_to_name_sharding(some_array_tree, mesh, *rules)
        bundled = sharding_util.name_to_name_device_put(some_array_tree, mesh, *rules)
        for ours in (shardings, jax.device_put(some_array_tree, shardings), bundled):
            assert_same_shardings(ours, expected)


def parameters_of(model):
    return pz.select(model).at_instances_of(pz.nn.Parameter).get_sequence()


def test_penzai_sharding_parameter_initializers():
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


def test_penzai_parameter_checkpointing():
    found = pz.select(tiny_transformer_def).at_instances_of(pz.nn.UninitializedParameter)
    param_dict_structure = {x.name: x.as_empty_parameter().value for x in found.get_sequence()}
    arguments = param_dict_structure, ON_DEVICES, {"embedding": "devices"}
    ours, expected = (
        library.name_to_name_sharding(*arguments, as_shape_dtype_struct=True)
        for library in (sharding_util, theirs)
    )
    assert_same_shardings(ours, expected)
    # Values for the structs, as a checkpoint would give them, into the uninitialised model.
    param_dict = jax.tree.map(lambda s: jax.device_put(np.ones(s.shape), s.sharding), ours)
    restored = found.apply(lambda uninit: uninit.initialize_with_value(param_dict[uninit.name]))
    params = parameters_of(sharding_util.place(restored, *arguments[1:]))
    assert_same_shardings({param.name: param.value for param in params}, param_dict)


# Penzai, both APIs: a model, its blocks, its parameters, how a loss calls it


def call_v1(model, tokens):
    return model(gemma.model_core.GemmaInputs.from_basic_segments(tokens))


APIS = {
    "v1": (
        lambda: sharding_util.initialize_parameters_sharded(
            tiny_transformer_def, jax.random.key(42), ON_DEVICES, {"embedding": "devices"}
        ),
        gemma.model_core.GemmaTransformerBlock,
        pz.nn.Parameter,
        call_v1,
    ),
    "v2": (
        lambda: sharding_util.sharded_init(llama, mesh=ON_DEVICES, rules={"embedding": "devices"}),
        model_parts.TransformerBlock,
        pz_v2.Parameter,
        lambda model, tokens: model(tokens),
    ),
}
EXAMPLES = pz.nx.ones({"batch": 8, "seq": 5}, dtype=jnp.int32)


@pytest.fixture(params=APIS, scope="module")
def api(request):
    build, *rest = APIS[request.param]
    return build(), *rest


def make_loss(call):
    def simplified_xent_loss_fn(model, rng, state, input_examples):
        del rng, state
        outputs = call(model, input_examples[{"seq": pz.slice[:-1]}])
        all_log_probs = pz.nx.nmap(jax.nn.log_softmax)(outputs.untag("vocabulary"))
        correct_next_tokens = input_examples[{"seq": pz.slice[1:]}]
        correct_log_probs = all_log_probs.tag("vocabulary")[{"vocabulary": correct_next_tokens}]
        loss = -correct_log_probs.untag("batch", "seq").unwrap().mean()
        return loss, None, {"loss": loss}

    return simplified_xent_loss_fn


def test_penzai_sharding_training_steps(api):
    model, _, parameter, call = api
    train_step = sharding_util.build_train_step_fn(make_loss(call), jit=True)
    optimizer_def = optax.adamw(5e-5, weight_decay=0.01)
    train_state = sharding_util.TrainState.initial_state(
        model=model, optimizer_def=optimizer_def, root_rng=jax.random.key(42)
    )
    updated, outs = train_step(train_state, input_examples=EXAMPLES)
    declared_step = sharding_util.build_train_step_fn(
        make_loss(call),
        jit=True,
        input_kwarg_shardings={
            "input_examples": sharding_util.name_to_name_sharding(
                EXAMPLES, ON_DEVICES, axis_name_to_mesh_name={"batch": "devices"}
            )
        },
        train_state_shardings=sharding_util.name_to_name_sharding(
            train_state,
            ON_DEVICES,
            axis_name_to_mesh_name={"embedding": "devices"},
            ignore_unnamed_arrays=True,
        ),
    )
    declared, same_outs = declared_step(train_state, input_examples=EXAMPLES)
    np.testing.assert_allclose(same_outs["loss"], outs["loss"], rtol=1e-6)
    for state in (updated, declared):
        found = pz.select(state.model).at_instances_of(parameter).get_sequence()
        before = pz.select(model).at_instances_of(parameter).get_sequence()
        specs = [[p.value.data_array.sharding.spec for p in ps] for ps in (found, before)]
        assert specs[0] == specs[1]
        assert {*itertools.chain(*specs[0])} >= {"devices"}


def test_penzai_adding_sharding_constraints(api):
    model, block, _, call = api
    layer = sharding_util.ConstrainShardingByName(
        ON_DEVICES, axis_name_to_mesh_name={"batch": "devices"}
    )
    constrained = pz.select(model).at_instances_of(block).insert_after(layer)
    selection = pz.select(constrained).at_instances_of(sharding_util.ConstrainShardingByName)
    train_state = sharding_util.TrainState.initial_state(
        model=constrained, optimizer_def=optax.adamw(5e-5), root_rng=jax.random.key(42)
    )
    train_step = sharding_util.build_train_step_fn(make_loss(call))
    text = train_step.lower(train_state, input_examples=EXAMPLES).as_text()
    assert text.count("sdy.sharding_constraint") >= selection.count() > 0
    unconstrained = pz.select(selection.remove_from_parent())
    assert unconstrained.at_instances_of(sharding_util.ConstrainShardingByName).count() == 0


# Flax: Scale up Flax Modules on multiple devices with pjit


class DotReluDot(nn.Module):
    logical: bool

    @nn.compact
    def __call__(self, x):
        annotate, constrain = nn.with_partitioning, jax.lax.with_sharding_constraint
        batch, embed, hidden = "data", None, "model"
        if self.logical:
            annotate, constrain = nn.with_logical_partitioning, nn.with_logical_constraint
            batch, embed, hidden = "batch", "embed", "hidden"
        init = nn.initializers.xavier_normal()
        W1 = self.param("W1", annotate(init, (embed, hidden)), (16, 16))
        y = constrain(jax.nn.relu(jnp.dot(x, W1)), P(batch, hidden))
        W2 = self.param("W2", annotate(init, (hidden, embed)), (16, 16))
        return constrain(jnp.dot(y, W2), P(batch, embed)), None


class MLP(nn.Module):
    logical: bool

    @nn.compact
    def __call__(self, x):
        partition = {nn.PARTITION_NAME: "layer" if self.logical else None}
        options = {"length": 3, "metadata_params": partition}
        over = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(DotReluDot, **over, **options)(self.logical)(x)[0]


def init_fn(k, x, model, optimizer):
    params, create = model.init(k, x)["params"], train_state.TrainState.create
    return create(apply_fn=model.apply, params=params, tx=optimizer)


def train_step(state, x):
    grads = jax.grad(lambda params: state.apply_fn({"params": params}, x).sum())(state.params)
    return state.apply_gradients(grads=grads)


# Ordered, as Flax reads them: the second rule for "hidden" is not reached.
LOGICAL_RULES = (("batch", "data"), ("hidden", "model"), ("hidden", "data"))


@pytest.mark.parametrize("logical", [False, True], ids=["mesh axes", "logical axes"])
def test_flax_specify_sharding_and_apply_to_the_train_step(logical):
    mesh = Mesh(DEVICES.reshape(2, 4), axis_names=("data", "model"))
    x, k = jnp.ones((8, 16)), jax.random.PRNGKey(0)
    static = MLP(logical), optax.adam(learning_rate=0.001)
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


@HALIAX_DEPRECATIONS
def test_haliax_named_jit_of_functions():
    mesh = Mesh(DEVICES.reshape((4, 2)), ("model", "data"))
    Intermediate = hax.Axis("intermediate", 32)
    inputs, weights = hax.ones((Batch, Embed)), hax.ones((Embed, Intermediate))

    def matmul(weights, inputs):
        return weights.dot(inputs, axis=Embed)

    axis_resources, out = {"intermediate": "model", "batch": "data"}, {"batch": "data"}
    ours = (
        pzs.named_jit(matmul, mesh, axis_resources),
        pzs.named_jit(matmul, mesh, in_rules=axis_resources, out_rules=out),
    )
    with jax.set_mesh(mesh):
        theirs = (
            hax.named_jit(matmul, axis_resources),
            hax.named_jit(matmul, in_axis_resources=axis_resources, out_axis_resources=out),
        )
        for compiled, expected in zip(ours, theirs, strict=True):
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

        model = named_jit(partial(hax.nn.MLP.init, Embed, Embed, Mlp, 2))(key=model_key)
        opt_state = named_jit(optimizer.init)(model)
        for _ in range(2):
            loss, model, opt_state = named_jit(train_step)(model, opt_state, batch)
        return model, opt_state[0].mu, opt_state[0].nu, loss

    def theirs(x):
        with hax.axis_mapping(compute_mapping):
            return hax.auto_sharded(x)

    ours = train(
        partial(pzs.named_jit, mesh=mesh, rules=param_mapping),
        partial(pzs.place, mesh=mesh, rules=compute_mapping),
    )
    with jax.set_mesh(mesh):
        expected = train(partial(hax.named_jit, axis_resources=param_mapping), theirs)
    assert_same_shardings(ours[:3], expected[:3])
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), ours, expected)


# torchax: Distributed arrays and automatic parallelization. Arrays of NumPy stand for its tensors.


def lay_out(tensors, name_to_sharding, mesh):
    named = pzs.name_axes(tensors, name_to_sharding)
    return pzs.without_names(pzs.place(named, mesh))


NAME_TO_SHARDING = {
    "layers.1.weight": P("model"),
    "layers.1.bias": P("model"),
    "layers.2.weight": P(None, "model"),
}


def test_torchax_neural_networks():
    params, rng = {}, np.random.default_rng(0)
    for i, (n_in, n_out) in enumerate(itertools.pairwise([16, 32, 32, 32, 8])):
        params[f"layers.{i}.weight"] = rng.normal(size=(n_out, n_in)).astype(np.float32)
        params[f"layers.{i}.bias"] = rng.normal(size=n_out).astype(np.float32)
    batch = {"inputs": rng.normal(size=(64, 16)).astype(np.float32)}

    @jax.jit
    def predict(params, batch):
        x = batch["inputs"]
        for i in range(4):
            x = jnp.maximum(x @ params[f"layers.{i}.weight"].T + params[f"layers.{i}.bias"], 0)
        return x

    mesh = jax.make_mesh((4, 2), ("batch", "model"))
    name_to_sharding = {name: NAME_TO_SHARDING.get(name, P()) for name in params}
    placed = lay_out(params, name_to_sharding, mesh)
    assert {name: array.sharding.spec for name, array in placed.items()} == name_to_sharding
    result = predict(placed, lay_out(batch, {"*": P("batch", None)}, mesh))
    assert result.sharding.spec == P("batch")
    np.testing.assert_allclose(result, predict(params, batch), rtol=1e-4)
