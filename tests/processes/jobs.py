"""Runs a function in several processes of one job on loopback; as a program, starts them.

The function is one of those in ``programs.py``, or of another module here. It gets the arguments,
and returns something that JSON can hold. Every process has its share of eight simulated devices.

Importing JAX and the libraries on it takes longer than most jobs: one program imports them, and is
forked for each process before JAX has any devices.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from penzai_shard.processes.launching import reserved_port
from tests.simulated_devices import fast

ROOT = pathlib.Path(__file__).parent.parent.parent
# A job that hangs is ended; one of a busy machine is not.
SECONDS_PER_JOB = 600


class Starter:
    """The program that has imported all, and is forked."""

    def __init__(self):
        environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
        self._program = subprocess.Popen(
            [sys.executable, "-m", "tests.processes.jobs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=ROOT,
            text=True,
        )
        atexit.register(self.stop)

    def ask(self, *request):
        self._program.stdin.write(json.dumps(request) + "\n")
        self._program.stdin.flush()
        return json.loads(self._program.stdout.readline())

    def stop(self):
        self._program.stdin.close()
        self._program.wait()
        self._program.stdout.close()


@functools.cache
def starter():
    return Starter()


class Job:
    """A job that was started. A context manager: at its end no process is left.

    Attributes:
        folder: Where the processes write what they print and what they return.
    """

    def __init__(self, function, arguments, processes, devices, folder, begun_by="jax"):
        self.folder = pathlib.Path(folder)
        self._held = contextlib.ExitStack()
        port = self._held.enter_context(reserved_port())
        flags = fast(f"--xla_force_host_platform_device_count={devices // processes}")
        given = [port, processes, begun_by, function, arguments, str(folder), flags]
        self._pids = [starter().ask("start", number, *given) for number in range(processes)]
        self._began = time.monotonic()
        self._ended = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for number, pid in enumerate(self._pids):
            if self.status(number) is None:
                starter().ask("kill", pid)
        self._held.close()

    def status(self, number):
        """The exit status of a process; None while it runs."""
        if number not in self._ended:
            status = starter().ask("poll", self._pids[number])
            if status is None:
                return None
            self._ended[number] = status, time.time()
        return self._ended[number][0]

    def ended_at(self, number):
        """When a process had ended, by ``time.time``."""
        return self._ended[number][1]

    def printed(self, number):
        return (self.folder / f"printed.{number}").read_text(errors="replace")

    def wait(self, seconds=SECONDS_PER_JOB):
        """The exit status of each process; None for one that did not end in time."""
        ends = time.monotonic() + seconds
        numbers = range(len(self._pids))
        while time.monotonic() < ends and None in [self.status(n) for n in numbers]:
            time.sleep(0.02)
        return [self.status(number) for number in numbers]

    def results(self):
        paths = [self.folder / f"result.{number}.json" for number in range(len(self._pids))]
        return [json.loads(path.read_text()) for path in paths]


def run(function, arguments=(), processes=2, devices=8, begun_by="jax"):
    """What the function returned in each process."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Job(function, list(arguments), processes, devices, folder, begun_by) as job,
    ):
        statuses = job.wait()
        printed = [f"process {n}: {job.printed(n)[-3000:]}" for n in range(processes)]
        assert statuses == [0] * processes, "\n".join(printed)
        return job.results()


def run_script(script, *arguments):
    """Runs a program, in a fork in place of a new Python that would import everything first.

    Args:
        script: Path of its file, or its text.
        arguments: What it finds in ``sys.argv``.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        Job("script", [str(script), [*map(str, arguments)], folder], 1, 8, folder) as job,
    ):
        (status,) = job.wait()
        printed = [(pathlib.Path(folder) / name).read_text() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(script, status, *printed)


CLUSTERS = {
    "slurm": {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_NODELIST": "localhost,elsewhere[02-03]",
        "SLURM_NTASKS": "{count}",
        "SLURM_PROCID": "{number}",
        "SLURM_LOCALID": "{number}",
    },
    "open mpi": {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1,10.148.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "{count}",
        "OMPI_COMM_WORLD_RANK": "{number}",
        "OMPI_COMM_WORLD_LOCAL_RANK": "{number}",
    },
}
"""What these tell each process through its environment, as JAX reads it."""


def begin(number, port, count, begun_by):
    """Makes this process one of the job, as its script would do; gives what the script is within.

    Args:
        number: The number of the process.
        port: Where the first one serves.
        count: How many there are.
        begun_by: ``"jax"``, for ``jax.distributed.initialize`` alone; or a cluster of which
            ``several_processes`` is to find out everything.
    """
    import jax

    import penzai_shard as pzs

    if begun_by == "jax":
        if count > 1:
            jax.distributed.initialize(
                f"127.0.0.1:{port}", count, number, initialization_timeout=SECONDS_PER_JOB
            )
        return contextlib.nullcontext()
    os.environ["JAX_COORDINATOR_PORT"] = str(port)
    for name, text in CLUSTERS[begun_by].items():
        os.environ[name] = text.format(number=number, count=count)
    return pzs.several_processes()


def process(number, port, count, begun_by, function, arguments, folder, flags):
    """What a process of a job does."""
    os.environ["XLA_FLAGS"] = flags
    with begin(number, port, count, begun_by):
        module, _, name = function.rpartition(".")
        module = importlib.import_module(f"tests.processes.{module or 'programs'}")
        result = getattr(module, name)(*arguments)
    (pathlib.Path(folder) / f"result.{number}.json").write_text(json.dumps(result))


def serve():
    """Starts, polls and kills as it is asked to; in a process of a job, gives what it is to do."""
    for module in ("programs", "training_programs"):
        importlib.import_module(f"tests.processes.{module}")
    importlib.import_module("orbax.checkpoint.experimental.v1")
    statuses = {}
    for line in sys.stdin:
        asked, *given = json.loads(line)
        answer = None
        if asked == "start":
            sys.stdout.flush()
            answer = os.fork()
            if not answer:
                return given
        elif asked == "poll":
            pid, status = (given[0], None)
            if pid not in statuses:
                pid, status = os.waitpid(pid, os.WNOHANG)
                if pid:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
            answer = statuses.get(given[0])
        else:
            os.kill(given[0], 9)
            os.waitpid(given[0], 0)
        print(json.dumps(answer), flush=True)
    return None


def main():
    given = serve()
    if given is None:
        return
    number, *rest = given
    with open(pathlib.Path(rest[5]) / f"printed.{number}", "w") as printed:
        nothing = os.open(os.devnull, os.O_RDONLY)
        for own, kept in ((nothing, 0), (printed.fileno(), 1), (printed.fileno(), 2)):
            os.dup2(own, kept)
    process(number, *rest)


if __name__ == "__main__":
    main()
