"""A family of models that Penzai converts: its configurations, its tensors, and its converter."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from penzai_shard.pretrained.configurations import Attributes, Configuration
from penzai_shard.pretrained.tensor_views import TensorView

Shape = tuple[int, ...]
Converter = Callable[[dict[str, Any]], Any]
"""Makes a Penzai model of arrays by name."""


@dataclasses.dataclass(frozen=True)
class Options:
    """What a caller may choose of a model.

    Attributes:
        dtype: The name of the dtype of its parameters.
        use_layer_stack: Whether its blocks are one ``pz.nn.LayerStack``.
        upcast_activations_to_float32: Whether it computes in float32, whatever its parameters are.
    """

    dtype: str
    use_layer_stack: bool = False
    upcast_activations_to_float32: bool = False

    def of_penzai(self) -> dict[str, bool]:
        """The options that Penzai's converters take."""
        return {
            "use_layer_stack": self.use_layer_stack,
            "upcast_activations_to_float32": self.upcast_activations_to_float32,
        }


def as_they_are(_: Configuration, tensors: Mapping[str, TensorView]) -> dict[str, TensorView]:
    """The tensors of a family whose converter takes them as they are stored."""
    return dict(tensors)


@dataclasses.dataclass(frozen=True)
class PartOfModel:
    """Where a family's models stand in those that have more parts, such as one for images.

    Attributes:
        attribute: The attribute with the part's configuration.
        around: What is known of the other attributes.
        prefix: What the names of the part's tensors begin with.
    """

    attribute: str
    around: Attributes
    prefix: str


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: Its name.
        architecture: The class of its models in transformers.
        model_type: Its name in configurations.
        attributes: What is known of the attributes of its configurations.
        check: What is wrong with a configuration beyond single attributes.
        shapes: The tensors that a configuration's model has, with their shapes.
        tied: Tensors that may be absent, and those whose values they have then.
        harmless: Patterns of the names of tensors that no parameter is made of, such as buffers.
        arranged: What the converter takes, as views of the tensors.
        converter: The converter.
        part: Where its models stand in others; None where they stand alone.
        stacks: Whether the blocks of a configuration's model can be one ``pz.nn.LayerStack``.
    """

    name: str
    architecture: str
    model_type: str
    attributes: Attributes
    check: Callable[[Configuration], list[str]]
    shapes: Callable[[Configuration], dict[str, Shape]]
    tied: Callable[[Configuration], dict[str, str]]
    harmless: tuple[str, ...]
    converter: Callable[[Configuration, Options], Converter]
    arranged: Callable[[Configuration, Mapping[str, TensorView]], dict[str, TensorView]] = (
        as_they_are
    )
    stacks: Callable[[Configuration], bool] = lambda configuration: True
    part: PartOfModel | None = None

    @property
    def prefix(self) -> str:
        """What the names of its tensors begin with in files."""
        return self.part.prefix if self.part else ""
