"""Does an edited model still compute the same? Both are run on the same values and compared."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jax_core

from penzai_shard.meshes import auto_context, onto_auto_twin
from penzai_shard.named_leaves import leaves_of
from penzai_shard.surgery.differences import (
    Difference,
    canonical_leaves,
    difference,
    largest_value,
)
from penzai_shard.surgery.equivalence_report import Comparison, Divergence, EquivalenceReport
from penzai_shard.surgery.model_calls import ModelCall, with_values_of
from penzai_shard.surgery.tapping import Recorder, Recording, tapped

_COTANGENT_SEED = 20240229
_MOST_NAMED = 5

Named = dict[str, Any]


def tolerance_of(dtypes: Sequence[Any]) -> float:
    """The relative difference that rounding may make, for the coarsest of some dtypes.

    Another summation order moves a result by a few units in the last place per operation, and
    more of them after many layers. Twice the machine epsilon to the power 3/4 leaves room for
    that in every dtype: 1.3e-5 in float32, 5e-2 in bfloat16.

    >>> round(tolerance_of(["float32"]), 7), round(tolerance_of(["float32", "bfloat16"]), 3)
    (1.28e-05, 0.053)
    """
    epsilons = [
        float(jnp.finfo(dtype).eps)
        for dtype in map(jnp.dtype, dtypes)
        if jnp.issubdtype(dtype, jnp.inexact)
    ]
    return 2.0 * max(epsilons) ** 0.75 if epsilons else 0.0


def check_equivalent(
    original: Any,
    edited: Any,
    *args: Any,
    gradients: bool = True,
    rtol: float | None = None,
    **side_inputs: Any,
) -> EquivalenceReport:
    """Runs a model and an edited form of it on the same values, and compares what they compute.

    Compared are the outputs; the gradients of all parameters by name, of the sum of the outputs
    times fixed random numbers; the state variables after the call; and the names, logical axes,
    shapes and dtypes of the parameters. The edited model is run with the original's parameters
    and state. Neither model changes, nor do variables in the inputs.

    If the outputs differ, both models are run once more, compiled with a callback around every
    layer that they have in common, to find the first one whose output differs.

    Args:
        original: A model.
        edited: What a recipe, or anything else, made of it.
        *args: The models' inputs: trees of arrays and variables.
        gradients: Whether to compare gradients too.
        rtol: The largest difference allowed, relative to the largest value of the array that it
            is in. By default that of the coarsest dtype that either model computes in; see
            ``tolerance_of``. Gradients are then allowed twice as much.
        **side_inputs: The models' side inputs.

    Returns:
        The report. It is true if the models are equivalent.

    >>> from penzai import pz
    >>> from penzai_shard.surgery import Recipe, wrap
    >>> from penzai_shard.layers import Checkpointed
    >>> model = pz.nn.Linear.from_config("w", jax.random.key(0), {"a": 2}, {"b": 3})
    >>> edited = Recipe(wrap("pz.nn:Linear", Checkpointed)).apply(model)
    >>> print(check_equivalent(model, edited, pz.nx.ones({"a": 2})))
    compared         arrays  worst at  ulps  relative  allowed
    ---------------  ------  --------  ----  --------  -------
    parameters       1       -         0     0         -        same
    outputs          1       -         0     0         1.3e-05  same
    state variables  0       -         0     0         1.3e-05  same
    gradients        1       -         0     0         2.6e-05  same
    equivalent
    """
    with auto_context():
        return _check(original, edited, args, side_inputs, gradients, rtol)


def _check(
    original: Any,
    edited: Any,
    args: tuple[Any, ...],
    side_inputs: Mapping[str, Any],
    gradients: bool,
    rtol: float | None,
) -> EquivalenceReport:
    calls = ModelCall(original, args, side_inputs), ModelCall(edited, args, side_inputs)
    parameters = _compare_parameters(calls[0].parameters, calls[1].parameters)
    if any(" became " in problem for problem in parameters.problems):
        note = "The models were not run, because their parameters have different shapes or dtypes."
        return EquivalenceReport((parameters,), notes=(note,))
    values = [_values(call, calls[0]) for call in calls]
    results = []
    dtypes: set[Any] = set()
    for call, (own_parameters, state, arrays) in zip(calls, values, strict=True):
        run = jax.jit(_step(call, gradients))
        traced = run.trace(own_parameters, state, arrays)
        _collect_dtypes(traced.jaxpr.jaxpr, dtypes)
        results.append(traced.lower().compile()(own_parameters, state, arrays))
    tolerance = tolerance_of(sorted(map(str, dtypes))) if rtol is None else rtol
    (out, state, grads), (edited_out, edited_state, edited_grads) = results
    comparisons = [
        parameters,
        _compare("outputs", out, edited_out, tolerance),
        _compare("state variables", state, edited_state, tolerance, extra_is_fine=True),
    ]
    notes = []
    if extra := sorted(set(_groups(edited_state)) - set(_groups(state))):
        notes.append(f"state variables of the edited model alone: {_some(extra)}")
    if gradients and not any(_is_inexact(array) for array in out.values()):
        notes.append("gradients were not compared: no output is a real number")
    elif gradients:
        # The backward pass rounds about as often again as the forward pass.
        allowed = 2 * tolerance if rtol is None else tolerance
        comparisons.append(_compare("gradients", grads, edited_grads, allowed))
    divergence = None
    if not all(comparison.ok for comparison in comparisons[1:3]):
        try:
            divergence = _first_divergence((original, edited), values, args, side_inputs, tolerance)
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            notes.append(
                "the first layer to differ was not found: with a callback around every layer the "
                f"models do not run ({type(error).__name__}: {reason})"
            )
    return EquivalenceReport(tuple(comparisons), divergence, tuple(notes))


def _values(call: ModelCall, original: ModelCall) -> tuple[Any, Any, Any]:
    """What to run a model on: the original's parameters and state, where it has them."""
    parameters = with_values_of(call.parameters, original.parameters)
    state = with_values_of(call.state, original.state)
    # Names may be of any type, and JAX sorts the keys of a dictionary.
    return onto_auto_twin((list(parameters.values()), list(state.values()), call.arrays))


