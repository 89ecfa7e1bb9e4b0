"""The picture of all layouts that were priced: memory against time."""

import os
from typing import TYPE_CHECKING, Any

from penzai_shard.choosing.choices.choice import PRICED_BY
from penzai_shard.choosing.choices.priced_candidates import StageName
from penzai_shard.errors import RuleTypeError, require_extra

if TYPE_CHECKING:
    from penzai_shard.choosing.choices.choices import Choices

_GIB = 2**30
_MIB = 2**20
_SHADES: dict[StageName, str] = {"names": "0.8", "propagation": "tab:blue", "compiled": "tab:green"}


def plot_choices(choices: "Choices", axes: Any = None) -> Any:
    """Draws ``Choices.plot``."""
    if axes is None:
        pyplot = require_extra("matplotlib.pyplot", "notebook")
        axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")[1]
    elif not hasattr(axes, "scatter"):
        file = axes if isinstance(axes, str | os.PathLike) else "choices.png"
        raise RuleTypeError(
            f"axes: is {axes!r:.80}, and must be the matplotlib.axes.Axes to draw on. To write a "
            f'file: choices.plot().figure.savefig("{file}").'
        )
    limit = choices.memory_limit
    unit, name = (_GIB, "GiB") if limit >= _GIB else (_MIB, "MiB")
    for stage, shade in _SHADES.items():
        points = [
            (one.memory / unit, one.time.bound) for one in choices.priced if one.stage == stage
        ]
        if points:
            axes.scatter(*zip(*points, strict=True), s=9, color=shade, label=PRICED_BY[stage])
    best = choices.best
    pick = best.memory_bytes / unit, best.seconds
    axes.scatter(*pick, s=140, marker="*", color="tab:red", zorder=3, label="the pick")
    axes.axvline(limit / unit, color="grey", linestyle="--", label="memory of a device")
    axes.set(xscale="log", yscale="log", xlabel=f"memory of a device ({name})")
    axes.set(ylabel="least time of a step (s)", title=choices.asked)
    axes.legend(fontsize="small")
    return axes
