"""What restoring a checkpoint takes: peak memory over what lands, and time against Orbax.

Each restore runs in a fresh process, after a small one that starts the devices and loads the
libraries. Both restore onto the same shardings; ours also verifies every number. With
``--conversions`` come those that Orbax does not do, of a checkpoint and of a safetensors file.

    python -m benchmarks.restore [MiB] [--rounds N] [--conversions]
"""

import json
import math
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from jax.sharding import NamedSharding
from penzai import pz

import penzai_shard as pzs
from benchmarks.measure import Figure, make_parser, print_figures, run_anew
from penzai_shard.checkpoints.records import ArrayRecord, write_texts
from penzai_shard.checkpoints.value_checksums import compute_checksums

T = TypeVar("T")

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


def save(folder: pathlib.Path, mib: int, *, safetensors: bool) -> None:
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
    if not safetensors:
        ocp.save(folder / "orbax", arrays)
        return
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


def measure_peak(run: Callable[[], T]) -> tuple[T, int]:
    """What a call gives, and the bytes that the resident memory grew by at most, on Linux."""
    # The kernel notes the peak; proc(5) says that 5 sets it back to what is resident now.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = read_memory("VmRSS")
    found = run()
    return found, read_memory("VmHWM") - before


def read_memory(name: str) -> int:
    """A line of the kernel's status of this process, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(kib) * 1024


def measure_once(folder: pathlib.Path, way: str, layout: str, conversion: str, mib: int) -> None:
    """Prints the seconds of a restore, and its peak memory over what lands."""
    restorer(folder / "small", way, layout, conversion, SMALL_MIB)()
    run = restorer(folder / "large", way, layout, conversion, mib)
    start = time.perf_counter()
    arrays, peak = measure_peak(lambda: jax.tree.leaves(jax.block_until_ready(run())))
    seconds = time.perf_counter() - start
    landed = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards)
    print(seconds, peak / landed)


def measure_anew(mib: int, rounds: int, *cases: tuple[str, ...]) -> list[tuple[float, float]]:
    """The median seconds and peak of each case; they take turns in new processes."""
    found: list[list[list[float]]] = [[] for _ in cases]
    for _ in range(rounds):
        for case, rows in zip(cases, found, strict=True):
            printed = run_anew("restore", str(mib), "--measure", *case)
            rows.append([float(word) for word in printed.split()])
    return [tuple(map(statistics.median, zip(*rows, strict=True))) for rows in found]


def compare_with_orbax(folder: str, mib: int, rounds: int) -> Iterator[Figure]:
    for layout in LAYOUTS:
        cases = [(folder, way, layout, "as stored") for way in ("ours", "orbax")]
        (ours, peak), (theirs, their_peak) = measure_anew(mib, rounds, *cases)
        work, detail = f"restore of {mib:,} MiB by {layout}", f"Orbax {their_peak:.2f}x"
        yield Figure(f"{work}, peak memory over what lands", peak, floor=1.15, detail=detail)
        detail = f"{ours:.1f} s against {theirs:.1f} s"
        work = f"{work} and verified, time against Orbax, which verifies nothing"
        yield Figure(work, ours / theirs, floor=1.1, detail=detail)


def convert(folder: str, mib: int, rounds: int) -> Iterator[Figure]:
    for layout in LAYOUTS:
        for conversion in CONVERSIONS:
            ways = {"ours": "a checkpoint", "model.safetensors": "a safetensors file"}
            cases = [(folder, way, layout, conversion) for way in ways]
            for what, (seconds, peak) in zip(
                ways.values(), measure_anew(mib, rounds, *cases), strict=True
            ):
                work = f"{mib:,} MiB of {what} by {layout}, {conversion}, peak over what lands"
                yield Figure(work, peak, floor=1.15, detail=f"{seconds:.1f} s")


def measure(mib: int, rounds: int, *, conversions: bool) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        for part, size in {"small": SMALL_MIB, "large": mib}.items():
            path = pathlib.Path(folder, part)
            path.mkdir()
            save(path, size, safetensors=conversions)
        yield from (convert if conversions else compare_with_orbax)(folder, mib, rounds)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("mib", type=int, nargs="?", default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversions", action="store_true", help="other orders and dtypes")
    parser.add_argument("--measure", nargs=4, help="one round: folder and what is restored")
    options = parser.parse_args()
    if options.measure:
        folder, *case = options.measure
        measure_once(pathlib.Path(folder), *case, options.mib)
        return
    mib, rounds = (8, 1) if options.quick else (options.mib, options.rounds)
    print_figures(measure(mib, rounds, conversions=options.conversions), options)


if __name__ == "__main__":
    main()
