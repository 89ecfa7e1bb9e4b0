"""The three ways to price candidates, from the quickest to the most exact one."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from penzai_shard.choosing.by_compiling import CompiledPrices
from penzai_shard.choosing.by_names import NamePrices
from penzai_shard.choosing.by_propagation import PropagatedPrices
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.priced_candidates import StageName
from penzai_shard.choosing.choices.search import Stage
from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.errors import ShardingError
from penzai_shard.inspection.devices.topologies import Topology


class Prices(Protocol):
    """What prices one candidate after the other."""

    def cost(self, candidate: Candidate) -> StepCost:
        """What a candidate costs."""


class OneByOne:
    """A stage that prices one candidate after the other.

    Args:
        name: What it is called.
        prices: Makes what prices them, once the stage is reached.
    """

    def __init__(self, name: StageName, prices: Callable[[], Prices]) -> None:
        self.name = name
        self._prices = functools.cache(prices)

    def costs(self, candidates: Sequence[Candidate]) -> Iterator[StepCost | ShardingError]:
        """What each costs; or why it cannot be laid out so."""
        prices = self._prices()
        for candidate in candidates:
            try:
                yield prices.cost(candidate)
            except ShardingError as error:
                yield error

    def close(self) -> None:
        """Nothing is held."""


class Compiling:
    """The stage that compiles candidates, several at a time.

    Args:
        problem: The training step.
        topology: What to compile for; None for as many simulated devices.
    """

    name: StageName = "compiled"

    def __init__(self, problem: TrainingProblem, topology: Topology | None = None) -> None:
        self._problem = problem
        self._topology = topology
        self._prices: CompiledPrices | None = None

    def costs(self, candidates: Sequence[Candidate]) -> Iterator[StepCost | ShardingError]:
        """What each costs."""
        if self._prices is None:
            self._prices = CompiledPrices(self._problem, self._topology)
        yield from self._prices.costs(candidates)

    def close(self) -> None:
        """Ends the processes."""
        if self._prices is not None:
            self._prices.__exit__(None, None, None)


def stages_of(
    problem: TrainingProblem,
    *,
    with_propagation: bool = True,
    with_compiling: bool = True,
    topology: Topology | None = None,
) -> list[Stage]:
    """The stages for a training step.

    Args:
        problem: The step.
        with_propagation: Whether the second one is among them.
        with_compiling: Whether the third one is.
        topology: What the third one compiles for; None for as many simulated devices.
    """
    stages: list[Stage] = [OneByOne("names", lambda: NamePrices.of(problem))]
    if with_propagation:
        stages.append(OneByOne("propagation", lambda: PropagatedPrices.of(problem)))
    if with_compiling:
        stages.append(Compiling(problem, topology))
    return stages
