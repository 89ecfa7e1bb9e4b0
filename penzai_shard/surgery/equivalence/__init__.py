"""Whether an edited model computes the same as its original.

``check`` runs both models on the same values and compares what they compute: parameters and state
by name (``named_values``), results array by array (``paired_runs``) on the yardstick of the
original's rounding errors (``yardsticks``), which runs in float64 measure (``model_steps``,
``wider_arithmetic``). Where they differ, ``tapping`` and ``divergence`` find the first layer that
does. The result is a ``report``.
"""

from penzai_shard.surgery.equivalence.check import check_equivalent
from penzai_shard.surgery.equivalence.divergence import Divergence
from penzai_shard.surgery.equivalence.report import (
    ArrayComparison,
    Comparison,
    EquivalenceReport,
    NotEquivalentError,
)

__all__ = [
    "ArrayComparison",
    "Comparison",
    "Divergence",
    "EquivalenceReport",
    "NotEquivalentError",
    "check_equivalent",
]
