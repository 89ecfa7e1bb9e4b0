"""What the processes of a job save and restore, in any number, and what they are refused."""

import json
import os
import pathlib
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from penzai import pz

import penzai_shard as pzs
from penzai_shard.checkpointing import taking_part as checkpointing_together
from penzai_shard.errors import ShardingError
from penzai_shard.library_apis import orbax_api
from penzai_shard.processes import any_process
from penzai_shard.processes import job as job_of_processes
from tests.processes.programs import refused

MESHES = {8: {"data": 4, "model": 2}, 4: {"data": 2, "model": 2}}
RULES = {"features": "data", "features_out": "model"}


def numbers():
    """The parameters, the same wherever they are made: split, replicated, and of other dtypes."""
    random = np.random.default_rng(0)
    return {
        "split": (random.normal(size=(512, 256)).astype("float32"), ("features", "features_out")),
        "whole": (random.normal(size=(64, 96)).astype("float32"), ("hidden", "seq")),
        "half": (jnp.asarray(random.normal(size=(8, 4)), "bfloat16"), ("features", "seq")),
        "count": (np.arange(8), ("features",)),
    }


def model_of(change=lambda array: array):
    return {name: pz.nx.wrap(change(a), *axes) for name, (a, axes) in numbers().items()}


def mesh():
    return pzs.make_mesh(MESHES[jax.device_count()])


def state_of(model):
    floats = {name: value for name, value in model.items() if name != "count"}
    state = pzs.TrainState.initial_state(floats, optax.adam(1e-2), jax.random.key(7))
    return pzs.place(state, mesh(), RULES)


def changed(state):
    """A state whose every array has numbers of its own."""

    def change(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.fold_in(x, 3)
        return x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)

    return jax.jit(lambda state: jax.tree.map(change, state))(state)


def assert_equal(restored, wanted):
    """Exactly, part by part; ``wanted`` may be laid out in any way."""
    restored, wanted = jax.tree.leaves(restored), jax.tree.leaves(wanted)
    for one, other in zip(restored, wanted, strict=True):
        assert one.dtype == other.dtype
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert one.shape == other.shape
        if isinstance(other, jax.Array) and not other.is_fully_addressable:
            assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
            there = [shard.data for shard in other.addressable_shards]
        else:
            there = [np.asarray(other)[shard.index] for shard in one.addressable_shards]
        for shard, part in zip(one.addressable_shards, there, strict=True):
            assert np.asarray(shard.data).tobytes() == np.asarray(part).tobytes()


def save(folder):
    """Saves parameters and train states, and gives the bytes that each process wrote."""
    model = pzs.place(model_of(), mesh(), RULES)
    pzs.save_params(f"{folder}/exact_params", model)
    state = changed(state_of(model_of()))
    pzs.save_train_state(f"{folder}/exact_state", state)
    pzs.save_safetensors(f"{folder}/exact_weights", model)
    manager = pzs.CheckpointManager(f"{folder}/run")
    manager.save(1, state)
    # Waited for where the job ends.
    manager.save(2, state)
    return {
        directory.name: sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        for directory in pathlib.Path(f"{folder}/exact_params").rglob("ocdbt.process_*")
    }


def restore(folder):
    """Restores all, whoever saved it, compares every number, and gives the bytes read for one."""
    wanted = model_of(jnp.zeros_like)
    before = _bytes_read()
    restored = pzs.restore_params(f"{folder}/exact_params", wanted, mesh(), RULES)
    read = _bytes_read() - before
    loaded = pzs.load_safetensors(f"{folder}/exact_weights", mesh(), RULES, into=wanted)
    for model in (restored, loaded):
        assert_equal(model, model_of())
        spec = model["split"].data_array.sharding.spec
        assert spec == jax.sharding.PartitionSpec("data", "model")
    state, saved = state_of(wanted), changed(state_of(model_of()))
    assert_equal(pzs.restore_train_state(f"{folder}/exact_state", state), saved)
    manager = pzs.CheckpointManager(f"{folder}/run")
    assert manager.steps() == [1, 2]
    assert_equal(manager.restore(state), saved)
    return read


def restore_damaged(folder):
    """Restores what is whole, and then what is not in a part that one process alone reads."""
    read = restore(folder)
    model = model_of(jnp.zeros_like)
    return read, refused(lambda: pzs.restore_params(f"{folder}/damaged", model, mesh(), RULES))


def _bytes_read():
    with open("/proc/self/io") as counts:
        return int(counts.readline().split()[1])


def dying(folder, when, victim):
    """Restores what another job saved; then one process dies in the midst of something.

    It says when on its standard output. The job was begun by ``jax.distributed.initialize`` alone.
    """
    me = jax.process_index()
    restore(folder)
    path = f"{folder}/{when}"
    model = pzs.place(model_of(), mesh(), RULES)
    pzs.save_params(path, model)

    def die(*_):
        print(f"dies at {time.time()}", flush=True)
        os.kill(os.getpid(), 9)

    if when == "saving":
        if me == victim:
            # Once this process has begun to write its part.
            begin = orbax_api.begin_save
            orbax_api.begin_save = lambda *given: (begin(*given), die())
        pzs.save_params(path, jax.tree.map(lambda x: x * 0, model), overwrite=True)
    elif when == "restoring":
        if me == victim:
            orbax_api.load = die
        pzs.restore_params(path, model, mesh(), RULES)
    else:
        step = jax.jit(lambda x: (x @ x.T).sum())
        for turn in range(10**9):
            if turn == 3 and me == victim:
                die()
            jax.block_until_ready(step(model["split"].data_array))


