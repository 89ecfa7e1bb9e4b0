"""Run as a program: damages small checkpoints in many ways, and judges what restoring them does.

Usage: python -m tests.checkpointing.damage_verdicts [--count 416] [--seed 0] [--kind TEXT] [--show]

Each damaged checkpoint must be refused within two seconds, by an error of this library that names
an array or a file concerned, with at most ten lines on standard error; or give exactly what was
saved. The judge keeps what was saved as NumPy arrays, and uses nothing of the library's.
"""

import argparse
import collections
import contextlib
import dataclasses
import gc
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.simulated_devices import EIGHT_DEVICES_FAST

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = EIGHT_DEVICES_FAST

import jax
import jax.numpy as jnp
import numpy as np
import optax
from penzai import pz

import penzai_shard as pzs
from penzai_shard.errors import ShardingError
from tests.checkpointing import damages_of_content  # noqa: F401 (more kinds)
from tests.checkpointing.damages import KINDS, Damage, Save, drawn_damages

MOST_SECONDS, MOST_LINES = 2.0, 10
HANGS = 120
SPLIT = {"a": "data", "b": "model", "embedding": "data"}
EXACT, REFUSED = "exact", "refused"
GOOD = (EXACT, REFUSED)
WRONG, SLOWLY = "WRONG VALUES", ", slowly"


@dataclasses.dataclass(frozen=True)
class Judged:
    """A kind of checkpoint: how to restore it, and what it must give.

    Attributes:
        save: The checkpoint.
        restore: Restores what is at a path.
        expected: Dtype, shape and bits of every array.
        structure: The structure of the tree, which has names and axes.
        most_lines: How many lines a refusal may have.
    """

    save: Save
    restore: Callable[[pathlib.Path], Any]
    expected: list[tuple[str, tuple[int, ...], bytes]]
    structure: Any
    most_lines: int = MOST_LINES

    def is_exact(self, restored: Any) -> bool:
        """Whether something has exactly the values, dtypes and axes that were saved."""
        return (
            jax.tree.structure(restored) == self.structure
            and contents_of(restored) == self.expected
        )


