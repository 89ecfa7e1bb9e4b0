"""Gradients that are padded before they are summed up over devices, not afterwards.

Each device has a part of the sum, and goes on with a slice of the whole. Compilers reduce-scatter
it where the slices are equal parts. Of a length that does not divide they sum up all of it, pad
that, and slice: twice the bytes. So the parts of the sum are computed with padding: products of
factors that are padded, as what becomes of the padding is cut off in the end.

What compilers compute wrongly of unequal parts is computed of whole ones, here and in a loss.
"""

from penzai_shard.training.padded_sums.gradients import summed_in_equal_parts
from penzai_shard.training.padded_sums.whole_operands import computed_rightly

__all__ = ["computed_rightly", "summed_in_equal_parts"]
