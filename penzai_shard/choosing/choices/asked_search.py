"""How ``choose_layout`` is to search, checked: what is kept, and what is tried."""

from collections.abc import Mapping, Sequence
from typing import Any

from penzai_shard.errors import RuleTypeError, raise_all
from penzai_shard.layers import resolve_policy


def check_search(
    keep: Any,
    rematerialise: Any,
    microbatches: Any,
    propagated: Any,
    compiled: Any,
    on_indivisible: Any = "error",
    names: Any = None,
) -> None:
    """Refuses what says nothing about a search, before anything is traced.

    Raises:
        RuleTypeError: An argument of ``choose_layout`` cannot be read; all of them at once.
    """
    problems = []
    if keep is not None and not isinstance(keep, Mapping):
        problems.append(
            f"keep: is {keep!r:.80}, and must map logical axes to mesh axes. Write "
            'keep={"batch": "data"}.'
        )
    problems += _unfit_pairs(keep if isinstance(keep, Mapping) else {})
    if names is not None and not isinstance(names, Mapping):
        problems.append(
            f"names: is {names!r:.80}, and must map roles to what the model calls them. Write "
            'names={"neurons": "mlp"}.'
        )
    problems += _unfit_policies(rematerialise)
    if not _is_list(microbatches) or not microbatches or any(_below(1, n) for n in microbatches):
        listed = [microbatches] if not _below(1, microbatches) else [1, 2, 4]
        problems.append(
            f"microbatches: is {microbatches!r:.80}, and must list positive numbers to try. Write "
            f"microbatches={listed}."
        )
    for name, count in (("propagated", propagated), ("compiled", compiled)):
        if _below(0, count):
            problems.append(
                f"{name}: is {count!r:.80}, and must be a number of layouts. Write {name}=12, or "
                f"{name}=0 for none."
            )
    if on_indivisible not in ("error", "pad"):
        fix = (
            'Layouts in which it is whole are tried anyway: on_indivisible="error".'
            if on_indivisible == "replicate"
            else 'Write on_indivisible="pad", or "error".'
        )
        problems.append(f"on_indivisible: is {on_indivisible!r:.80}. {fix}")
    raise_all(RuleTypeError, "choose_layout cannot read what it was given:", problems)


def _unfit_pairs(keep: Mapping[Any, Any]) -> list[str]:
    """What is wrong with what is kept, each pair by itself."""
    return [
        f"keep[{name!r}]: is {over!r:.80}, and must be a mesh axis, several in a tuple, or None "
        f"for what stays whole. Write keep={{{name!r}: 'data'}}."
        for name, over in keep.items()
        if not (over is None or isinstance(over, str))
        and not (isinstance(over, list | tuple) and all(isinstance(each, str) for each in over))
    ]


def _unfit_policies(rematerialise: Any) -> list[str]:
    is_list = _is_list(rematerialise) and bool(rematerialise)
    listed = rematerialise if is_list else [rematerialise or None]
    problems = []
    for policy in listed:
        try:
            resolve_policy(policy)
        except RuleTypeError as error:
            problems.append(f"rematerialise: {error}")
    if not is_list and not problems:
        problems.append(
            f"rematerialise: is {rematerialise!r:.80}, and must list policies to try. Write "
            f"rematerialise={listed!r:.80}."
        )
    return problems


def _is_list(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


def _below(least: int, number: Any) -> bool:
    """Whether something is not a number that is at least so large."""
    return not isinstance(number, int) or isinstance(number, bool) or number < least
