"""Two processes save and restore together: this file is the test, and the program it starts."""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

import penzai_shard as pzs
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.checkpoints.filling import Source
from penzai_shard.checkpoints.restoring import restore
from penzai_shard.checkpoints.saving import begin_save
from penzai_shard.processes.arrays import put

NUMBERS = np.random.default_rng(0).normal(size=(16, 24)).astype("float32")


def save(path, arrays):
    return begin_save(path, leaves_of(arrays), "params").finish()


def restore_as(path, structs):
    sources = {n: Source((n,), s.shape, tuple(range(s.ndim))) for n, s in structs.items()}
    return restore(path, lambda manifest: (sources, structs))


def refuse(error, path, act):
    with pytest.raises(error) as caught:
        act()
    assert [problem.path for problem in caught.value.problems] == [path]


def main(me, port, folder):
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, me)
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, ("data", "model"))
    # Each process has every second column, so that what they read overlaps.
    odd = Mesh(devices.T, ("model", "data"))
    layouts = [
        NamedSharding(mesh, jax.P()),
        NamedSharding(mesh, jax.P("model", "data")),
        NamedSharding(odd, jax.P(None, ("model", "data"))),
    ]
    keys = jax.random.split(jax.random.key(3), 8)
    local = {"key": jax.random.key(1), "numpy": np.arange(3)}
    for number, layout in enumerate(layouts):
        rows = NamedSharding(layout.mesh, jax.P("data"))
        w, placed = put([NUMBERS, keys], [layout, rows])
        path = save(folder / str(number), {"w": w, "keys": placed, **local})
        for other in layouts:
            structs = {name: jax.typeof(jnp.asarray(array)) for name, array in local.items()}
            structs = {n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in structs.items()}
            structs["w"] = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=other)
            structs["keys"] = jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=rows)
            restored = restore_as(path, structs)
            assert restored["w"].sharding == other
            numbers = jax.random.key_data(keys)
            for array, whole in [(restored["w"], NUMBERS), (restored["keys"], numbers)]:
                is_key = array.dtype == keys.dtype
                for part in (jax.random.key_data(array) if is_key else array).addressable_shards:
                    np.testing.assert_array_equal(part.data, whole[part.index])
            assert restored["key"] == local["key"]
            assert restored["numpy"].tolist() == [0, 1, 2]

    refuse(pzs.ShardingError, "w", lambda: save(folder / "b", {"w": NUMBERS + me, "v": NUMBERS}))
    deleted = {"w": jnp.ones(2), "v": jnp.ones(2)}
    if me == 1:
        deleted["v"].delete()
    refuse(pzs.ShardingError, "v", lambda: save(folder / "b", deleted))
    refuse(pzs.CheckpointWriteError, path, lambda: save(path, {"w": NUMBERS}))
    others = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=layouts[me])}
    refuse(pzs.ShardingError, "w", lambda: restore_as(path, others))
    assert sorted(p.name for p in folder.iterdir()) == ["0", "1", "2"]


def test_two_processes_save_and_restore_together(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": flags}
    started = [
        subprocess.Popen([sys.executable, __file__, me, port, tmp_path], env=env) for me in "01"
    ]
    try:
        assert [process.wait(120) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]))
