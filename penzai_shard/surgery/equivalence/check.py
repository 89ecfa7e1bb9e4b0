"""Does an edited model still compute the same? Both are run on the same values and compared."""

from collections.abc import Iterator
from typing import Any

from penzai_shard.array_kinds import has_abstract
from penzai_shard.meshes import auto_context
from penzai_shard.surgery.equivalence.array_comparisons import Comparison
from penzai_shard.surgery.equivalence.model_calls import ModelCall
from penzai_shard.surgery.equivalence.model_steps import STATE, ModelStep
from penzai_shard.surgery.equivalence.named_values import NamedValues, some
from penzai_shard.surgery.equivalence.paired_runs import PairedRuns
from penzai_shard.surgery.equivalence.report import EquivalenceReport
from penzai_shard.surgery.equivalence.unfit_comparisons import explain_nameless_inputs, refuse_unfit


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
        calls = ModelCall(original, args, side_inputs), ModelCall(edited, args, side_inputs)
        try:
            return _report(*calls, gradients, rtol or 0.0, same_values, added_parameters)
        except AttributeError as error:
            explain_nameless_inputs(error, args, side_inputs)
            raise


def _report(
    original: ModelCall,
    edited: ModelCall,
    gradients: bool,
    rtol: float,
    same_values: bool,
    added_parameters: bool,
) -> EquivalenceReport:
    found = NamedValues.of(original.parameters, edited.parameters, same_values)
    state = NamedValues.of(original.state, edited.state, same_values)
    before = tuple(state.problems("state variable has another value before the call"))
    parameters = Comparison(
        "parameters",
        len(original.parameters),
        found.changed,
        tuple(_parameter_problems(found, added_parameters)),
    )
    notes: list[str] = []
    not_compared: list[str] = []
    if found.added and added_parameters:
        not_compared.append(f"parameters of the edited model alone: {some(found.added)}")
    if not same_values:
        not_compared.append("values of parameters and of state variables before the call")
    elif has_abstract([*original.parameters.values(), *edited.parameters.values()]):
        not_compared.append("values of parameters, which an abstract model lacks")
    if found.reshaped or state.reshaped:
        notes.append(
            "The models were not run, because their parameters or state variables have "
            "different shapes or dtypes."
        )
        rest = (Comparison(STATE, problems=before),) if before else ()
        return EquivalenceReport((parameters, *rest), None, tuple(notes), tuple(not_compared))
    step = ModelStep(original, gradients)
    runs = PairedRuns(step, ModelStep(edited, gradients, step), rtol, notes)
    outputs, after, *of_gradients = runs.comparisons
    notes += _notes_on_values(found, state)
    divergence = None
    if not (outputs.ok and after.ok and not before):
        divergence = runs.first_divergence()
    if state.added:
        notes.append(f"state variables of the edited model alone: {some(state.added)}")
    if gradients and not runs.has_float_outputs:
        notes.append("gradients were not compared: no output is a real number")
        of_gradients = []
    comparisons = parameters, outputs, after.with_problems(before), *of_gradients
    return EquivalenceReport(
        comparisons, divergence, tuple(notes), tuple(not_compared), runs.precision
    )


def _parameter_problems(found: NamedValues, added_parameters: bool) -> list[str]:
    return [
        *(
            f"{name}: parameter is missing from the edited model"
            + (f"; {found.renamed[name]} has its values there" if name in found.renamed else "")
            for name in found.missing
        ),
        *(
            f"{name}: parameter of the edited model alone"
            for name in (() if added_parameters else found.added)
        ),
        *found.problems("parameter has other values"),
    ]


def _notes_on_values(*found: NamedValues) -> Iterator[str]:
    if any(values.differs_by_rounding for values in found):
        yield (
            "Values that differ by rounding alone may come from the same initialisers, run "
            "compiled (as sharded_init does) and not. same_values=False compares only what "
            "the models compute."
        )
    if any(values.changed for values in found):
        yield (
            "Both models ran on the original's parameters and state, whatever values the "
            "edited model has."
        )
