"""Describes devices that need not be there: their number, memory and links.

All published figures are for one chip, or one GPU, and for one direction: pages that add up both
directions of a link are halved. What nobody publishes is None, and no other figure takes its place.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from penzai_shard.errors import MeshError, Problem, Problems
from penzai_shard.meshes import mesh_text

# Slices of TPUs


class Slices(NamedTuple):
    """Which slices there are of a generation of TPUs.

    Attributes:
        shapes: The chips of each along the links, without those made of cubes of 64 chips.
        largest: The largest slice of cubes; empty for a generation without.
        ring: Without cubes, how many chips in a row have a link from the last to the first.
        has_parts: Whether JAX lays a mesh axis over a part of an axis of the grid, too.
        options: What libtpu needs to hear to describe the devices as JAX has them in a real run.
    """

    shapes: tuple[tuple[int, ...], ...]
    largest: tuple[int, ...] = ()
    ring: int = 0
    has_parts: bool = False
    options: Mapping[str, Any] = {}

    def cubes(self) -> list[tuple[int, ...]]:
        """The slices that consist of cubes of 64 chips, so that every row of chips is a ring."""
        sides = [range(4, most + 1, 4) for most in self.largest]
        return [shape for shape in itertools.product(*sides) if shape and [*shape] == sorted(shape)]

    def all_shapes(self) -> list[tuple[int, ...]]:
        """All slices, the smallest first."""
        return sorted({*self.shapes, *self.cubes()}, key=lambda shape: (math.prod(shape), shape))


# https://cloud.google.com/tpu/docs/system-architecture-tpu-vm
_SQUARES = Slices(((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)), ring=16)
_CUBES = Slices(((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)), (16, 16, 24))
_OF_V5E = _SQUARES._replace(has_parts=True)
# JAX has one device for the two cores of a chip; libtpu by itself describes two.
_OF_V4 = _CUBES._replace(largest=(16, 16, 16), options={"chip_config_name": "megacore"})


# Published figures


class Figures(NamedTuple):
    """What is published of a kind of device.

    Attributes:
        kind: Its name, as in ``"v5e:4x4"``.
        device_kind: A regular expression for how JAX calls it.
        flops: Dense operations in bfloat16 per second of a chip.
        memory: Bytes that programs can have on one device.
        memory_bandwidth: Bytes per second of a chip's own memory.
        link: Bytes per second: of a TPU over one link to a neighbour, of a GPU over all its links
            to the other GPUs of its host.
        between: Bytes per second that a GPU has of the network between hosts: of one port.
        slices: Which there are of a TPU.
    """

    kind: str
    device_kind: str
    flops: float
    memory: float
    memory_bandwidth: float
    link: float
    between: float = 0.0
    slices: Slices | None = None


_GIB, _GB = 2**30, 1e9
# JAX takes so much of a GPU: https://docs.jax.dev/en/latest/gpu_memory_allocation.html
_GPU_SHARE = 0.75
_HELD = _GPU_SHARE * _GB

# Of TPUs: https://cloud.google.com/tpu/docs/v5e and its neighbours; of v4 Jouppi et al. 2023
# (arXiv:2304.01433, table 4). Memory is what libtpu 0.0.42 leaves to a device, as it says
# of a program that is too large. Links: v5e has 400 GB/s in both directions over 4 links, v5p
# 1,200 GB/s over 6, v6e 3,200 Gbit/s over 4.
# Of GPUs: https://www.nvidia.com/en-us/data-center/ and https://docs.nvidia.com/dgx/; flops are
# without sparsity, and a port has 200 or 400 Gbit/s.
FIGURES = (
    Figures("v4", "TPU v4$", 275e12, 30.75 * _GIB, 1200 * _GB, 50 * _GB, slices=_OF_V4),
    Figures("v5e", "TPU v5 lite$", 197e12, 15.75 * _GIB, 819 * _GB, 50 * _GB, slices=_OF_V5E),
    Figures("v5p", "TPU v5$", 459e12, 95.74 * _GIB, 2765 * _GB, 100 * _GB, slices=_CUBES),
    Figures("v6e", "TPU v6 lite$", 918e12, 31.25 * _GIB, 1600 * _GB, 100 * _GB, slices=_SQUARES),
    Figures("a100-80gb", r"A100.*80GB", 312e12, 80 * _HELD, 2039 * _GB, 300 * _GB, 25 * _GB),
    Figures("a100", r"A100", 312e12, 40 * _HELD, 1555 * _GB, 300 * _GB, 25 * _GB),
    Figures("h100", r"\bH100\b(?! NVL)", 989.5e12, 80 * _HELD, 3350 * _GB, 450 * _GB, 50 * _GB),
    Figures("h200", r"\bH200\b", 989.5e12, 141 * _HELD, 4800 * _GB, 450 * _GB, 50 * _GB),
    Figures("b200", r"\bB200\b", 2250e12, 180 * _HELD, 8000 * _GB, 900 * _GB, 50 * _GB),
)
SLICES = {each.kind: each.slices for each in FIGURES if each.slices}


def find_figures(device_kind: str) -> Figures | None:
    """What is published of a kind of device, with the memory that programs can have.

    Args:
        device_kind: As JAX names it.

    >>> find_figures("TPU v5 lite").memory / 2**30, find_figures("cpu")
    (15.75, None)
    """
    return next((each for each in FIGURES if re.search(each.device_kind, device_kind)), None)


# Topologies

# Only TPUs have a grid.
_NAME = re.compile(r"(?!cpu:\d+x|gpu:\d+x\d+x)[A-Za-z]\w*:\d+(x\d+)*")
_FIX = "Write for instance 'v5e:16x16', 'v5p:8x8x16', 'cpu:512', or 'gpu:4x8' for 4 hosts."


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices that need not be there.

    Attributes:
        name: A slice of TPUs by generation and chips, as JAX names it: ``"v5e:16x16"``. Simulated
            CPU devices: ``"cpu:512"``. GPUs by hosts and GPUs of each: ``"gpu:4x8"``.
        target_config: Of GPUs, which kind: the text of XLA's ``GpuTargetConfigProto``, as XLA's
            sources have them in ``xla/tools/hlo_opt/gpu_specs``.

    Several slices are not described. Where they only divide the batch, a device needs what it needs
    on one slice with that part of the batch.

    Raises:
        MeshError: There are no devices of that name.

    >>> Topology("v5e:16x16").device_count, Topology("cpu:512").device_count
    (256, 512)
    """

    name: str
    target_config: str = ""

    def __post_init__(self) -> None:
        problems = Problems(f"there is no topology {self.name!r}:")
        is_name = isinstance(self.name, str) and _NAME.fullmatch(self.name) is not None
        kinds = [*SLICES, "cpu", "gpu"]
        if not is_name or self.kind not in kinds or not self.device_count:
            what = f"a name is a kind of device ({', '.join(kinds)}) and a number of them"
            problems.add("", what, _FIX)
        elif self.kind in SLICES:
            shapes = SLICES[self.kind].all_shapes()
            if self.shape not in shapes:
                what = f"{self.kind} has slices of {', '.join(map(_shape_text, shapes[:8]))} chips"
                what += " and larger ones" * (len(shapes) > 8)
                problems.add("", what, _topology_fix(self.kind, self.device_count) or _FIX)
        elif self.kind == "gpu" and not self.target_config:
            text = "pathlib.Path('h100_sxm.txtpb').read_text()"
            fix = f"Write Topology({self.name!r}, target_config={text})."
            problems.add("", "programs for GPUs need to know which ones", fix)
        problems.raise_if_any(MeshError)

    @property
    def kind(self) -> str:
        """The generation of TPUs, ``"cpu"`` or ``"gpu"``."""
        return self.name.partition(":")[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of TPUs the chips along the links; of GPUs hosts and GPUs of each."""
        return tuple(map(int, self.name.partition(":")[2].split("x")))

    @property
    def platform(self) -> Literal["cpu", "cuda", "tpu"]:
        """The platform that programs are lowered for."""
        return "tpu" if self.kind in SLICES else "cuda" if self.kind == "gpu" else "cpu"

    @property
    def device_count(self) -> int:
        """How many JAX devices there are."""
        return math.prod(self.shape)

    @property
    def memory_limit(self) -> int | None:
        """The bytes that programs can have on one device; None of simulated ones."""
        if found := re.search(r"\bdevice_memory_size:\s*(\d+)", self.target_config):
            return int(_GPU_SHARE * int(found[1]))
        return None if self.figures is None else int(self.figures.memory)

    @property
    def figures(self) -> Figures | None:
        """What is published of the devices; None of simulated ones, and of GPUs not known."""
        found = re.search(r'device_description_str:\s*"([^"]*)"', self.target_config)
        described = find_figures(found[1]) if found else None
        return next((each for each in FIGURES if each.kind == self.kind), described)

    def check_mesh(self, mesh_sizes: Mapping[str, int]) -> None:
        """Refuses a mesh with another number of devices.

        Args:
            mesh_sizes: The size of each mesh axis.

        Raises:
            MeshError: It has another number of devices.
        """
        count = math.prod(mesh_sizes.values())
        if count != self.device_count:
            what = f"the mesh has {count:,} devices, and the topology {self.device_count:,}"
            fix = f"Choose sizes whose product is {self.device_count:,}."
            problem = Problem("", what, _topology_fix(self.kind, count) or fix)
            headline = f"{self.name!r} does not carry mesh ({mesh_text(mesh_sizes)}):"
            raise MeshError(headline, [problem])


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _topology_fix(kind: str, count: int) -> str:
    """What to write for a number of devices of a kind; empty if there is nothing."""
    if kind not in SLICES:
        return f"Write '{kind}:{count}'."
    for shape in SLICES[kind].all_shapes():
        if math.prod(shape) == count:
            return f"Write '{kind}:{_shape_text(shape)}'."
    return ""
