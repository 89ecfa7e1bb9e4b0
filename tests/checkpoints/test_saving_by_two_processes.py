"""Two processes save and restore together: this file is the test, and the program it starts."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import penzai_shard as pzs
from penzai_shard.checkpoints.moving import move
from penzai_shard.processes.arrays import put
from tests.checkpoints.trees import is_key, structs_of
from tests.processes.launching import run_processes
from tests.refusals import problem_paths

NUMBERS = np.random.default_rng(0).normal(size=(16, 24)).astype("float32")


def main(me, address, folder):
    jax.distributed.initialize(address, 2, me)
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, ("data", "model"))
    # Each process has every second column, so that what they read overlaps.
    odd = Mesh(devices.T, ("model", "data"))
    layouts = [
        NamedSharding(mesh, jax.P()),
        NamedSharding(mesh, jax.P("model", "data")),
        NamedSharding(odd, jax.P(None, ("model", "data"))),
    ]
    whole = {"w": NUMBERS, "keys": jax.random.split(jax.random.key(3), 8)}
    local = {"key": jax.random.key(1), "numpy": np.arange(3)}
    for number, layout in enumerate(layouts):
        rows = NamedSharding(layout.mesh, jax.P("data"))
        spread = dict(zip(whole, put([*whole.values()], [layout, rows]), strict=True))
        path = pzs.save_params(folder / str(number), spread | local)
        # Each layout is once the second, once the third.
        for other in (layouts * 2)[number + 1 : number + 3]:
            structs = structs_of(local) | structs_of({"w": NUMBERS}, other)
            structs |= {"keys": structs_of(whole, rows)["keys"]}
            for restored in (pzs.restore_params(path, structs), move(spread | local, structs)):
                assert restored["w"].sharding == other
                for name, expected in whole.items():
                    data = jax.random.key_data if is_key(expected) else jnp.asarray
                    for part in data(restored[name]).addressable_shards:
                        np.testing.assert_array_equal(part.data, data(expected)[part.index])
                assert restored["key"] == local["key"]
                assert restored["numpy"].tolist() == [0, 1, 2]

    other_path = folder / "b"
    different = {"w": NUMBERS + me, "v": NUMBERS}
    assert problem_paths(pzs.ShardingError, pzs.save_params, other_path, different) == ["w"]
    deleted = {"w": jnp.ones(2), "v": jnp.ones(2)}
    if me == 1:
        deleted["v"].delete()
    assert problem_paths(pzs.ShardingError, pzs.save_params, other_path, deleted) == ["v"]
    call = pzs.save_params, path, {"w": NUMBERS}
    assert problem_paths(pzs.CheckpointWriteError, *call) == [path]
    call = pzs.restore_params, path, structs_of({"w": NUMBERS}, layouts[me])
    assert problem_paths(pzs.ShardingError, *call, allow="extra") == ["w"]
    assert sorted(p.name for p in folder.iterdir()) == ["0", "1", "2"]


def test_two_processes_save_and_restore_together(tmp_path):
    assert [status for status, _, _ in run_processes(__file__, tmp_path)] == [0, 0]


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]))
