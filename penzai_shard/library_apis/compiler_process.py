"""The process that compiles for devices that are not there. Started as a script, by its path.

It reads from standard input for which devices, then lowered programs one by one, and answers with
what the compiler made of each. Of this package it imports one module, since the whole takes longer
to import than most programs take to compile.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import pickle
import queue
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, BinaryIO, Literal, TypedDict


class DevicesWanted(TypedDict):
    """What the process is asked for first: the devices to compile for.

    ``search_path`` is where Python finds modules; ``topology`` and ``topology_options`` are JAX'
    name and options of what ``platform`` is to be described.
    """

    search_path: list[str]
    platform: Literal["cpu", "tpu", "cuda"]
    topology: str
    topology_options: dict[str, Any]


class Program(TypedDict):
    """What it is asked for then, as often as there are programs: to compile one.

    ``dcn_shape`` says over how many slices each mesh axis goes; the network between slices is the
    slow one. Without a mesh the program is for one device. ``options`` are those of
    ``compiler_api.options_of_this_process``.
    """

    bytecode: bytes
    mesh_shape: dict[str, int]
    dcn_shape: tuple[int, ...]
    options: bytes


class Answer(TypedDict, total=False):
    """What came of it: a program, or the step that failed with the message of the failure."""

    module: bytes
    memory: dict[str, int]
    device_kind: str
    slice_of: tuple[int, ...] | None
    seconds: float
    failed: Literal["devices", "mesh", "compile"]
    message: str


def absent_devices(wanted: DevicesWanted) -> list[Any]:
    """Descriptions of devices, or simulated ones."""
    import jax
    from jax.experimental import topologies

    if wanted["platform"] == "cpu":
        return list(jax.devices("cpu"))
    topology = topologies.get_topology_desc(
        wanted["topology"], wanted["platform"], **wanted["topology_options"]
    )
    return list(topology.devices)


def mesh_devices(program: Program, devices: Sequence[Any]) -> list[Any]:
    """The devices in the order in which a mesh of all of them has them in a real run."""
    import jax
    from jax.experimental import mesh_utils

    shape, names = tuple(program["mesh_shape"].values()), tuple(program["mesh_shape"])
    if not shape:
        return list(devices[:1])
    if math.prod(program["dcn_shape"]) == 1:
        return list(jax.make_mesh(shape, names, devices=devices).devices.flat)
    within = [size // slices for size, slices in zip(shape, program["dcn_shape"], strict=True)]
    # As ``jax.make_mesh`` does, for one slice.
    may_split = "v5 lite" in devices[0].device_kind
    mesh = mesh_utils.create_hybrid_device_mesh(
        within, program["dcn_shape"], devices, allow_split_physical_axes=may_split
    )
    return list(mesh.flat)


def answer_to(program: Program, devices: Sequence[Any]) -> Answer:
    """Compiles a program for devices."""
    step: Literal["mesh", "compile"] = "mesh"
    try:
        devices = mesh_devices(program, devices)
        step, start = "compile", time.perf_counter()
        compiler_api = _beside("compiler_api")
        compiled = compiler_api.compile_bytecode(program["bytecode"], devices, program["options"])
    except Exception as error:
        kind = devices[0].device_kind if step == "compile" else ""
        return {"failed": step, "message": _message_of(error), "device_kind": kind}
    return {
        "module": compiler_api.module_to_bytes(compiled.module),
        "memory": dataclasses.asdict(compiled.memory),
        "device_kind": devices[0].device_kind,
        "slice_of": compiler_api.slices_of(devices),
        "seconds": time.perf_counter() - start,
    }


def _message_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


@functools.cache
def _beside(name: str) -> Any:
    """A module beside this one, without the package around it."""
    path = pathlib.Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _read_programs(requests: BinaryIO, programs: "queue.Queue[Program]") -> None:
    """Reads programs while others compile; ends this process when the one that asks ends.

    However it ends, or if it closes the pipe.
    """
    while True:
        try:
            programs.put(pickle.load(requests))
        except (EOFError, pickle.UnpicklingError):
            os._exit(1)


def main() -> None:
    """Reads what is wanted and answers it, until nobody waits for an answer any more."""
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What compilers print is not part of the answer.
    try:
        wanted: DevicesWanted = pickle.load(requests)
    except EOFError:
        return
    sys.path[:] = wanted["search_path"]
    devices: list[Any] = []
    failure: Answer | None = None
    try:
        devices = absent_devices(wanted)
    except Exception as error:
        failure = {"failed": "devices", "message": _message_of(error), "device_kind": ""}
    programs: queue.Queue[Program] = queue.Queue()
    threading.Thread(target=_read_programs, args=(requests, programs), daemon=True).start()
    while True:
        program = programs.get()
        pickle.dump(failure or answer_to(program, devices), answers)
        answers.flush()
        # It may wait long for the next one, beside others that need memory.
        _beside("c_library").give_back_free_memory()


if __name__ == "__main__":
    main()
