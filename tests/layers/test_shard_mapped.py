"""A layer per device: values, gradients and state stay, parameters are gathered; or refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from penzai import pz
from penzai.models.transformer import model_parts, sampling_mode

import penzai_shard as pzs
from tests.layers.calls import Calls
from tests.models import llama, mlp_v1
from tests.refusals import problems_of

SQUARE = pzs.make_mesh({"data": 2, "model": 2, "other": 2})
MESH, EXPLICIT = (pzs.make_mesh({"data": 4, "model": 2}, explicit=e) for e in (False, True))
PARAMETERS, BATCH = {"embedding": "data", "neurons": "model"}, {"batch": "data"}
BOTH = BATCH | {"neurons": "model"}
X = pz.nx.wrap(jax.random.normal(jax.random.key(9), (8, 8)), "batch", "embedding")
TOKENS = pz.nx.wrap(jnp.arange(32).reshape(8, 4) % 16, "batch", "seq")
UP = pz.nn.Linear.from_config("up", jax.random.key(0), {"embedding": 8}, {"neurons": 16})
DOWN = pz.nn.Linear.from_config("down", jax.random.key(1), {"neurons": 16}, {"embedding": 8})
MLP = pz.nn.Sequential([UP, pz.nn.Elementwise(jnp.tanh), DOWN])


def keeps(function, kept):
    """A layer that keeps what a function gives of its input and of the last value."""

    def run(kept, x):
        kept.value = function(x, kept.value)
        return x

    return Calls(run, kept)


def calls(function, *names):
    """A layer that calls a function of the bare array."""
    return Calls(lambda _, x: pz.nx.nmap(function)(x.untag("batch", "embedding")).tag(*names))


def same(function):
    return calls(function, "batch", "embedding")


def fsdp(layer, rules=BATCH, mesh=MESH, **options):
    return pzs.ShardMapped(layer, mesh, PARAMETERS, rules, **options)


def at(kind, model, wrap):
    return pz.select(model).at_instances_of(kind).apply(wrap)


def output_and_gradients(layer, x=X):
    """The output, and the gradients of a loss by parameter and by input."""
    slots, parameters = pz.unbind_params(layer, freeze=True)

    def loss(parameters, x):
        output = pz.bind_variables(slots, parameters)(x)
        output = output.unwrap(*sorted(output.named_shape)).astype(jnp.float32)
        return jnp.sum(jnp.sin(output)), output

    (_, output), (gradients, own) = jax.value_and_grad(loss, (0, 1), has_aux=True)(parameters, x)
    return {"output": output, "x": own, **{p.label: p.value for p in gradients}}


def check_equal(found, expected, tolerance=1e-5):
    for own, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(own, other, rtol=tolerance, atol=tolerance)


def refuse(layer, x=X, error=pzs.ManualRegionError):
    """The problems of a layer that is refused when it is traced."""
    problems = problems_of(error, jax.eval_shape, lambda: layer(x))
    assert all(problem.fix for problem in problems)
    return problems


# Values and gradients


def test_call_values_and_gradients():
    constrained = pz.nn.Sequential([UP, pzs.ConstrainShardingByName(MESH, BOTH), DOWN])
    summed = pz.nn.Sequential([*MLP.sublayers, same(lambda x: jax.lax.psum(x, "model"))])
    kept = {"keep_split": ("neurons",)}
    pairs = [
        (MLP, fsdp(MLP)),
        (MLP, fsdp(MLP, mesh=EXPLICIT)),
        (MLP, pzs.ShardMapped(MLP, MESH, {"embedding": ("data", "model")}, {}, per_device=True)),
        (MLP, at(pz.nn.Linear, MLP, fsdp)),
        (MLP, pzs.Jitted(fsdp(at(pz.nn.Linear, pzs.Checkpointed(MLP), fsdp)))),
        (MLP, pzs.Checkpointed(fsdp(MLP), "all_but_gathered")),
        (MLP, fsdp(MLP, min_size=1000)),
        (MLP, fsdp(summed, per_device=True, **kept)),
        (constrained, fsdp(constrained)),
        (UP, fsdp(UP, BOTH)),
        (UP, fsdp(UP, BOTH, **kept)),
        (UP, fsdp(UP, BOTH, per_device=True, **kept)),
    ]
    run = jax.jit(lambda x: [[output_and_gradients(one, x) for one in pair] for pair in pairs])
    for bare, found in run(X):
        check_equal(found, bare)


def test_call_stacks():
    stacked, kind = llama(stacked=True), pz.nn.LayerStack
    rolled = pzs.RolledLayerStack.from_layer_stack
    around = at(kind, stacked, lambda stack: fsdp(rolled(stack)))
    inside = at(kind, at(model_parts.TransformerBlock, stacked, fsdp), rolled)
    bare, *found = jax.jit(lambda: [model(TOKENS) for model in (stacked, around, inside)])()
    for own in found:
        check_equal(own, bare)


def test_call_moves_parameters():
    both = ("data", "model")
    layer = pzs.ShardMapped(MLP, MESH, {"embedding": both}, {"batch": both})
    slots, parameters = pz.unbind_params(layer, freeze=True)
    parameters = pzs.place(parameters, MESH, {"embedding": both})

    def loss(parameters):
        return jnp.sum(pz.bind_variables(slots, parameters)(X).data_array ** 2)

    lowered = jax.jit(jax.grad(loss)).lower(parameters)
    # One for each parameter, and its gradient is scattered.
    assert lowered.as_text().count("stablehlo.all_gather") == 2
    assert lowered.compile().as_text().count(" reduce-scatter(") == 2


def test_call_runs_again_without_tracing():
    layer = fsdp(MLP)
    output = layer(X)
    assert output.data_array.sharding.spec == P("data")
    with jax.no_tracing():
        check_equal(fsdp(MLP)(X), output)


def test_call_16_bits():
    layers = [pzs.InPrecision(layer, "bfloat16") for layer in (MLP, fsdp(MLP))]
    expected, found = jax.jit(lambda: [output_and_gradients(layer) for layer in layers])()
    check_equal(found, expected, 0.05)


def test_call_other_arguments():
    def compute(_, x, *, mask, plain):
        shapes.append((x.named_shape["batch"], mask.named_shape["batch"], plain.shape))
        return x + mask * plain.sum(), "logits", None, x.untag("embedding")

    shapes, mask = [], pz.nx.wrap(jnp.arange(8.0), "batch")
    found, *_ = fsdp(Calls(compute))(X, mask=mask, plain=jnp.ones(3))
    assert (2, 2, (3,)) in shapes
    check_equal(found, X + 3 * mask)
    x = pz.nx.wrap(X.data_array, "batch", "features")
    check_equal(fsdp(mlp_v1())(x), mlp_v1()(x))


# State and random numbers


def test_call_state():
    count = keeps(lambda x, n: n + 1, pz.StateVariable(value=0, label="count"))
    rows = keeps(lambda x, kept: x + kept, pz.StateVariable(value=X, label="rows"))
    layer = fsdp(pz.nn.Sequential([count, rows]))
    layer(X)
    jax.jit(lambda: layer(X))
    pzs.Jitted(layer)(X)
    assert int(count.held.value) == 2
    check_equal(rows.held.value, 3 * X)


def test_call_cache_decodes():
    make = sampling_mode.KVCachingTransformerLM.from_uncached
    models = [make(llama(blocks=1), 8, {"batch": 8}, "cache") for _ in range(2)]
    bare, model = map(pzs.Jitted, (models[0], at(model_parts.TransformerBlock, models[1], fsdp)))
    for _ in range(2):
        check_equal(model(TOKENS), bare(TOKENS))


def test_call_random_streams():
    x = pz.nx.ones({"batch": 8, "embedding": 64})
    stream = pz.RandomStream.from_base_key(jax.random.key(3), "offset")
    layer = fsdp(pz.nn.StochasticDropout(0.5))
    output = layer(x, random_stream=stream).data_array
    parts = {}
    for shard in output.addressable_shards:
        parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    assert [len(part) for part in parts.values()] == [1] * 4
    assert len(set().union(*parts.values())) == 4
    assert int(stream.offset.value) == 1


# Layers for one device's part

AROUND, POSITIONS = [(i, (i + 1) % 4) for i in range(4)], jnp.repeat(jnp.arange(4), 2)[:, None]
gather = functools.partial(jax.lax.all_gather, axis_name="data", tiled=True)


clip_gradient = jax.custom_vjp(lambda x: x * 1.0)
clip_gradient.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.1, 0.1),))


def exchange(x, *dims):
    return jax.lax.all_to_all(x, "data", *dims, tiled=True)


# What a device does, and what all do together.
COLLECTIVES = {
    "psum": (calls(lambda x: jax.lax.psum(x.sum(), "data")), jnp.sum),
    "pmean": (calls(lambda x: jax.lax.pmean(x.mean(), "data")), jnp.mean),
    "ppermute": (same(lambda x: jax.lax.ppermute(x, "data", AROUND)), lambda x: jnp.roll(x, 2, 0)),
    "all_gather": (calls(lambda x: gather(x, to="invarying"), "all", "embed"), lambda x: x),
    "all_to_all": (same(lambda x: exchange(exchange(x, 1, 0), 0, 1)), lambda x: x),
    "axis_index": (same(lambda x: x + jax.lax.axis_index("data")), lambda x: x + POSITIONS),
    "custom_vjp": (same(clip_gradient), clip_gradient),
}


def test_per_device_values_and_gradients():
    def run(function):
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(function(x)) * 3))(X.data_array)

    def per_device(layer):
        mapped = fsdp(layer, per_device=True)
        return lambda x: mapped(pz.nx.wrap(x, "batch", "embedding")).data_array

    pairs = [(per_device(layer), whole) for layer, whole in COLLECTIVES.values()]
    for found, expected in jax.jit(lambda: [[*map(run, pair)] for pair in pairs])():
        check_equal(found, expected)
    for name, (layer, _) in COLLECTIVES.items():
        (problem,) = refuse(fsdp(layer))[:1]
        assert "test_shard_mapped.py:" in problem.path
        assert ("per_device=True" in problem.fix) == (name != "custom_vjp")


# Refusals


def longer_as_a_whole(_, x):
    """Gives two of each at the lengths of the whole and beyond, one at that of a part."""
    own = x.named_shape["embedding"]
    return pz.nx.zeros({"batch": x.named_shape["batch"], "embedding": 16 if own > 4 else own})


def test_call_refuses():
    odd = pz.nn.Linear.from_config("odd", jax.random.key(0), {"embedding": 6}, {"neurons": 2})
    zero = pz.StateVariable(value=0.0, label="kept")
    for layer, path in (
        (fsdp(calls(jnp.sum)), "test_shard_mapped.py:"),
        (fsdp(Calls(lambda _, x: {"a": x.untag("batch")})), "output/a"),
        (fsdp(Calls(longer_as_a_whole), {"batch": "data", "embedding": "model"}, SQUARE), "output"),
        (fsdp(UP, keep_split=("neurons",)), "output"),
        (fsdp(MLP, keep_split=("neurons",)), "linear_and_affine.py:"),
        (fsdp(calls(jnp.mean), per_device=True), "output"),
        (fsdp(UP, {"embedding": "model"}), ""),
        (fsdp(keeps(lambda x, _: x.untag("batch")[0], zero)), "test_shard_mapped.py:"),
        (fsdp(keeps(lambda x, _: x.untag("batch"), zero)), "kept"),
    ):
        assert any(path in problem.path for problem in refuse(layer))
    assert zero.value == 0.0
    problems = refuse(fsdp(odd), pz.nx.ones({"batch": 6, "embedding": 6}), pzs.PlanError)
    assert {problem.path for problem in problems} == {"argument", "odd.weights"}
    with pytest.raises(ValueError, match="incompatible devices"):
        fsdp(UP)(jax.device_put(X, jax.devices()[3]))
    for options in ({"mesh": None}, {"min_size": "1k"}, {"keep_split": "neurons"}):
        with pytest.raises(pzs.RuleTypeError):
            fsdp(UP, **options)


def test_refusal_names_all_operations_of_a_layer_at_once():
    (problem,) = refuse(fsdp(same(lambda x: jnp.exp(x @ x.T) @ x)))
    assert "('dot_general', 'exp')" in problem.fix


@pytest.mark.parametrize("rules", [({"embeding": "data"}, {}), ({}, {"bacth": "data"})])
def test_a_rule_that_is_nearly_a_name_warns(rules):
    with pytest.warns(pzs.ShardingWarning, match="Did you mean '(embedding|batch)'"):
        pzs.ShardMapped(UP, MESH, *rules)(X)


def test_assume_independent():
    layer = same(lambda x: jnp.flip(x, 0))
    assert "'rev'" in refuse(fsdp(layer))[0].fix
    found = fsdp(layer, assume_independent=("rev",))(X)
    check_equal(found.data_array, X.data_array.reshape(4, 2, 8)[:, ::-1].reshape(8, 8))
    vouched = fsdp(same(clip_gradient), assume_independent=("custom_vjp_call",))
    found, expected = map(output_and_gradients, (vouched, same(clip_gradient)))
    check_equal(found, expected)


def test_random_numbers_over_a_mesh_axis_of_length_1():
    mesh = pzs.make_mesh({"data": 8, "model": 1})
    dropout = pz.nn.StochasticDropout(0.5)
    layer = pzs.ShardMapped(dropout, mesh, {}, {"batch": ("data", "model")})
    stream = pz.RandomStream.from_base_key(jax.random.key(0))
    kept = np.asarray(layer(X, random_stream=stream).unwrap("batch", "embedding")) != 0
    assert len({row.tobytes() for row in kept}) > 4
