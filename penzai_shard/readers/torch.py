"""Reads tensors of torch, as in ``module.state_dict()``: NumPy's view of their memory, no names.

A tensor becomes its data: trees of shardings and of values hold these in its place.
"""

from typing import Any

import jax
import numpy as np
import torch

from penzai_shard.readers.reader import Content

# torch shares memory of dtypes that NumPy lacks by way of integers of the same width.
_INTEGERS = {1: torch.uint8, 2: torch.int16}
_OF_NUMPY = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
)
_OF_JAX = _OF_NUMPY | {"bfloat16", "float8_e4m3fn", "float8_e5m2"}


class _Tensors:
    library = "torch"

    def reads(self, kind: type) -> bool:
        return issubclass(kind, torch.Tensor)

    def open(self, node: Any) -> Content:
        if hasattr(node, "jax") and callable(node.jax):
            # A tensor of torchax stands for an array of JAX.
            return Content(node.jax())
        dtype_name = str(node.dtype).removeprefix("torch.")
        is_plain = node.layout is torch.strided and not (node.is_nested or node.is_quantized)
        is_ordinary = type(node).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        if not is_plain or not is_ordinary or dtype_name not in _OF_JAX:
            what = f"it is no ordinary dense tensor ({type(node).__name__} of {dtype_name})"
            return Content(None, problem=(what, "Give tensor.detach().to_dense()."))
        dtype = np.dtype(dtype_name)
        narrow = jax.dtypes.canonicalize_dtype(dtype)
        if node.is_meta:
            return Content(jax.ShapeDtypeStruct(tuple(node.shape), narrow))
        tensor = node.detach().cpu().resolve_conj().resolve_neg()
        if dtype_name in _OF_NUMPY:
            array = tensor.numpy()
        else:
            array = tensor.view(_INTEGERS[dtype.itemsize]).numpy().view(dtype)
        # Counts, as those of batch norms, are 64-bit integers in torch, and small.
        if narrow != dtype and np.array_equal(array.astype(narrow), array):
            array = array.astype(narrow)
        elif narrow != dtype:
            what = f"its values of {dtype} are not those of {narrow}, which JAX would keep"
            return Content(None, problem=(what, f"Convert it: tensor.to(torch.{narrow})."))
        return Content(array)

    def close(self, template: Any, data: Any) -> Any:
        return data

    def why_not(self, tree: Any) -> tuple[str, str] | None:
        if not isinstance(tree, torch.nn.Module):
            return None
        return f"{type(tree).__name__} is a module of torch", "Give module.state_dict()."


READERS = [_Tensors()]
