"""What a train step costs in a layout, by what Shardy makes of it."""

from collections.abc import Hashable

from penzai_shard.choosing.by_propagation.marked_steps import MarkedStep, StepTables
from penzai_shard.choosing.by_propagation.program_costs import cost_of, cost_of_deep
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.shallow_models import Shallow, shallow
from penzai_shard.choosing.step_costs import StepCost
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.inspection.steps.lowered_steps import LoweredStep
from penzai_shard.library_apis.shardy_placed import PlacedProgram


class PropagatedPrices:
    """Prices the layouts of one training step by Shardy's propagation, without compiling.

    The step is lowered once for all layouts that edit the model alike, with marks in place of
    layouts; a candidate's are then put in. Shardy, the part of XLA that lays out values, propagates
    them and writes down what has to be moved between any two operations; products are laid out as
    XLA does it, which Shardy leaves to it. A deep model is priced from one and two of its blocks.

    >>> import jax, optax, penzai_shard
    >>> from penzai import pz
    >>> def build():
    ...     axes = {"embedding": 8}, {"neurons": 8}
    ...     return pz.nn.Linear.from_config("up", jax.random.key(0), *axes)
    >>> def loss_fn(model, rng, state, x):
    ...     return model(x).untag("batch", "neurons").unwrap().mean(), state, {}
    >>> from penzai_shard.named_arrays import named_array
    >>> x = named_array(jax.ShapeDtypeStruct((8, 8), "float32"), ("batch", "embedding"))
    >>> model = penzai_shard.abstract_model(build)
    >>> prices = PropagatedPrices.of(TrainingProblem(model, loss_fn, optax.sgd(0.1), {"x": x}))
    >>> layout = penzai_shard.Layout.data_parallel(blocks=())
    >>> cost = prices.cost(Candidate((("data", 4),), layout))
    >>> [(sent.what, sent.mesh_axes, sent.bytes) for sent in cost.sent if sent.names]
    [('gradient', ('data',), 384.0)]
    """

    def __init__(self, shallow_problem: Shallow) -> None:
        self._problems = shallow_problem
        self._steps: dict[tuple[int, Hashable], MarkedStep] = {}

    @classmethod
    def of(cls, problem: TrainingProblem) -> "PropagatedPrices":
        """Prices for a step.

        Args:
            problem: The step. Nothing is lowered yet.
        """
        return cls(shallow(problem))

    def cost(self, candidate: Candidate) -> StepCost:
        """What the step costs in a layout.

        The first candidate of a structure lowers the step, in half a second for each block.

        Raises:
            ShardingError: The layout does not fit the model, or Shardy refuses it.
        """
        programs = [
            self._placed(number, problem, candidate)
            for number, problem in enumerate(self._problems.problems)
        ]
        if len(programs) == 1:
            return cost_of(*programs[0], candidate.mesh_shape)
        return cost_of_deep(programs, candidate.mesh_shape, self._problems.blocks)

    def _placed(
        self, number: int, problem: TrainingProblem, candidate: Candidate
    ) -> tuple[PlacedProgram, LoweredStep]:
        tables = StepTables.of(problem, candidate)
        key = (number, tables.structure)
        if key not in self._steps:
            self._steps[key] = MarkedStep(problem, tables)
        step = self._steps[key]
        return step.placed(tables), step.lowered
