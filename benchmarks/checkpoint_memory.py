"""Peak memory and time of saving and restoring 2 GiB on eight simulated devices.

Every way of doing it runs in a process of its own, since memory that was used once is seldom given
back: this library, with and without comparing checksums, plain Orbax on the same arrays, and
plain Orbax with its limit on what is read at once. Bytes are those of the process above what it
had before (the peak that Linux keeps, which is reset first), set against the bytes that land in
it; of a save, above the model. Times are of one process, in turns.

    python -m benchmarks.checkpoint_memory [--mib 2048] [--rounds 5] [--only restore,save,time]
        [--folder DIR]
"""

import argparse
import gc
import json
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

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    )

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
from penzai import pz

import penzai_shard as pzs
from benchmarks.contenders import chosen, median_ratios

MIB = 2**20
# One more than the largest piece, which Orbax must be able to reserve.
READ_LIMIT = 256 * MIB + 1
SAVED_AS = {"row": "data"}
LAYOUTS: dict[str, dict[str, str]] = {
    "rows": {"row": "data"},
    "columns": {"column": "data"},
    "replicated": {},
}


def sizes(mib: int) -> dict[str, dict[str, int]]:
    """Parameters by name, and the sizes of their axes: one large, and blocks of three smaller."""
    unit = mib * MIB // 32
    columns = 2048 if mib >= 128 else 64
    wanted = [4 * unit]
    while sum(wanted) < mib * MIB:
        wanted += [2 * unit, unit, unit]
    return {
        f"parameter_{i}": {"row": size // (4 * columns), "column": columns}
        for i, size in enumerate(wanted)
    }


def abstract(mib: int, dtype: str = "float32", turned: bool = False) -> dict[str, Any]:
    """The model without values."""

    def build() -> dict[str, Any]:
        return {
            name: pz.nx.zeros(
                dict(reversed(axes.items())) if turned else axes, dtype=jnp.dtype(dtype)
            )
            for name, axes in sizes(mib).items()
        }

    return jax.eval_shape(build)


def filled(mib: int, mesh: Any, rules: Any) -> dict[str, Any]:
    """The model with normal numbers, made one parameter at a time."""
    rng = np.random.default_rng(0)
    model = {}
    for name, axes in sizes(mib).items():
        shape = tuple(axes.values())
        sharding = pzs.make_plan({name: abstract(mib)[name]}, mesh, rules).restore_structs()
        numbers = rng.standard_normal(shape, np.float32)
        data = jax.device_put(numbers, sharding[name].data_array.sharding, may_alias=False)
        model[name] = pz.nx.wrap(data.block_until_ready()).tag(*axes)
        del numbers, data
    return model


def _load(path: str, structs: Any, limit: int | None) -> Any:
    context = ocp.Context()
    context.memory.read_concurrent_bytes = limit
    with context:
        return ocp.load(path, structs)


def restorers(path: str, mesh: Any, rules: Any, mib: int) -> dict[str, Callable[[], Any]]:
    """The ways of restoring."""

    def ours(dtype: str = "float32", turned: bool = False, **options: Any) -> Any:
        model = abstract(mib, dtype, turned)
        return pzs.restore_params(f"{path}/ours", model, mesh, rules, **options)

    def unverified() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pzs.ShardingWarning)
            return ours(verify=False)

    def orbax(limit: int | None = None) -> Any:
        structs = pzs.restore_structs(abstract(mib), mesh, rules)
        return _load(f"{path}/orbax", structs, limit)

    return {
        "ours": ours,
        "ours, unverified": unverified,
        "ours, cast": lambda: ours("bfloat16", on_dtype_mismatch="cast"),
        "ours, transposed": lambda: ours(turned=True, on_axis_mismatch="transpose"),
        "orbax": orbax,
        "orbax, read limit": lambda: orbax(READ_LIMIT),
    }


def savers(path: str, model: Any) -> dict[str, Callable[[], Any]]:
    """The ways of saving."""

    def orbax() -> None:
        ocp.save(f"{path}/orbax_saved", model, overwrite=True)

    return {
        "ours": lambda: pzs.save_params(f"{path}/saved", model, overwrite=True),
        "orbax": orbax,
    }


