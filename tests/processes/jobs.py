"""Runs a function in several processes of one job on loopback; as a program, one of them.

The function is one of those in ``programs.py``, or of another module here. It gets the arguments,
and returns something that JSON can hold. Every process has its share of eight simulated devices.
"""

import importlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
ATTEMPTS = 3


class Job:
    """A job that was started. A context manager: at its end no process is left.

    Attributes:
        processes: The processes, that of number 0 first.
        folder: Where they write what they print and what they return.
    """

    def __init__(self, function, arguments, processes, devices, heartbeat, folder):
        self.folder = pathlib.Path(folder)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = dict(
            os.environ,
            XLA_FLAGS=f"--xla_force_host_platform_device_count={devices // processes}",
            JAX_PLATFORMS="cpu",
            PYTHONPATH=str(ROOT),
            # Of several processes only the first one writes to the cache of compiled programs.
            PYTHONUNBUFFERED="1",
        )
        self.processes = []
        for number in range(processes):
            command = [sys.executable, __file__, str(port), str(processes), str(number)]
            command += [str(heartbeat), function, json.dumps(arguments), str(self.folder)]
            with open(self.folder / f"printed.{number}", "w") as printed:
                self.processes.append(
                    subprocess.Popen(
                        command, stdout=printed, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def printed(self, number):
        return (self.folder / f"printed.{number}").read_text(errors="replace")

    def wait(self, seconds):
        """The exit status of each process; None for one that did not end in time."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and any(p.poll() is None for p in self.processes):
            time.sleep(0.05)
        return [process.poll() for process in self.processes]

    def results(self):
        paths = [self.folder / f"result.{number}.json" for number in range(len(self.processes))]
        return [json.loads(path.read_text()) for path in paths]


def run(function, arguments=(), processes=2, devices=8, seconds=240):
    """What the function returned in each process."""
    for attempt in range(ATTEMPTS):
        with (
            tempfile.TemporaryDirectory() as folder,
            Job(function, list(arguments), processes, devices, 100, folder) as job,
        ):
            statuses = job.wait(seconds)
            if statuses == [0] * processes:
                return job.results()
            printed = [f"process {n}: {job.printed(n)[-3000:]}" for n in range(processes)]
            # Another program may have taken the port between finding it and using it.
            if "already in use" not in job.printed(0) or attempt == ATTEMPTS - 1:
                raise AssertionError("\n".join([f"exit statuses {statuses}", *printed]))
    return None


def main(port, count, number, heartbeat, function, arguments, folder):
    import jax

    if int(count) > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            int(count),
            int(number),
            initialization_timeout=120,
            heartbeat_timeout_seconds=int(heartbeat),
        )
    module, _, name = function.rpartition(".")
    program = getattr(importlib.import_module(f"tests.processes.{module or 'programs'}"), name)
    result = program(*json.loads(arguments))
    (pathlib.Path(folder) / f"result.{number}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
