"""Starts a test file as the program of several processes on this machine."""

import os
import socket
import subprocess
import sys


def run_processes(file, *arguments, count=2, devices=4):
    """The exit status and the output of each process of a job.

    Each gets its number, the address of the first one, and the other arguments.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": flags}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, file, str(me), address, *arguments], env=env, **pipes)
        for me in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, errors) in zip(started, outputs, strict=True):
        if process.returncode:
            print(errors[-3000:])
    return [(p.returncode, *output) for p, output in zip(started, outputs, strict=True)]
