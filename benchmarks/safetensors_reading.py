"""What reading a safetensors file takes, against Orbax's ranged reading: time, bytes, memory.

Both restore onto the same shardings of eight CPU devices. Time is the median of rounds in which
they take turns in one process; peak memory over what lands is that of a fresh process. Orbax tells
the bytes that it reads; ours are counted where parts of tensors are looked at.

    python benchmarks/safetensors_reading.py [MiB] [--rounds N]
"""

import argparse
import logging
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import NamedSharding
from restore import PeakMemory, array_shapes, write_safetensors

import penzai_shard as pzs
from penzai_shard.checkpoints.tensor_files import TensorStore

LAYOUTS = {"rows": ("data", None), "columns": (None, "data"), "replicated": ()}
SMALL_MIB = 1
BYTES_READ = "/jax/orbax/read/safetensors/bytes_read"


def save(path: pathlib.Path, mib: int) -> None:
    rng, shapes = np.random.default_rng(0), array_shapes(mib)
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    write_safetensors(path, arrays, {})


def restorer(path: pathlib.Path, way: str, layout: str, mib: int) -> Callable[[], Any]:
    sharding = NamedSharding(pzs.make_mesh({"data": 8}), jax.P(*LAYOUTS[layout]))
    structs = {
        name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
        for name, shape in array_shapes(mib).items()
    }

    def restore() -> Any:
        if way == "ours":
            return pzs.restore_params(path, structs)
        with ocp.Context(checkpoint_layout=ocp.options.CheckpointLayout.SAFETENSORS):
            return ocp.load(path, structs)

    return lambda: jax.block_until_ready(restore())


def count_bytes(path: pathlib.Path, way: str, layout: str, mib: int) -> int:
    """The bytes that one restore reads of the file."""
    counts: list[float] = []
    if way == "ours":
        read = TensorStore.read

        def counting(store: Any, *args: Any) -> np.ndarray:
            piece = read(store, *args)
            counts.append(piece.nbytes)
            return piece

        TensorStore.read = counting  # type: ignore[method-assign]
        restorer(path, way, layout, mib)()
        TensorStore.read = read  # type: ignore[method-assign]
    else:

        def listen(event: str, value: float, **_: Any) -> None:
            counts.extend([value] * (event == BYTES_READ))

        jax.monitoring.register_scalar_listener(listen)
        restorer(path, way, layout, mib)()
        jax.monitoring.clear_event_listeners()
    return int(sum(counts))


def measure_memory(folder: pathlib.Path, way: str, layout: str, mib: int) -> None:
    """Prints the peak memory of a restore over what lands."""
    restorer(folder / "small.safetensors", way, layout, SMALL_MIB)()
    run = restorer(folder / "large.safetensors", way, layout, mib)
    with PeakMemory() as memory:
        arrays = run()
    # CPU devices share the memory of copies.
    pointers = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for array in arrays.values()
        for shard in array.addressable_shards
    }
    print(memory.above / sum(pointers.values()), sum(pointers.values()) / 2**20)


def compare(folder: pathlib.Path, layout: str, mib: int, rounds: int) -> str:
    path = folder / "large.safetensors"
    runs = {way: restorer(path, way, layout, mib) for way in ("ours", "orbax")}
    seconds: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(rounds):
        for way, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - start)
    ours, orbax = (statistics.median(found) for found in seconds.values())
    sizes = [count_bytes(path, way, layout, mib) / 2**20 for way in runs]
    peaks = []
    for way in runs:
        command = [sys.executable, __file__, str(mib), "--measure", str(folder), way, layout]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        peaks.append("{:.2f}x of {:.0f} MiB".format(*map(float, done.stdout.split())))
    return (
        f"| {layout} | {ours:.2f} s | {orbax:.2f} s | {ours / orbax:.2f}x "
        f"| {sizes[0]:.0f}, {sizes[1]:.0f} MiB | {peaks[0]}, {peaks[1]} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mib", type=int, nargs="?", default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore", pzs.ShardingWarning)
    logging.getLogger("absl").setLevel(logging.ERROR)
    if options.measure:
        folder, way, layout = options.measure
        measure_memory(pathlib.Path(folder), way, layout, options.mib)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        save(folder / "small.safetensors", SMALL_MIB)
        save(folder / "large.safetensors", options.mib)
        print(f"| {options.mib} MiB | ours | Orbax | time | bytes read | peak memory |")
        print("|---|---|---|---|---|---|")
        for layout in LAYOUTS:
            print(compare(folder, layout, options.mib, options.rounds), flush=True)


if __name__ == "__main__":
    main()
