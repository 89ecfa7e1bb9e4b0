"""Compiles train steps and evaluations: one program for each structure and layout of a state.

A call takes nothing apart. The state that a step returns remembers the program that made it, and
its fields go to that program as they are. Everything is looked at when a state comes from
elsewhere, and to explain a call that failed.
"""

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from penzai_shard.arrays.inputs import bound_sharding, find_mesh, run_inputs
from penzai_shard.arrays.kinds import is_deleted, is_struct, is_traced
from penzai_shard.arrays.steps import Lowerable
from penzai_shard.arrays.structure import Leaf, leaves_of
from penzai_shard.errors import Problem, Problems, ShardingError
from penzai_shard.meshes import auto_context, on_auto_twin
from penzai_shard.training import gradient
from penzai_shard.training.aux_reductions import read_reductions
from penzai_shard.training.gradient import LossCall
from penzai_shard.training.train_state import (
    TrainState,
    check_arguments,
    describe,
    refuse_statics,
    settle,
)

_RESERVED = ("model", "rng", "state")
_METRICS = ("loss", "gradient_norm")


class _Prepared(NamedTuple):
    """What a step keeps with a state."""

    run: Any
    # Whether no array was bound to a device when the program was made.
    is_free: bool
    # The state as the program takes it, if it is another.
    state: TrainState | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Step:
    """A train step, or an evaluation.

    Attributes:
        called: What messages call it.
        call: The loss function and how it is called.
        is_jitted: Whether to compile.
        state_shardings: The declared layout of the state: a state of shardings, one, or None.
        input_shardings: The declared layouts of inputs by name.
        aux_shardings: The declared layout of the outputs.
        is_donating: Whether the next state may take the memory of the one before.
        step_metrics: What is added to the outputs; None for an evaluation.
    """

    called: str
    call: LossCall
    is_jitted: bool
    state_shardings: Any
    input_shardings: Mapping[str, Any]
    aux_shardings: Any
    is_donating: bool = False
    step_metrics: tuple[str, ...] | None = None
    # By structure and layout of a state.
    programs: dict[Any, _Prepared] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        state = given = self._read_state(args)
        inputs = self._lay_out_inputs(on_auto_twin(inputs))
        prepared = state.prepared.get(self)
        if prepared is not None:
            state = prepared.state or state
        if prepared is None or not _is_ready(prepared, state, inputs):
            if any(map(is_traced, jax.tree.leaves((given, inputs)))):
                return self._finish(given, self._compute(given, gradient.NO_LAYOUT, inputs), {})
            state, prepared = self._prepare(given, inputs)
            vars(given)["prepared"] = {**given.prepared, self: prepared._replace(state=state)}
        try:
            with auto_context():
                results = prepared.run(*state.arguments(), inputs)
        except Exception:
            find_mesh([*leaves_of(state), *self._read_inputs(inputs)], self.called)
            raise
        # The new state is as the program takes it. It must not hold itself: cycles stay in memory.
        return self._finish(state, results, {self: prepared._replace(state=None)})

    def lowerable(self, *args: Any, **inputs: Any) -> Lowerable:
        """The function that the step would call, with structs in place of arrays.

        Args:
            *args: The state, of arrays or of structs.
            **inputs: The inputs of the loss function, of arrays or of structs.

        Raises:
            ShardingError: As the step itself; or it is not compiled.
        """
        state = self._read_state(args)
        check_arguments(f"{self.called} to lower", {"jit": (False, self.is_jitted, "jit=True")})
        inputs = self._lay_out_inputs(on_auto_twin(inputs))
        state, prepared = self._prepare(state, inputs, allow_structs=True)
        state, inputs = jax.tree.map(describe, (state, inputs))
        arguments = (*state.arguments(), inputs)
        # Each struct is another object, by which it is found in the order of the arguments.
        known = {id(leaf.value): leaf for leaf in leaves_of(state) + leaves_of({"inputs": inputs})}
        leaves = tuple(known[id(struct)] for struct in jax.tree.leaves(arguments))
        count = len(jax.tree.leaves(arguments[0])) if self.is_donating else 0
        donated = tuple(index < count for index in range(len(leaves)))
        return Lowerable(prepared.run, arguments, leaves, donated)

    def lower(self, *args: Any, **inputs: Any) -> Any:
        """The lowered program, as of ``jax.jit``; arguments as for ``lowerable``."""
        return self.lowerable(*args, **inputs).lower()

    def trace(self, *args: Any, **inputs: Any) -> Any:
        """The traced program, as of ``jax.jit``; arguments as for ``lowerable``."""
        return self.lowerable(*args, **inputs).trace()

    def _compute(self, state: TrainState, layout: gradient.Layout, inputs: Any) -> Any:
        """What the step replaces, the number of steps, and the outputs."""
        if self.step_metrics is None:
            return None, None, gradient.evaluate(self.call, state, inputs)
        return gradient.update(self.call, state, layout, inputs, self.step_metrics)

    def _finish(self, state: TrainState, results: Any, prepared: Mapping[Any, Any]) -> Any:
        replaced, step, outputs = results
        return outputs if replaced is None else (state.after(replaced, step, prepared), outputs)

    def _read_state(self, args: tuple[Any, ...]) -> TrainState:
        is_right = len(args) == 1 and isinstance(args[0], TrainState)
        fix = "step(state, x=x), with state = TrainState.initial_state(model, optimizer, root_rng)"
        check_arguments(self.called, {"train_state": (args, is_right, fix)})
        state: TrainState = args[0]
        return state

    # Preparation of a state that no step has made

    def _prepare(
        self, state: TrainState, inputs: Any, *, allow_structs: bool = False
    ) -> tuple[TrainState, _Prepared]:
        leaves, structure = run_inputs(state, self.called, allow_structs=allow_structs)
        refuse_statics(structure.statics, self.called)
        everything = [*leaves, *self._read_inputs(inputs, allow_structs)]
        wanted = self._declared(leaves)
        declared = (sharding.mesh for sharding in wanted.values() if hasattr(sharding, "mesh"))
        mesh = find_mesh(everything, self.called) or next(declared, None)
        is_free = all(bound_sharding(leaf.value) is None for leaf in everything)
        values = settle(leaves, mesh, wanted)
        state = structure.fill(values)
        if self.is_donating:
            state = _copy_repeated(state)

        shardings = tuple(map(bound_sharding, values))
        is_free = is_free and not any(shardings)
        key = (jax.tree.structure(state), shardings)
        if key not in self.programs:
            run = self._make_program(state, is_free)
            self.programs[key] = _Prepared(run, is_free, None)
        return state, self.programs[key]

    def _make_program(self, state: TrainState, is_free: bool) -> Any:
        template = state.template
        layout = gradient.NO_LAYOUT if is_free else gradient.find_layout(state)

        def run_step(replaced: Any, step: Any, constants: Any, inputs: Any) -> Any:
            fields: Any = step, *replaced, *constants, template
            state = TrainState(*fields)
            return self._compute(state, layout, inputs)

        if not self.is_jitted:
            return run_step
        shardings: Any = (None, None, (None, self.aux_shardings))
        if self.step_metrics is not None:
            # A step gives what it got: with any other layout the next one is compiled again.
            replaced, step, _ = jax.tree.map(bound_sharding, state.arguments())
            shardings = (replaced, step, self.aux_shardings)
        donated = (0,) if self.is_donating else ()
        return jax.jit(run_step, donate_argnums=donated, out_shardings=shardings)

    def _declared(self, leaves: Sequence[Leaf]) -> dict[str, Sharding]:
        """The declared sharding of arrays of a state by path; those that are bound must have it."""
        given, paths = self.state_shardings, [leaf.path for leaf in leaves]
        if isinstance(given, Sharding):
            declared = dict.fromkeys(paths, given)
        else:
            declared = {leaf.path: leaf.value for leaf in leaves_of(given) if leaf.value}
        problems = Problems(f"{self.called} got another state than train_state_shardings declare:")
        for path in declared.keys() - set(paths):
            problems.add(
                path, "the state has no array of this path", "Declare those of this state."
            )
        for leaf in leaves:
            own, sharding = bound_sharding(leaf.value), declared.get(leaf.path)
            if own and sharding and not own.is_equivalent_to(sharding, len(leaf.shape)):
                fix = "Move it: jax.device_put(state, train_state_shardings)."
                problems.add(leaf.path, f"it lies as {own}, declared is {sharding}", fix)
        problems.raise_if_any(ShardingError)
        return declared

    def _read_inputs(self, inputs: dict[str, Any], allow_structs: bool = False) -> list[Leaf]:
        leaves, structure = run_inputs(inputs, self.called, allow_structs=allow_structs)
        refuse_statics(structure.statics, self.called)
        problems = Problems(f"{self.called} cannot call its loss function:")
        if structure.variables:
            problems.add("", "there are variables among the inputs", "Give the .value of each.")
        for name in inputs.keys() & set(_RESERVED):
            problems.add(name, "the step itself gives an argument of this name", "Rename it.")
        try:
            inspect.signature(self.call.loss_fn).bind(**dict.fromkeys(_RESERVED), **inputs)
        except TypeError as error:
            what = f"the step calls it with {', '.join((*_RESERVED, *inputs))}: {error}"
            problems.add("", what, "Write def loss_fn(model, rng, state, x), and step(state, x=x).")
        problems.raise_if_any(ShardingError)
        return leaves

    def _lay_out_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        for name, shardings in self.input_shardings.items():
            try:
                wanted = jax.tree.broadcast(shardings, inputs[name])
                inputs[name] = jax.tree.map(_lay_out, inputs[name], wanted)
            except Exception as error:
                self._read_inputs(inputs, allow_structs=True)
                fix = "Make it: name_to_name_sharding(inputs, mesh, rules)."
                problem = Problem(name, "input_kwarg_shardings does not fit this input", fix)
                raise ShardingError(f"{self.called}:", [problem]) from error
        return inputs


