"""Why each layer's output and each gradient is laid out as it is."""

from penzai_shard.inspection.sharding_causes.records import (
    ShardingCause,
    ShardingLoss,
    WayStep,
    WhyRow,
)
from penzai_shard.inspection.sharding_causes.report import WhyReport
from penzai_shard.inspection.sharding_causes.why import why

__all__ = ["ShardingCause", "ShardingLoss", "WayStep", "WhyReport", "WhyRow", "why"]
