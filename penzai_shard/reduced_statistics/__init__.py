"""Which dimensions of its parameter an array of an optimizer has.

Statistics such as those of adafactor and sm3 keep only some of them. By their sizes they are
aligned with the parameter (``aligned_names``), which is known by the names that both have
(``parameter_sizes``), or, without names, by where both are (``unnamed_statistics``).
"""

from penzai_shard.reduced_statistics.aligned_names import AlignedNames as AlignedNames
from penzai_shard.reduced_statistics.aligned_names import DimensionsOf as DimensionsOf
from penzai_shard.reduced_statistics.aligned_names import align_names as align_names
from penzai_shard.reduced_statistics.parameter_sizes import ParameterSizes as ParameterSizes
from penzai_shard.reduced_statistics.unnamed_statistics import (
    dimensions_of_statistics as dimensions_of_statistics,
)
from penzai_shard.reduced_statistics.unnamed_statistics import parameters_of as parameters_of
