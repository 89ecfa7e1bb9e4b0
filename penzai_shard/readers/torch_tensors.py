"""Tensors of torch: as in ``module.state_dict()``, without logical axis names.

A tensor is read as what NumPy sees of its memory, so nothing is copied. torch shares memory of
dtypes that NumPy does not have by way of integers of the same width.
"""

import sys
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from penzai_shard.array_kinds import loses_integers
from penzai_shard.readers.array_reader import ArrayReader, ReadArray

# By width in bytes, the integers as which torch shares memory of dtypes that NumPy lacks.
_INTEGERS = {1: "uint8", 2: "int16"}
_OF_NUMPY = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
)
_OF_JAX_ALONE = frozenset(
    f"float8_{form}" for form in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")
) | {"bfloat16"}

_STRIDED = "torch.strided"


class _TorchReader(ArrayReader):
    """Reads ordinary tensors; says of all others, and of modules, what to give in their place."""

    library = "torch"
    bare = True
    naming = "Name it with name_axes(tree, {...})"

    def reads(self, node_type: type) -> bool:
        torch = sys.modules["torch"]
        return issubclass(node_type, torch.Tensor | torch.nn.Module)

    def read(self, node: Any) -> ReadArray:
        if problem := _unreadable(node):
            return ReadArray(None, None, problem)
        dtype = np.dtype(_dtype_name(node))
        narrow = jax.dtypes.canonicalize_dtype(dtype)
        if narrow != dtype and dtype.kind in "fc":
            return ReadArray(
                None,
                None,
                f"is of {dtype}, of which JAX would keep {narrow}. Convert it, "
                f"tensor.to(torch.{narrow}), or set jax.config.update('jax_enable_x64', True)",
            )
        if _has_no_values(node):
            return ReadArray(jax.ShapeDtypeStruct(tuple(node.shape), narrow), None)
        array = _in_host_memory(node, dtype)
        if narrow != dtype:
            # Counts, such as those of batch norms, are of int64 in torch and small.
            if loses_integers(array):
                return ReadArray(
                    None,
                    None,
                    f"has values of {dtype} beyond those of {narrow}, which is what JAX would "
                    "keep. Set jax.config.update('jax_enable_x64', True)",
                )
            array = array.astype(narrow)
        return ReadArray(array, None)

    def with_data(self, node: Any, data: Any) -> Any:
        return data

    def refusal(self, tree: Any, as_model: bool = False) -> str:
        problem = _unreadable(tree) if self.reads(type(tree)) else ""
        return f"and this {problem}" if problem else ""

    def memory(self, node: Any) -> Hashable | None:
        if _unreadable(node) or _has_no_values(node) or not node.numel():
            return None
        return node.device, node.data_ptr(), node.numel()


READER = _TorchReader()


def _dtype_name(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _has_no_values(tensor: Any) -> bool:
    """Whether a tensor is on ``meta``, or a fake one: a shape and a dtype without memory."""
    return tensor.is_meta or _is_fake(tensor)


def _is_fake(tensor: Any) -> bool:
    return any(base.__name__ == "FakeTensor" for base in type(tensor).__mro__)


def _unreadable(node: Any) -> str:
    """Why something of torch is not an ordinary tensor, and what to give; empty if it is one."""
    torch = sys.modules["torch"]
    kind = type(node).__name__
    if isinstance(node, torch.nn.Module):
        return (
            f"is a module of torch, {kind}, and not its weights. Give these: "
            "name_axes(module.state_dict(), {...})"
        )
    if torch.nn.parameter.is_lazy(node):
        return f"is a {kind} of torch, which has no shape yet. Call its module once"
    # What such a class holds is not what its methods for memory give.
    own = type(node).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if own and not _is_fake(node):
        whole = "tensor.full_tensor()" if hasattr(node, "full_tensor") else "tensor.dequantize()"
        part = ", which can be a part of a whole" if hasattr(node, "full_tensor") else ""
        return (
            f"is a {kind} of {type(node).__module__}{part}, and not an ordinary tensor. Give one, "
            f"such as {whole}"
        )
    if node.is_nested:
        return "is a nested tensor. Give an ordinary one, torch.nested.to_padded_tensor(tensor, 0)"
    if node.is_quantized:
        return f"is a quantised tensor of {_dtype_name(node)}. Give tensor.dequantize()"
    if str(node.layout) != _STRIDED:
        layout = str(node.layout).removeprefix("torch.")
        return f"is a tensor of layout {layout}. Give tensor.to_dense()"
    if _dtype_name(node) not in _OF_NUMPY | _OF_JAX_ALONE:
        return f"is a tensor of {_dtype_name(node)}, a dtype that JAX does not have. Convert it"
    if not _has_no_values(node) and node.numel() and not node.untyped_storage().nbytes():
        return (
            "is a tensor whose memory was freed, as torch's FullyShardedDataParallel does. Give "
            "those of a full state dict"
        )
    return ""


def _in_host_memory(tensor: Any, dtype: np.dtype) -> np.ndarray:
    """What NumPy sees of a tensor: its own memory, or a copy of what is on another device."""
    torch = sys.modules["torch"]
    tensor = tensor.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg()
    if dtype.name in _OF_NUMPY:
        return tensor.numpy()
    as_integers = getattr(torch, _INTEGERS[dtype.itemsize])
    return tensor.view(as_integers).numpy().view(dtype)
