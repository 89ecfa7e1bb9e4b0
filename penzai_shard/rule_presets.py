"""The layouts that most people want, as rules to be combined with ``|``."""

import dataclasses
import numbers
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import RuleTypeError
from penzai_shard.rule_kinds import LargestDimensionRule, LogicalAxis, NameRule

# The logical axes of penzai.models.transformer that every device can compute a part of alone.
# In grouped-query attention an array has both head axes; the first that it has is split.
TRANSFORMER_MODEL_AXES: tuple[str, ...] = (
    "neurons",
    "heads",
    "head_groups",
    "query_heads",
    "vocabulary",
)


OfUnnamed: TypeAlias = Literal["largest"] | None
"""What ``fully_sharded`` splits of an array without names: its largest dimension, or nothing."""

# Arrays with fewer elements than this fully_sharded() leaves whole by default.
MIN_SIZE = 2**18


def data_parallel(
    mesh_axis: str | tuple[str, ...] = "data", batch_axis: LogicalAxis = "batch"
) -> AxisRules:
    """Every device holds the whole model and sees its own part of the batch.

    Args:
        mesh_axis: The mesh axis, or axes, that the batch is split over.
        batch_axis: The logical axis of the batch.

    Raises:
        RuleTypeError: These are not names of axes.

    >>> data_parallel()
    AxisRules({'batch': 'data'})
    """
    return AxisRules.from_rules(
        dataclasses.replace(rule, for_activations=True)
        for rule in AxisRules([(batch_axis, mesh_axis)]).name_rules
    )


def fully_sharded(
    mesh_axis: str | tuple[str, ...] = "data",
    min_size: int = MIN_SIZE,
    unnamed: OfUnnamed = None,
) -> AxisRules:
    """Of each large array, the largest dimension that divides and is free is split.

    The layout of ZeRO stage 3 (Rajbhandari et al. 2020, arXiv:1910.02054) and PyTorch's FSDP
    (Zhao et al. 2023, arXiv:2304.11277). Small arrays are not worth gathering and stay whole.
    Dimensions that a rule for names has taken, or keeps unsharded, are not free, in whichever
    order the two are combined; positional dimensions of named arrays never are.

    Args:
        mesh_axis: The mesh axis, or axes, that parameters are split over.
        min_size: Arrays with fewer elements than this stay whole.
        unnamed: ``"largest"`` for arrays without names too: of these, too, the largest dimension
            that divides is split, the first of equals, as ``shard_params`` does in tutorials of
            Flax and JAX. What stays whole, also scalars and random keys, is then no error, and
            the plan says why. By default rules are for arrays with names.

    Raises:
        RuleTypeError: These are not mesh axes, or ``min_size`` is not a number of elements, or
            ``unnamed`` is something else.

    >>> rules = fully_sharded(min_size=1) | tensor_parallel(axes=("neurons",))
    >>> rules.spec(("embedding", "neurons"), (8, 64), {"data": 4, "model": 2})
    P('data', 'model')
    >>> fully_sharded(min_size=1, unnamed="largest").spec(None, (3, 8), {"data": 4})
    P(None, 'data')
    """
    check_of_unnamed("fully_sharded", unnamed)
    if isinstance(min_size, bool) or not isinstance(min_size, numbers.Integral) or min_size < 0:
        raise RuleTypeError(
            "fully_sharded: min_size is a number of elements, for instance min_size=1024, not "
            f"{min_size!r}."
        )
    mesh_axes = AxisRules([("largest dimension", mesh_axis)]).rules[0].mesh_axes
    if not mesh_axes:
        raise RuleTypeError(
            f"fully_sharded: a mesh axis to split over is needed, not {mesh_axis!r}. "
            "Write for instance fully_sharded('data'), or leave the rule out."
        )
    rule = LargestDimensionRule(mesh_axes, min_size, splits_unnamed=unnamed is not None)
    return AxisRules.from_rules([rule])


def check_of_unnamed(called: str, unnamed: object) -> None:
    """Checks the option ``unnamed`` of ``fully_sharded``.

    Args:
        called: The function that was called, for messages.
        unnamed: What it was given.

    Raises:
        RuleTypeError: It is neither ``"largest"`` nor None.

    >>> check_of_unnamed("fully_sharded", "largest")
    """
    if unnamed is None or (isinstance(unnamed, str) and unnamed == "largest"):
        return
    on_unnamed = (
        f" A plan that allows arrays without names is asked for by on_unnamed={unnamed!r}."
        if isinstance(unnamed, str) and unnamed in ("error", "replicate", "infer")
        else ""
    )
    raise RuleTypeError(
        f"{called}: unnamed says what is split of arrays without names: unnamed='largest', their "
        f"largest dimension, or None, nothing; not {unnamed!r}.{on_unnamed}"
    )


def tensor_parallel(
    mesh_axis: str | tuple[str, ...] = "model",
    axes: Sequence[LogicalAxis] = TRANSFORMER_MODEL_AXES,
) -> AxisRules:
    """Of each array, the first of some logical axes that it has is split.

    The layout of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053) by name: hidden neurons,
    attention heads and vocabulary are split, the embedding is not.

    Args:
        mesh_axis: The mesh axis, or axes, that they are split over.
        axes: The logical axes, the most wanted first: an array that has several is split along
            the first that divides. By default those of Penzai's transformers.

    Raises:
        RuleTypeError: These are not names of axes.

    >>> tensor_parallel().spec(("head_groups", "query_heads"), (4, 2), {"model": 2})
    P('model',)
    """
    if isinstance(axes, str) or not isinstance(axes, Iterable):
        raise RuleTypeError(
            f"the rules need a sequence of logical axes, not {axes!r}. Write ({axes!r},)."
        )
    read = AxisRules([(name, mesh_axis) for name in axes]).rules
    return AxisRules.from_rules(
        dataclasses.replace(rule, yields=True) for rule in read if isinstance(rule, NameRule)
    )
