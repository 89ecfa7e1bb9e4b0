"""Penzai's converters of other projects' weights, as functions of named arrays alone.

They take models of torch, and look into ``transformers`` to see whether a model is one of theirs.
Each is called here by copies of its function in which some global names mean something else: the
arrays pass through as they are, and neither torch nor transformers is imported. The modules of
Penzai are not changed.
"""

import builtins
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
from penzai.models.transformer.variants import gemma, gpt_neox, llamalike_common

GEMMA_PRESET = "the configuration at hand"


def convert_llamalike(
    config: Mapping[str, Any], arrays: Mapping[str, Any], dtype: str, **options: Any
) -> Any:
    """Penzai's model of a Llama or Mistral of Hugging Face.

    Args:
        config: Attributes of the configuration by name.
        arrays: What the state dictionary holds; JAX arrays or tracers.
        dtype: The name of their dtype, as JAX has it.
        **options: ``use_layer_stack`` and ``upcast_activations_to_float32``.
    """
    convert = with_globals(llamalike_common.llamalike_from_huggingface_model, jax=_passing_jax())
    return convert(_model(config, arrays, dtype), **options)


def convert_gpt_neox(
    config: Mapping[str, Any], arrays: Mapping[str, Any], dtype: str, **options: Any
) -> Any:
    """Penzai's model of a GPT-NeoX of Hugging Face; arguments as for ``convert_llamalike``.

    Penzai compares the configuration with the default one of transformers: here, with itself.
    """
    model = _model(config, arrays, dtype)
    transformers = types.SimpleNamespace(
        GPTNeoXForCausalLM=type(model), GPTNeoXConfig=lambda: model.config
    )
    convert = with_globals(
        gpt_neox.gpt_neox_from_huggingface_model,
        jax=_passing_jax(),
        __builtins__=_builtins_importing(transformers=transformers),
    )
    return convert(model, **options)


def convert_gemma(
    preset: Mapping[str, Any],
    gate_is_transposed: bool,
    arrays: Mapping[str, Mapping[str, Any]],
    **options: Any,
) -> Any:
    """Penzai's model of a Gemma as Google publishes it for Flax.

    Args:
        preset: Fields of ``LlamalikeTransformerConfig`` that differ from size to size; Penzai
            has a table of them for the sizes that were published.
        gate_is_transposed: Whether the gate's weights have the embedding last.
        arrays: Arrays by layer and name.
        **options: As for ``convert_llamalike``.
    """
    convert = with_globals(
        gemma.gemma_from_pretrained_checkpoint,
        _GEMMA_PRESETS={GEMMA_PRESET: dict(preset)},
        _NEEDS_GATING_TRANSPOSE={GEMMA_PRESET: gate_is_transposed},
    )
    return convert(dict(arrays), preset_name=GEMMA_PRESET, **options)


def with_globals(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """A copy of a function in which global names mean something else.

    >>> with_globals(with_globals, types=types).__name__
    'with_globals'
    """
    assert isinstance(function, types.FunctionType)
    copied = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


class _Model:
    """What the converters use of a model of torch."""

    def __init__(self, config: Any, arrays: Mapping[str, Any], dtype: str) -> None:
        self.config, self.dtype, self._arrays = config, f"torch.{dtype}", dict(arrays)

    def state_dict(self) -> dict[str, Any]:
        return self._arrays


def _model(config: Mapping[str, Any], arrays: Mapping[str, Any], dtype: str) -> _Model:
    attributes = dict(config)
    return _Model(types.SimpleNamespace(**attributes, to_dict=lambda: attributes), arrays, dtype)


def _passing_jax() -> Any:
    """JAX, but for arrays from torch, which are JAX's already."""
    dlpack = types.SimpleNamespace(from_dlpack=lambda array: array)
    return types.SimpleNamespace(**{**vars(jax), "dlpack": dlpack})


def _builtins_importing(**modules: Any) -> dict[str, Any]:
    """Python's builtins, of which ``import`` finds other modules by some names."""

    def import_one(name: str, *args: Any, **kwargs: Any) -> Any:
        return modules[name] if name in modules else builtins.__import__(name, *args, **kwargs)

    return {**vars(builtins), "__import__": import_one}
