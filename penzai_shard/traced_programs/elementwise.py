"""Primitives that compute each element of their result by itself."""

_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil
    clamp clz complex conj convert_element_type copy cos cosh digamma div eq eq_to erf erf_inv
    erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le le_to lgamma
    log log1p logistic lt lt_to max min mul mulhi ne neg nextafter not or polygamma
    population_count pow real reduce_precision regularized_incomplete_beta rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor zeta"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""Primitives whose result at an index depends on the operands at this index alone (on the only
element of a scalar operand), by a formula that is the same for every index.

Checks let through what stands here: ``layers`` runs it on a device's part of an array,
``placement`` in any layout.
"""
