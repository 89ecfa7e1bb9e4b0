"""What rules say of every array of a tree: a plan that can be read before anything is placed."""

from typing import Any

__all__ = ["LeafPlan", "ShardingPlan"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penzai_shard.planning import plan

    return getattr(plan, name)
