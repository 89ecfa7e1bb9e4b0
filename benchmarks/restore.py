"""What restoring a checkpoint takes: peak memory over what lands, and time against Orbax.

Each restore runs in a fresh process, after a small one that starts the devices and loads the
libraries. Both restore onto the same shardings; ours also verifies every number.

    python benchmarks/restore.py [MiB] [--rounds N]
"""

import argparse
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import NamedSharding

import penzai_shard as pzs

LAYOUTS = {"rows": ("data", None), "columns": (None, "data")}
SMALL_MIB = 1


def array_shapes(mib: int) -> dict[str, tuple[int, int]]:
    """An embedding that is a quarter of the model, and blocks of three matrices."""
    rows = math.ceil(mib * 2**20 / 4 / 4 / 2048 / 64) * 64
    matrices = {f"block_{i}/{j}": (rows // 8, 2048) for i in range(8) for j in range(3)}
    return {"embedding": (rows, 2048), **matrices}


def save(folder: pathlib.Path, mib: int) -> None:
    rng = np.random.default_rng(0)
    mesh = pzs.make_mesh({"data": 8})
    sharding = NamedSharding(mesh, jax.P("data"))
    arrays = {
        name: jax.device_put(rng.standard_normal(shape, np.float32), sharding)
        for name, shape in array_shapes(mib).items()
    }
    pzs.save_params(folder / "ours", arrays)
    ocp.save(folder / "orbax", arrays)


def restorer(folder: pathlib.Path, way: str, layout: str, mib: int) -> Callable[[], object]:
    sharding = NamedSharding(pzs.make_mesh({"data": 8}), jax.P(*LAYOUTS[layout]))
    structs = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
        for name, shape in array_shapes(mib).items()
    }
    if way == "orbax":
        return lambda: ocp.load(folder / "orbax", structs)
    return lambda: pzs.restore_params(folder / "ours", structs)


class PeakMemory:
    """The resident memory of this process above that at the start, sampled every 2 ms."""

    def __enter__(self) -> "PeakMemory":
        self._start, self.above, self._ended = self._resident(), 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(0.002):
            self.above = max(self.above, self._resident() - self._start)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @staticmethod
    def _resident() -> int:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def measure(folder: pathlib.Path, way: str, layout: str, mib: int) -> None:
    """Prints the seconds of a restore, and its peak memory over what lands."""
    restorer(folder / "small", way, layout, SMALL_MIB)()
    run = restorer(folder / "large", way, layout, mib)
    start = time.perf_counter()
    with PeakMemory() as memory:
        arrays = jax.block_until_ready(run())
    seconds = time.perf_counter() - start
    landed = sum(shard.data.nbytes for a in arrays.values() for shard in a.addressable_shards)
    print(seconds, memory.above / landed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mib", type=int, nargs="?", default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        folder, way, layout = options.measure
        measure(pathlib.Path(folder), way, layout, options.mib)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        save(folder / "small", SMALL_MIB)
        save(folder / "large", options.mib)
        print(f"| restore of {options.mib} MiB by | ours | Orbax | time | peak memory |")
        print("|---|---|---|---|---|")
        for layout in LAYOUTS:
            found: dict[str, list[list[float]]] = {"ours": [], "orbax": []}
            for _ in range(options.rounds):
                for way, rows in found.items():
                    command = [sys.executable, __file__, str(options.mib)]
                    command += ["--measure", name, way, layout]
                    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                    rows.append([float(word) for word in done.stdout.split()])
            (ours, peak), (orbax, orbax_peak) = (
                map(statistics.median, zip(*rows, strict=True)) for rows in found.values()
            )
            print(
                f"| {layout} | {ours:.1f} s | {orbax:.1f} s | {ours / orbax:.2f}x "
                f"| {peak:.2f}x (Orbax {orbax_peak:.2f}x) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
