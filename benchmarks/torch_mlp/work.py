"""The work that all do: a ``torch.nn.Sequential``, its weights, its batch and its layouts."""

import dataclasses
import functools
from collections import OrderedDict

import numpy as np
import optax

import benchmarks.simulated_devices  # noqa: F401
from benchmarks.parallel_training.work import Layout

NAMES = {
    "0.weight": ("hidden", "pixels"),
    "0.bias": ("hidden",),
    "2.weight": ("width", "hidden"),
    "2.bias": ("width",),
    "4.weight": ("hidden", "width"),
    "4.bias": ("hidden",),
    "6.weight": ("classes", "hidden"),
    "6.bias": ("classes",),
}
"""The entries of the model's state dict and the logical axes of each, in order."""

OUTPUTS = {0: "hidden", 2: "width", 4: "hidden", 6: "classes"}
"""The linear layers and the logical axis of what each gives."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of model and batch."""

    pixels: int = 784
    hidden: int = 1024
    width: int = 1024
    classes: int = 10
    batch: int = 8192

    @functools.cached_property
    def weights(self) -> OrderedDict[str, np.ndarray]:
        """The weights that all start from, drawn as ``torch.nn.Linear`` draws them."""
        draw, found = np.random.default_rng(0), OrderedDict()
        for name, axes in NAMES.items():
            inputs = getattr(self, NAMES[name.replace("bias", "weight")][1])
            lengths = [getattr(self, axis) for axis in axes]
            bound = inputs**-0.5
            found[name] = draw.uniform(-bound, bound, lengths).astype(np.float32)
        return found

    @functools.cached_property
    def inputs(self) -> tuple[np.ndarray, np.ndarray]:
        """A batch: pixels and the right classes."""
        draw = np.random.default_rng(1)
        pixels = draw.normal(size=(self.batch, self.pixels)).astype(np.float32)
        return pixels, draw.integers(self.classes, size=self.batch).astype(np.int32)

    @property
    def parameters(self) -> int:
        """The number of trained numbers."""
        return sum(array.size for array in self.weights.values())


_SPLIT = {"pixels": "data", "width": "data"}
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("data parallel", {"data": 8}, {}, {"batch": "data"}),
        Layout("fully sharded", {"data": 8}, _SPLIT, {"batch": "data"}),
        Layout(
            "4x2",
            {"data": 4, "model": 2},
            {**_SPLIT, "hidden": "model"},
            {"batch": "data", "hidden": "model"},
        ),
    )
}


def optimizer() -> optax.GradientTransformation:
    """The optimizer of all."""
    return optax.adam(1e-3)
