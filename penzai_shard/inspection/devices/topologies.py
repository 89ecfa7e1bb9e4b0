"""The devices that a program can be compiled for without them, by name."""

import dataclasses
import itertools
import math
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from penzai_shard.errors import MeshError
from penzai_shard.inspection.devices.device_figures import GPU_SHARE
from penzai_shard.meshes import mesh_text

# XLA numbers the devices of a process so that this many have a number.
MOST_SIMULATED_DEVICES = 2048

_NAME = re.compile(r"([A-Za-z]\w*):(\d+(?:x\d+)*)(_twisted)?(?:\*(\d+))?")
# As clouds name machines: by the number of chips, or of cores (of v2 to v5p).
_MACHINE = re.compile(r"(v\d+\w*|tpu\d+\w*)-(\d+)(?:\*(\d+))?")
_EXAMPLES = '"v5e:16x16", "v5p:8x8x16", "v5e:16x16*4" (four slices), "cpu:512"'


@dataclasses.dataclass(frozen=True)
class TpuGeneration:
    """Which slices there are of a generation of TPUs.

    Attributes:
        shapes: The chips of each slice along the links of its network; of a generation with
            ``largest``, only those smaller than a cube of 64 chips.
        devices_per_chip: How many JAX devices a chip is.
        counts_cores: Whether clouds count cores in the names of machines, two to a chip.
        largest: In which slices of cubes of 64 chips end; None if there are no cubes.
        ring: Of a generation without cubes, how many chips in a row have a link back to the first.
        options: What libtpu must be told to describe devices as JAX has them in a real run.
    """

    shapes: tuple[tuple[int, ...], ...]
    devices_per_chip: int = 1
    counts_cores: bool = False
    largest: tuple[int, ...] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ring: int | None = None

    def has(self, shape: tuple[int, ...]) -> bool:
        """Whether there is a slice of a shape."""
        return shape in self.shapes or self.is_made_of_cubes(shape)

    def is_made_of_cubes(self, shape: tuple[int, ...]) -> bool:
        """Whether a slice is made of cubes of 64 chips; its network is then a torus."""
        if self.largest is None or len(shape) != 3:
            return False
        fits = all(size <= most for size, most in zip(shape, self.largest, strict=True))
        return fits and all(size % 4 == 0 for size in shape) and list(shape) == sorted(shape)

    def all_shapes(self) -> Iterator[tuple[int, ...]]:
        """The slices that there are, the smaller ones first."""
        cubes: list[tuple[int, ...]] = []
        if self.largest is not None:
            sides = [range(4, most + 1, 4) for most in self.largest]
            cubes = [shape for shape in itertools.product(*sides) if list(shape) == sorted(shape)]
        yield from sorted({*self.shapes, *cubes}, key=lambda shape: (math.prod(shape), shape[::-1]))


_SQUARES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_PARTS_OF_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))