def resident(field: str) -> int:
    """Bytes of memory of this process, by the name that Linux has for them."""
    status = pathlib.Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def peak_above(work: Callable[[], Any]) -> tuple[Any, int, int]:
    """What it gives, its peak above what was there before, and the peak altogether."""
    gc.collect()
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    before = resident("VmRSS")
    result = jax.block_until_ready(work())
    peak = resident("VmHWM")
    return result, peak - before, peak


def landed(arrays: Any) -> int:
    """Bytes of arrays on all devices of this process."""
    return sum(s.data.nbytes for x in jax.tree.leaves(arrays) for s in x.addressable_shards)


def measure(what: str, layout: str, way: str, path: str, mib: int) -> dict[str, int]:
    """One measurement, in a process that does nothing else; a small one before warms it up."""
    mesh, rules = pzs.make_mesh({"data": 8}), LAYOUTS[layout]
    if what == "save":
        model = filled(mib, mesh, rules)
        savers(f"{path}/warm", filled(1, mesh, rules))[way]()
        _, above, peak = peak_above(savers(path, model)[way])
        return {"bytes": landed(model), "above": above, "peak": peak}
    restorers(f"{path}/warm", mesh, rules, 1)[way]()
    arrays, above, peak = peak_above(restorers(path, mesh, rules, mib)[way])
    return {"bytes": landed(arrays), "above": above, "peak": peak}


def prepare(path: str, mib: int) -> None:
    """What is restored: the same numbers saved by both, split by rows."""
    mesh = pzs.make_mesh({"data": 8})
    for size, where in ((mib, path), (1, f"{path}/warm")):
        model = filled(size, mesh, SAVED_AS)
        pzs.save_params(f"{where}/ours", model)
        ocp.save(f"{where}/orbax", model)


def in_another_process(*args: str, path: str, mib: int) -> str:
    """What this script prints when it is called with some arguments."""
    command = [sys.executable, "-m", "benchmarks.checkpoint_memory", *args]
    done = subprocess.run(
        [*command, "--folder", path, "--mib", str(mib)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def print_memory(whats: list[str], path: str, mib: int) -> None:
    """A line for each way, layout and kind of work."""
    for what in whats:
        ways = restorers(path, None, {}, mib) if what == "restore" else savers(path, None)
        for layout in LAYOUTS:
            for way in ways:
                out = in_another_process("--measure", what, layout, way, path=path, mib=mib)
                found = json.loads(out.splitlines()[-1])
                print(
                    f"{what:8} {layout:10} {way:18} {found['bytes'] / MIB:6.0f} MiB, "
                    f"{found['above'] / MIB:6.0f} MiB above the start, "
                    f"{found['above'] / found['bytes']:.2f} times the bytes; "
                    f"the process {found['peak'] / MIB:6.0f} MiB",
                    flush=True,
                )


def print_times(path: str, mib: int, rounds: int) -> None:
    """Median ratios of times to those of plain Orbax, in turns."""
    mesh = pzs.make_mesh({"data": 8})
    model = filled(mib, mesh, SAVED_AS)
    restoring = restorers(path, mesh, SAVED_AS, mib)
    names = ("orbax", "ours", "ours, unverified")
    works = {f"restore, {name}": restoring[name] for name in names}
    works |= {f"save, {name}": save for name, save in savers(path, model).items()}
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name in list(works)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            jax.block_until_ready(works[name]())
            if turn:
                times[name].append(time.perf_counter() - start)
    for kind in ("restore", "save"):
        of_kind = {name: found for name, found in times.items() if name.startswith(kind)}
        for name, ratio in median_ratios(of_kind, f"{kind}, orbax").items():
            seconds = statistics.median(of_kind[name])
            print(f"{name:26} {ratio:.2f} times plain Orbax, {seconds:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="restore,save,time")
    parser.add_argument("--folder")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prepare:
        prepare(args.folder, args.mib)
    elif args.measure:
        print(json.dumps(measure(*args.measure, args.folder, args.mib)))
    else:
        wanted = chosen(args.only, ("restore", "save", "time"), "kind of work")
        with tempfile.TemporaryDirectory(dir=args.folder) as path:
            in_another_process("--prepare", path=path, mib=args.mib)
            print_memory([what for what in wanted if what != "time"], path, args.mib)
            if "time" in wanted:
                print_times(path, args.mib, args.rounds)


if __name__ == "__main__":
    main()
