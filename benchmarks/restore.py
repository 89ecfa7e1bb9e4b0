"""What restoring a checkpoint takes: peak memory over what lands, and time against Orbax.

Each restore runs in a fresh process, after a small one that starts the devices and loads the
libraries. Both restore onto the same shardings; ours also verifies every number. Then come the
conversions that Orbax does not do, of a checkpoint and of a safetensors file with checksums.

    python benchmarks/restore.py [MiB] [--rounds N]
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import NamedSharding
from penzai import pz

import penzai_shard as pzs
from penzai_shard.checkpoints.records import ArrayRecord, write_texts
from penzai_shard.checkpoints.value_checksums import compute_checksums

LAYOUTS = {"rows": ("data", None), "columns": (None, "data")}
# What differs from what is stored: the order of axes, and the dtype.
CONVERSIONS = {
    "as stored": ("ab", "float32"),
    "transposed": ("ba", "float32"),
    "cast": ("ab", "bfloat16"),
    "transposed and cast": ("ba", "bfloat16"),
}
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
    pzs.save_params(
        folder / "ours", {name: pz.nx.wrap(array, *"ab") for name, array in arrays.items()}
    )
    ocp.save(folder / "orbax", arrays)
    sums = compute_checksums(arrays)
    records = {
        name: ArrayRecord(array.shape, "float32", ("a", "b"), values=sums[name])
        for name, array in arrays.items()
    }
    write_safetensors(folder / "model.safetensors", arrays, write_texts(records))


def write_safetensors(
    path: pathlib.Path, arrays: Mapping[str, jax.Array | np.ndarray], texts: Mapping[str, str]
) -> None:
    """Writes a file as its format says, one tensor after the other."""
    header: dict[str, object] = {"__metadata__": texts} if texts else {}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.asarray(array).tobytes())


def restorer(
    folder: pathlib.Path, way: str, layout: str, conversion: str, mib: int
) -> Callable[[], object]:
    mesh, spec = pzs.make_mesh({"data": 8}), LAYOUTS[layout]
    if way == "orbax":
        sharding = NamedSharding(mesh, jax.P(*spec))
        structs = {
            name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
            for name, shape in array_shapes(mib).items()
        }
        return lambda: ocp.load(folder / "orbax", structs)

    # Rows and columns are those of what lands.
    order, dtype = CONVERSIONS[conversion]
    shapes = {name: {"a": a, "b": b} for name, (a, b) in array_shapes(mib).items()}
    model = jax.eval_shape(
        lambda: {
            name: pz.nx.zeros({axis: shape[axis] for axis in order}, dtype)
            for name, shape in shapes.items()
        }
    )
    rules = {axis: name for axis, name in zip(order, spec, strict=True) if name}
    path, allow = folder / way, ("transpose", "cast")
    return lambda: pzs.restore_params(path, model, mesh, rules, allow=allow)


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


def measure(folder: pathlib.Path, way: str, layout: str, conversion: str, mib: int) -> None:
    """Prints the seconds of a restore, and its peak memory over what lands."""
    restorer(folder / "small", way, layout, conversion, SMALL_MIB)()
    run = restorer(folder / "large", way, layout, conversion, mib)
    start = time.perf_counter()
    with PeakMemory() as memory:
        arrays = jax.tree.leaves(jax.block_until_ready(run()))
    seconds = time.perf_counter() - start
    landed = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
    print(seconds, memory.above / landed)


def measure_anew(mib: int, rounds: int, *cases: tuple[str, ...]) -> list[tuple[float, float]]:
    """The median seconds and peak of each case; they take turns in new processes."""
    found: list[list[list[float]]] = [[] for _ in cases]
    for _ in range(rounds):
        for case, rows in zip(cases, found, strict=True):
            command = [sys.executable, __file__, str(mib), "--measure", *case]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rows.append([float(word) for word in done.stdout.split()])
    return [tuple(map(statistics.median, zip(*rows, strict=True))) for rows in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mib", type=int, nargs="?", default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    mib, rounds = options.mib, options.rounds
    if options.measure:
        folder, *case = options.measure
        measure(pathlib.Path(folder), *case, mib)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for part, size in {"small": SMALL_MIB, "large": mib}.items():
            (folder / part).mkdir()
            save(folder / part, size)
        print(f"| restore of {mib} MiB by | ours | Orbax | time | peak memory |")
        print("|---|---|---|---|---|")
        for layout in LAYOUTS:
            cases = [(name, way, layout, "as stored") for way in ("ours", "orbax")]
            (ours, peak), (orbax, orbax_peak) = measure_anew(mib, rounds, *cases)
            print(
                f"| {layout} | {ours:.1f} s | {orbax:.1f} s | {ours / orbax:.2f}x "
                f"| {peak:.2f}x (Orbax {orbax_peak:.2f}x) |",
                flush=True,
            )
        print(f"\n| {mib} MiB | a checkpoint: time, peak memory | a safetensors file |")
        print("|---|---|---|")
        for layout in LAYOUTS:
            for conversion in CONVERSIONS:
                ways = "ours", "model.safetensors"
                cases = [(name, way, layout, conversion) for way in ways]
                found = measure_anew(mib, rounds, *cases)
                cells = [f"{seconds:.1f} s, {peak:.2f}x" for seconds, peak in found]
                print(f"| {layout}, {conversion} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
