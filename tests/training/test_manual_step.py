"""Steps per device: against the automatic step, and against those of guides to ``jax.shard_map``.

The guide is "Data parallel training in JAX" of the UvA Deep Learning Tutorials, whose cells are
written by hand here: ``apply_by_hand`` and all that the model of ``Classifier(True)`` calls.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs
from tests.models import MODELS, penzai_mlp
from tests.refusals import problem_paths
from tests.training import losses as cases

COLLECTIVES = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(")
ALL, GRID = pzs.make_mesh({"data": 8}), pzs.make_mesh({"data": 4, "model": 2})
SPLIT, BOTH = {"in": "data"}, {"in": "data", "out": "model"}
X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)


def count_collectives(step, *args, **inputs):
    """Those that move data over the first mesh axis."""
    text = step.lower(*args, **inputs).compile().as_text()
    lines = [line for line in text.splitlines() if "replica_groups=[4,2]" not in line]
    return collections.Counter(COLLECTIVES.findall("\n".join(lines)))


def assert_same_params(a, b, **tolerance):
    for path, value in a.trained_arrays.items():
        np.testing.assert_allclose(value, b.trained_arrays[path], **{"atol": 1e-6} | tolerance)
        assert value.sharding == b.trained_arrays[path].sharding


# A model of Penzai, whose weights are split


def mlp_loss(model, rng, state, x):
    logits = model(x).unwrap("batch", "features")
    return cases.mean_square(logits), state, {"logits": model(x), "top": logits.max()}


LAYOUTS = {
    "data parallel": (ALL, {}, 2),
    "fully sharded": (ALL, {"features": "data"}, 1),
    "tensor parallel": (GRID, {"features": "data", "features_out": "model"}, 1),
    "Explicit": (pzs.make_mesh({"data": 8}, explicit=True), {"features": "data"}, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_manual_step_is_the_automatic_one(name):
    mesh, rules, count = LAYOUTS[name]
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    x = pzs.shard_batch(pz.nx.wrap(X, "batch", "features"), mesh, {"batch": "data"})
    found = []
    for manual_axes in (None, "data"):
        state = cases.initial(pzs.place(penzai_mlp(sizes=(8, 16, 8)), mesh, rules), optimizer)
        options = {"accumulate_steps": count, "manual_axes": manual_axes}
        options |= {"donate_params_and_state": True, "aux_reduction": {"top": "max"}}
        step = pzs.build_train_step_fn(mlp_loss, step_metrics=["loss", "gradient_norm"], **options)
        if manual_axes:
            collectives = count_collectives(step, state, x=x)
        for _ in range(3):
            state, aux = step(state, x=x)
        assert cases.count_programs(step) == 1
        found.append((state, aux))
    (state, aux), (automatic, expected_aux) = reversed(found)
    assert_same_params(state, automatic)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), aux, expected_aux)
    # The sum of outputs is one, that of the loss and of all gradients another.
    split = sum("data" in value.sharding.spec for value in state.trained_arrays.values())
    assert collectives["all-gather"] == collectives["reduce-scatter"] == split
    assert bool(split) == bool(rules)
    assert mesh is GRID or collectives["all-reduce"] <= 3


@pytest.mark.filterwarnings("ignore:jax.core.is_constant_dim:DeprecationWarning")
@pytest.mark.parametrize("name", ["counted mlp", "linen", "haliax mlp", "plain", "nnx"])
def test_manual_step_of_each_library(name):
    loss, x = cases.LOSSES[name]
    state = jax.device_put(cases.initial(MODELS[name](), optax.sgd(0.1)), NamedSharding(ALL, P()))
    options = {"batch_axis": 0, "step_metrics": "loss"}
    step = pzs.build_train_step_fn(loss, manual_axes="data", **options)
    if name == "nnx":
        # Each device has running means of its own examples.
        paths = problem_paths(pzs.ShardingError, step, state, x=x)
        assert paths == ["state_vars/norm/mean", "state_vars/norm/var"]
        return
    (new, aux), (expected, expected_aux) = (
        each(state, x=x) for each in (step, pzs.build_train_step_fn(loss, **options))
    )
    assert_same_params(new, expected)
    np.testing.assert_allclose(aux["loss"], expected_aux["loss"], rtol=1e-6)


# Losses of a matrix, as code per device writes them


def initial(mesh, rules, optimizer=None, **options):
    model = pzs.name_axes({"w": cases.W, "b": jnp.zeros(8)}, {"w": ("in", "out"), "b": ("out",)})
    options = {"plain_arrays": True, **options}
    state = cases.initial(model, optimizer or optax.sgd(0.5), **options)
    return jax.device_put(state, pzs.train_state_sharding(state, mesh, rules))


def squares(model, x):
    return (x @ model["w"] + model["b"] - 1) ** 2


def mean(model, rng, state, x):
    return squares(model, x).mean(), state, {}


def mean_by_pmean(model, rng, state, x):
    return lax.pmean(squares(model, x).mean(), "data"), state, {}


def pair(model, rng, state, x):
    return (jnp.where(x > 0, squares(model, x), 0).sum(), (x > 0).sum()), state, {}


def pair_by_psum(model, rng, state, x):
    return lax.psum(pair(model, rng, state, x)[0], "data"), state, {}


def mean_over_all(model, rng, state, x):
    axes = jax.typeof(x).sharding.mesh.manual_axes
    return lax.pmean(squares(model, x).mean(), axes), state, {}


def mean_in_a_loop(model, rng, state, x):
    loss, third = jnp.zeros(()), squares(model, x).mean() / 3
    return lax.scan(lambda loss, _: (loss + third, None), loss, length=3)[0], state, {}


def gathered(model, rng, state, x):
    """Each device gathers the matrix by itself, and the gradient of that is a mean."""
    w = gather_array_with_mean_grads(model["w"].unwrap("data", "out"), 0, "data")
    return mean({"w": w, "b": model["b"]}, rng, state, x)


def run(
    loss, mesh=ALL, rules=SPLIT, x=X, count=1, jit=True, manual_axes=("data",), **state_options
):
    options = {"accumulate_steps": count, "batch_axis": 0, "step_metrics": "loss", "jit": jit}
    if loss not in (mean, pair):
        options["manual_axes"] = manual_axes
    state = initial(mesh, rules, **state_options)
    return pzs.build_train_step_fn(loss, **options)(state, x=x)


# Mesh, rules, microbatches: whether JAX keeps account of what varies, and what is gathered.
WAYS = [(ALL, SPLIT, 1), (GRID, BOTH, 2)]


@functools.cache
def run_automatically(loss, way):
    mesh, rules, count = WAYS[way]
    return run(loss, mesh, rules, count=count)


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize(
    ("loss", "per_device"),
    [(own, functools.partial(own)) for own in (mean, pair)]
    + [(mean, mean_by_pmean), (pair, pair_by_psum)],
)
def test_losses_per_device(loss, per_device, way):
    mesh, rules, count = WAYS[way]
    expected, expected_aux = run_automatically(loss, way)
    state, aux = run(per_device, mesh, rules, count=count)
    assert_same_params(state, expected)
    np.testing.assert_allclose(aux["loss"], expected_aux["loss"], rtol=1e-6)


def search_line(grads, state, params, *, value, value_fn, grad_fn, **_):
    """An update of an optimizer that asks for the loss, and for more, at other parameters."""
    there = optax.apply_updates(params, optax.tree.scale(-0.1, grads))
    return optax.tree.scale(-0.1 * (value + value_fn(there)), grad_fn(there)), state


def test_loops_gathers_and_line_searches_per_device():
    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), search_line)
    expected, _ = run(mean, optimizer=optimizer)
    assert_same_params(run(mean_in_a_loop, optimizer=optimizer)[0], expected)


# The name of a mesh axis says that a device has its part, however it is stored.
@pytest.mark.parametrize("rules", [None, {}], ids=["split", "whole"])
@pytest.mark.parametrize("trained", ["bw", "b"])
def test_a_loss_gathers_by_itself(rules, trained):
    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), search_line)
    options = {"optimizer": optimizer, "trainable": lambda parameter: parameter.label in trained}
    expected, _ = run(mean, **options)
    model = {"w": pz.nx.wrap(jnp.asarray(cases.W), "data", "out"), "b": jnp.zeros(8)}
    model = pzs.place(model, ALL, rules, on_unnamed="replicate")
    step = pzs.build_train_step_fn(gathered, batch_axis=0, manual_axes="data")
    state, _ = step(cases.initial(model, **options), x=X)
    for path, value in expected.trained_arrays.items():
        np.testing.assert_allclose(state.trained_arrays[path], value, atol=1e-6)


HYBRID = pzs.make_mesh({"replica": 2, "data": 2, "model": 2})
REPLICAS = ("replica", "data")


@pytest.mark.parametrize(
    ("mesh", "rules", "manual_axes"),
    [
        (HYBRID, {"in": "data"}, REPLICAS),
        (HYBRID, {"in": REPLICAS, "out": "model"}, REPLICAS),
        (HYBRID, {"in": "data", "out": "replica"}, REPLICAS[::-1]),
        (GRID, {"in": ("data", "model")}, "data"),
        (GRID, BOTH, ("data", "model")),
    ],
)
def test_layouts_over_several_mesh_axes(mesh, rules, manual_axes):
    step = pzs.build_train_step_fn(mean_over_all, batch_axis=0, manual_axes=manual_axes)
    state, _ = step(initial(mesh, rules), x=X)
    assert_same_params(state, run(mean, mesh, rules)[0])


def test_ways_to_run_per_device():
    _, aux = run(mean)
    for options in ({"jit": False}, {"mesh": pzs.make_mesh({"data": 1}, jax.devices()[:1])}):
        np.testing.assert_allclose(run(mean_by_pmean, **options)[1]["loss"], aux["loss"], rtol=1e-6)
    evaluate = pzs.build_eval_step_fn(mean_by_pmean, batch_axis=0, manual_axes="data")
    np.testing.assert_allclose(evaluate(initial(ALL, SPLIT), x=X)[0], aux["loss"], rtol=1e-6)
    options = {"mesh": ALL, "rules": {**SPLIT, "batch": "data"}, "first_axis": "batch"}
    options |= {"manual_axes": "data", "batch_axis": 0, "step_metrics": "loss"}
    trainer = pzs.StatefulTrainer(initial(ALL, SPLIT), mean_by_pmean, **options)
    np.testing.assert_allclose(trainer.step(x=X)["loss"], aux["loss"], rtol=1e-6)


# What comes back


def test_outputs_of_devices_are_joined_as_those_of_microbatches():
    def loss(model, rng, state, x):
        x, n = x.unwrap("batch", "in"), len(x.unwrap("batch", "in"))
        aux = {"x": pz.nx.wrap(x, "batch", "in"), "n": n, "mean": x.mean(), "key": rng}
        aux |= {"top": x.max(), "sums": [x.sum()]}
        return mean(model, rng, state, x)[0], state, aux

    words = {"n": "sum", "key": "last", "top": "max", "sums": "sum"}
    x = pz.nx.wrap(X, "batch", "in")
    for options in ({"manual_axes": "data", "accumulate_steps": 2}, {"accumulate_steps": 4}, {}):
        step = pzs.build_train_step_fn(loss, aux_reduction=words, **options)
        _, aux = step(initial(GRID, BOTH), x=x)
        np.testing.assert_array_equal(aux["x"].unwrap("batch", "in"), X)
        assert int(aux["n"]) == 16
        found = aux["mean"], aux["top"], *aux["sums"]
        np.testing.assert_allclose(found, (X.mean(), 1.0, X.sum()), atol=1e-5)


def test_each_device_has_a_key_of_its_own():
    def loss(model, rng, state, x):
        return mean(model, rng, state, x)[0], state, jax.random.uniform(rng, (len(x),))

    options = {"batch_axis": 0, "manual_axes": "data", "aux_reduction": "concatenate"}
    _, drawn = pzs.build_train_step_fn(loss, **options)(initial(GRID, BOTH), x=X)
    step_key = jax.random.fold_in(cases.KEY, 0)
    expected = [jax.random.uniform(jax.random.fold_in(step_key, i), (4,)) for i in range(4)]
    np.testing.assert_array_equal(drawn, np.concatenate(expected))


def test_what_is_carried_on_is_the_same_on_all_devices():
    def loss(model, rng, state, x, over):
        seen = state["seen"] + over(squares(model, x).mean())
        return mean(model, rng, state, x)[0], {"steps": state["steps"] + 1, "seen": seen}, {}

    def run_one(over, count, **options):
        options |= {"accumulate_steps": count, "batch_axis": 0}
        step = pzs.build_train_step_fn(functools.partial(loss, over=over), **options)
        return step(initial(ALL, SPLIT, loss_fn_state={"seen": 0.0, "steps": 0}), x=X)[0]

    for count in (1, 2):
        state = run_one(lambda x: lax.pmean(x, "data"), count, manual_axes="data")
        expected = run_one(lambda x: x, count)
        seen = (each.loss_fn_state["seen"] for each in (state, expected))
        np.testing.assert_allclose(*seen, rtol=1e-5)
        assert int(state.loss_fn_state["steps"]) == count
        call = functools.partial(run_one, lambda x: x, count, manual_axes="data")
        assert problem_paths(pzs.ShardingError, call) == ["loss_fn_state/seen"]


def report(model, rng, state, x):
    """What may be examples, of plain arrays, is joined by a word or not at all."""
    return *mean(model, rng, state, x)[:2], {"losses": squares(model, x).mean(1)}


def fail(model, rng, state, x):
    fail.calls += 1
    raise ZeroDivisionError("of the user")


# fmt: off
REFUSED = [
    (pzs.MeshError, "params", lambda: run(mean_by_pmean, pzs.make_mesh({"model": 8}), {})),
    (pzs.MeshError, "params", lambda: jax.jit(lambda: run(mean_by_pmean))()),
    (pzs.ShardingError, "x", lambda: run(mean_by_pmean, x=X[:12])),
    (pzs.ShardingError, "x", lambda: run(mean_by_pmean, count=4)),
    (pzs.ShardingError, "", lambda: run(mean_by_pmean, x=X[0, 0])),
    (pzs.ShardingError, "losses", lambda: run(report)),
    (pzs.MeshError, "params", lambda: run(mean_by_pmean, manual_axes=[0])),
]
# fmt: on


@pytest.mark.parametrize(("error", "path", "call"), REFUSED)
def test_refused(error, path, call):
    assert problem_paths(error, call) == [path]


def test_an_error_of_the_loss_comes_out_as_it_is():
    fail.calls = 0
    with pytest.raises(ZeroDivisionError, match=r"^of the user"):
        run(fail)
    assert fail.calls == 1


# The guide


def gather_array_with_mean_grads(x, axis, axis_name):
    axis_size = lax.psum(1, axis_name)

    @jax.custom_gradient
    def f(x):
        def grad_fn(g):
            return lax.psum_scatter(g, axis_name, scatter_dimension=axis, tiled=True) / axis_size

        return lax.all_gather(x, axis_name, axis=axis, tiled=True), grad_fn

    return f(x)


def is_box(node):
    return isinstance(node, nn.Partitioned)


def shard_params(params, axis_name, min_weight_size):
    def shard(x):
        value, names = (x.value, x.names) if is_box(x) else (x, (None,) * x.ndim)
        if axis_name in names or value.size <= min_weight_size:
            return x
        # The longest dimension, as the guide takes it; all of them divide here.
        dim, size = int(np.argmax(value.shape)), lax.psum(1, axis_name)
        start = lax.axis_index(axis_name) * (value.shape[dim] // size)
        part = lax.dynamic_slice_in_dim(value, start, value.shape[dim] // size, dim)
        return nn.Partitioned(part, (*names[:dim], axis_name, *names[dim + 1 :]))

    return jax.tree.map(shard, params, is_leaf=is_box)


def gather_params(params, axis_name):
    def gather(p):
        if is_box(p) and axis_name in p.names:
            return gather_array_with_mean_grads(p.value, p.names.index(axis_name), axis_name)
        return p

    return jax.tree.map(gather, params, is_leaf=is_box)


class Classifier(nn.Module):
    is_sharded: bool

    @nn.compact
    def __call__(self, x, train):
        dense = nn.Dense
        if self.is_sharded:
            gather = functools.partial(gather_params, axis_name="data")
            shard = functools.partial(shard_params, axis_name="data", min_weight_size=2**4)
            options = {"mapped_collections": "params", "mutable": True}
            dense = nn.map_variables(dense, trans_in_fn=gather, trans_out_fn=shard, **options)
        x = nn.silu(dense(32, name="input_dense")(x))
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return dense(10, name="output_dense")(x)


LABELS = np.arange(16) % 10


def loss_fn(params, model, rng, inputs, labels):
    logits = model.apply(params, inputs, train=True, rngs={"dropout": rng})
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    correct, batch_size = jnp.argmax(logits, axis=-1) == labels, len(inputs)
    metrics = {"loss": (loss.sum(), batch_size), "accuracy": (correct.sum(), batch_size)}
    return loss.mean(), metrics


def apply_by_hand(params, opt_state, step, inputs, labels, model, optimizer, specs):
    """The step of the guide, in which each device folds its key."""
    rng = jax.random.fold_in(jax.random.fold_in(cases.KEY, step), lax.axis_index("data"))
    differentiate = jax.value_and_grad(loss_fn, has_aux=True)
    (_, metrics), grads = differentiate(params, model, rng, inputs, labels)
    grads = jax.tree.map(
        lambda spec, g: g if "data" in spec else lax.pmean(g, "data"), specs, grads
    )
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, lax.psum(metrics, "data")


# Whether the loss function gets boxes.
KINDS = {False: (None,), True: (None, False)}


@pytest.mark.parametrize("is_sharded", KINDS, ids=["data parallel", "fully sharded"])
def test_guide_by_hand(is_sharded):
    model, optimizer = Classifier(is_sharded), optax.adamw(1e-2)
    per_device = functools.partial(jax.shard_map, mesh=ALL, check_vma=False)
    init = functools.partial(model.init, cases.KEY, X[:2], train=False)
    shapes = jax.eval_shape(per_device(init, in_specs=(), out_specs=P()))
    specs = nn.get_partition_spec(shapes)
    params = jax.jit(per_device(init, in_specs=(), out_specs=specs))()
    opt_state = jax.jit(optimizer.init)(params)
    layouts = specs, nn.get_partition_spec(opt_state)
    x, labels = (jax.device_put(value, NamedSharding(ALL, P("data"))) for value in (X, LABELS))
    by_hand = functools.partial(apply_by_hand, model=model, optimizer=optimizer, specs=specs)
    flows = {"in_specs": (*layouts, P(), P("data"), P("data")), "out_specs": (*layouts, P())}
    by_hand = jax.jit(per_device(by_hand, **flows))
    by_hand = by_hand.lower(params, opt_state, jnp.int32(0), x, labels).compile()

    def loss(model, rng, state, **given):
        loss, metrics = loss_fn(model, Classifier(is_sharded), rng, **given)
        return loss, state, metrics

    options = {"batch_axis": 0, "manual_axes": "data", "aux_reduction": "sum"}
    step = pzs.build_train_step_fn(loss, **options)
    # The model's own gather opens boxes; without them the step has gathered.
    states = [cases.initial(params, optimizer, plain_arrays=plain) for plain in KINDS[is_sharded]]
    for number in range(3):
        params, opt_state, expected = by_hand(params, opt_state, jnp.int32(number), x, labels)
        for index, state in enumerate(states):
            states[index], metrics = step(state, inputs=x, labels=labels)
            check = functools.partial(np.testing.assert_allclose, rtol=1e-5)
            jax.tree.map(check, metrics, expected)
    for state in states:
        assert_same_params(state, cases.initial(params, optimizer))
    assert cases.count_programs(step) == len(states)

    # As cheap as by hand, but for the addition that counts the steps.
    compiled = step.lower(states[0], inputs=x, labels=labels).compile()
    found, costs = compiled.cost_analysis(), by_hand.cost_analysis()
    assert found["flops"] <= costs["flops"] + 16
    assert found["bytes accessed"] <= costs["bytes accessed"] + 64
    texts = (each.as_text() for each in (compiled, by_hand))
    kinds = [collections.Counter(COLLECTIVES.findall(text)) for text in texts]
    assert kinds[0] == kinds[1]
    assert kinds[0]["all-gather"] == kinds[0]["reduce-scatter"] == 3 * is_sharded
