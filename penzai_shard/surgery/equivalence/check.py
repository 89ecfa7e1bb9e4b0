"""Runs a model and an edited form of it on the same values, and compares what they compute.

The yardstick is what rounding does to the original: the largest difference between the original as
it runs and in float64. The edited model as it runs may be off by a few times as much; in float64,
where both compute without rounding, by a tiny part of it. An array goes by the path that it has in
``strip(model)``, so that wrappers do not change its name.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from penzai import pz

from penzai_shard.arrays.inputs import find_mesh, run_inputs
from penzai_shard.arrays.static_values import same_static
from penzai_shard.arrays.structure import Leaf, flatten, read_variables
from penzai_shard.errors import Problems, RuleTypeError
from penzai_shard.layers.pure_call import PureCall, read_settings
from penzai_shard.meshes import auto_context, on_auto_twin
from penzai_shard.paths import join_paths, paths_text
from penzai_shard.reports.report import Column, Report
from penzai_shard.surgery.equivalence import float64
from penzai_shard.surgery.equivalence.float64 import Float64Run, as_float64, is_equal, to_array
from penzai_shard.surgery.inserted import flatten_bare

_OUTPUTS, _GRADIENTS, _STATE = "outputs", "gradients", "state"
_GROUPS = {"parameter": "parameters", "state": "state before"}
_COLUMNS = (
    Column("path", "path"),
    Column("group"),
    *map(Column, ("difference", "allowed", "in_float64", "allowed_in_float64")),
    Column("ok", "ok"),
    Column("fact", "detail"),
)
_EPSILON_64 = 2.0**-52
# Rounding of the original that an edited model may have, and units in the last place besides.
_TIMES, _ULPS = 8.0, 4.0
# Without a run in float64, nobody knows how the original rounds; sums of many terms have this much.
_ULPS_UNKNOWN = 64.0
# Rounding by more is that of a choice which falls the other way; in float64 it seldom does.
_MOST_NOISE = 0.01
# Where the arrays of the model stand among those of the call.
_MODEL = "body/model/"
_COARSE = "A difference smaller than rounding is not found:"


class _Allowance(NamedTuple):
    """What two models may differ by.

    Attributes:
        rtol: What is allowed in any case, relative to the largest value of an array.
        finest: The smallest machine epsilon to which the original rounds, in which case the models
            may differ in float64 by a small part of that; 0 if some of their operations rounded in
            float64 too.
        has_new_constants: Whether the edited model computes with constants that are not the
            original's, and may be rounded.
        coarser: How many times coarser than the original the edited model rounds.
    """

    rtol: float = 0.0
    finest: float = 0.0
    has_new_constants: bool = False
    coarser: float = 1.0


class _Difference(NamedTuple):
    """How far two arrays are apart, relative to the largest value of the first.

    Attributes:
        size: The largest difference as the models run.
        allowed: How large it may be.
        size_in_float64: The largest difference in float64; None if that is not known.
        allowed_in_float64: How large it may be.
        fact: What differs in more than figures, without a full stop.
    """

    size: float = 0.0
    allowed: float = 0.0
    size_in_float64: float | None = None
    allowed_in_float64: float = 0.0
    fact: str = ""

    @property
    def ok(self) -> bool:
        """Whether the arrays are close enough."""
        is_same_function = (self.size_in_float64 or 0.0) <= self.allowed_in_float64
        return not self.fact and self.size <= self.allowed and is_same_function


_MISSING = _Difference(fact="the edited model does not have it")
_ADDED = _Difference(fact="the original does not have it")

# By group and path: what a call computes, and how two calls differ.
_Results = dict[tuple[str, str], Any]
_Differences = dict[tuple[str, str], _Difference]


def check_equivalent(
    original: Any,
    edited: Any,
    *args: Any,
    gradients: bool = True,
    rtol: float | None = None,
    same_values: bool = True,
    added_parameters: bool = False,
    **side_inputs: Any,
) -> Report:
    """Tells whether an edited model computes what its original computes.

    Outputs, state after the call and gradients are compared, as the models run and in float64. What
    they may differ by is measured: as they run a few times the rounding error of the original, in
    float64, where rounding plays no part, a tiny part of that. So a rescale by 1.0001 is found, and
    another order of sums or a lower precision is not taken for a difference. Arrays go by their
    paths in ``strip(model)``; gradients are those of a sum of the outputs with fixed weights, with
    regard to parameters and inputs.

    Source of the yardstick: Parker 1997, "Monte Carlo Arithmetic", with float64 in place of random
    rounding.

    Args:
        original: A model of any library, or any function of arrays.
        edited: What became of it. It is run on the original's parameters and state.
        *args: The inputs of both.
        gradients: Whether to compare gradients.
        rtol: A difference that is allowed in any case, relative to an array's largest value.
        same_values: Whether parameters and state must have the same values before the call.
        added_parameters: Whether the edited model may have parameters that the original lacks.
        **side_inputs: The side inputs of both.

    Returns:
        A report that is true if the models are equivalent, with a row for each array: differences
        are relative to the largest value of the original's, and those that are allowed are rounded
        up to a power of ten. The notes say what could not be compared, and where float64 is not
        available, so that differences smaller than rounding are not found.

    Raises:
        RuleTypeError: Something is no model.
        ShardingError: Arrays are deleted, or shapes.

    >>> double = lambda x: 2 * x
    >>> check_equivalent(double, lambda x: x + x, jnp.ones(3)).verdict
    'equivalent: 2 arrays agree'
    >>> bool(check_equivalent(double, lambda x: 2.0002 * x, jnp.ones(3)))
    False
    """
    problems = Problems("check_equivalent(original, edited, *inputs) runs two models:")
    for called, model in {"original": original, "edited": edited}.items():
        if not callable(model):
            what = f"a {type(model).__name__} cannot be called"
            problems.add(called, what, "Give a model, as recipe.apply(model) returns it.")
    problems.raise_if_any(RuleTypeError)

    notes = ["Both models are one object: nothing is edited."] if edited is original else []
    with auto_context():
        one, other = (_read_call(model, args, side_inputs) for model in (original, edited))
        if not same_values:
            notes.append("Values of parameters, and of state before the call, were not compared.")
        found, can_run = _compare_held(one, other, same_values, added_parameters, notes)
        if can_run:
            # Equal values are used where the edited model has placed them.
            known = {} if same_values and not found else one.of_role(*_GROUPS)
            leaves = [known.get(leaf.path, leaf) for leaf in other.leaves]
            other = other._replace(leaves=leaves)
            found |= _compare_runs(one, other, gradients, rtol or 0.0, notes)

    rows = _make_rows(found)
    wrong = [" ".join(row[1::-1]) for row in rows if not row[-2]]
    arrays = f"{len(rows)} array{'s' * (len(rows) != 1)}"
    verdict = f"equivalent: {arrays} agree{'s' * (len(rows) == 1)}"
    if wrong:
        differ = f"differ{'s' * (len(wrong) == 1)}"
        verdict = f"not equivalent: {len(wrong)} of {arrays} {differ}, first {wrong[0]}"
    return Report("equivalence", verdict, _COLUMNS, rows, notes, not wrong)


def _make_rows(found: _Differences) -> list[tuple[Any, ...]]:
    """A row for each array."""
    rows = []
    for (group, path), each in found.items():
        # Two digits of what is wrong. Of the others the power of ten is enough, and equal blocks
        # fold into one row.
        figures = [x and float(f"{x:.2g}") for x in each[:-1]]
        if each.ok:
            figures = [x and 10.0 ** math.ceil(math.log10(x)) for x in figures]
        name = path.removeprefix(_MODEL) or "(root)"
        rows.append((name, group, *figures, each.ok, each.fact or None))
    return sorted(rows, key=lambda row: (row[-2], row[1] == _GRADIENTS))


# A model as a function of named arrays


@pz.pytree_dataclass
class _Spread(pz.Struct):  # type: ignore[misc]
    """Calls a model with several arguments, which for a ``PureCall`` are one."""

    model: Any

    def __call__(self, arguments: tuple[Any, ...], /, **side_inputs: Any) -> Any:
        return self.model(*arguments, **side_inputs)


class _NamedCall(NamedTuple):
    """A model and its inputs as a function of arrays.

    Attributes:
        call: The function.
        leaves: What it takes, dimensions sorted by ``_sort_dims``. The role of each is "parameter",
            "state", "input" or "constant".
    """

    call: PureCall
    leaves: list[Leaf]

    def of_role(self, *roles: str) -> dict[str, Leaf]:
        """The arrays with some roles, by path."""
        return {leaf.path: leaf for leaf in self.leaves if leaf.role in roles}


def _read_call(model: Any, args: tuple[Any, ...], side_inputs: Mapping[str, Any]) -> _NamedCall:
    """Reads a model and its inputs.

    Raises:
        ShardingError: Arrays are deleted, or shapes; all of them are in it.
        MeshError: Arrays are bound to different devices.
    """
    if isinstance(model, functools.partial):
        # JAX looks for arrays only in a partial of its own.
        model = jax.tree_util.Partial(model.func, *model.args, **model.keywords)
    inputs = {"argument": args, "side_inputs": dict(side_inputs)}
    arrays, _ = run_inputs(inputs | {"model": model}, "check_equivalent")
    find_mesh(arrays, "check_equivalent")

    tree = {**inputs, "body": _Spread(model)}
    leaves, structure = flatten_bare(tree)
    structure.check_paths()
    # In a model that names no parameters, each array of floats is one.
    has_parameters = any(leaf.role == "parameter" for leaf in leaves)
    for number, leaf in enumerate(leaves):
        role = "parameter" if float64.is_float(leaf) and not has_parameters else "constant"
        role = leaf.role or (role if leaf.path.startswith(_MODEL) else "input")
        names = leaf.names and tuple(sorted(leaf.names, key=_name_order))
        value = _sort_dims(on_auto_twin(jnp.asarray(leaf.value)), leaf.names)
        leaves[number] = dataclasses.replace(leaf, role=role, names=names, value=value)
    return _NamedCall(PureCall(structure, read_settings(tree)), leaves)


def _sort_dims(value: Any, names: Sequence[Any] | None, *, back: bool = False) -> Any:
    """An array with its positional dimensions first, then the named ones by name; or back again."""
    given = list(names or ())
    order = sorted(range(len(given)), key=lambda i: _name_order(given[i]))
    order = sorted(order, key=order.__getitem__) if back else order
    return value if order == sorted(order) else jnp.transpose(value, order)


def _name_order(name: Any) -> tuple[bool, str]:
    return name is not None, str(name)


# What the models hold


def _compare_held(
    one: _NamedCall, other: _NamedCall, same_values: bool, allow_added: bool, notes: list[str]
) -> tuple[_Differences, bool]:
    """Compares parameters, and state before the call; tells whether the models can be run."""
    found: _Differences = {}
    can_run = True
    for role, group in _GROUPS.items():
        own, new = one.of_role(role), other.of_role(role)
        added = [path for path in new if path not in own]
        if added and (allow_added or role == "state"):
            shown = paths_text(added, len(added))
            notes.append(f"Only the edited model has these {group}: {shown}.")
        elif added:
            found |= {(group, path): _ADDED for path in added}
        for path, leaf in own.items():
            twin = new.get(path)
            if twin is None:
                found[group, path] = _MISSING
            elif _form(leaf) != _form(twin):
                fact = f"{_form(leaf)} became {_form(twin)}"
                found[group, path], can_run = _Difference(fact=fact), False
            elif same_values and not is_equal(leaf.value, twin.value):
                found[group, path] = _Difference(fact="the values differ")
    return found, can_run


def _form(leaf: Leaf) -> str:
    """What must stay of an array, as text."""
    return f"{leaf.dtype}{leaf.value.shape} with axes {leaf.names}"


# What they compute


class _Step:
    """One call of a model: outputs, state after it, and gradients of a sum of the outputs.

    Two steps that trace to the same program are equal. A model itself does not tell: it may read
    what its structure does not show, such as a variable of the module in which it was written.

    Args:
        call: The model and its inputs.
        paths: The arrays with regard to which to differentiate.
        values: The arrays of the call.
        original: The step of the original, if the model is an edited one.

    Attributes:
        form: What is no array in the output: its containers and settings.
        exact: How to run the step in float64.
    """

    def __init__(
        self, call: PureCall, paths: frozenset[str], values: list[Any], original: Any = None
    ) -> None:
        self._call, self._paths = call, paths
        self.form: Any = None
        self._jitted = jax.jit(self._compute)
        traced = self._jitted.trace(values)
        self.exact = Float64Run(traced.jaxpr, original and original.exact)
        self._text = f"{traced.jaxpr} {traced.out_info}"
        self._key = self._text, call, paths, self.form, traced.jaxpr.consts

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Step) and same_static(self._key, other._key)

    def run(self, values: list[Any]) -> _Results:
        """What the step computes as it is."""
        results: _Results = jax.device_get(self._jitted(values))
        return results

    def _compute(self, values: list[Any]) -> _Results:
        paths = self._call.structure.paths
        chosen = {i: value for i, value in enumerate(values) if paths[i] in self._paths}
        gradients, results = jax.grad(self._score, has_aux=True)(chosen, values)
        return {**results, **{(_GRADIENTS, paths[i]): x for i, x in gradients.items()}}

    def _score(self, chosen: dict[int, Any], values: list[Any]) -> tuple[Any, _Results]:
        structure = self._call.structure
        arrays = [
            _sort_dims(chosen.get(i, value), structure.names[i], back=True)
            for i, value in enumerate(values)
        ]
        output, assigned = self._call(arrays)
        leaves, form = flatten(output)
        form.check_paths()
        # The order of named dimensions may change.
        named: Any = pz.nx.NamedArrayBase
        containers = jax.tree_util.tree_structure(output, is_leaf=lambda x: isinstance(x, named))
        self.form = containers, form.statics
        results = {(_OUTPUTS, leaf.path): _sort_dims(leaf.value, leaf.names) for leaf in leaves}
        score = _add_up(results.values())

        # State after the call, and parameters that it has assigned.
        before = read_variables(structure.fill_alike(arrays))
        for number, variable in enumerate(structure.variables):
            if variable.role == "state" or number in assigned:
                # A variable that holds nothing before the call has no path.
                path = [*structure.paths[variable.leaves], f"variable {number}"][0]
                for leaf in flatten(assigned.get(number, before[number]))[0]:
                    key = _STATE, join_paths(path, leaf.path)
                    results[key] = _sort_dims(leaf.value, leaf.names)
        return score, {key: to_array(array) for key, array in results.items()}


# Gives an equal step that ran before: an original is often compared with several models.
_find_compiled: Callable[[_Step], _Step] = functools.lru_cache(4)(lambda step: step)


def _add_up(arrays: Iterable[Any]) -> Any:
    """A sum of arrays, each element times a number that depends on its place."""
    total: Any = jnp.float32(0)
    for number, array in enumerate(map(to_array, arrays)):
        # Integers decide the numbers, as they are the same in float64.
        place = jax.lax.iota(jnp.int32, array.size).reshape(array.shape) % 65521
        weights = jnp.cos((place + number).astype(jnp.float32))
        is_float = jnp.issubdtype(array.dtype, jnp.inexact)
        for part in (array.real, array.imag) if is_float else ():
            total += jnp.sum(part.astype(np.promote_types(part.dtype, np.float32)) * weights)
    return total


def _compare_runs(
    one: _NamedCall, other: _NamedCall, gradients: bool, rtol: float, notes: list[str]
) -> _Differences:
    """Compares what two models compute, as they are and in float64."""
    # Gradients with regard to the inputs, and to the parameters that both have.
    common = one.of_role("parameter", "input").keys() & other.of_role("parameter", "input").keys()
    leaves = [leaf for leaf in one.leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    paths = frozenset(leaf.path for leaf in leaves if gradients and leaf.path in common)
    arrays = [[leaf.value for leaf in call.leaves] for call in (one, other)]
    step = _find_compiled(_Step(one.call, paths, arrays[0]))
    new_step = _Step(other.call, paths, arrays[1], step)
    steps = step, new_step
    own = [each.run(values) for each, values in zip(steps, arrays, strict=True)]

    exact, opaque = None, set()
    try:
        flat = [each.exact(values) for each, values in zip(steps, arrays, strict=True)]
        exact = [dict(zip(*pair, strict=True)) for pair in zip(own, flat, strict=True)]
        opaque = step.exact.opaque | new_step.exact.opaque
        if opaque:
            notes.append(f"{_COARSE} {', '.join(sorted(opaque))} run in their own dtypes.")
    except Exception as error:  # Operations may fail in any way where arrays have another dtype.
        fact = f"{type(error).__name__}: {error}".partition("\n")[0]
        notes.append(f"{_COARSE} the models do not run in float64 ({fact}).")

    # A model that computes in fewer digits is allowed what the original would lose in them.
    epsilons, coarsest = step.exact.epsilons, max(new_step.exact.epsilons)
    is_exact = exact is not None and not opaque
    usual = min(epsilons) if is_exact else max(epsilons)
    if coarsest > max(epsilons):
        digits = new_step.exact.epsilons[coarsest]
        notes.append(f"The edited model may be off by what the original would be in {digits}.")
    allowance = _Allowance(
        rtol,
        min(epsilons) if is_exact else 0.0,
        new_step.exact.has_new_constants,
        max(coarsest / usual, 1.0),
    )

    # The edited model may have state that the original lacks, but not assign what that only reads.
    found, held = {}, one.of_role("parameter", "state")
    for key in own[0] | own[1]:
        if key not in own[1]:
            found[key] = _MISSING
        elif key in own[0]:
            pair = [results[key] for results in exact] if exact else None
            found[key] = _compare([results[key] for results in own], pair, allowance)
        elif key[0] != _STATE or key[1] in held:
            found[key] = _ADDED
    if not same_static(step.form, new_step.form):
        found[_OUTPUTS, ""] = _Difference(fact="containers or settings differ")
    return found


# How far two arrays are apart


def _compare(own: list[Any], exact: list[Any] | None, allowance: _Allowance) -> _Difference:
    """Compares an array of two models.

    Args:
        own: The original's and the edited model's, as they run.
        exact: The same in float64.
        allowance: What they may differ by.
    """
    one, other = own
    if one.shape != other.shape or one.dtype != other.dtype:
        return _Difference(fact=f"{one.dtype}{one.shape} became {other.dtype}{other.shape}")
    if not jnp.issubdtype(one.dtype, jnp.inexact):
        count = int(np.sum(one != other))
        return _Difference(fact=f"{count} of {one.size} elements differ" if count else "")
    pairs = [[as_float64(array) for array in own], *([exact] if exact else [])]
    if not all(_has_same_finite_elements(*pair) for pair in pairs):
        return _Difference(fact="other elements are not finite")

    # As the models run: both are measured against what the original is without rounding.
    (one, other), epsilon = pairs[0], float64.epsilon_of(own[0])
    reference = np.where(np.isfinite(pairs[-1][0]), pairs[-1][0], one)
    size, noise = _largest(reference), _largest(one, reference)
    scale = max(size, noise) or 1.0
    most = _TIMES * noise + (_ULPS if exact else _ULPS_UNKNOWN) * epsilon * size
    most = max(most * allowance.coarser, allowance.rtol * size) / scale
    apart = 0.0 if is_equal(one, other) else _largest(other, reference) / scale
    if not exact:
        return _Difference(apart, most)

    # In float64: what differs by more is another function.
    close = _TIMES * min(noise, _MOST_NOISE * scale) + _ULPS * epsilon * size
    close *= math.sqrt(_EPSILON_64 / max(allowance.finest, _EPSILON_64))
    close += allowance.has_new_constants * epsilon * size
    close = max(close, allowance.rtol * size) / scale
    return _Difference(apart, most, _largest(exact[1], exact[0]) / scale, close)


def _largest(array: Any, other: Any = 0.0) -> float:
    """The largest finite element of an array, or difference of two."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(array - other)
    return float(apart[np.isfinite(apart)].max(initial=0))


def _has_same_finite_elements(one: Any, other: Any) -> bool:
    is_same = (one == other) | ((one != one) & (other != other))
    return bool(np.all(is_same | (np.isfinite(one) & np.isfinite(other))))