def _step(call: ModelCall, gradients: bool) -> Callable[..., tuple[Named, Named, Named]]:
    """A function that runs a model, and gives outputs, state and gradients by name."""
    parameter_names, state_names = list(call.parameters), list(call.state)

    def outputs_of(
        parameters: list[Any], state: list[Any], arrays: list[Any]
    ) -> tuple[Any, tuple[Named, Named]]:
        output, new_state = call(
            dict(zip(parameter_names, parameters, strict=True)),
            dict(zip(state_names, state, strict=True)),
            arrays,
        )
        leaves = canonical_leaves(output)
        named_state = {
            _joined(str(name), path): array
            for name, value in new_state.items()
            for path, array in canonical_leaves(value)
        }
        return _weighted_sum([array for _, array in leaves]), (dict(leaves), named_state)

    def step(
        parameters: list[Any], state: list[Any], arrays: list[Any]
    ) -> tuple[Named, Named, Named]:
        if not gradients:
            _, (outputs, new_state) = outputs_of(parameters, state, arrays)
            return outputs, new_state, {}
        grads, (outputs, new_state) = jax.grad(outputs_of, has_aux=True, allow_int=True)(
            parameters, state, arrays
        )
        named = {
            _joined(str(name), path): array
            for name, gradient in zip(parameter_names, grads, strict=True)
            for path, array in canonical_leaves(gradient)
            if array.dtype != jax.dtypes.float0
        }
        return outputs, new_state, named

    return step


def _joined(name: str, path: str) -> str:
    return name if not path or path == name else path if path.startswith(name) else f"{name}/{path}"


def _weighted_sum(arrays: Sequence[Any]) -> Any:
    """The sum of all elements times random numbers that depend on their places alone."""
    total = jnp.float32(0)
    for index, array in enumerate(arrays):
        if not _is_inexact(array):
            continue
        key = jax.random.fold_in(jax.random.key(_COTANGENT_SEED), index)
        weights = jax.random.normal(key, array.shape, jnp.float32)
        part = jnp.sum(jnp.real(array).astype(jnp.float32) * weights)
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            part += jnp.sum(jnp.imag(array).astype(jnp.float32) * weights)
        total += part
    return total


