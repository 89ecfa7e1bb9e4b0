"""From a configuration and what is stored to a model without values and views of its parameters.

Nothing here touches a device or a file's data: all that can be wrong is found before.
"""

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from penzai_shard.checkpointing.comparison import Extra
from penzai_shard.errors import CheckpointMismatchError, raise_all
from penzai_shard.pretrained.configurations import Configuration
from penzai_shard.pretrained.families import Family, Options
from penzai_shard.pretrained.gemma_families import (
    GEMMA,
    GEMMA_2,
    GEMMA_3,
    GEMMA_3_WITH_IMAGES,
)
from penzai_shard.pretrained.gpt_neox_family import GPT_NEOX
from penzai_shard.pretrained.llamalike_families import LLAMA, MISTRAL
from penzai_shard.pretrained.stored_tensors import StoredTensor
from penzai_shard.pretrained.tensor_views import Converted, TensorView, WholeTensor
from penzai_shard.pretrained.traced_converters import converted_views

FAMILIES = (LLAMA, MISTRAL, GEMMA, GEMMA_2, GEMMA_3, GEMMA_3_WITH_IMAGES, GPT_NEOX)
"""The families of models that can be loaded without a model to load into."""

OF_MODELS = ("float32", "bfloat16")
"""The dtypes of which Penzai's converters make models."""

_WHICH_DTYPE = "Say which with dtype='bfloat16' or dtype='float32'."

_READ = (*OF_MODELS, "float16", "float64")


def family_of(config: Mapping[str, Any], source: str = "config.json") -> Family:
    """The family of a configuration.

    Args:
        config: The configuration's attributes.
        source: What messages call it.

    Raises:
        CheckpointMismatchError: It is of no family that Penzai converts.

    >>> family_of({"architectures": ["LlamaForCausalLM"], "hidden_size": 64}).name
    'Llama'
    """
    if not isinstance(config, Mapping):
        raise CheckpointMismatchError(
            f"{source}: is a {type(config).__name__}, and a configuration is a table of attributes."
        )
    architectures, model_type = config.get("architectures"), config.get("model_type")
    for family in FAMILIES:
        if architectures == [family.architecture] and model_type in (None, family.model_type):
            return family
        if not architectures and model_type == family.model_type:
            return family
    known = ", ".join(f"{family.architecture} ({family.model_type})" for family in FAMILIES)
    raise CheckpointMismatchError(
        f"{source}: architectures is {architectures!r} and model_type {model_type!r}, and the ones "
        f"that Penzai converts are {known}. For any other, build the model and give it with into=, "
        "and the names of its tensors with names=."
    )


def configuration_of(config: Any, source: str = "config.json") -> Configuration:
    """A configuration, checked; arguments and errors as for ``converted_model``."""
    family = family_of(config, source)
    if family.part:
        Configuration(config, family.part.around, source, family.name)
        config = config.get(family.part.attribute)
        source = f"{source}[{family.part.attribute!r}]"
        if not isinstance(config, Mapping):
            raise CheckpointMismatchError(
                f"{source}: is {config!r}, and has to be the configuration of the {family.name}."
            )
    return Configuration(config, family.attributes, source, family.name, family.check)


def converted_model(
    config: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    *,
    dtype: Any = None,
    use_layer_stack: bool = False,
    upcast_activations_to_float32: bool = False,
    on_extra: Extra = "error",
    source: str = "config.json",
) -> tuple[Any, dict[str, TensorView]]:
    """Penzai's model of a Hugging Face checkpoint, and where the values of its parameters are.

    Args:
        config: The attributes of its configuration.
        tensors: What is stored, by name.
        dtype: The dtype of the parameters; None keeps that of the tensors. The tensors are
            converted before anything else, as if they were stored so.
        use_layer_stack: Whether the blocks are one ``pz.nn.LayerStack``.
        upcast_activations_to_float32: Whether the model computes in float32, whatever its
            parameters are.
        on_extra: ``"ignore"`` leaves tensors that no parameter is made of. Buffers that older
            versions of transformers stored are left in any case.
        source: What messages call the configuration.

    Returns:
        The model, its parameters frozen and with ``jax.ShapeDtypeStruct`` objects in place of
        arrays; and a view of each parameter by its label.

    Raises:
        CheckpointMismatchError: The family is not known, the configuration asks for what Penzai's
            model does not do, or tensors are missing, superfluous or of another shape than the
            configuration says; with all that is wrong.
    """
    family = family_of(config, source)
    configuration = configuration_of(config, source)
    if configuration["num_hidden_layers"] > len(tensors):
        raise CheckpointMismatchError(
            f"{source} has num_hidden_layers = {configuration['num_hidden_layers']}, and there are "
            f"{len(tensors)} tensors, less than one for each layer."
        )
    _refuse_unlike_layers(use_layer_stack, family, configuration)
    shapes, tied = _tensors_of(family, configuration)
    options = Options(
        _dtype_of_model(dtype, shapes, tensors, source),
        use_layer_stack,
        upcast_activations_to_float32,
    )
    model, views = _converted(family, configuration, options, shapes, tied, tensors)
    problems = _problems(shapes, tied, tensors, views, source)
    if on_extra == "error":
        problems += _superfluous(family, shapes, tensors, source)
    raise_all(
        CheckpointMismatchError,
        f"the tensors are not those of the {family.name} in {source}:",
        problems,
    )
    return model, views


