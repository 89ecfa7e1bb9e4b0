"""From a selector to a restore on another mesh: what a run costs besides its steps."""

import functools
import itertools
import subprocess
import sys

import jax
import optax
from penzai import pz
from penzai.models.transformer import model_parts

import penzai_shard as pzs
from tests.models import llama

RULES = {"embedding": "data", "neurons": "model"}
OPTIMIZER = optax.adam(1e-3)
build = functools.partial(llama, blocks=1)


def start_state(model, mesh):
    """A state of a model whose batch is split after each block."""
    blocks = pz.select(model).at_instances_of(model_parts.TransformerBlock)
    layer = pzs.ConstrainShardingByName(mesh, {"batch": "data"})
    edited = blocks.insert_after(layer)
    return pzs.TrainState.initial_state(edited, OPTIMIZER, jax.random.key(1))


def take_steps(state, mesh, count):
    """The state after some steps, how often the loss was traced, and the buffers after each."""
    traced = []

    def loss_fn(model, rng, state, tokens):
        traced.append(model)
        logits = model(tokens)
        return (logits**2).untag(*logits.named_shape).mean().unwrap(), state, {}

    step = pzs.build_train_step_fn(loss_fn, donate_params_and_state=True)
    tokens = pzs.shard_batch(
        pz.nx.ones({"batch": 8, "seq": 4}, dtype=jax.numpy.int32), mesh, {"batch": "data"}
    )
    buffers = [find_buffers(state)]
    for _ in range(count):
        state, _ = step(state, tokens=tokens)
        buffers.append(find_buffers(jax.block_until_ready(state)))
    return state, len(traced), buffers


def find_buffers(state):
    """The addresses of what a step donates: all but counters, keys and constants."""
    donated = jax.tree.leaves((state.params, state.opt_state))
    return {
        shard.data.unsafe_buffer_pointer()
        for array in donated
        if array.ndim
        for shard in array.addressable_shards
    }


def continue_run(path, shape):
    """The second half of a run, in a process of its own."""
    mesh = pzs.make_mesh(shape)
    shapes = start_state(pzs.abstract_model(build), mesh)
    state = pzs.restore_train_state(path, shapes, mesh, RULES)
    state, traced, buffers = take_steps(state, mesh, 5)
    assert (int(state.step), traced) == (10, 1)
    reused = [len(a & b) / len(b) for a, b in itertools.pairwise(buffers)]
    assert min(reused) >= 0.98, reused


def test_main_job_compiles_its_step_once_in_each_process(tmp_path):
    mesh = pzs.make_mesh({"data": 4, "model": 2})
    state = start_state(pzs.sharded_init(build, mesh=mesh, rules=RULES), mesh)
    state, traced, _ = take_steps(state, mesh, 5)
    assert traced == 1
    path = pzs.save_train_state(tmp_path / "state", state)
    code = (
        "from tests.test_main_job import continue_run\n"
        "for data, model in ((4, 2), (2, 4), (8, 1)):\n"
        f"    continue_run({path!r}, {{'data': data, 'model': model}})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
