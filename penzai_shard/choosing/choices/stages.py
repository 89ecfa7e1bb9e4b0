"""The three ways to price candidates, from the quickest to the most exact one."""

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from penzai_shard.choosing.by_compiling import CompiledPrices
from penzai_shard.choosing.by_names import NamePrices
from penzai_shard.choosing.by_propagation import PropagatedPrices
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.priced_candidates import StageName
from penzai_shard.choosing.choices.search import Stage
from penzai_shard.choosing.shallow_models import Shallow, shallow
from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.errors import ShardingError
from penzai_shard.inspection.devices.topologies import Topology
from penzai_shard.library_apis.c_library import give_back_free_memory


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
        """Forgets the programs that are priced from, hundreds of megabytes for deep models."""
        self._prices.cache_clear()
        give_back_free_memory()


class Compiling:
    """The stage that compiles candidates, several at a time.

    Args:
        problem: The training step.
        topology: What to compile for; None for as many simulated devices.
        cut: Cuts the step, once the stage is reached.
    """

    name: StageName = "compiled"

    def __init__(
        self, problem: TrainingProblem, topology: Topology | None, cut: Callable[[], Shallow]
    ) -> None:
        self._problem = problem
        self._topology = topology
        self._cut = cut
        self._prices: CompiledPrices | None = None

    @property
    def is_extrapolating(self) -> bool:
        """Whether costs follow from those of fewer blocks."""
        return self._prices is not None and self._prices.are_extrapolated

    def costs(self, candidates: Sequence[Candidate]) -> Iterator[StepCost | ShardingError]:
        """What each costs."""
        yield from self._started().costs(candidates)

    def closer_costs(self, candidates: Sequence[Candidate]) -> Iterator[StepCost | ShardingError]:
        """What each costs by programs of one block more."""
        yield from self._started().costs(candidates, closely=True)

    def whole_costs(self, candidates: Sequence[Candidate]) -> Iterator[StepCost | ShardingError]:
        """What each costs by the program of all blocks."""
        yield from self._started().costs(candidates, whole=True)

    def _started(self) -> CompiledPrices:
        if self._prices is None:
            # What the stages before held refers to itself, and processes need the memory.
            gc.collect()
            give_back_free_memory()
            self._prices = CompiledPrices(self._problem, self._topology, cut=self._cut())
        return self._prices

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
    notes: list[str] | None = None,
) -> list[Stage]:
    """The stages for a training step.

    Args:
        problem: The step.
        with_propagation: Whether the second one is among them.
        with_compiling: Whether the third one is.
        topology: What the third one compiles for; None for as many simulated devices.
        notes: Where it is added, once the first one is asked, why a deep model is not cut.
    """

    # To cut a step is to trace it three times, which is done once for all stages.
    @functools.cache
    def cut() -> Shallow:
        found = shallow(problem)
        if notes is not None and found.doubt:
            notes.append(f"Priced whole, which takes longer: {found.doubt}.")
        return found

    stages: list[Stage] = [OneByOne("names", lambda: NamePrices(cut()))]
    if with_propagation:
        stages.append(OneByOne("propagation", lambda: PropagatedPrices(cut())))
    if with_compiling:
        stages.append(Compiling(problem, topology, cut))
    return stages
