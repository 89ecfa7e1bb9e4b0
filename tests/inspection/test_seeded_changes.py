"""A lock finds what got worse, names where, and is silent about what costs nothing.

A job is a function of options that gives a step, its arguments and its inputs. A change is the job
before, and the same job with other options. With what makes it worse stands what the lock has to
name. That a change costs something, or nothing, is seen in the programs that JAX compiles before
and after it, without this package: their arguments, collectives and memory, and how many programs
two steps need.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from penzai import pz

import penzai_shard as pzs

MESH = pzs.make_mesh({"data": 4, "model": 2})
KEY = jax.random.key(0)


def put(value, *axes):
    return jax.device_put(value, NamedSharding(MESH, P(*axes)))


def pin(value, *axes):
    return jax.lax.with_sharding_constraint(value, NamedSharding(MESH, P(*axes)))


# A Penzai model: trained fully sharded, trained with a split optimizer state, evaluated, called

PIN = pzs.ConstrainShardingByName(MESH, {"batch": "data"})
RULES = {"embedding": "data", "neurons": "model", "vocabulary": "model"}
WHOLE_EMBEDDING = {"neurons": "model", "vocabulary": "model"}


def build(key=KEY, blocks=2, neurons="neurons"):
    embedding, hidden = {"embedding": 16}, {neurons: 32}
    linear = functools.partial(pz.nn.Linear.from_config, init_base_rng=key)
    table = pz.nn.EmbeddingTable.from_config("lm/embedder", key, 32, embedding)
    layers = [pz.nn.EmbeddingLookup(table), PIN]
    for block in (f"lm/block_{number}" for number in range(blocks)):
        up = linear(f"{block}/up", input_axes=embedding, output_axes=hidden)
        down = linear(f"{block}/down", input_axes=hidden, output_axes=embedding)
        body = pz.nn.Sequential([up, pz.nn.Elementwise(jnp.tanh), down])
        layers += [pz.nn.Residual(body), PIN]
    head = linear("lm/head", input_axes=embedding, output_axes={"vocabulary": 32})
    return pz.nn.Sequential([*layers, head])


def loss_with(report=lambda logits, loss: {"loss": loss}):
    """A loss function, and what it reports of the logits and the loss."""

    def loss_fn(model, rng, state, tokens):
        logits = model(tokens).unwrap("batch", "vocabulary")
        loss = jnp.mean(jax.nn.logsumexp(logits, axis=1))
        return loss, state, report(logits, loss)

    return loss_fn


SGD, LOSS = optax.sgd(1e-2, momentum=0.9), loss_with()
TOKENS = pz.nx.wrap(np.arange(256) % 32, "batch")
make_donating = functools.partial(pzs.build_train_step_fn, donate_params_and_state=True)


def train(
    make=make_donating,
    loss_fn=LOSS,
    model=build,
    optimizer=SGD,
    rules=RULES,
    optimizer_rules=None,
    batch_axes=("data",),
    **options,
):
    state = pzs.TrainState.initial_state(model(), optimizer, KEY)
    state = jax.device_put(state, pzs.train_state_sharding(state, MESH, rules, optimizer_rules))
    tokens = pzs.shard_batch(TOKENS, MESH, {"batch": batch_axes})
    return make(loss_fn, **options), (state,), {"tokens": tokens}


zero1 = functools.partial(train, rules=WHOLE_EMBEDDING, optimizer_rules=RULES, accumulate_steps=2)
evaluate = functools.partial(train, make=pzs.build_eval_step_fn)


def call(model=build, rules=RULES, wrap=lambda model: model):
    model = wrap(pzs.place(model(), MESH, rules))
    return model, (pz.nx.wrap(put(jnp.arange(32), "data"), "batch"),), {}


# A step over dictionaries, a loop over blocks, a program for each device

LAYOUT = {"up": ("data", "model"), "down": ("model", "data")}
jit_donating = functools.partial(jax.jit, donate_argnums=0)


def dense(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["down"]


def constrain(new, layout):
    return jax.lax.with_sharding_constraint(new, layout)


def by_hand(finish=constrain, jit=jit_donating, dtype="float32", mean=None):
    values = {"up": np.ones((16, 32), dtype), "down": np.ones((32, 16), dtype)}
    state = {
        "params": {name: put(values[name], *LAYOUT[name]) for name in LAYOUT},
        "momentum": {name: put(values[name], *LAYOUT[name]) for name in LAYOUT},
        "counts": put(np.zeros(16, np.float32)),
        "mean": put(np.float32(0) if mean is None else mean),
    }
    layout = jax.tree.map(lambda array: array.sharding, state)

    def step(state, x):
        differentiate = jax.value_and_grad(lambda own: jnp.mean(dense(own, x) ** 2))
        loss, gradients = differentiate(state["params"])
        momentum = jax.tree.map(lambda old, own: 0.9 * old + own, state["momentum"], gradients)
        params = jax.tree.map(lambda old, own: old - 0.1 * own, state["params"], momentum)
        counts, mean = state["counts"] + jnp.sum(x, 1), 0.9 * state["mean"] + 0.1 * loss
        new = {"params": params, "momentum": momentum, "counts": counts, "mean": mean}
        return finish(new, layout), loss

    return jit(step), (state, put(np.ones((16, 16), dtype), "data")), {}


# On CPUs remat saves memory in loops only: elsewhere XLA undoes it.
def loop(before=pin, remat=jax.checkpoint):
    def find_loss(weights, x):
        def block(x, weight):
            return pin(jax.nn.gelu(x @ weight), "data"), None

        return jnp.mean(jax.lax.scan(remat(block), x, before(weights))[0])

    weights, x = put(np.ones((4, 16, 16)), None, "data"), put(np.ones((256, 16)), "data")
    return jax.jit(jax.grad(find_loss)), (weights, x), {}


def scatter(product):
    return jax.lax.psum_scatter(product, "model", scatter_dimension=1, tiled=True)


# It stays an all-reduce, of twice the bytes (compiled for CPUs and TPU v5e).
def reduce_and_slice(product):
    start = jax.lax.axis_index("model") * 8
    return jax.lax.dynamic_slice_in_dim(jax.lax.psum(product, "model"), start, 8, 1)


def on_each_device(reduce=scatter):
    specs = P("model"), P("data", "model")
    run = jax.shard_map(
        lambda weight, x: reduce(x @ weight), mesh=MESH, in_specs=specs, out_specs=specs[1]
    )
    return jax.jit(run), tuple(put(np.ones((16, 16)), *spec) for spec in specs), {}


# Options


def edit(kind, change, number=None):
    """A builder of the model with an edit of all layers of a kind, or of one of them."""

    def build_edited():
        selection = pz.select(build()).at_instances_of(kind)
        return change(selection if number is None else selection.pick_nth_selected(number))

    return build_edited


def wrap_blocks(wrapper):
    return edit(pz.nn.Residual, lambda some: some.apply(wrapper))


PINS = type(PIN)
NO_PINS = edit(PINS, lambda some: some.remove_from_parent())
# The layout flows on from the constraint before it: the program stays as it is.
ONE_PIN_LESS = edit(PINS, lambda some: some.remove_from_parent(), 1)
OTHER_AXIS = pzs.ConstrainShardingByName(MESH, {"batch": "model"})
OTHER_PIN = edit(PINS, lambda some: some.set(OTHER_AXIS), 1)
WHOLE = pzs.ConstrainShardingByName(MESH, {})
WHOLE_HIDDEN = edit(pz.nn.Elementwise, lambda some: some.insert_after(WHOLE), 1)
report_logits = loss_with(lambda logits, loss: {"logits": logits})
report_more = loss_with(lambda logits, loss: {"loss": loss, "perplexity": jnp.exp(loss)})


def constrain_some(new, layout):
    some = {name: new[name] for name in ("params", "momentum")}
    return new | constrain(some, {name: layout[name] for name in some})


def constrain_float32(new, layout):
    return constrain(new | {"params": optax.tree.cast(new["params"], jnp.float32)}, layout)


def as_structs(step, *arguments):
    def describe(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)

    return step, *jax.tree.map(describe, arguments)


def take_a_step(step, args, inputs):
    state, _ = step(*args, **inputs)
    return step, (state, *args[1:]), inputs


def freeze(model):
    return pz.bind_variables(*pz.unbind_variables(model, freeze=True))


# The changes


def change(job, then=lambda *step: step, **options):
    """A job, and the same job with other options; ``then`` makes another step of that one."""
    return job, lambda: then(*job(**options))


UP = "lm/block_0/up"
by_hand_half = functools.partial(by_hand, dtype="bfloat16")
REGRESSIONS = {
    "constraints lost": ("lm/block_0", change(train, model=NO_PINS)),
    "constraint over another mesh axis": ("lm/block_0", change(train, model=OTHER_PIN)),
    "activation gathered": ("lm/block_1", change(evaluate, model=WHOLE_HIDDEN)),
    "rule overruled": (UP, change(evaluate, rules=[("neurons", None), *RULES.items()])),
    "axis renamed": (UP, change(evaluate, model=functools.partial(build, neurons="hidden"))),
    "vocabulary whole": ("lm/head", change(evaluate, rules=RULES | {"vocabulary": None})),
    "donation lost": ("donated", change(train, make=pzs.build_train_step_fn)),
    "batch whole": ("inputs/tokens", change(evaluate, batch_axes=())),
    "block added": ("lm/block_2", change(evaluate, model=functools.partial(build, blocks=3))),
    "second moment": ("optimizer state nu", change(train, optimizer=optax.adam(1e-2))),
    "logits returned": ("outputs", change(evaluate, loss_fn=report_logits)),
    "optimizer state whole": (f"{UP}.weights optimizer", change(zero1, optimizer_rules=None)),
    "microbatches lost": ("temporaries", change(zero1, accumulate_steps=1)),
    "embedding whole": (UP, change(call, rules=WHOLE_EMBEDDING)),
    "by hand: donation lost": ("donated", change(by_hand, jit=jax.jit)),
    "by hand: counts drift": ("counts", change(by_hand, finish=constrain_some)),
    # Weakly typed, where the next state is not.
    "by hand: number of Python": ("mean", change(by_hand, mean=0.0)),
    "by hand: float32 result": ("params/up", change(by_hand_half, finish=constrain_float32)),
    "loop: gather inside": ("weights", change(loop, before=lambda weights: weights)),
    "loop: remat lost": ("temporaries", change(loop, remat=lambda block: block)),
    "shard_map: all-reduce": ("all-reduce", change(on_each_device, reduce=reduce_and_slice)),
}

HARMLESS = {
    "other learning rate": change(train, optimizer=optax.sgd(3e-3, momentum=0.9)),
    "one number more": change(evaluate, loss_fn=report_more),
    "structs": change(evaluate, then=as_structs),
    "constraint without effect lost": change(evaluate, model=ONE_PIN_LESS),
    "state bound": change(evaluate, lambda step, args, x: (functools.partial(step, *args), (), x)),
    "rule without use": change(evaluate, rules=pzs.AxisRules(RULES) | {"heads": "model"}),
    "blocks in a scope": change(call, model=wrap_blocks(lambda own: pzs.Scoped(own, "own"))),
    "blocks jitted": change(call, model=wrap_blocks(pzs.Jitted)),
    "blocks checkpointed": change(call, model=wrap_blocks(pzs.Checkpointed)),
    "model frozen": change(call, wrap=freeze),
    "model jitted": change(call, wrap=pzs.Jitted),
    "by hand: after a step": change(by_hand, then=take_a_step),
    "loop: constraint twice": change(loop, before=lambda weights: pin(pin(weights))),
}


@functools.cache
def lock_of(job):
    step, args, inputs = job()
    return pzs.ShardingLock.of(step, *args, **inputs)


def check(before, after):
    step, args, inputs = after()
    return lock_of(before).check(step, *args, **inputs)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_check_names_what_got_worse(name):
    named, change = REGRESSIONS[name]
    report = check(*change)
    assert not report
    assert named in "\n".join(" ".join(map(str, row)) for row in report.rows)


@pytest.mark.parametrize("name", HARMLESS)
def test_check_is_silent_about_what_costs_nothing(name):
    report = check(*HARMLESS[name])
    assert report, str(report)
