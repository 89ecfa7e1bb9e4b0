"""Does an edited model still compute the same? Both are run on the same values and compared.

Each model runs twice: as it is, and in float64, where a program shows the function that it
computes without its rounding. The functions must agree far more closely than the original rounds;
the results as they are, as closely as the original's own rounding errors reach (``yardsticks``).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from penzai_shard.meshes import auto_context
from penzai_shard.surgery.equivalence.array_comparisons import (
    GROUPS,
    Runs,
    compared,
    functions_agree,
    in_groups,
    joined_errors,
    largest_errors,
)
from penzai_shard.surgery.equivalence.differences import Difference
from penzai_shard.surgery.equivalence.divergence import Divergence, first_to_differ
from penzai_shard.surgery.equivalence.model_calls import ModelCall
from penzai_shard.surgery.equivalence.model_steps import ModelStep, Results, WiderStep
from penzai_shard.surgery.equivalence.named_values import NamedValues, drawn, is_abstract, some
from penzai_shard.surgery.equivalence.program_constants import is_float, widest
from penzai_shard.surgery.equivalence.report import ArrayComparison, Comparison, EquivalenceReport
from penzai_shard.surgery.equivalence.tapping import Recorder, tapped
from penzai_shard.surgery.equivalence.unfit_comparisons import explain_nameless_inputs, refuse_unfit
from penzai_shard.surgery.equivalence.wider_arithmetic import Rounding
from penzai_shard.surgery.equivalence.yardsticks import Deviation

_WIDEST = float(np.finfo(np.float64).eps)
_ROUNDED_RUNS = 4
_MAGNIFIED = 2.0**20

# Values that differ by no more are taken for one computation, rounded in two ways.
_ULPS_OF_ROUNDING = 2


def check_equivalent(
    original: Any,
    edited: Any,
    *args: Any,
    gradients: bool = True,
    rtol: float | None = None,
    same_values: bool = True,
    added_parameters: bool = False,
    **side_inputs: Any,
) -> EquivalenceReport:
    """Runs a model and an edited form of it on the same values, and compares what they compute.

    Compared are the parameters and the state variables before the call by name: logical axes,
    shapes, dtypes and values; the outputs; the state variables after the call; and the gradients
    of all parameters by name, of the sum of the outputs times fixed random numbers. The edited
    model is then run on the original's parameters and state. Neither model changes, nor do
    variables in the inputs.

    Each array is measured against itself, element by element. How far it may be off is derived
    from the original: its rounding errors are measured by running it in float64, exactly and with
    every operation rounded at random as its dtype rounds. The edited model as it is may be off by
    as much as that. Run in float64, where conversions to other dtypes do nothing, it computes the
    same function only if it agrees far more closely. So an edit that lowers the precision is
    certified where its errors are those that the original would have in that precision, and a
    rescale that is smaller than them is found all the same. Integers and truth values must be
    equal, and numbers that are not finite must be so alike.

    If the outputs differ, both models are run once more, compiled with a callback around every
    layer that they have in common, to find the first one whose output differs.

    Abstract models are run on numbers drawn at random.

    Args:
        original: A model.
        edited: What a recipe, or anything else, made of it.
        *args: The models' inputs: trees of arrays and variables.
        gradients: Whether to compare gradients too.
        rtol: A difference that is allowed in any case, relative to the largest value of the array
            that it is in. None for what rounding explains alone.
        same_values: Whether parameters and state variables must have the original's values before
            the call. Give False for an edit that changes them on purpose; the report says so.
        added_parameters: Whether the edited model may have parameters that the original lacks,
            such as adapters. They keep their own values, and their gradients are not compared.
        **side_inputs: The models' side inputs.

    Returns:
        The report. It is true if the models are equivalent.

    Raises:
        RuleTypeError: A model or an input is something else, or an array was donated.

    >>> import jax
    >>> from penzai import pz
    >>> from penzai_shard.surgery import Recipe, wrap
    >>> from penzai_shard.layers import Checkpointed
    >>> model = pz.nn.Linear.from_config("w", jax.random.key(0), {"a": 2}, {"b": 3})
    >>> edited = Recipe(wrap("pz.nn:Linear", Checkpointed)).apply(model)
    >>> bool(check_equivalent(model, edited, pz.nx.ones({"a": 2})))
    True
    """
    refuse_unfit((original, edited), args, side_inputs)
    with auto_context():
        check = _Check((original, edited), (args, side_inputs), rtol or 0.0, gradients)
        try:
            return check.report(same_values, added_parameters)
        except AttributeError as error:
            explain_nameless_inputs(error, args, side_inputs)
            raise


class _Check:
    """One comparison of two models."""

    def __init__(
        self,
        models: tuple[Any, Any],
        inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
        rtol: float,
        gradients: bool,
    ) -> None:
        self._models = models
        self._inputs = inputs
        self._calls = ModelCall(models[0], *inputs), ModelCall(models[1], *inputs)
        self._rtol = rtol
        self._gradients = gradients
        self._notes: list[str] = []
        self._precision = ""
        self._not_compared: list[str] = []

    def report(self, same_values: bool, added_parameters: bool) -> EquivalenceReport:
        original, edited = self._calls
        found = NamedValues.of(original.parameters, edited.parameters, same_values)
        state = NamedValues.of(original.state, edited.state, same_values)
        parameters = self._parameters(found, added_parameters)
        if not same_values:
            self._not_compared.append("values of parameters and of state variables before the call")
        elif any(is_abstract(value) for call in self._calls for value in call.parameters.values()):
            self._not_compared.append("values of parameters, which an abstract model lacks")
        before = _state_before(state)
        if found.reshaped or state.reshaped:
            self._notes.append(
                "The models were not run, because their parameters or state variables have "
                "different shapes or dtypes."
            )
            rest = (Comparison("state variables", problems=before),) if before else ()
            return self._report((parameters, *rest))
        for call in self._calls:
            for values in (call.parameters, call.state):
                values.update({name: drawn(name, value) for name, value in values.items()})
        steps = (
            ModelStep(original, original, self._gradients),
            ModelStep(edited, original, self._gradients),
        )
        runs, comparisons = self._run_and_compare(steps, found.added)
        comparisons[1] = comparisons[1].with_problems(before)
        self._explain_changes([*found.changed.values(), *state.changed.values()])
        divergence = None
        if not (comparisons[0].ok and comparisons[1].ok):
            divergence = self._first_divergence(runs, steps, functions_agree(comparisons))
        if state.added:
            self._notes.append(f"state variables of the edited model alone: {some(state.added)}")
        if self._gradients and not any(is_float(array) for array in runs.own[0][0].values()):
            self._notes.append("gradients were not compared: no output is a real number")
            comparisons = comparisons[:2]
        return self._report((parameters, *comparisons), divergence)

    def _report(
        self, comparisons: tuple[Comparison, ...], divergence: Divergence | None = None
    ) -> EquivalenceReport:
        return EquivalenceReport(
            comparisons,
            divergence,
            tuple(self._notes),
            tuple(self._not_compared),
            self._precision,
        )

    def _explain_changes(self, changes: Sequence[Difference]) -> None:
        if any(map(_is_rounding, changes)):
            self._notes.append(
                "Values that differ by rounding alone may come from the same initialisers, run "
                "compiled (as sharded_init does) and not. same_values=False compares only what "
                "the models compute."
            )
        if changes:
            self._notes.append(
                "Both models ran on the original's parameters and state, whatever values the "
                "edited model has."
            )

    def _parameters(self, found: NamedValues, added_parameters: bool) -> Comparison:
        renamed = dict(found.renamed)
        problems = [
            f"{name}: parameter is missing from the edited model"
            + (f"; {renamed[name]} has its values there" if name in renamed else "")
            for name in found.missing
        ]
        if found.added and added_parameters:
            self._not_compared.append(f"parameters of the edited model alone: {some(found.added)}")
        else:
            problems += [f"{name}: parameter of the edited model alone" for name in found.added]
        problems += [f"{name}: {text}" for name, text in found.reshaped.items()]
        problems += _changes(found, "parameter has other values")
        arrays = tuple(
            ArrayComparison(
                name, apart.ulps, apart.relative, own=Deviation(apart.relative, 0, np.inf)
            )
            for name, apart in found.changed.items()
        )
        count = len(self._calls[0].parameters)
        return Comparison("parameters", count, arrays, tuple(problems))

    def _run_and_compare(
        self, steps: tuple[ModelStep, ModelStep], added: tuple[str, ...]
    ) -> tuple[Runs, list[Comparison]]:
        """Runs both models; again with other roundings where the first yardstick is not enough."""
        own = steps[0].run(), steps[1].run()
        wider = self._in_float64(steps)
        runs = self._runs(steps, own, wider)
        groups = GROUPS if self._gradients else GROUPS[:2]

        def compare() -> list[Comparison]:
            return compared(runs, groups, self._rtol, added)

        comparisons = compare()
        if wider and wider[1].has_new_constants and not functions_agree(comparisons):
            # A constant is known to within half a unit in the last place of its dtype.
            rounded = [wider[1].run(rounding) for rounding in _roundings(runs=2 * _ROUNDED_RUNS)]
            runs.of_constants = largest_errors(runs.exact[1], rounded)
            comparisons = compare()
        coarsest = max(steps[1].epsilons, default=0.0)
        # Where the functions are compared in float64, a lower precision in some places is safe.
        usual = min if runs.closeness < 1 else max
        is_lower = coarsest > usual(steps[0].epsilons, default=coarsest)
        if is_lower and not all(comparison.ok for comparison in comparisons):
            runs.lower_errors = self._errors(steps, own, wider, runs.exact[0], coarsest)
            runs.coarsest = coarsest
            before, comparisons = comparisons, compare()
            if sum(one.ok for one in comparisons) > sum(one.ok for one in before):
                self._precision = _dtype_of(coarsest)
                self._notes.append(
                    "The edited model rounds to fewer digits than the original: it may be off by "
                    f"what the original would be if it rounded all to {self._precision}."
                )
        return runs, comparisons

    def _in_float64(self, steps: tuple[ModelStep, ModelStep]) -> tuple[WiderStep, WiderStep] | None:
        try:
            return steps[0].wider(), steps[1].wider(steps[0])
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            self._notes.append(
                "The models do not run in float64, so that a change smaller than rounding is not "
                f"found ({type(error).__name__}: {reason})."
            )
            return None

    def _runs(
        self,
        steps: tuple[ModelStep, ModelStep],
        own: tuple[Results, Results],
        wider: tuple[WiderStep, WiderStep] | None,
    ) -> Runs:
        if wider is None:
            exact = in_groups(own[0], widest), in_groups(own[1], widest)
            closeness = 1.0
        else:
            exact = wider[0].run(), wider[1].run()
            finest = min(steps[0].epsilons, default=_WIDEST)
            # Halfway between what float64 rounds and what the model rounds.
            closeness = float(np.sqrt(_WIDEST / max(finest, _WIDEST)))
            if opaque := sorted(wider[0].opaque | wider[1].opaque):
                self._notes.append(
                    "not run in float64, so that a change in them that is smaller than rounding "
                    f"is not found: {', '.join(opaque)}"
                )
                closeness = 1.0
        return Runs(own, exact, self._errors(steps, own, wider, exact[0]), closeness)

    def _errors(
        self,
        steps: tuple[ModelStep, ModelStep],
        own: tuple[Results, Results],
        wider: tuple[WiderStep, WiderStep] | None,
        exact: Results,
        coarsest: float = 0.0,
    ) -> Results:
        """The original's rounding errors, where all is rounded at least as coarsely as said."""
        if wider is None:
            disturbed = [steps[0].run_disturbed(seed, coarsest) for seed in range(_ROUNDED_RUNS)]
            return largest_errors(exact, disturbed)
        # What float64 itself rounds is too small to be added to a float64 number.
        is_widest = max([coarsest, *steps[0].epsilons], default=0.0) <= _WIDEST
        scale = _MAGNIFIED if is_widest else 1.0
        rounded = [wider[0].run(rounding) for rounding in _roundings(coarsest, scale)]
        errors = in_groups(largest_errors(exact, rounded), lambda error: error / scale)
        return joined_errors(errors, largest_errors(exact, [own[0]]))

    def _first_divergence(
        self, runs: Runs, steps: tuple[ModelStep, ModelStep], same_function: bool
    ) -> Divergence | None:
        """Runs both models with a tap around every layer that they have in common."""
        finest, coarsest = (
            pick([*steps[0].epsilons, *steps[1].epsilons], default=_WIDEST) for pick in (min, max)
        )
        in_float64 = runs.closeness < 1 and not same_function
        tolerance = 2 * coarsest**0.75
        if in_float64:
            tolerance = finest if runs.of_constants else float(np.sqrt(_WIDEST * finest))
        recorders = Recorder(), Recorder()
        try:
            calls = [
                ModelCall(tapped(model, recorder), *self._inputs)
                for model, recorder in zip(self._models, recorders, strict=True)
            ]
            for call in calls:
                for values in (call.parameters, call.state):
                    values.update({name: drawn(name, value) for name, value in values.items()})
            listening = [ModelStep(call, calls[0], gradients=False) for call in calls]
            if in_float64:
                listening[0].wider(callbacks=True).run()
                listening[1].wider(listening[0], callbacks=True).run()
            else:
                for step in listening:
                    step.run()
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            self._notes.append(
                "the first layer to differ was not found: with a callback around every layer the "
                f"models do not run ({type(error).__name__}: {reason})"
            )
            return None
        originals, edits = (recorder.recordings for recorder in recorders)
        return first_to_differ(originals, edits, max(tolerance, self._rtol))