def _is_inexact(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _collect_dtypes(jaxpr: Any, found: set[Any]) -> None:
    """The dtypes of all that a traced function computes with, nested functions included."""
    for equation in jaxpr.eqns:
        for variable in (*equation.invars, *equation.outvars):
            dtype = getattr(variable.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
                found.add(jnp.dtype(dtype))
        for parameter in equation.params.values():
            for part in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(part, "jaxpr", part)
                if isinstance(inner, jax_core.Jaxpr):
                    _collect_dtypes(inner, found)


def _compare_parameters(original: Mapping[Any, Any], edited: Mapping[Any, Any]) -> Comparison:
    problems = []
    if missing := [str(name) for name in original if name not in edited]:
        problems.append(f"missing from the edited model: {_some(missing)}")
    if added := [str(name) for name in edited if name not in original]:
        problems.append(f"in the edited model alone: {_some(added)}")
    for name in original:
        if name in edited:
            before, after = _form(original[name]), _form(edited[name])
            if before != after:
                problems.append(f"{name}: {before} became {after}")
    return Comparison("parameters", len(original), problems=tuple(problems))


def _form(value: Any) -> str:
    """Logical axes, shape and dtype, in an order that names alone decide."""
    described = []
    for leaf in leaves_of(value):
        names = leaf.names or (None,) * len(leaf.shape)
        axes = sorted(
            f"{name}={size}"
            for name, size in zip(names, leaf.shape, strict=True)
            if name is not None
        )
        positional = [
            str(size) for name, size in zip(names, leaf.shape, strict=True) if name is None
        ]
        described.append(f"{leaf.dtype}[{', '.join([*positional, *axes])}]")
    return " ".join(described)


def _groups(named: Mapping[str, Any]) -> list[str]:
    return [name.partition("(")[0] for name in named]


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    return shown if len(names) <= _MOST_NAMED else f"{shown} and {len(names) - _MOST_NAMED} more"


def _compare(
    what: str, original: Named, edited: Named, tolerance: float, extra_is_fine: bool = False
) -> Comparison:
    problems = []
    if missing := [name or "the output" for name in original if name not in edited]:
        problems.append(f"missing from the edited model: {_some(missing)}")
    added = [name or "the output" for name in edited if name not in original]
    if added and not extra_is_fine:
        problems.append(f"in the edited model alone: {_some(added)}")
    common = [name for name in original if name in edited]
    differences = _differences(original, edited, common)
    problems += [f"{found.name}: {found.problem}" for found in differences if found.problem]
    worst = max(differences, key=lambda found: found.relative, default=None)
    if worst is None:
        return Comparison(what, 0, tolerance=tolerance, problems=tuple(problems))
    return Comparison(
        what,
        len(common),
        worst.name if worst.relative > 0 else "",
        max(found.ulps for found in differences),
        worst.relative,
        tolerance,
        tuple(problems),
    )


def _differences(original: Named, edited: Named, names: Sequence[str]) -> list[Difference]:
    scale = largest_value([original[name] for name in names])
    return [difference(name or "the output", original[name], edited[name], scale) for name in names]


def _first_divergence(
    models: tuple[Any, Any],
    values: Sequence[tuple[Any, Any, Any]],
    args: tuple[Any, ...],
    side_inputs: Mapping[str, Any],
    tolerance: float,
) -> Divergence | None:
    """The first layer, in the order in which they end, whose output is not the original's."""
    recordings: list[dict[str, Recording]] = []
    for model, (parameters, state, arrays) in zip(models, values, strict=True):
        recorder = Recorder()
        call = ModelCall(tapped(model, recorder), args, side_inputs)
        jax.block_until_ready(jax.jit(_step(call, gradients=False))(parameters, state, arrays))
        jax.effects_barrier()
        recordings.append(recorder.recordings)
    originals, edits = recordings
    return _first_to_differ(originals, edits, tolerance)


def _first_to_differ(
    originals: Mapping[str, Recording], edits: Mapping[str, Recording], tolerance: float
) -> Divergence | None:
    # Below a layer that was replaced by another, equal paths mean nothing.
    changed = tuple(
        f"{path}/"
        for path, found in originals.items()
        if path and path in edits and edits[path].layer != found.layer
    )
    common = [
        (path, found)
        for path, found in sorted(originals.items(), key=lambda item: item[1].order)
        if path in edits and not path.startswith(changed)
    ]
    differing = {
        path: call
        for path, found in common
        if (call := _first_call_off(found.outputs, edits[path].outputs, tolerance)) is not None
    }
    if not differing:
        return None
    first = originals[next(iter(differing))]
    # In a loop, a layer late in an early turn comes before one early in a later turn.
    turns = len(first.outputs)
    path = min(
        (path for path in differing if len(originals[path].outputs) == turns),
        key=lambda path: (differing[path], originals[path].order),
    )
    found, call = originals[path], differing[path]
    same = [other for other, _ in common if other not in differing]
    before = [other for other in same if originals[other].order < found.order]
    input_off = _apart(found.inputs[call : call + 1], edits[path].inputs[call : call + 1])
    return Divergence(
        path,
        found.layer,
        _apart(found.outputs[call : call + 1], edits[path].outputs[call : call + 1]),
        input_differs=input_off > tolerance,
        after=before[-1] if before else None,
    )


def _first_call_off(
    original: Sequence[Named], edited: Sequence[Named], tolerance: float
) -> int | None:
    """The first call of a layer whose values differ; None if there is none."""
    for call, (one, other) in enumerate(zip(original, edited, strict=False)):
        if _apart([one], [other]) > tolerance:
            return call
    return None


def _apart(original: Sequence[Named], edited: Sequence[Named]) -> float:
    """The largest relative difference over some calls of a layer."""
    largest = 0.0
    for one, other in zip(original, edited, strict=False):
        if one.keys() != other.keys():
            return float(np.inf)
        found = _differences(one, other, list(one))
        largest = max([largest, *(part.relative for part in found)])
    return largest
