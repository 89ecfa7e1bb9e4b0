"""The floating point operations of a compiled program's matrix products and convolutions."""

import math
import re

import numpy as np

from penzai_shard.compiled_programs.executions import executions
from penzai_shard.compiled_programs.instruction_text import ArrayType
from penzai_shard.compiled_programs.modules import Instruction, Module

_WINDOW = re.compile(r"(\w+)=([\dx_\-]+)")


def product_flops(module: Module) -> int:
    """What one device computes in matrix products and convolutions in one run.

    A multiplication and an addition are two operations. What a loop runs counts as often as it
    runs; once, if that is not known. The compiler for TPUs writes products as convolutions.

    Args:
        module: A compiled program. One whose products are calls of a library has none.

    >>> module = Module.from_text('''
    ... HloModule m
    ... ENTRY e {
    ...   a = f32[4,8]{1,0} parameter(0)
    ...   b = f32[8,16]{1,0} parameter(1)
    ...   ROOT c = f32[4,16]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }''')
    >>> product_flops(module) == 2 * 4 * 8 * 16
    True
    """
    runs = executions(module)
    total = 0
    for one in module:
        if one.opcode in _FLOPS and one.computation in runs:
            times = runs[one.computation].times
            left, right = (
                module.computations[one.computation].instructions[name].results[0]
                for name in one.operand_names[:2]
            )
            total += _FLOPS[one.opcode](one, left, right) * (1 if times is None else times)
    return total


def _of_dot(one: Instruction, left: ArrayType, right: ArrayType) -> int:
    del right
    numbers = re.findall(r"\d+", one.attributes.get("lhs_contracting_dims", ""))
    contracted = math.prod(left.shape[int(number)] for number in numbers)
    return 2 * math.prod(one.results[0].shape) * contracted


def _of_convolution(one: Instruction, left: ArrayType, right: ArrayType) -> int:
    """As XLA counts them: where a window is over padding or between elements, nothing is."""
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", one.attributes["dim_labels"])
    assert labels is not None
    sizes = [
        dict(zip(text, array.shape, strict=True))
        for text, array in zip(labels.groups(), (left, right, one.results[0]), strict=True)
    ]
    window = {
        key: text.split("x") for key, text in _WINDOW.findall(one.attributes.get("window", ""))
    }
    # Only those dimensions of the image that a window goes over have a digit.
    places = 1
    for number in filter(str.isdigit, labels[1]):
        image, kernel, result = (each[number] for each in sizes)
        places *= _places(image, kernel, result, _window_of(window, int(number)))
    # Each group of the features, or of the batch, has its own part of the kernel and of the result.
    return 2 * sizes[2]["b"] * sizes[2]["f"] * sizes[1]["i"] * places


_FLOPS = {"dot": _of_dot, "convolution": _of_convolution}


def _window_of(window: dict[str, list[str]], dimension: int) -> tuple[int, int, int, int]:
    """Stride, padding before, dilation of the image and of the window in one dimension."""

    def number(key: str, default: int) -> int:
        return int(window[key][dimension].partition("_")[0]) if key in window else default

    dilations = number("lhs_dilate", 1), number("rhs_dilate", 1)
    return number("stride", 1), number("pad", 0), *dilations


def _places(image: int, kernel: int, result: int, window: tuple[int, int, int, int]) -> int:
    """How many pairs there are of an element of a result and one of the image in its window."""
    stride, pad, of_image, of_window = window
    starts = np.arange(result) * stride - pad
    positions = starts[:, None] + np.arange(kernel) * of_window
    inside = (positions >= 0) & (positions <= (image - 1) * of_image)
    return int(np.count_nonzero(inside & (positions % of_image == 0)))
