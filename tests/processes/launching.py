"""Starts a test file as a program, or as that of jobs of two processes on this machine."""

import concurrent.futures
import os
import socket
import subprocess
import sys


def run_program(file, *arguments):
    """What a program prints that ends well, and its errors."""
    command = [sys.executable, file, *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, done.stderr


def run_processes(file, *arguments):
    """The exit status, the output and the errors of both processes of a job; see ``run_jobs``."""
    return run_jobs(file, [arguments])[0]


def run_jobs(file, rows):
    """For jobs of two processes with four devices each, which run at once, how each process ended.

    Each process gets its number, the address of the first one, and the arguments of its job.
    """
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": flags}
    options = {"env": env, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    addresses = [find_address() for _ in rows]
    processes = [
        subprocess.Popen([sys.executable, file, str(me), address, *map(str, row)], **options)
        for address, row in zip(addresses, rows, strict=True)
        for me in (0, 1)
    ]
    # Each is read from at once, or it would wait with a full pipe.
    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        ends = [*pool.map(wait_for, processes)]
    return [ends[i : i + 2] for i in range(0, len(ends), 2)]


def find_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def wait_for(process):
    try:
        output, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    if process.returncode:
        print(errors[-3000:])
    return process.returncode, output, errors
