"""Starts a test file as the program of several processes on this machine.

Half of their time would be imports: as a program, this file imports once, and forks the others.
"""

import itertools
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import tempfile


def run_processes(file, *arguments):
    """The exit status, the output and the errors of both processes of a job; see ``run_jobs``."""
    return run_jobs(file, [arguments])[0]


def run_jobs(file, rows):
    """For jobs of two processes with four devices each, which run at once, how each process ended.

    Each process gets its number, the address of the first one, and the arguments of its job.
    """
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": flags}
    jobs = [[find_address(), *map(str, row)] for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, folder, file, json.dumps(jobs)]
        forking = subprocess.Popen(command, env=env, start_new_session=True)
        try:
            assert forking.wait(timeout=120) == 0
        finally:
            if forking.returncode is None:
                os.killpg(forking.pid, signal.SIGKILL)
        return [[read_end(folder, job, me) for me in (0, 1)] for job in range(len(jobs))]


def find_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def read_end(folder, job, me):
    parts = [pathlib.Path(folder, f"{job}.{me}.{part}") for part in ("status", "out", "err")]
    status, output, errors = [part.read_text() for part in parts]
    if status != "0":
        print(errors[-3000:])
    return int(status), output, errors


def fork_processes(folder, file, jobs):
    """Forks processes that go on with another file, as if Python had been started with it."""
    import optax  # noqa: F401
    import orbax.checkpoint.experimental.v1  # noqa: F401
    import pytest  # noqa: F401

    import penzai_shard.checkpoints.manager
    import penzai_shard.fitting.fit  # noqa: F401

    children = {}
    for job, me in itertools.product(range(len(jobs)), (0, 1)):
        path = f"{folder}/{job}.{me}"
        if not (child := os.fork()):
            for stream, part in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{path}.{part}", os.O_CREAT | os.O_WRONLY), stream)
            sys.argv = [file, str(me), *jobs[job]]
            runpy.run_path(file, run_name="__main__")
            return
        children[path] = child
    for path, child in children.items():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        pathlib.Path(f"{path}.status").write_text(str(status))


if __name__ == "__main__":
    fork_processes(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
