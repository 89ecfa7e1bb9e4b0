"""What people read: one ``Report`` of rows for every room, and the views of it."""

from typing import Any

__all__ = ["Column", "HasReport", "Report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penzai_shard.reports import report

    return getattr(report, name)
