"""Run as a program: kills processes that save, at random moments, and judges what they leave.

Usage: python -m tests.checkpointing.killed_saves [--kills 60] [--manager-kills 50] [--seed 0]

Half of the first save to one path with ``overwrite=True``, half to numbered paths; a third each
ends by SIGKILL, SIGTERM and Ctrl-C. The others save with a ``CheckpointManager`` in the background,
and end by SIGKILL. After each the newest version must restore exactly, as must all that are
offered; the next save must work, and nothing but checkpoints may be left then.

Each process is a fork of this one, which has imported everything and begun nothing: so a kill costs
a second and not ten. It judges first what the one before left, then saves until it is killed.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import random
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from tests.simulated_devices import EIGHT_DEVICES_FAST

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = EIGHT_DEVICES_FAST

import jax.numpy as jnp
import numpy as np
from penzai import pz

import penzai_shard as pzs
from penzai_shard.library_apis import orbax_api

SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT")
PLACES = ("one path", "numbered paths")
# A save takes one to three tenths of a second.
LONGEST_WAIT = 0.3
# Orbax' threads would wait for five minutes.
MOST_SECONDS = 120.0


def values(version: int) -> dict[str, Any]:
    """What a version holds: a few arrays in which every element depends on the version."""
    rng = np.random.default_rng(version)
    return {
        "large": pz.nx.wrap(jnp.asarray(rng.normal(size=(64, 4096)), "float32")).tag("a", "b"),
        "small": pz.nx.wrap(jnp.arange(8) + version).tag("a"),
        "whole": pz.nx.wrap(jnp.asarray(rng.normal(size=(7,)), "float32")).tag("c"),
    }


def version_in(restored: dict[str, Any]) -> Any:
    """Which version something is, exactly; else what is wrong with it."""
    version = int(restored["small"].data_array[0])
    for name, wanted in values(version).items():
        found, wanted = (np.asarray(x.data_array).tobytes() for x in (restored[name], wanted))
        if found != wanted:
            return f"not the {name!r} of version {version}"
    return version


class OnePath:
    """Every version is saved over the one before."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.mesh = pzs.make_mesh({"data": 8})

    def versions(self) -> list[int]:
        """All versions that are offered; the last ones are restored to see that they are whole."""
        path = self.folder / "params"
        return [self.restored(path)] if path.exists() or any(self.folder.iterdir()) else []

    def restored(self, path: pathlib.Path) -> Any:
        """Which version is at a path, or what is wrong with it."""
        try:
            return version_in(pzs.restore_params(path, values(0), self.mesh, {"a": "data"}))
        except pzs.errors.CheckpointNotFoundError:
            return 0
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def save(self, version: int, tree: Any) -> int:
        """Saves a version; the newest version that is certainly whole then."""
        pzs.save_params(self.folder / "params", tree, overwrite=True)
        return version

    def finish(self) -> None:
        """Waits until all is saved."""

    def garbage(self) -> list[str]:
        """What is there beside the checkpoints that should be."""
        return sorted(name for name in os.listdir(self.folder) if name != "params")


class NumberedPaths(OnePath):
    """Every version is saved to a path of its own."""

    def versions(self) -> list[int]:
        found = sorted(int(p.name[7:]) for p in self.folder.glob("params_*"))
        # Older ones were judged before.
        return [self.restored(self.folder / f"params_{number}") for number in found[-3:]]

    def save(self, version: int, tree: Any) -> int:
        pzs.save_params(self.folder / f"params_{version}", tree, overwrite=True)
        return version

    def garbage(self) -> list[str]:
        return sorted(n for n in os.listdir(self.folder) if not n.startswith("params_"))