def _lay_out(value: Any, sharding: Sharding) -> Any:
    return value.update(sharding=sharding) if is_struct(value) else jax.device_put(value, sharding)


def _is_ready(prepared: _Prepared, state: TrainState, inputs: Any) -> bool:
    """Whether a prepared program can take a state as it is."""
    if is_deleted(next(iter(state.trained_arrays.values()))):
        return False
    return not (prepared.is_free and any(map(bound_sharding, jax.tree.leaves(inputs))))


def _copy_repeated(state: TrainState) -> TrainState:
    """The state with copies of arrays that occur twice, so that all can be donated."""
    replaced, step, constants = state.arguments()
    seen = set(map(id, jax.tree.leaves((step, constants))))

    def own(value: Any) -> Any:
        is_repeated = id(value) in seen and isinstance(value, jax.Array)
        seen.add(id(value))
        return value.copy() if is_repeated else value

    return state.after(jax.tree.map(own, replaced), step)


# The two functions that build steps


def build_train_step_fn(
    loss_fn: Callable[..., Any],
    *,
    jit: bool = True,
    donate_params_and_state: bool = False,
    input_kwarg_shardings: Mapping[str, Any] | None = None,
    train_state_shardings: Any = None,
    aux_output_shardings: Any = None,
    accumulate_steps: int = 1,
    batch_axis: Any = "batch",
    aux_reduction: Any = None,
    step_metrics: Sequence[str] = (),
) -> Any:
    """Builds the function that does one step of training.

    Args:
        loss_fn: ``loss_fn(model, rng, state, **inputs) -> (loss, new_state, aux)``. The loss is a
            scalar, or a pair of a sum and the count of which it is to be the mean, over all
            microbatches. Within it parameters are constant, and state variables of the model can be
            assigned to.
        jit: Whether to compile.
        donate_params_and_state: Whether the next state may take the memory of the one before, which
            is deleted then.
        input_kwarg_shardings: Where inputs are put, by name: shardings for ``jax.device_put``.
        train_state_shardings: Where the state lies: ``train_state_sharding(...)``, or one sharding
            for all of it. Arrays that are on no device yet are put there, others must lie so.
        aux_output_shardings: Where the outputs of the loss function lie, as ``out_shardings`` of
            ``jax.jit``.
        accumulate_steps: The number of microbatches into which each batch is split, to save memory.
        batch_axis: The logical axis of the examples; for plain arrays the number of the dimension.
        aux_reduction: How outputs of several microbatches become one: ``"mean"``, ``"sum"``,
            ``"max"``, ``"min"``, ``"last"`` or ``"concatenate"``, or these by path. By default
            floats are averaged, and named arrays with the batch axis concatenated.
        step_metrics: What is added to the outputs: ``"loss"``, ``"gradient_norm"``.

    Returns:
        ``step(train_state, **inputs) -> (train_state, aux)``. ``step.lower`` and ``step.trace`` are
        those of ``jax.jit``, also for structs.

    Raises:
        RuleTypeError: An argument cannot be read. By the step, with all offenders by path:
        ShardingError: Arrays are deleted, no arrays, or not as declared; the loss function takes or
            gives something else.
        MeshError: The arrays are not all on the same devices.

    >>> import optax
    >>> from jax import numpy as jnp
    >>> def loss_fn(model, rng, state, x):
    ...     return jnp.sum((model["w"] - x) ** 2), state, {}
    >>> step = build_train_step_fn(loss_fn, step_metrics=["loss"])
    >>> state = TrainState.initial_state({"w": jnp.zeros(3)}, optax.sgd(0.25), jax.random.key(0))
    >>> state, aux = step(state, x=jnp.ones(3))
    >>> float(aux["loss"]), state.model["w"].tolist()
    (3.0, [0.5, 0.5, 0.5])
    """
    metrics = (step_metrics,) if isinstance(step_metrics, str) else tuple(step_metrics)
    donates, is_known = donate_params_and_state, set(metrics) <= set(_METRICS)
    checks = {
        "step_metrics": (metrics, is_known, f"step_metrics={_METRICS}"),
        "donate_params_and_state": (donates, jit or not donates, "jit=True, or leave it out"),
    }
    call = LossCall(loss_fn, accumulate_steps, batch_axis, read_reductions(aux_reduction))
    shardings = _read_shardings(call, train_state_shardings, input_kwarg_shardings, checks)
    return _Step("A train step", call, jit, *shardings, aux_output_shardings, donates, metrics)


