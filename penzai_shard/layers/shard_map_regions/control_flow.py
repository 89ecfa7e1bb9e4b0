"""How split dimensions pass through loops and branches, whose bodies are programs themselves."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penzai_shard.layers.shard_map_regions.split_values import (
    Dimension,
    Flow,
    MixesElementsError,
    Split,
    join_flows,
    same_value,
)
from penzai_shard.library_apis.jax_api import scan_counts


class Follows(Protocol):
    """What follows a program."""

    def results(self, whole: Any, part: Any, flows: Sequence[Flow]) -> tuple[Flow, ...]:
        """What the results of a program are, from what its inputs are."""


def _scan(analysis: Follows, whole: Any, part: Any, flows: Sequence[Flow]) -> Sequence[Flow]:
    params = whole.params
    if not same_value(params["reverse"], part.params["reverse"]):
        raise MixesElementsError("its direction depends on the length of a split dimension")
    first, carried = scan_counts(params)
    rest = first + carried
    constants, carry, along = list(flows[:first]), list(flows[first:rest]), list(flows[rest:])
    turns: Dimension = None
    if params["length"] != part.params["length"] or any(flow.dims[0] for flow in along):
        splits = {flow.dims[0] for flow in along}
        if carry or len(splits) != 1 or not isinstance(turns := splits.pop(), Split):
            raise MixesElementsError("it takes a turn for each element of a split dimension")
    inner = [dataclasses.replace(flow, dims=flow.dims[1:]) for flow in along]
    programs = params["jaxpr"], part.params["jaxpr"]
    carry, results = _turns(analysis, *programs, constants, carry, inner)
    return [*carry, *(dataclasses.replace(f, dims=(turns, *f.dims)) for f in results)]


def _turns(
    analysis: Follows,
    whole: Any,
    part: Any,
    constants: Sequence[Flow],
    carry: Sequence[Flow],
    along: Sequence[Flow] = (),
) -> tuple[list[Flow], list[Flow]]:
    """What the carried values and the results of a loop's turn are, after any number of turns."""
    carry = list(carry)
    while True:
        found = analysis.results(whole, part, [*constants, *carry, *along])
        after = [join_flows(pair) for pair in zip(carry, found[: len(carry)], strict=True)]
        if after == carry:
            return carry, list(found[len(carry) :])
        carry = after


def _while(analysis: Follows, whole: Any, part: Any, flows: Sequence[Flow]) -> Sequence[Flow]:
    params = whole.params
    first = params["cond_nconsts"]
    rest = first + params["body_nconsts"]
    tested, constants = flows[:first], flows[first:rest]
    programs = [(p["body_jaxpr"], p["cond_jaxpr"]) for p in (params, part.params)]
    carry, _ = _turns(analysis, programs[0][0], programs[1][0], constants, flows[rest:])
    (condition,) = analysis.results(programs[0][1], programs[1][1], [*tested, *carry])
    return _decided(condition, carry)


def _cond(analysis: Follows, whole: Any, part: Any, flows: Sequence[Flow]) -> Sequence[Flow]:
    branches = zip(whole.params["branches"], part.params["branches"], strict=True)
    found = [analysis.results(one, other, flows[1:]) for one, other in branches]
    return _decided(flows[0], [join_flows(column) for column in zip(*found, strict=True)])


def _decided(condition: Flow, flows: Sequence[Flow]) -> list[Flow]:
    """Values that depend on a condition."""
    if condition.partial:
        raise MixesElementsError("it decides by a gradient that is summed over the devices")
    return [
        dataclasses.replace(
            flow,
            random=flow.random or condition.random,
            refused=flow.refused | condition.refused,
            zero=False,
        )
        for flow in flows
    ]


def _linear_solve(analysis: Follows, whole: Any, part: Any, flows: Sequence[Flow]) -> list[Flow]:
    remaining = list(flows)
    lengths = whole.params["const_lengths"]._asdict()
    constants = {name: [remaining.pop(0) for _ in range(count)] for name, count in lengths.items()}
    found: list[Flow] = []
    for name, program in whole.params["jaxprs"]._asdict().items():
        if program is None:
            continue
        other = getattr(part.params["jaxprs"], name)
        results = analysis.results(program, other, [*constants[name], *remaining])
        # The solution is what the derivative multiplies and solves for again.
        found = [
            dataclasses.replace(join_flows(pair), zero=False)
            for pair in zip(found or results, results, strict=True)
        ]
    return found


CONTROL: dict[str, Callable[[Follows, Any, Any, Sequence[Flow]], Sequence[Flow]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,
}
"""The rule of each operation that runs other programs any number of times."""