class Manager(OnePath):
    """A manager saves every version in the background, and keeps two."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(folder)
        self.manager = pzs.CheckpointManager(folder, keep_last=2)

    def versions(self) -> list[int]:
        options: Any = {"mesh": self.mesh, "rules": {"a": "data"}}
        found = []
        for step in self.manager.steps():
            version = version_in(self.manager.restore(values(0), step, **options))
            found.append(version if version == step else f"step {step} has {version}")
        return found

    def save(self, version: int, tree: Any) -> int:
        self.manager.save(version, tree)
        return version - 1  # This one may still be written.

    def finish(self) -> None:
        self.manager.wait()

    def garbage(self) -> list[str]:
        # It keeps two, and the one that it is to remove until the new one is there.
        return sorted(os.listdir(self.folder))[:-2]


PLACES: dict[str, type[OnePath]] = {
    "one path": OnePath,
    "numbered paths": NumberedPaths,
    "a manager": Manager,
}


def save_for_ever(place: OnePath, say: Callable[..., None]) -> None:
    """Says what is in a folder, then saves one version after the other."""
    found = place.versions()
    say("found", found)
    version = found[-1] if found and isinstance(found[-1], int) else 0
    is_first = True
    while True:
        version += 1
        tree = pzs.place(values(version), place.mesh, {"a": "data"})
        say("begins", version)
        say("saved", place.save(version, tree))
        if is_first:
            # The first save after a kill has cleared away what that left.
            place.finish()
            say("saved", version)
            say("garbage", place.garbage())
            is_first = False


@dataclasses.dataclass
class Process:
    """A fork that saves, and what it says."""

    number: int
    pipe: int
    errors: int
    _text: bytes = b""

    def said(self, seconds: float) -> Iterator[tuple[str, Any]]:
        """What it says, until it ends or some seconds have passed."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self.pipe], [], [], left)[0]:
                return
            piece = os.read(self.pipe, 2**16)
            if not piece:
                return
            *lines, self._text = (self._text + piece).split(b"\n")
            for line in lines:
                what, content = json.loads(line)
                yield what, content

    def end(self) -> tuple[int, str]:
        """Waits for its end: the status, and what it wrote to standard error."""
        _, status = os.waitpid(self.number, 0)
        os.close(self.pipe)
        with os.fdopen(self.errors, "rb") as file:
            return os.waitstatus_to_exitcode(status), file.read().decode(errors="replace")


def started(act: Callable[[Callable[..., None]], None]) -> Process:
    """Runs a function in a fork; it is given a function that says something to this process."""
    read, write = os.pipe()
    read_errors, write_errors = os.pipe()
    number = os.fork()
    if number:
        os.close(write)
        os.close(write_errors)
        return Process(number, read, read_errors)
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(write_errors, 2)

        def say(*what: Any) -> None:
            os.write(write, json.dumps(what).encode() + b"\n")

        def unraisable(what: Any) -> None:
            # Python drops an interrupt that comes in a callback of its garbage collector (JAX has
            # one), whatever the program does.
            if issubclass(what.exc_type, KeyboardInterrupt):
                say("dropped", repr(what.object))
            else:
                sys.__unraisablehook__(what)

        sys.unraisablehook = unraisable
        act(say)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


@dataclasses.dataclass
class Kill:
    """One kill: how, what was said before, and what is wrong with what it left.

    Attributes:
        place: Where the process saved to.
        signal: What ended it.
        begun: The newest version of which a save began.
        saved: The newest version of which a save is known to have ended.
        seconds: How long the process then went on.
        left: Whether parts of a save were left.
        has_cleared: Whether it had saved before, and so cleared away what others had left.
        problems: What is wrong.
    """

    place: str
    signal: str
    begun: int = 0
    saved: int = 0
    seconds: float = 0.0
    left: bool = False
    has_cleared: bool = False
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def came_in_a_save(self) -> bool:
        """Whether it came between the beginning of a save and its end."""
        return self.begun > self.saved


