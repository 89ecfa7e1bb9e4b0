"""Where the layout of each value of a program comes from, by the compiler's own propagation."""

from penzai_shard.sharding_propagation.program import (
    FLOW as FLOW,
)
from penzai_shard.sharding_propagation.program import (
    Edge as Edge,
)
from penzai_shard.sharding_propagation.program import (
    Hop as Hop,
)
from penzai_shard.sharding_propagation.program import (
    Operation as Operation,
)
from penzai_shard.sharding_propagation.program import (
    PropagatedProgram as PropagatedProgram,
)
