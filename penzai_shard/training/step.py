"""Compiles train steps and evaluations: one program for each structure and layout of a state.

A call takes nothing apart. A step remembers the program of each state that it returned, while that
state is in use, and hands its fields to the program as they are. Everything is looked at when a
state comes from elsewhere, and to explain a call that failed.
"""

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import NamedSharding, Sharding

from penzai_shard.arrays.inputs import Lowerable, bound_sharding, find_mesh, make_struct
from penzai_shard.arrays.kinds import is_deleted, is_struct, is_traced
from penzai_shard.arrays.structure import Leaf, leaves_of
from penzai_shard.errors import Problems, ShardingError, check_arguments
from penzai_shard.meshes import auto_context, on_auto_twin
from penzai_shard.training import gradient
from penzai_shard.training.microbatches import LossCall, read_reductions
from penzai_shard.training.train_state import TrainState, put_on_mesh, read_arrays

# The arguments of a loss function that are no inputs.
RESERVED = ("model", "rng", "state")
_METRICS = ("loss", "gradient_norm")


@dataclasses.dataclass(eq=False, repr=False)
class _Step:
    """A train step, or an evaluation.

    Attributes:
        called: What messages call it.
        call: The loss function and how it is called.
        is_jitted: Whether to compile.
        state_shardings: The declared layout of the state: a state of shardings, or None.
        input_shardings: The declared layouts of inputs by name.
        aux_shardings: The declared layout of the outputs.
        is_donating: Whether the next state may take the memory of the one before.
        step_metrics: What is added to the outputs; None for an evaluation.
        programs: By structure and layout of a state.
        states: For each state that was met the one that its program takes, None for itself, and
            the program.
    """

    called: str
    call: LossCall
    is_jitted: bool
    state_shardings: Any
    input_shardings: Mapping[str, Any]
    aux_shardings: Any
    is_donating: bool = False
    step_metrics: tuple[str, ...] | None = None
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)
    states: Any = dataclasses.field(default_factory=weakref.WeakKeyDictionary, init=False)

    def __post_init__(self) -> None:
        call, layout, inputs = self.call, self.state_shardings, self.input_shardings
        count, metrics = call.accumulate_steps, self.step_metrics or ()
        is_axis = not isinstance(call.batch_axis, int) or call.batch_axis >= 0
        is_layout = isinstance(layout, TrainState | None)
        is_layout &= all(isinstance(own, NamedSharding) for own in jax.tree.leaves(layout))
        fix = "train_state_sharding(state, mesh, rules)"
        checks = {
            "loss_fn": (call.loss_fn, callable(call.loss_fn), "def loss_fn(model, rng, state, x)"),
            "accumulate_steps": (count, type(count) is int and count > 0, "accumulate_steps=1"),
            "batch_axis": (call.batch_axis, is_axis, "batch_axis='batch', or 0 for plain arrays"),
            "step_metrics": (metrics, {*metrics} <= {*_METRICS}, f"step_metrics={_METRICS}"),
            "train_state_shardings": (layout, is_layout, fix),
        }
        check_arguments(self.called, checks)
        self.state_shardings, self.input_shardings = on_auto_twin((layout, inputs))
        if isinstance(self.aux_shardings, dict):
            # They are those of what the loss function itself reports.
            self.aux_shardings = dict.fromkeys(metrics) | self.aux_shardings

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        given = self._read_state(args)
        inputs = self._put_inputs(inputs)
        state, program = self.states.get(given, (None, None))
        state = state or given
        if program is None or not _is_ready(state, inputs):
            if any(map(is_traced, jax.tree.leaves((given, inputs)))):
                return self._finish(given, self._compute(given, gradient.Shardings({}, {}), inputs))
            state, program = self._find_program(given, inputs)
            self.states[given] = state, program
        try:
            with auto_context():
                results = program(*state.arguments(), inputs)
        except Exception:
            find_mesh([*leaves_of(state), *self._read_inputs(inputs)], self.called)
            raise
        return self._finish(state, results, program)

    def __repr__(self) -> str:
        return f"{self.called} of {getattr(self.call.loss_fn, '__name__', self.call.loss_fn)}"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from treescope import rendering_parts as parts

        return parts.build_one_line_tree_node(parts.text(repr(self)), path)

    def lowerable(self, *args: Any, wrap: Any = None, **inputs: Any) -> Lowerable:
        """The function that the step would call, with structs in place of arrays.

        Args:
            *args: The state, of arrays or of structs.
            wrap: What the loss function gets in place of the model, as a function of it.
            **inputs: The inputs of the loss function, of arrays or of structs.

        Raises:
            ShardingError: As the step itself.
            RuleTypeError: The step is not compiled.
        """
        if wrap is not None:
            call = dataclasses.replace(self.call, wrap=wrap)
            return dataclasses.replace(self, call=call).lowerable(*args, **inputs)
        check_arguments(f"{self.called} to lower", {"jit": (False, self.is_jitted, "jit=True")})
        state = self._read_state(args)
        self._read_inputs(inputs, allow_structs=True)
        # Of structs nothing is moved; each is another object, by which it is found below.
        state, inputs = jax.tree.map(make_struct, (state, inputs))
        inputs = self._put_inputs(inputs)
        state, program = self._find_program(state, inputs, allow_structs=True)
        arguments = (*state.arguments(), inputs)
        named = {id(leaf.value): leaf for leaf in leaves_of(state) + leaves_of({"inputs": inputs})}
        leaves = tuple(named[id(struct)] for struct in jax.tree.leaves(arguments))
        results = ("loss", "aux") if self.step_metrics is None else (0, 1, "aux")
        return Lowerable(program, arguments, leaves, results)

    def lower(self, *args: Any, **inputs: Any) -> Any:
        """The lowered program, as of ``jax.jit``; arguments as for ``lowerable``."""
        return self.trace(*args, **inputs).lower()

    def trace(self, *args: Any, **inputs: Any) -> Any:
        """The traced program, as of ``jax.jit``; arguments as for ``lowerable``."""
        return self.lowerable(*args, **inputs).trace()

    def _compute(self, state: TrainState, shardings: gradient.Shardings, inputs: Any) -> Any:
        """Loss and outputs; of a train step new fields, the number of steps, and the outputs."""
        if self.step_metrics is None:
            loss, _, _, aux = gradient.run_loss(self.call, state, shardings, inputs)
            return loss, aux
        return gradient.update(self.call, state, shardings, inputs, self.step_metrics)

    def _finish(self, state: TrainState, results: Any, program: Any = None) -> Any:
        if self.step_metrics is None:
            return results
        fields, step, aux = results
        new = state.with_fields(fields, step)
        # Nothing that is remembered of a state may hold it: it would stay in memory.
        self.states[new] = None, program
        return new, aux

    def _read_state(self, args: tuple[Any, ...]) -> TrainState:
        state, *others = args or (None,)
        # To read the form of a call takes as long as to call a program of twenty arrays.
        if others or not isinstance(state, TrainState):
            fix = f"{self._form}, with state = TrainState.initial_state(model, optimizer, root_rng)"
            is_state = isinstance(state, TrainState)
            check_arguments(self.called, {"train_state": (state, is_state, fix)})
            check_arguments(self.called, {"inputs by position": (others, False, self._form)})
        return cast(TrainState, state)

    @property
    def _form(self) -> str:
        """How the step is called, with the names that the loss function has for its inputs."""
        names = [n for n in inspect.signature(self.call.loss_fn).parameters if n not in RESERVED]
        return f"step({', '.join(['state', *(f'{name}={name}' for name in names)])})"

    def _put_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = on_auto_twin(inputs)
        for name in self.input_shardings.keys() & inputs.keys():
            shardings = jax.tree.broadcast(self.input_shardings[name], inputs[name])
            inputs[name] = jax.tree.map(_put, inputs[name], shardings)
        return inputs

    # A state that no step has made

    def _find_program(
        self, state: TrainState, inputs: Any, *, allow_structs: bool = False
    ) -> tuple[TrainState, Any]:
        """The state as a program takes it, and the program."""
        leaves, structure = read_arrays(state, self.called, allow_structs=allow_structs)
        input_leaves = self._read_inputs(inputs, allow_structs)
        shardings = self._read_state_shardings(leaves)
        meshes = (sharding.mesh for sharding in shardings.values())
        mesh = find_mesh([*leaves, *input_leaves], self.called) or next(meshes, None)
        values = put_on_mesh(leaves, mesh, shardings)
        state = cast(TrainState, structure.fill(values))

        key = (jax.tree.structure(state), tuple(map(bound_sharding, values)))
        if key not in self.programs:
            self.programs[key] = self._make_program(state)
        return state, self.programs[key]

    def _make_program(self, state: TrainState) -> Any:
        """A function of what ``TrainState.arguments`` gives, and of inputs."""
        template, shardings = state.template, gradient.find_shardings(state)

        def run_step(fields: Any, step: Any, constants: Any, inputs: Any) -> Any:
            values: Any = step, *fields, *constants, template
            return self._compute(TrainState(*values), shardings, inputs)

        if not self.is_jitted:
            return run_step
        # A step gives what it got: with any other layout the next one is compiled again.
        fields, step, _ = jax.tree.map(bound_sharding, state.arguments())
        first: Any = (None,) if self.step_metrics is None else (fields, step)
        donated = (0,) if self.is_donating else ()
        return jax.jit(run_step, donate_argnums=donated, out_shardings=(*first, self.aux_shardings))

    def _read_state_shardings(self, leaves: Sequence[Leaf]) -> dict[str, NamedSharding]:
        """The declared sharding of arrays of a state by path; those that are bound must have it."""
        own = {leaf.path: leaf for leaf in leaves}
        shardings = {x.path: x.value for x in leaves_of(self.state_shardings) if x.value}
        problems = Problems(f"{self.called} got another state than train_state_shardings declare:")
        for path, sharding in shardings.items():
            bound = bound_sharding(own[path].value) if path in own else None
            fix = "Move it: jax.device_put(state, train_state_shardings)."
            if path not in own:
                problems.add(path, "the state has no such array", "Declare those of this state.")
            elif bound and not bound.is_equivalent_to(sharding, len(own[path].shape)):
                problems.add(path, f"it lies as {bound}, declared is {sharding}", fix)
        problems.raise_if_any(ShardingError)
        return shardings

    def _read_inputs(self, inputs: dict[str, Any], allow_structs: bool = False) -> list[Leaf]:
        leaves, _ = read_arrays(inputs, self.called, allow_structs=allow_structs)
        problems = Problems(f"{self.called} cannot call its loss function:")
        for name in self.input_shardings.keys() - inputs.keys():
            problems.add(name, "input_kwarg_shardings name it, and it is no input", "Give it.")
        try:
            inspect.signature(self.call.loss_fn).bind(**dict.fromkeys(RESERVED), **inputs)
        except TypeError as error:
            names = ", ".join((*RESERVED, *inputs))
            what = f"the step calls it by keyword with {names}: {error}"
            problems.add("", what, f"Write {self._form}, or def loss_fn({names}).")
        problems.raise_if_any(ShardingError)
        return leaves


