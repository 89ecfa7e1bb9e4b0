"""Gradients that are padded before they are summed up over devices, not afterwards.

Each device has a part of the sum, and goes on with a slice of the whole. Compilers reduce-scatter
it where the slices are equal parts. Of a length that does not divide they sum up all of it, pad
that, and slice: twice the bytes. So the parts of the sum are computed with padding: products of
factors that are padded, as what becomes of the padding is cut off in the end.
"""

from penzai_shard.training.padded_sums.gradients import summed_in_equal_parts

__all__ = ["summed_in_equal_parts"]