def build_eval_step_fn(
    loss_fn: Callable[..., Any],
    *,
    jit: bool = True,
    input_kwarg_shardings: Mapping[str, Any] | None = None,
    train_state_shardings: Any = None,
    aux_output_shardings: Any = None,
    accumulate_steps: int = 1,
    batch_axis: Any = "batch",
    aux_reduction: Any = None,
) -> Any:
    """Builds the function that evaluates a train state and changes nothing.

    Args:
        loss_fn: As for ``build_train_step_fn``, as are all others.
        jit: Whether to compile.
        input_kwarg_shardings: Where inputs are put.
        train_state_shardings: Where the state lies.
        aux_output_shardings: Where the outputs lie.
        accumulate_steps: The number of microbatches.
        batch_axis: The logical axis of the examples.
        aux_reduction: How outputs of several microbatches become one.

    Returns:
        ``evaluate(train_state, **inputs) -> (loss, aux)``.

    Raises:
        RuleTypeError, ShardingError, MeshError: As ``build_train_step_fn``, and its step.

    >>> import optax
    >>> from jax import numpy as jnp
    >>> evaluate = build_eval_step_fn(lambda model, rng, state, x: (x @ model["w"], state, {}))
    >>> state = TrainState.initial_state({"w": jnp.ones(3)}, optax.sgd(0.25), jax.random.key(0))
    >>> float(evaluate(state, x=jnp.ones(3))[0])
    3.0
    """
    call = LossCall(loss_fn, accumulate_steps, batch_axis, read_reductions(aux_reduction))
    shardings = _read_shardings(call, train_state_shardings, input_kwarg_shardings, {})
    return _Step("An evaluation", call, jit, *shardings, aux_output_shardings)


