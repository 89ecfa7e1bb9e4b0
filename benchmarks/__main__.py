"""Measures every floor, one script after the other, and prints one table of figures.

Each script runs in a new process, so that none finds the caches, threads or memory of another. One
that fails, or takes too long, has its error as a row, and the others go on. The exit status is 1 if
a floor does not hold. On two cores with nothing else to do it all takes less than 15 minutes.

    python -m benchmarks [--quick] [NAME ...]
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.measure import ROOT, Figure, make_parser, print_figures

# The most seconds that each script takes on two quiet cores: 15 minutes in all.
SCRIPTS = {
    "names": 30,
    "imports": 15,
    "plan": 45,
    "sharded_init": 260,
    "jitted": 40,
    "train_step": 30,
    "parallel_training": 250,
    "surgery": 40,
    "restore": 110,
    "first_step": 20,
    "price": 60,
}
# How many times longer a script may take before it is ended: other machines are slower.
PATIENCE = 3


def run_script(name: str, *, quick: bool) -> Iterator[Figure]:
    """The figures of a script; the last one says what went wrong, if anything did."""
    limit = SCRIPTS[name] * PATIENCE
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json"]
    if quick:
        command.append("--quick")
    # Settings of a user, for instance a cache of compiled programs, would change what is measured.
    environment = {key: x for key, x in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as printed,
        tempfile.TemporaryFile("w+") as errors,
    ):
        # The files of a script that is ended go with the folder.
        environment |= {"JAX_PLATFORMS": "cpu", "TMPDIR": folder}
        streams = {"stdout": printed, "stderr": errors}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True, **streams
        )
        end = f"It takes more than {limit} s."
        try:
            status = process.wait(limit)
            end = f"It ends with status {status}."
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # Its own processes too, however it ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.seek(0)
        for line in printed:
            # Libraries print, too.
            if line.startswith("{"):
                yield Figure(**json.loads(line))
        if status != 0:
            errors.seek(0)
            text = errors.read().strip()
            if text:
                print(text, file=sys.stderr, flush=True)
            reason = text.splitlines()[-1] if status and text else ""
            yield Figure(name, None, detail=f"{end} {reason}".strip())


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCRIPTS))
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in SCRIPTS]
    if unknown:
        parser.error(f"no such script: {', '.join(unknown)}")
    names = options.names or SCRIPTS
    figures = (figure for name in names for figure in run_script(name, quick=options.quick))
    return 0 if print_figures(figures, options) else 1


if __name__ == "__main__":
    sys.exit(main())