# https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, and its page on each generation.
TPU_GENERATIONS: dict[str, TpuGeneration] = {
    "v2": TpuGeneration(((2, 2), (4, 4), (8, 8), (8, 16), (16, 16)), 2, True, ring=16),
    "v3": TpuGeneration(
        ((2, 2), (4, 4), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32)), 2, True, ring=32
    ),
    # JAX has one device for the two cores of a chip; libtpu, without being asked, describes two.
    "v4": TpuGeneration(_PARTS_OF_A_CUBE, 1, True, (16, 16, 16), {"chip_config_name": "megacore"}),
    "v5e": TpuGeneration(_SQUARES, ring=16),
    "v5p": TpuGeneration(_PARTS_OF_A_CUBE, 1, True, (16, 16, 24)),
    "v6e": TpuGeneration(_SQUARES, ring=16),
    "tpu7x": TpuGeneration(_PARTS_OF_A_CUBE, 2, False, (16, 24, 24)),
}
OTHER_NAMES = {
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v7x": "tpu7x",
    "v5": "v5p",
    "ironwood": "tpu7x",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices that need not be there.

    Attributes:
        name: As JAX names slices of TPUs, by generation and chips: ``"v5e:16x16"``,
            ``"v5p:8x8x16"``; several equal ones as ``"v5e:16x16*4"``. Simulated CPU devices:
            ``"cpu:512"``. GPUs by hosts and devices of each: ``"gpu:4x8"``.
        target_config: Of GPUs, what kind they are: the text of XLA's ``GpuTargetConfigProto``, or
            the path of a file with it. There are such files in XLA's sources, in
            ``xla/backends/gpu/target_config/specs`` or ``xla/tools/hlo_opt/gpu_specs``.
        slice_axes: Of several slices, over how many of them each mesh axis goes, for instance
            ``{"data": 4}``; by default the first mesh axes that their number divides.

    Raises:
        MeshError: There are no such devices; the message says which there are.

    >>> Topology("v5e:16x16*4").device_count, Topology("tpu7x:2x2x1").device_count
    (1024, 8)
    """

    name: str
    target_config: str | os.PathLike[str] | None = None
    slice_axes: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        self._refuse_unknown()

    @property
    def kind(self) -> str:
        """The generation of TPUs, or ``"cpu"`` or ``"gpu"``."""
        return self._parts[0]

    @property
    def platform(self) -> Literal["cpu", "cuda", "tpu"]:
        """The platform that programs are lowered for."""
        return {"cpu": "cpu", "gpu": "cuda"}.get(self.kind, "tpu")  # type: ignore[return-value]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of TPUs the chips of one slice along its links; of GPUs hosts and devices of each."""
        return self._parts[1]

    @property
    def slices(self) -> int:
        """How many slices there are; other devices are one."""
        return self._parts[3]

    @property
    def device_count(self) -> int:
        """How many JAX devices there are."""
        return math.prod(self.shape) * self.devices_per_chip * self.slices

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Along which of a slice's axes the last chip has a link to the first.

        >>> Topology("v5e:8x16").wraps, Topology("v5p:4x4x8").wraps, Topology("v5p:2x2x1").wraps
        ((False, True), (True, True, True), (False, False, False))
        """
        generation = TPU_GENERATIONS.get(self.kind)
        if generation is None:
            return (False,) * len(self.shape)
        if generation.is_made_of_cubes(self.shape):
            return (True,) * len(self.shape)
        return tuple(size == generation.ring for size in self.shape)

    @property
    def memory_limit(self) -> int | None:
        """What programs can have of a GPU's memory by its target configuration, in bytes.

        JAX' share of it; None of other devices, and if it does not say.
        """
        if self.kind != "gpu":
            return None
        found = re.search(r"\bdevice_memory_size:\s*(\d+)", self.target_config_text())
        return found and int(int(found[1]) * GPU_SHARE)

    def request(self) -> tuple[str, dict[str, Any]]:
        """The name and the options by which JAX describes the devices."""
        kind, shape, twisted, slices = self._parts
        if kind == "cpu":
            return "cpu", {}
        if kind == "gpu":
            hosts, devices = shape if len(shape) == 2 else (1, shape[0])
            return "gpu", {
                "topology": f"1x{hosts}x{devices}",
                "target_config": self.target_config_text(),
            }
        generation = TPU_GENERATIONS[kind]
        options = dict(generation.options)
        if slices > 1:
            options["num_slices"] = slices
        if generation.is_made_of_cubes(shape):
            options["wrap"] = [True, True, True]
        if math.prod(shape) == 1:
            options["chips_per_host_bounds"] = [1, 1, 1]
        return f"{kind}:{_shape_text(shape)}{twisted}", options

    def target_config_text(self) -> str:
        """The target configuration of GPUs as text.

        Raises:
            MeshError: There is none.
        """
        config = self.target_config
        if config is None:
            raise MeshError(
                f"topology {self.name!r}: programs for GPUs need to know which ones. Give a target "
                f'configuration: Topology({self.name!r}, target_config="h100.txtpb"), a file as '
                "XLA's sources have them in xla/tools/hlo_opt/gpu_specs."
            )
        if isinstance(config, str) and "{" in config:
            return config
        try:
            return pathlib.Path(config).read_text(encoding="utf-8")
        except OSError as error:
            raise MeshError(
                f"target_config: {os.fspath(config)!r} cannot be read ({error.strerror}). Give the "
                "path of a file with a GpuTargetConfigProto as text, or that text."
            ) from error

    def slices_of_axes(self, mesh_shape: Mapping[str, int]) -> tuple[int, ...]:
        """Over how many slices each axis of a mesh goes.

        Args:
            mesh_shape: The sizes of the mesh axes by name.

        Raises:
            MeshError: The slices cannot be spread so.

        >>> Topology("v5e:16x16*4").slices_of_axes({"data": 64, "model": 16})
        (4, 1)
        """
        asked = self.slice_axes
        if asked is None:
            left, spread = self.slices, []
            for size in mesh_shape.values():
                spread.append(math.gcd(left, size))
                left //= spread[-1]
            if left == 1:
                return tuple(spread)
        elif (
            asked.keys() <= mesh_shape.keys()
            and math.prod(asked.values()) == self.slices
            and all(n > 0 and mesh_shape[name] % n == 0 for name, n in asked.items())
        ):
            return tuple(asked.get(name, 1) for name in mesh_shape)
        how = "" if asked is None else f" as slice_axes={dict(asked)!r} says"
        raise MeshError(
            f"topology {self.name!r}: its {self.slices} slices cannot be spread over mesh "
            f"({mesh_text(mesh_shape)}){how}. The numbers of slices along mesh axes must divide "
            f"the sizes of these, and their product must be {self.slices}."
        )

    def refuse_mesh(self, mesh_shape: Mapping[str, int]) -> None:
        """Refuses a mesh of another number of devices.

        Raises:
            MeshError: The numbers differ; the message says which topologies there are of as many.
        """
        wanted = math.prod(mesh_shape.values())
        if wanted == self.device_count:
            return
        fitting = [f'topology="{name}"' for name in topologies_of(self.kind, wanted)]
        fix = f"Choose sizes of the mesh axes whose product is {self.device_count:,}."
        if fitting:
            fix = f"Write {' or '.join(fitting)}."
        raise MeshError(
            f"the mesh ({mesh_text(mesh_shape)}) has {wanted:,} devices, and topology "
            f"{self.name!r} has {self.device_count:,}. {fix}"
        )

    @property
    def _parts(self) -> tuple[str, tuple[int, ...], str, int]:
        found = _NAME.fullmatch(self.name)
        assert found is not None
        shape = tuple(int(size) for size in found[2].split("x"))
        return found[1].lower(), shape, found[3] or "", int(found[4] or 1)

    @property
    def devices_per_chip(self) -> int:
        """How many JAX devices a chip is."""
        generation = TPU_GENERATIONS.get(self.kind)
        return 1 if generation is None else generation.devices_per_chip

    def _refuse_unknown(self) -> None:
        if not isinstance(self.name, str) or _NAME.fullmatch(self.name) is None:
            raise MeshError(
                f"{self.name!r} is not the name of a topology. {machine_fix(self.name)}"
                f"Names are for instance {_EXAMPLES}."
            )
        kind, shape, twisted, slices = self._parts
        if math.prod(shape) * slices == 0:
            raise MeshError(
                f"topology {self.name!r} has no devices. Write for instance {_EXAMPLES}."
            )
        if kind in ("cpu", "gpu"):
            self._refuse_unknown_hosts(kind, shape, twisted, slices)
            return
        generation = TPU_GENERATIONS.get(kind)
        if generation is None:
            known = ", ".join(TPU_GENERATIONS)
            fix = (
                f"Write {self.name.replace(kind, OTHER_NAMES[kind])!r}. "
                if kind in OTHER_NAMES
                else ""
            )
            raise MeshError(
                f"topology {self.name!r}: {kind!r} is not known. {fix}"
                f"There are {known}, cpu and gpu."
            )
        if not generation.has(shape):
            raise MeshError(
                f"topology {self.name!r}: there is no slice of {_shape_text(shape)} chips of "
                f"{kind}. {_shape_fix(kind, generation, shape)}"
            )

    def _refuse_unknown_hosts(
        self, kind: str, shape: tuple[int, ...], twisted: str, slices: int
    ) -> None:
        if twisted or slices > 1 or len(shape) > (1 if kind == "cpu" else 2):
            form = '"cpu:512"' if kind == "cpu" else '"gpu:8", or by hosts and devices "gpu:4x8"'
            raise MeshError(f"topology {self.name!r}: write {form}.")
        if kind == "cpu" and shape[0] > MOST_SIMULATED_DEVICES:
            raise MeshError(
                f"topology {self.name!r}: a process can simulate {MOST_SIMULATED_DEVICES:,} CPU "
                'devices at most. Make the mesh smaller, or compile for TPUs: "v5p:16x16x16".'
            )


def topologies_of(kind: str, device_count: int) -> list[str]:
    """The topologies of a number of devices, one slice each if there is one; at most four.

    >>> topologies_of("v5e", 256), topologies_of("v5e", 1024), topologies_of("v5e", 7)
    (['v5e:16x16'], ['v5e:16x16*4'], [])
    """
    if kind == "cpu":
        return [f"cpu:{device_count}"] if device_count <= MOST_SIMULATED_DEVICES else []
    if kind == "gpu":
        by_eight = device_count > 8 and device_count % 8 == 0
        return [f"gpu:{device_count // 8}x8" if by_eight else f"gpu:{device_count}"]
    generation = TPU_GENERATIONS[kind]
    sizes: dict[int, list[tuple[int, ...]]] = {}
    for shape in generation.all_shapes():
        sizes.setdefault(math.prod(shape) * generation.devices_per_chip, []).append(shape)
    if device_count in sizes:
        return [f"{kind}:{_shape_text(shape)}" for shape in reversed(sizes[device_count][-4:])]
    for size in sorted(sizes, reverse=True):
        if device_count % size == 0 and size > generation.devices_per_chip:
            return [f"{kind}:{_shape_text(sizes[size][-1])}*{device_count // size}"]
    return []


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _shape_fix(kind: str, generation: TpuGeneration, shape: tuple[int, ...]) -> str:
    fitting = topologies_of(kind, math.prod(shape) * generation.devices_per_chip)
    fix = f"Of as many there are {', '.join(map(repr, fitting))}. " if fitting else ""
    shapes = ", ".join(_shape_text(each) for each in generation.shapes)
    if generation.largest is None:
        return f"{fix}There are {shapes}."
    return (
        f"{fix}There are {shapes}, and those of multiples of 4, in rising order, up to "
        f"{_shape_text(generation.largest)}."
    )


def machine_fix(name: Any) -> str:
    """What to write in place of a cloud's name of a machine."""
    found = _MACHINE.fullmatch(name) if isinstance(name, str) else None
    kind = OTHER_NAMES.get(found[1], found[1]) if found else ""
    if found is None or kind not in TPU_GENERATIONS:
        return ""
    generation = TPU_GENERATIONS[kind]
    chips = int(found[2]) // (2 if generation.counts_cores else 1)
    fitting = topologies_of(kind, chips * generation.devices_per_chip)
    return f"Write {' or '.join(map(repr, fitting))}. " if fitting else ""