def _read_shardings(
    call: LossCall, of_state: Any, of_inputs: Any, others: Mapping[str, tuple[Any, bool, str]]
) -> tuple[Any, Any]:
    """The declared layouts of state and inputs; refuses what no step can be built of."""
    steps, axis = call.accumulate_steps, call.batch_axis
    is_axis = axis >= 0 if isinstance(axis, int) else isinstance(axis, Hashable)
    is_state = isinstance(of_state, TrainState | Sharding | None)
    fix = "train_state_sharding(state, mesh, rules)"
    checks = {
        "loss_fn": (call.loss_fn, callable(call.loss_fn), "def loss_fn(model, rng, state, x)"),
        "accumulate_steps": (steps, type(steps) is int and steps > 0, "accumulate_steps=1"),
        "batch_axis": (axis, is_axis, "batch_axis='batch', or a number for plain arrays"),
        "train_state_shardings": (of_state, is_state, fix),
        "input_kwarg_shardings": (of_inputs, isinstance(of_inputs, Mapping | None), "{'x': ...}"),
    }
    for leaf in leaves_of(of_state) if isinstance(of_state, TrainState) else ():
        checks[leaf.path] = (leaf.value, isinstance(leaf.value, Sharding | None), fix)
    check_arguments("a step", {**checks, **others})
    return on_auto_twin(of_state), on_auto_twin(dict(of_inputs or {}))