def contents_of(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bits of every array; axes and names are in the tree's structure."""
    found = []
    for leaf in jax.tree.leaves(tree):
        dtype = str(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        found.append((dtype, array.shape, array.tobytes()))
    return found


def _arrays(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def drawn(shape: tuple[int, ...], dtype: Any, *axes: str) -> Any:
        return pz.nx.wrap(jnp.asarray(rng.normal(size=shape) * 50, dtype)).tag(*axes)

    return {
        "square": drawn((8, 8), "float32", "a", "b"),
        "other_square": drawn((8, 8), "float32", "a", "b"),
        "transposed": drawn((8, 8), "float32", "b", "a"),
        "half": drawn((8, 16), jnp.bfloat16, "a", "c"),
        "integers": drawn((8,), "int32", "a"),
        "mlp/bias": drawn((8,), "int32", "a"),
        "repeated": pz.nx.wrap(jnp.full((8, 4), seed, "float32")).tag("a", "b"),
        "zeros": pz.nx.zeros({"a": 8, "c": 2}),
        "empty": pz.nx.zeros({"a": 0, "c": 3}),
        "random_key": jax.random.key(seed),
    }


def _large_arrays(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        name: pz.nx.wrap(jnp.asarray(rng.normal(size=(64, 256)), dtype)).tag("a", "b")
        for name, dtype in (("first", "float32"), ("second", "float32"), ("third", jnp.bfloat16))
    }


def _tiny_array(seed: int) -> dict[str, Any]:
    return {
        "one": pz.nx.wrap(jnp.asarray([seed, 2, 3], "float32")).tag("c"),
        "two": pz.nx.wrap(jnp.asarray([seed, 5, 6], "float32")).tag("c"),
    }


def _train_state(seed: int) -> Any:
    model = pz.nn.Sequential(
        [
            pz.nn.Linear.from_config(
                name, jax.random.key(seed + i), {"embedding": 8}, {"embedding_out": 8}
            )
            for i, name in enumerate(("up", "down"))
        ]
    )
    state = pzs.TrainState.initial_state(model, optax.adam(1e-3), jax.random.key(seed))
    # After some steps nothing is zero any more.
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: (
            jnp.asarray(rng.normal(size=x.shape), x.dtype)
            if getattr(x, "ndim", 0) and jnp.issubdtype(x.dtype, jnp.floating)
            else x
        ),
        state,
    )


def made_saves(directory: pathlib.Path, names: Iterable[str] = ()) -> list[Judged]:
    """Checkpoints of several kinds: whole and split, small and large, parameters and states."""
    mesh = pzs.make_mesh({"data": 4, "model": 2})
    makers: dict[str, tuple[Any, Any, Any, bool]] = {
        "params": (_arrays, pzs.save_params, pzs.restore_params, False),
        "split params": (_arrays, pzs.save_params, pzs.restore_params, True),
        "large params": (_large_arrays, pzs.save_params, pzs.restore_params, True),
        "tiny params": (_tiny_array, pzs.save_params, pzs.restore_params, False),
        "train state": (_train_state, pzs.save_train_state, pzs.restore_train_state, True),
    }
    return [
        _made(directory / name.replace(" ", "_"), name, mesh, *makers[name])
        for name in names or makers
    ]


def _made(
    directory: pathlib.Path, name: str, mesh: Any, make: Any, save: Any, restore: Any, split: bool
) -> Judged:
    paths = []
    for seed in (2, 1):
        tree = make(seed)
        tree = pzs.place(tree, mesh, SPLIT) if split else tree
        paths.append(pathlib.Path(save(directory / str(seed), tree)))
    stored = sorted(pzs.checkpointing.read_manifest(paths[1]).records.items())
    full = [(n, r) for n, r in stored if 0 not in r.shape]
    alike = tuple(
        (n, m)
        for n, r in full
        for m, other in full
        if n < m and (r.shape, r.dtype) == (other.shape, other.dtype)
    )
    return Judged(
        Save(name, paths[1], paths[0], tuple(n for n, _ in full), alike),
        lambda path: restore(path, tree, mesh, SPLIT),
        contents_of(tree),
        jax.tree.structure(tree),
    )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What restoring a damaged checkpoint did."""

    damage: Damage
    what: str
    seconds: float
    text: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it is what must happen."""
        return self.what in GOOD

    def __str__(self) -> str:
        damage = self.damage
        named = ", ".join(damage.names[:3])
        text = self.text[:1500].replace("\n", "\n  ")
        first = f"{self.what} ({self.seconds:.2f} s): {damage.save.name}: {damage.kind}:"
        return f"{first}\n  {damage.where} ({named})\n  {text}"


def judged(damage: Damage, how: Judged, directory: pathlib.Path) -> Verdict:
    """Does a damage to a copy of its checkpoint, restores that, and judges the result."""
    copy = directory / "copy"
    for _ in range(3):  # On a busy machine everything is slow now and then.
        shutil.copytree(damage.save.path, copy)
        try:
            damage.edit(copy)
            verdict = _verdict(damage, how, copy)
        finally:
            shutil.rmtree(copy)
        if not verdict.what.endswith(SLOWLY):
            break
    return verdict


def _verdict(damage: Damage, how: Judged, path: pathlib.Path) -> Verdict:
    error: BaseException | None = None
    restored = None
    start = time.monotonic()
    with standard_error() as printed, warnings.catch_warnings(), ended_after(HANGS):
        warnings.simplefilter("always")
        try:
            restored = how.restore(path)
        except BaseException as raised:
            error = raised
        seconds = time.monotonic() - start
        gc.collect()
        if error is not None:
            # As a script would end with it, whose own line is that of ``restore`` above.
            traceback.print_exception(error.with_traceback(_from_the_call(error)))
    lines = printed()
    text = "\n".join(lines) if error is None else f"{type(error).__name__}: {error}"
    what = EXACT if error is None else REFUSED
    if isinstance(error, TimeoutError) or seconds >= HANGS:
        what = "hangs"
    elif error is None and not how.is_exact(restored):
        what = WRONG
    elif error is not None and not isinstance(error, ShardingError):
        what = f"another library's {type(error).__name__}"
    elif error is not None and not named(damage, str(error), path):
        what = "names neither array nor file"
    elif len(lines) > how.most_lines:
        what = "many lines"
        text = "\n".join(lines)
    elif seconds > MOST_SECONDS:
        what += SLOWLY
    return Verdict(damage, what, seconds, text)


def _from_the_call(error: BaseException) -> Any:
    return error.__traceback__ and error.__traceback__.tb_next


def named(damage: Damage, text: str, path: pathlib.Path) -> bool:
    """Whether a message names an array or a file concerned; ``"."`` is the whole directory."""
    said = text.replace(f"{path}/", "").replace(str(path), " . ")
    return any(
        re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", said) is not None for name in damage.names
    )


# Stays open: threads that outlive a failure may still write to it.
_DESCRIPTOR = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


@contextlib.contextmanager
def standard_error() -> Iterator[Callable[[], list[str]]]:
    """Collects all that any thread or library writes to standard error."""
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            with contextlib.redirect_stderr(_DESCRIPTOR):
                yield lambda: lines
        finally:
            _DESCRIPTOR.flush()
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


@contextlib.contextmanager
def ended_after(seconds: int) -> Iterator[None]:
    """Ends what hangs."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"hung for {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    # Some calls of other libraries end by nothing else.
    timer = threading.Timer(3 * seconds, os._exit, [3])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def verdicts(
    saves: list[Judged], directory: pathlib.Path, seed: int, count: int, kind: str = ""
) -> Iterator[Verdict]:
    """The verdicts of drawn damages."""
    by_name = {how.save.name: how for how in saves}
    for damage in drawn_damages([how.save for how in saves], seed, count):
        if kind in damage.kind:
            yield judged(damage, by_name[damage.save.name], directory)


def print_table(found: list[Verdict], kinds: Iterable[str]) -> None:
    """Prints how often each verdict was given on each kind of damage."""
    import rich.console
    import rich.table

    counts = collections.Counter((v.damage.kind, v.what) for v in found)
    columns = [*GOOD, *sorted({v.what for v in found} - {*GOOD})]
    table = rich.table.Table("damage", *columns, show_footer=True)
    for kind in kinds:
        row = [counts[kind, column] for column in columns]
        if any(row):
            table.add_row(kind, *(str(n or "") for n in row))
    for column, name in zip(table.columns[1:], columns, strict=True):
        column.justify = "right"
        column.footer = str(sum(v.what == name for v in found))
    table.columns[0].footer = f"{len(found)} in all"
    rich.console.Console(width=140).print(table)


def run_as_program(
    description: str,
    made: Callable[[pathlib.Path], list["Judged"]],
    judged_in: Callable[..., Iterable["Verdict"]],
    kinds: Any,
    *,
    count: int,
) -> int:
    """Reads the command line, judges drawn damages, prints them; whether every verdict was good."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", default="", help="only kinds that have this text in their name")
    parser.add_argument("--show", action="store_true", help="print every message")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        saves = made(directory)
        for how in saves:  # What is compiled once is not counted.
            assert how.is_exact(how.restore(how.save.path)), how.save.name
            assert how.save.files(), how.save.name
        gc.freeze()
        found = []
        for verdict in judged_in(saves, directory, options.seed, options.count, options.kind):
            found.append(verdict)
            if options.show or not verdict.is_good:
                print(verdict)
    print_table(found, kinds)
    slowest = max(verdict.seconds for verdict in found)
    print(f"slowest: {slowest:.2f} s; seed {options.seed}")
    return 0 if all(verdict.is_good for verdict in found) else 1


if __name__ == "__main__":
    sys.exit(run_as_program(__doc__.splitlines()[0], made_saves, verdicts, KINDS, count=416))
