"""The process that compiles for devices that are not there. Started as a script, by its path.

It reads a request and a lowered program from standard input and answers with what the compiler made
of it. Of this package it imports one module, since the whole takes longer to import than most
programs take to compile.
"""

import dataclasses
import importlib.util
import math
import os
import pathlib
import pickle
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, BinaryIO, Literal, TypedDict


class Request(TypedDict):
    """What the process is asked for; the bytecode of the program follows.

    ``dcn_shape`` says over how many slices each mesh axis goes; the network between slices is the
    slow one. ``options`` is of ``compiler_api.options_of_this_process``.
    """

    search_path: list[str]
    platform: Literal["cpu", "tpu"]
    topology: str
    topology_options: dict[str, Any]
    mesh_shape: dict[str, int]
    dcn_shape: tuple[int, ...]
    options: bytes


class Answer(TypedDict, total=False):
    """What came of it: a program, or the step that failed with the message of the failure."""

    module: bytes
    memory: dict[str, int]
    device_kind: str
    seconds: float
    failed: Literal["devices", "mesh", "compile"]
    message: str


def mesh_devices(request: Request, devices: Sequence[Any]) -> list[Any]:
    """The devices in the order in which a mesh of all of them has them in a real run."""
    import jax
    from jax.experimental import mesh_utils

    shape, names = tuple(request["mesh_shape"].values()), tuple(request["mesh_shape"])
    if math.prod(request["dcn_shape"]) == 1:
        # As ``make_mesh`` does.
        return list(jax.make_mesh(shape, names, devices=devices).devices.flat)
    within = [size // slices for size, slices in zip(shape, request["dcn_shape"], strict=True)]
    split = "lite" in devices[0].device_kind
    return list(
        mesh_utils.create_hybrid_device_mesh(
            within, request["dcn_shape"], devices, allow_split_physical_axes=split
        ).flat
    )


def absent_devices(request: Request) -> list[Any]:
    """Descriptions of the devices, or simulated ones."""
    import jax
    from jax.experimental import topologies

    if request["platform"] == "cpu":
        return jax.devices("cpu")
    topology = topologies.get_topology_desc(
        platform=request["platform"],
        topology_name=request["topology"],
        **request["topology_options"],
    )
    return list(topology.devices)


def answer_to(request: Request, requests: BinaryIO) -> Answer:
    """Compiles the program that follows the request."""
    path = pathlib.Path(__file__).with_name("compiler_api.py")
    spec = importlib.util.spec_from_file_location("compiler_api", path)
    assert spec is not None
    assert spec.loader is not None
    compiler_api = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = compiler_api
    spec.loader.exec_module(compiler_api)
    step: Literal["devices", "mesh", "compile"] = "devices"
    try:
        devices = absent_devices(request)
        step = "mesh"
        devices = mesh_devices(request, devices)
        bytecode = pickle.load(requests)
        threading.Thread(target=_end_with_parent, args=(requests,), daemon=True).start()
        step, start = "compile", time.perf_counter()
        compiled = compiler_api.compile_bytecode(bytecode, devices, request["options"])
    except Exception as error:
        return {"failed": step, "message": f"{type(error).__name__}: {error}"}
    return {
        "module": compiler_api.module_to_bytes(compiled.module),
        "memory": dataclasses.asdict(compiled.memory),
        "device_kind": devices[0].device_kind,
        "seconds": time.perf_counter() - start,
    }


def _end_with_parent(requests: BinaryIO) -> None:
    """Ends this process when the one that asked ends, however it does, or closes the pipe."""
    requests.read(1)
    os._exit(1)


def main() -> None:
    """Reads one request and answers it."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What compilers print is not part of the answer.
    request: Request = pickle.load(requests)
    sys.path[:] = request["search_path"]
    try:
        answer = answer_to(request, requests)
    except EOFError:
        return  # Nobody waits for the answer any more.
    pickle.dump(answer, answers)
    answers.close()
    sys.stderr.flush()
    os._exit(0)  # Threads of compilers are not waited for.


if __name__ == "__main__":
    main()
