"""How often a run of a program executes each of its computations."""

import dataclasses
import graphlib
from collections.abc import Iterator

from penzai_shard.compiled_programs.modules import Instruction, Module
from penzai_shard.compiled_programs.trip_counts import trip_count
from penzai_shard.compiled_programs.value_flow import ValueFlow

# They run a computation inside of themselves: once per element, or as often as they like.
RUN_INSIDE = frozenset(
    {
        "all-reduce",
        "all-reduce-start",
        "custom-call",
        "map",
        "reduce",
        "reduce-scatter",
        "reduce-window",
        "scatter",
        "select-and-scatter",
        "sort",
        "topk",
    }
)
_UNKNOWN_TIMES = RUN_INSIDE | {"scan"}
# The computation of an asynchronous instruction runs once, from its start on.
_CONTINUED = frozenset(("async-update", "async-done"))


@dataclasses.dataclass(frozen=True)
class Executions:
    """How often something is executed in one run.

    Attributes:
        times: The number; None if the program does not say.
        at_most: Whether it may be less, since it is in a branch of a conditional.
    """

    times: int | None
    at_most: bool = False

    def __add__(self, other: "Executions") -> "Executions":
        at_most = self.at_most or other.at_most
        if self.times is None or other.times is None:
            return Executions(None, at_most)
        return Executions(self.times + other.times, at_most)

    def of_call(self, call: "Executions") -> "Executions":
        """Those of what is called, for each execution of the caller."""
        at_most = self.at_most or call.at_most
        if self.times is None or call.times is None:
            return Executions(None, at_most)
        return Executions(self.times * call.times, at_most)


def executions(module: Module) -> dict[str, Executions]:
    """How often one run executes each computation; those that it never does are absent.

    Loops count by their trip count, nested ones multiply. A branch of a conditional counts as if
    it were taken each time, and is marked; the program does not say which one is.
    """
    flow = ValueFlow(module)
    calls = {
        name: [call for one in computation for call in _calls(flow, one)]
        for name, computation in module.computations.items()
    }
    callers = {name: set[str]() for name in calls}
    for name, called in calls.items():
        for other, _ in called:
            callers[other].add(name)
    result = {module.entry: Executions(1)}
    for name in graphlib.TopologicalSorter(callers).static_order():
        if name not in result:
            continue
        for other, call in calls[name]:
            times = result[name].of_call(call)
            result[other] = result[other] + times if other in result else times
    return result


def _calls(flow: ValueFlow, one: Instruction) -> Iterator[tuple[str, Executions]]:
    if one.opcode in _CONTINUED:
        return
    for name in flow.module.called_by(one):
        yield name, _executions_of_call(flow, one, name)


def _executions_of_call(flow: ValueFlow, one: Instruction, name: str) -> Executions:
    if one.opcode == "while":
        trips = trip_count(flow, one)
        # The condition is asked once more than the body runs.
        once_more = flow.module.called_as(one, "condition").name == name
        return Executions(None if trips is None else trips + once_more)
    if one.opcode == "conditional":
        return Executions(1, at_most=True)
    return Executions(None if one.opcode in _UNKNOWN_TIMES else 1)