def taking_part(folder):
    """One that does not take part, and those that do something else, are refused by name.

    At the end process 1 is done, and process 0 saves alone; so that the job does not end well.
    """
    me = jax.process_index()
    job_of_processes.joined().patience = 100.0
    job_of_processes._SECONDS_TO_SAY_WHERE = 60.0
    path, other, weights = (f"{folder}/{name}" for name in ("params", "other", "weights"))
    manager = pzs.CheckpointManager(f"{folder}/run")
    model = pzs.place(model_of(), mesh(), RULES)
    state = state_of(model_of())
    found = {}

    def in_thread(name, *acts, after=lambda: None):
        """What happens in threads of one name, one in each process."""

        def act():
            found[name] = refused(acts[me])
            after()

        any_process(False, "beginning at the same time")
        thread = threading.Thread(target=act, name=name)
        thread.start()
        thread.join()
        any_process(False, "ending at the same time")

    def alone(name, process, act):
        """What one process is told while the other one does something else, until it was told."""
        told, begun = f"{folder}/{name} was told", pathlib.Path(folder, f"{name}, something else")
        if me == 0:
            os.mkfifo(told)

        def works_on():
            begun.touch()
            os.close(os.open(told, os.O_RDONLY))  # Something else.

        def meanwhile():
            while not begun.exists():
                time.sleep(0.01)
            act()

        def tell():
            if me == process:
                os.close(os.open(told, os.O_WRONLY))

        job_of_processes.joined().patience = 1.0
        acts = (meanwhile if each == process else works_on for each in (0, 1))
        in_thread(name, *acts, after=tell)
        job_of_processes.joined().patience = 100.0

    def save(path=path, model=model, **options):
        return lambda: pzs.save_params(path, model, **options)

    def restore(path=path, model=model, mesh_of=mesh, rules=RULES, **options):
        return lambda: pzs.restore_params(path, model, mesh_of(), rules, **options)

    def load(rules=RULES):
        return lambda: pzs.load_safetensors(weights, mesh(), rules, into=model)

    def turned():
        return pzs.make_mesh({"model": 2, "data": 4})

    float16 = model | {"whole": model["whole"].astype("float16")}
    split = pzs.place(model_of(), mesh(), {"features": "model"})
    less = {name: model[name] for name in ("split", "whole")}
    alone("first saves", 0, save())
    alone("last saves", 1, save())
    alone("manager saves", 1, lambda: manager.save(1, state))
    save()()
    save(other)()
    pzs.save_safetensors(weights, model)
    alone("first restores", 0, restore())
    in_thread("save and restore", save(overwrite=True), restore())
    in_thread("save and any", save(overwrite=True), lambda: pzs.any_process(False, "shall we stop"))
    for name, one, another in (
        ("saved paths", save(f"{folder}/a"), save(f"{folder}/b")),
        ("saved overwrite", save(overwrite=True), save()),
        ("saved kinds", save(f"{folder}/a"), lambda: pzs.save_train_state(f"{folder}/a", state)),
        ("saved names", save(f"{folder}/a"), save(f"{folder}/a", less)),
        ("saved dtypes", save(f"{folder}/a"), save(f"{folder}/a", float16)),
        ("saved layouts", save(f"{folder}/a"), save(f"{folder}/a", split)),
        ("paths", restore(), restore(other)),
        ("models", restore(on_extra="ignore"), restore(model=less, on_extra="ignore")),
        (
            "dtypes",
            restore(on_dtype_mismatch="cast"),
            restore(model=float16, on_dtype_mismatch="cast"),
        ),
        ("rules", restore(), restore(rules={"features": "model"})),
        ("meshes", restore(), restore(mesh_of=turned)),
        ("options", restore(), restore(on_extra="ignore")),
        ("loaded layouts", load(), load({"features": "model"})),
    ):
        in_thread(name, one, another)
    # One path for both, with a directory of its own behind it in each process.
    own = pathlib.Path(folder, f"own {me}")
    own.mkdir()
    os.chdir(own)
    checkpointing_together._SECONDS_TO_SEE = 1.0
    in_thread("unshared", save("/proc/self/cwd/params"), save("/proc/self/cwd/params"))
    # What each process does with its own devices is its own affair.
    alone = pzs.make_mesh({"data": 4}, jax.local_devices())
    restored = pzs.restore_params((path, other)[me], model_of(), alone, {"features": "data"})
    assert_equal(restored, model_of())
    pathlib.Path(folder, f"found.{me}.json").write_text(json.dumps(found))
    if me == 0:
        try:
            save(f"{folder}/alone")()
        except ShardingError as error:
            print(f"said at {time.time()}", flush=True)
            raise error from None