def _put(value: Any, sharding: Sharding) -> Any:
    return value.update(sharding=sharding) if is_struct(value) else jax.device_put(value, sharding)


def _find_array(tree: Any) -> Any:
    """The last array of a tree, without taking the whole apart; None if there is none."""
    node = jax.tree_util.default_registry.flatten_one_level(tree)
    if node is None:
        return tree
    return next((x for x in map(_find_array, reversed([*node[0]])) if x is not None), None)


def _is_ready(state: TrainState, inputs: Any) -> bool:
    """Whether all is there, and the state need not follow its inputs onto a mesh."""
    first, given = next(iter(state.trained_arrays.values())), jax.tree.leaves(inputs)
    # A program that JAX has run over several devices ends the process if it then gets an array that
    # was donated (jax 0.10.2). Of a state all is donated together, or all but what was replaced.
    if any(map(is_deleted, (first, _find_array(state.opt_arrays), *given))):
        return False
    on_mesh = (hasattr(bound_sharding(value), "mesh") for value in given)
    return bound_sharding(first) is not None or not any(on_mesh)


# The two functions that build steps


def _read_texts(texts: str | Sequence[str] | None) -> tuple[str, ...]:
    return (texts,) if isinstance(texts, str) else tuple(texts or ())


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
    manual_axes: str | Sequence[str] | None = None,
    gather: Callable[..., Any] | None = None,
) -> Any:
    """Builds the function that does one step of training.

    Args:
        loss_fn: ``loss_fn(model, rng, state, **inputs) -> (loss, new_state, aux)``. The loss is a
            scalar, or a pair of a sum and the count of which it is to be the mean, over all
            microbatches. Within it parameters are constant, and state variables of the model can be
            assigned to. What is assigned to parameters of an NNX module is lost: nothing tells it
            from what transformations of NNX assign.
        jit: Whether to compile.
        donate_params_and_state: Whether the next state may take the memory of the one before, which
            is deleted then. A step that is not compiled takes none.
        input_kwarg_shardings: Where inputs are put, by name: shardings for ``jax.device_put``.
        train_state_shardings: Where the state lies: ``train_state_sharding(...)``. Arrays that are
            on no device yet are put there, others must lie so.
        aux_output_shardings: Where the outputs of the loss function lie, as ``out_shardings`` of
            ``jax.jit``.
        accumulate_steps: The number of microbatches into which each batch is split, to save memory.
        batch_axis: The logical axis of the examples; for plain arrays the number of the dimension.
        aux_reduction: How outputs of several microbatches or devices become one: ``"mean"``,
            ``"sum"``, ``"max"``, ``"min"``, ``"last"`` or ``"concatenate"``, or these by path, that
            of ``""`` for all others. By default floats are averaged, and named arrays with the
            batch axis concatenated; of plain arrays that have the dimension ``batch_axis`` it is
            said.
        step_metrics: What is added to the outputs, a dictionary then, if it is not there:
            ``"loss"``, ``"gradient_norm"``.
        manual_axes: The mesh axes over which each device computes the loss of its own examples, as
            code under ``jax.shard_map`` is written; other mesh axes are left to the compiler. The
            loss function gets a device's examples, all of everything else, and ``rng`` folded with
            the device's position. Parameters that are split are gathered for it, but not along a
            dimension that has the name of such a mesh axis: the loss function gathers that, and
            averages its gradient, as ``jax.lax.psum_scatter(...) / size`` does. Losses and
            gradients are averaged over the devices, so that the loss must be a mean, or the pair
            above; it may be one that ``jax.lax.pmean`` or ``psum`` has made the same on all. What
            is carried on must be the same on all devices.
        gather: Gives the loss function its parameters as it computes with them:
            ``layout.gathering(model, mesh)``. By default the compiler decides.

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
    reductions, axes = read_reductions(aux_reduction), _read_texts(manual_axes)
    call = LossCall(loss_fn, accumulate_steps, batch_axis, reductions, axes, gather=gather)
    metrics = _read_texts(step_metrics)
    shardings = train_state_shardings, input_kwarg_shardings or {}, aux_output_shardings
    return _Step("A train step", call, jit, *shardings, donate_params_and_state, metrics)


def build_eval_step_fn(loss_fn: Callable[..., Any], **options: Any) -> Any:
    """Builds the function that evaluates a train state and changes nothing.

    Args:
        loss_fn: As for ``build_train_step_fn``.
        **options: As for ``build_train_step_fn``: ``jit``, ``input_kwarg_shardings``,
            ``train_state_shardings``, ``aux_output_shardings``, ``accumulate_steps``,
            ``batch_axis``, ``aux_reduction``, ``manual_axes``, ``gather``.

    Returns:
        ``evaluate(train_state, **inputs) -> (loss, aux)``.

    Raises:
        RuleTypeError, ShardingError, MeshError: As ``build_train_step_fn``, and its step.

    >>> import optax
    >>> from jax import numpy as jnp
    >>> evaluate = build_eval_step_fn(lambda model, rng, state, x: (x @ model["w"], state, {}))
    >>> state = TrainState.initial_state({"w": jnp.ones(3)}, optax.sgd(0.1), jax.random.key(0))
    >>> float(evaluate(state, x=jnp.ones(3))[0])
    3.0
    """
    called, fix = "An evaluation", "none: it makes no new state, and gives the loss"
    others = ("donate_params_and_state", "step_metrics")
    check_arguments(called, {x: (options[x], False, fix) for x in others if x in options})
    step = build_train_step_fn(loss_fn, **options)
    return dataclasses.replace(step, called=called, step_metrics=None)