def _state_before(found: NamedValues) -> tuple[str, ...]:
    problems = [f"{name}: {text}" for name, text in found.reshaped.items()]
    return (*problems, *_changes(found, "state variable has another value before the call"))


def _changes(found: NamedValues, words: str) -> list[str]:
    """One line per name of which the values differ, which says so if only rounding is to blame."""
    rounded = {name: apart.ulps for name, apart in found.changed.items() if _is_rounding(apart)}
    most = max(rounded.values(), default=0)
    return [
        f"{name}: {words}"
        + (f", by rounding alone (up to {most:.2g} ulp)" if name in rounded else "")
        for name in found.changed
    ]


def _is_rounding(apart: Difference) -> bool:
    return not apart.problem and apart.ulps <= _ULPS_OF_ROUNDING


def _roundings(
    coarsest: float = 0.0, scale: float = 1.0, runs: int = _ROUNDED_RUNS
) -> Iterator[Rounding]:
    for seed in range(runs):
        yield Rounding(np.uint32(seed + 1), np.float64(scale), np.float64(coarsest))


def _dtype_of(epsilon: float) -> str:
    """The dtype that rounds so coarsely."""
    for dtype in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        if float(jnp.finfo(dtype).eps) == epsilon:
            return dtype
    return f"units of {epsilon:.1g}"
