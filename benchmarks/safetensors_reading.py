"""What reading a safetensors file takes, against Orbax's ranged reading: time, bytes, memory.

Both restore onto the same shardings of eight CPU devices. Time is the median of rounds in which
they take turns in one process; peak memory over what lands is that of a fresh process. Orbax tells
the bytes that it reads; ours are counted where parts of tensors are looked at.

    python -m benchmarks.safetensors_reading [MiB] [--rounds N]
"""

import functools
import logging
import os
import pathlib
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import NamedSharding

import penzai_shard as pzs
from benchmarks.measure import (
    Figure,
    make_parser,
    median_ratio,
    print_figures,
    run_anew,
    take_turns,
)
from benchmarks.restore import array_shapes, measure_peak, write_safetensors
from penzai_shard.checkpoints.tensor_files import TensorStore

LAYOUTS = {"rows": ("data", None), "columns": (None, "data"), "replicated": ()}
WAYS = "ours", "orbax"
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


def measure_once(folder: pathlib.Path, way: str, layout: str, mib: int) -> None:
    """Prints the peak memory of a restore over what lands."""
    restorer(folder / "small.safetensors", way, layout, SMALL_MIB)()
    arrays, peak = measure_peak(restorer(folder / "large.safetensors", way, layout, mib))
    # CPU devices share the memory of copies.
    pointers = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for array in arrays.values()
        for shard in array.addressable_shards
    }
    print(peak / sum(pointers.values()))


def seconds(run: Callable[[], Any]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def compare(folder: pathlib.Path, layout: str, mib: int, rounds: int) -> Iterator[Figure]:
    path = folder / "large.safetensors"
    timers = [functools.partial(seconds, restorer(path, way, layout, mib)) for way in WAYS]
    ours, theirs = take_turns(timers, rounds, warm_up=0)
    medians = [statistics.median(column) for column in (ours, theirs)]
    sizes = [count_bytes(path, way, layout, mib) / 2**20 for way in WAYS]
    work = f"a safetensors file of {mib} MiB, {layout}"
    detail = "{:.2f} s against {:.2f} s, read {:.0f} MiB against {:.0f} MiB"
    detail = detail.format(*medians, *sizes)
    yield Figure(f"{work}, time against Orbax", median_ratio(ours, theirs), detail=detail)
    printed = [
        run_anew("safetensors_reading", str(mib), "--measure", str(folder), way, layout)
        for way in WAYS
    ]
    peak, their_peak = map(float, printed)
    detail = f"Orbax {their_peak:.2f}x"
    yield Figure(f"{work}, peak memory over what lands", peak, floor=1.15, detail=detail)


def measure(mib: int, rounds: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        save(folder / "small.safetensors", SMALL_MIB)
        save(folder / "large.safetensors", mib)
        for layout in LAYOUTS:
            yield from compare(folder, layout, mib, rounds)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("mib", type=int, nargs="?", default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", nargs=3, help="one round: folder and what is restored")
    options = parser.parse_args()
    warnings.simplefilter("ignore", pzs.ShardingWarning)
    logging.getLogger("absl").setLevel(logging.ERROR)
    if options.measure:
        folder, way, layout = options.measure
        measure_once(pathlib.Path(folder), way, layout, options.mib)
        return
    mib, rounds = (8, 1) if options.quick else (options.mib, options.rounds)
    print_figures(measure(mib, rounds), options)


if __name__ == "__main__":
    main()