def model_of_configuration(
    config: Mapping[str, Any],
    dtype: str,
    *,
    use_layer_stack: bool = False,
    source: str = "config.json",
) -> Any:
    """Penzai's model of a configuration, of which nothing is stored.

    Args:
        config: The attributes of the configuration.
        dtype: The dtype of the parameters, ``"bfloat16"`` or ``"float32"``.
        use_layer_stack: Whether the blocks are one ``pz.nn.LayerStack``.
        source: What messages call the configuration.

    Returns:
        The model that ``converted_model`` makes of all its tensors.

    Raises:
        CheckpointMismatchError: As for ``converted_model``.

    >>> sizes = {"hidden_size": 8, "intermediate_size": 16, "vocab_size": 32}
    >>> layers = {"num_attention_heads": 2, "num_hidden_layers": 1}
    >>> model = model_of_configuration({"model_type": "llama", **sizes, **layers}, "float32")
    >>> from penzai_shard.checkpointing import param_dict
    >>> dict(param_dict(model)["transformer/final_norm/scale.weights"].named_shape)
    {'embedding': 8}
    """
    family = family_of(config, source)
    configuration = configuration_of(config, source)
    _refuse_unlike_layers(use_layer_stack, family, configuration)
    options = Options(_known_dtype(str(jnp.dtype(dtype))), use_layer_stack)
    return _converted(family, configuration, options, *_tensors_of(family, configuration), {})[0]


def _refuse_unlike_layers(
    use_layer_stack: bool, family: Family, configuration: Configuration
) -> None:
    if use_layer_stack and not family.stacks(configuration):
        raise CheckpointMismatchError(
            f"use_layer_stack: the layers of this {family.name} differ in their attention, and "
            "Penzai stacks layers alike alone. Leave it out."
        )


def _tensors_of(
    family: Family, configuration: Configuration
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The shapes of all tensors; and those that may be absent, with those that they are then."""
    shapes = {family.prefix + name: s for name, s in family.shapes(configuration).items()}
    tied = {
        family.prefix + name: family.prefix + other
        for name, other in family.tied(configuration).items()
    }
    return shapes, tied


def _converted(
    family: Family,
    configuration: Configuration,
    options: Options,
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    tensors: Mapping[str, StoredTensor],
) -> tuple[Any, dict[str, TensorView]]:
    """The model and its views, of tensors as the configuration says that they are."""
    wanted: dict[str, TensorView] = {}
    for name, shape in shapes.items():
        stored = tied.get(name, name) if name not in tensors else name
        dtype = tensors[stored].dtype if stored in tensors else options.dtype
        file = tensors[stored].file if stored in tensors else ""
        tensor: TensorView = WholeTensor(StoredTensor(stored, shape, dtype, file))
        own = name.removeprefix(family.prefix)
        wanted[own] = tensor if dtype == options.dtype else Converted(tensor, options.dtype)
    return converted_views(
        family.converter(configuration, options), family.arranged(configuration, wanted)
    )


def _dtype_of_model(
    dtype: Any,
    shapes: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    source: str,
) -> str:
    """The dtype of all parameters."""
    stored: dict[str, str] = {}
    for name in shapes:
        if name in tensors:
            stored.setdefault(tensors[name].dtype, name)
    unread = [
        f"{name}: is of {kind}, which is no dtype of weights that Penzai's converters know."
        for kind, name in stored.items()
        if kind not in _READ
    ]
    raise_all(CheckpointMismatchError, "the tensors cannot be read as weights:", unread)
    listed = ", ".join(f"{kind} ({name})" for kind, name in stored.items()) or "no tensor"
    if dtype is None:
        if len(stored) != 1:
            raise CheckpointMismatchError(
                f"the tensors of {source} are of several dtypes, {listed}, and Penzai's models of "
                f"one. {_WHICH_DTYPE}"
            )
        (wanted,) = stored
    else:
        wanted = str(jnp.dtype(dtype))
    return _known_dtype(wanted)


def _known_dtype(wanted: str) -> str:
    if wanted not in OF_MODELS:
        raise CheckpointMismatchError(
            f"the parameters would be of {wanted}, and Penzai's converters make models of "
            f"{' or '.join(OF_MODELS)}. {_WHICH_DTYPE}"
        )
    return wanted


def _problems(
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    tensors: Mapping[str, StoredTensor],
    views: Mapping[str, TensorView],
    source: str,
) -> list[str]:
    """All in which what is stored differs from what the configuration says."""
    parameters = {tensor: label for label, view in views.items() for tensor in view.tensors}
    problems = []
    for name, shape in shapes.items():
        stored = tensors.get(name)
        if stored is None and name not in tied:
            near = difflib.get_close_matches(name, tensors.keys() - shapes.keys(), 1, 0.8)
            hint = f" There is {near[0]!r}, which no parameter is made of." if near else ""
            parameter = parameters.get(name, name)
            problems.append(f"{parameter}: its tensor {name!r} is missing.{hint}")
        elif stored is not None and stored.shape != shape:
            problems.append(
                f"{parameters.get(name, name)}: its tensor {name!r} has the shape {stored.shape} "
                f"in {stored.file}, and {source} makes it {shape}."
            )
    return problems


def _superfluous(
    family: Family,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, StoredTensor],
    source: str,
) -> list[str]:
    return [
        f"{name}: in {tensor.file}, and no parameter of the {family.name} in {source} is made of "
        "it. Pass on_extra='ignore' to leave it there."
        for name, tensor in tensors.items()
        if name not in shapes
        and not any(
            fnmatch.fnmatchcase(name, family.prefix + pattern) for pattern in family.harmless
        )
    ]