def killed(folder: pathlib.Path, place: str, name: str, rng: random.Random, before: Kill) -> Kill:
    """Starts a process that judges what the kill before left, and kills it in a save."""
    process = started(lambda say: save_for_ever(PLACES[place](folder), say))
    kill = Kill(place, name)
    saves, wait = rng.randint(1, 3), rng.uniform(0, LONGEST_WAIT)
    for what, content in process.said(600):
        _take(kill, before, what, content)
        if what == "begins":
            saves -= 1
        if not saves:
            break
    time.sleep(wait)
    start = time.monotonic()
    os.kill(process.number, getattr(signal, name))
    for what, content in process.said(MOST_SECONDS):
        _take(kill, before, what, content)
        if what == "dropped":
            # As a person presses Ctrl-C again, once what it came into has ended.
            time.sleep(0.2)
            os.kill(process.number, getattr(signal, name))
    kill.seconds = time.monotonic() - start
    if kill.seconds >= MOST_SECONDS:
        kill.problems.append(f"goes on for {MOST_SECONDS} s after {name}")
        os.kill(process.number, signal.SIGKILL)
    status, errors = process.end()
    if not kill.begun:
        kill.problems.append(f"began no save: {errors[-2000:]}")
    if name == "SIGINT":
        # Python may warn after it of coroutines that had not begun.
        if status != 1 or "KeyboardInterrupt" not in errors.splitlines():
            kill.problems.append(f"ended with status {status}: {errors[-2000:]}")
    elif status != -getattr(signal, name):
        kill.problems.append(f"ended with status {status}: {errors[-2000:]}")
    kill.left = any(entry.startswith(".") for entry in os.listdir(folder))
    if name == "SIGINT" and kill.left and (kill.has_cleared or not before.left):
        kill.problems.append(f"leaves {os.listdir(folder)}")
    return kill


def _take(kill: Kill, before: Kill, what: str, content: Any) -> None:
    """Notes what a process says, and judges by it what the kill before left."""
    if what == "begins":
        kill.begun = content
    elif what == "saved":
        kill.saved = content
    elif what == "garbage":
        kill.has_cleared = True
        if content:
            before.problems.append(f"after the next save there is still {content}")
    elif what == "found":
        newest = content[-1] if content else 0
        are_whole = all(isinstance(version, int) for version in content)
        if not are_whole or not before.saved <= newest <= before.begun:
            text = f"saved {before.saved}, began {before.begun}, and found is {content}"
            before.problems.append(text)
        kill.saved = kill.begun = newest if are_whole else 0


def kills(directory: pathlib.Path, place: str, signals: list[str], seed: int) -> list[Kill]:
    """Ends saves to one place, each by a signal, and judges what each left."""
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    orbax_api.orbax()
    rng = random.Random(f"{place} {seed}")
    folder = directory / place.replace(" ", "_")
    folder.mkdir()
    before, found = Kill(place, ""), []
    for name in signals:
        before = killed(folder, place, name, rng, before)
        found.append(before)
    # A last one judges, and is ended once it has saved.
    killed(folder, place, "SIGKILL", rng, before)
    return found


def main() -> int:
    """Kills saves; the exit status says whether all left what they should."""
    import rich.console
    import rich.table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60, help="of saves to paths")
    parser.add_argument("--manager-kills", type=int, default=50, help="of saves by a manager")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signals = list(itertools.islice(itertools.cycle(SIGNALS), options.kills // 2))
    runs = {"one path": signals, "numbered paths": signals}
    runs["a manager"] = ["SIGKILL"] * options.manager_kills
    with tempfile.TemporaryDirectory() as name:
        found = [
            kill
            for place, how in runs.items()
            for kill in kills(pathlib.Path(name), place, how, options.seed)
        ]
    wrong = sum(bool(kill.problems) for kill in found)
    columns = ("kills", "in a save", "left part of it", "wrong")
    table = rich.table.Table("saves to", "ended by", *columns)
    for place, how in itertools.product(PLACES, SIGNALS):
        these = [kill for kill in found if (kill.place, kill.signal) == (place, how)]
        if not these:
            continue
        in_a_save = sum(kill.came_in_a_save for kill in these)
        left = sum(kill.left for kill in these)
        bad = sum(bool(kill.problems) for kill in these)
        table.add_row(place, how, *map(str, (len(these), in_a_save, left, bad)))
    rich.console.Console().print(table)
    print(f"{len(found)} kills, {wrong} wrong; seed {options.seed}")
    print(f"slowest end: {max(kill.seconds for kill in found):.1f} s")
    for kill in found:
        for problem in kill.problems:
            print(f"{kill.place}, {kill.signal}: {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
