"""Train steps that compile once and spend no Python time per array.

A step flattens its state once, when the state was made or changed by hand. From then on it passes
a list of arrays to one compiled program and wraps the list that comes back.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding, Sharding

from penzai_shard.errors import RuleTypeError, ShardingError, raise_all
from penzai_shard.meshes import (
    auto_context,
    has_explicit_axes,
    onto_auto_twin,
    shardings_on_auto_twin,
)
from penzai_shard.training.gradient_step import GradientStep
from penzai_shard.training.loss_contract import RESERVED
from penzai_shard.training.state_layout import (
    as_array,
    canonical,
    device_problems,
    equal_constants_once,
    is_traced,
    mesh_of,
    settled,
    sharding_text,
    with_strong_type,
    without_shared_buffers,
)
from penzai_shard.training.state_structure import (
    FIELD_OF_SECTION,
    KEPT_SECTIONS,
    STEPPED_SECTIONS,
    FlatState,
    StateStructure,
)
from penzai_shard.training.train_state import TrainState, from_flat, to_flat
from penzai_shard.tree_paths import array_path_text, join_paths


class LossFunction(Protocol):
    """What ``build_train_step_fn`` takes as a loss; see there."""

    def __call__(
        self, *, model: Any, rng: jax.Array, state: Any, **inputs: Any
    ) -> tuple[Any, Any, Any]:
        """Returns ``(loss, new_state, aux)``."""


def build_train_step_fn(
    loss_fn: LossFunction | Callable[..., tuple[Any, Any, Any]],
    *,
    jit: bool = True,
    donate_params_and_state: bool = False,
    input_kwarg_shardings: Mapping[str, Any] | None = None,
    train_state_shardings: Any = None,
    accumulate_steps: int = 1,
    batch_axis: str = "batch",
) -> "TrainStep":
    """Builds the function that does one step of training.

    One compilation serves any number of steps: the new state always lies exactly as declared,
    or, if nothing is declared, exactly as the state that went in.

    Args:
        loss_fn: ``loss_fn(model, rng, state, **inputs) -> (loss, new_state, aux)``, called with
            keywords. ``model`` is bound, its parameters frozen and its state variables mutable;
            ``rng`` is the run's key folded with the step's number, ``state`` the loss function's
            own state. The loss is a floating scalar, ``new_state`` of the form of ``state``,
            and ``aux`` any tree of arrays.
        jit: Whether to compile. If not, everything runs eagerly, to be debugged.
        donate_params_and_state: Whether the new state may take the memory of the old one, which
            is then unusable, and so is any model that shares its arrays. Frozen parameters,
            constants and the random key are never donated.
        input_kwarg_shardings: For some inputs by name, a sharding or a tree of shardings.
            Arrays that JAX is free to place are placed so; arrays that lie otherwise are an
            error.
        train_state_shardings: Declared layout of the state, as `train_state_sharding` makes it,
            or one sharding for everything. Leaves that are None are not declared.
        accumulate_steps: Number of microbatches. Above 1, every named input that has the batch
            axis is split (strided, so that each device keeps its examples), the gradients are
            averaged, floating auxiliary outputs too, and of other auxiliary outputs the last
            microbatch's counts; state passes from one microbatch to the next. All in one
            compiled loop.
        batch_axis: The logical axis to split inputs along.

    Returns:
        ``step(train_state, **inputs) -> (train_state, aux)``.

    Raises:
        ShardingError: Donation was asked for without compilation, or ``accumulate_steps`` is
            not a positive integer. Calling the step raises it where state, inputs or loss
            function are not as described here.

    >>> import jax.numpy as jnp, optax
    >>> def loss_fn(model, rng, state, x):
    ...     loss = jnp.sum((model["w"] - x) ** 2)
    ...     return loss, state, {"loss": loss}
    >>> step = build_train_step_fn(loss_fn)
    >>> state = TrainState.initial_state({"w": jnp.zeros(3)}, optax.sgd(0.5), jax.random.key(0))
    >>> state, aux = step(state, x=jnp.ones(3))
    >>> float(aux["loss"]), state.params["w"].tolist()
    (3.0, [1.0, 1.0, 1.0])
    """
    if donate_params_and_state and not jit:
        raise ShardingError(
            "donate_params_and_state=True needs compilation. Pass jit=True, or do not donate."
        )
    if (
        not isinstance(accumulate_steps, int)
        or isinstance(accumulate_steps, bool)
        or accumulate_steps < 1
    ):
        raise RuleTypeError(
            f"accumulate_steps must be a positive integer, not {accumulate_steps!r}."
        )
    return TrainStep(
        GradientStep(loss_fn, accumulate_steps, batch_axis),
        jit=jit,
        donate=donate_params_and_state,
        input_shardings=dict(input_kwarg_shardings or {}),
        declared=train_state_shardings,
    )


class TrainStep:
    """A train step; made by ``build_train_step_fn``.

    It keeps compiled programs, one per structure and layout of a state, but no state.
    """

    def __init__(
        self,
        computation: GradientStep,
        *,
        jit: bool,
        donate: bool,
        input_shardings: dict[str, Any],
        declared: Any,
    ) -> None:
        self._computation = computation
        self._jit = jit
        self._donate = donate
        self._input_shardings = shardings_on_auto_twin(input_shardings)
        self._declared = shardings_on_auto_twin(declared)
        self._programs: dict[Any, _Program] = {}

    def __call__(self, train_state: TrainState, /, **inputs: Any) -> tuple[TrainState, Any]:
        """Does one step.

        Args:
            train_state: The state to start from. Donated if the step was built so.
            **inputs: Inputs of the loss function; trees of arrays.

        Returns:
            The next state and the loss function's auxiliary output.

        Raises:
            ShardingError: State, inputs or loss function are not as promised; see
                ``build_train_step_fn``.
        """
        flat = _flat_of(train_state)
        leaves = self._checked_inputs(inputs)
        program = flat.program
        if (
            not isinstance(program, _Program)
            or program.owner is not self
            or (program.free and any(map(_is_committed, leaves)))
        ):
            if is_traced(flat.stepped) or is_traced(flat.kept) or is_traced(leaves):
                return self._inline(flat, inputs)
            flat, program = self._prepare(flat, leaves)
        if self._input_shardings:
            inputs = self._placed_inputs(inputs)
        with auto_context():
            stepped, aux = program.run(flat.stepped, flat.passed, inputs)
        new = FlatState(flat.structure, stepped, flat.kept, program, flat.passed)
        return from_flat(new), aux

    def lower(self, train_state: TrainState, /, **inputs: Any) -> Any:
        """The step's ``jax.stages.Lowered`` for a state and inputs, without running it.

        Args:
            train_state: The state, concrete; or abstract, with a sharding in every struct.
            **inputs: Inputs, concrete or abstract.

        Returns:
            What ``jax.jit(...).lower(...)`` gives.

        Raises:
            ShardingError: The step was built with ``jit=False``, or as calling it does.
        """
        if not self._jit:
            raise ShardingError("a step built with jit=False has nothing to lower. Pass jit=True.")
        flat = to_flat(train_state)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in flat.stepped):
            program = self._program(
                flat.structure,
                [getattr(leaf, "sharding", None) for leaf in flat.stepped],
                tuple(range(len(flat.kept))),
            )
        else:
            flat, program = self._prepare(flat, self._checked_inputs(inputs))
        if self._input_shardings:
            inputs = self._placed_inputs(inputs)
        with auto_context():
            return program.run.lower(flat.stepped, flat.passed, inputs)

    def _checked_inputs(self, inputs: dict[str, Any]) -> list[Any]:
        leaves = jax.tree.leaves(inputs)
        if not inputs.keys().isdisjoint(RESERVED):
            taken = sorted(inputs.keys() & set(RESERVED))
            raise ShardingError(
                f"inputs cannot be named {', '.join(taken)}: the loss function gets "
                f"{', '.join(RESERVED)} from the train state. Rename the input."
            )
        if any(map(_is_explicit, leaves)):
            for name in inputs:
                inputs[name] = onto_auto_twin(inputs[name])
        return leaves

    def _prepare(self, flat: FlatState, inputs: list[Any]) -> tuple[FlatState, "_Program"]:
        """Settles a state that did not come from this step, and finds its program."""
        structure = flat.structure
        stepped = [with_strong_type(leaf) for leaf in flat.stepped]
        kept = [as_array(leaf) for leaf in flat.kept]
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in stepped + kept):
            raise ShardingError(
                "this train state is abstract. Fill it before training, for instance with "
                "restore_train_state(path, state, mesh, rules)."
            )
        declared = self._declared_shardings(structure)
        if declared is not None:
            stepped, kept = self._as_declared(structure, stepped, kept, declared)
        mesh = mesh_of(stepped) or mesh_of(kept) or mesh_of(inputs)
        if declared is None and not any(map(_is_committed, (*stepped, *kept, *inputs))):
            # JAX was free to place everything, and stays so: the result mixes with any other.
            if self._donate:
                stepped = without_shared_buffers(stepped, kept)
            passed, index = equal_constants_once(kept)
            program = self._program(structure, None, index)
            return FlatState(structure, stepped, kept, program, passed), program
        with auto_context():
            stepped = [settled(leaf, mesh) for leaf in stepped]
            kept = [settled(leaf, mesh) for leaf in kept]
        raise_all(
            ShardingError,
            "the arrays of this train state lie on different devices:",
            device_problems(
                structure.paths(STEPPED_SECTIONS + KEPT_SECTIONS), stepped + kept, mesh
            ),
        )
        if self._donate:
            stepped = without_shared_buffers(stepped, kept)
        passed, index = equal_constants_once(kept)
        program = self._program(structure, [leaf.sharding for leaf in stepped], index)
        return FlatState(structure, stepped, kept, program, passed), program

    def _program(
        self,
        structure: StateStructure,
        shardings: list[Sharding | None] | None,
        kept_index: tuple[int, ...],
    ) -> "_Program":
        """The program for a structure and a layout; None is that of a state JAX may place."""
        declared = self._declared_shardings(structure)
        if declared is not None and shardings is not None:
            shardings = [
                own if told is None else told
                for own, told in zip(shardings, declared[0], strict=True)
            ]
        key = (structure, None if shardings is None else tuple(shardings), kept_index)
        if key not in self._programs:
            self._programs[key] = _Program(self, structure, shardings, kept_index)
        return self._programs[key]

    def _declared_shardings(
        self, structure: StateStructure
    ) -> tuple[list[Sharding | None], list[Sharding | None]] | None:
        """The declared sharding of every stepped and every kept leaf, None where undeclared."""
        declared = self._declared
        if declared is None:
            return None
        if isinstance(declared, Sharding):
            counts = [
                sum(structure.treedefs[section].num_leaves for section in sections)
                for sections in (STEPPED_SECTIONS, KEPT_SECTIONS)
            ]
            return [declared] * counts[0], [declared] * counts[1]
        problems = []
        lists: list[list[Any]] = []
        for sections in (STEPPED_SECTIONS, KEPT_SECTIONS):
            found: list[Any] = []
            for section in sections:
                tree = getattr(declared, FIELD_OF_SECTION[section], None)
                if FIELD_OF_SECTION[section] == "params" and isinstance(tree, Mapping):
                    wanted = section == "trainable"
                    names = structure.variables.trainable_names
                    tree = {
                        name: value for name, value in tree.items() if (name in names) == wanted
                    }
                treedef = structure.treedefs[section]
                if tree is None or isinstance(tree, Sharding):
                    found.extend([tree] * treedef.num_leaves)
                    continue
                try:
                    found.extend(treedef.flatten_up_to(tree))
                except (ValueError, TypeError) as error:
                    problems.append(f"{FIELD_OF_SECTION[section]}: {error}")
            lists.append(found)
        fix = "Make them anew: train_state_sharding(state, mesh, rules)."
        raise_all(
            ShardingError,
            f"train_state_shardings are not shaped like this train state. {fix}",
            problems,
        )
        bad = [
            f"a {type(leaf).__name__} stands where a sharding should be. {fix}"
            for leaf in lists[0] + lists[1]
            if leaf is not None and not isinstance(leaf, Sharding)
        ]
        raise_all(ShardingError, "train_state_shardings hold something else:", bad[:3])
        return lists[0], lists[1]

    def _as_declared(
        self,
        structure: StateStructure,
        stepped: list[Any],
        kept: list[Any],
        declared: tuple[list[Sharding | None], list[Sharding | None]],
    ) -> tuple[list[Any], list[Any]]:
        """The state with exactly the declared shardings, if it lies so already."""
        problems = []
        results: list[list[Any]] = []
        for sections, leaves, shardings in (
            (STEPPED_SECTIONS, stepped, declared[0]),
            (KEPT_SECTIONS, kept, declared[1]),
        ):
            placed = []
            for i, (leaf, told) in enumerate(zip(leaves, shardings, strict=True)):
                if told is None or leaf.sharding == told:
                    placed.append(leaf)
                elif canonical(leaf.sharding).is_equivalent_to(told, leaf.ndim):
                    placed.append(jax.device_put(leaf, told))
                else:
                    path = list(structure.paths(sections))[i]
                    problems.append(
                        f"{path}: has {sharding_text(leaf.sharding)}, "
                        f"declared {sharding_text(told)}."
                    )
            results.append(placed)
        raise_all(
            ShardingError,
            "the train state does not lie as declared in train_state_shardings. "
            "Place it once before training: state = jax.device_put(state, shardings).",
            problems,
        )
        return results[0], results[1]

    def _placed_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs under their declared shardings."""
        unknown = sorted(self._input_shardings.keys() - inputs.keys())
        raise_all(
            ShardingError,
            "input_kwarg_shardings name inputs that this step did not get:",
            [f"{name}: the inputs are {sorted(inputs)}. Pass or drop it." for name in unknown],
        )
        problems: list[str] = []

        def place(key_path: Any, leaf: Any, told: Any, name: str) -> Any:
            if told is None or isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
                return leaf
            if not isinstance(leaf, jax.Array) or not leaf.committed:
                return jax.device_put(leaf, told)
            if leaf.sharding == told:
                return leaf
            if canonical(leaf.sharding).is_equivalent_to(told, leaf.ndim):
                return jax.device_put(leaf, told)
            path = join_paths(name, array_path_text(key_path))
            problems.append(
                f"input {path}: has {sharding_text(leaf.sharding)}, declared "
                f"{sharding_text(told)}. Place it so: jax.device_put(..., sharding), "
                "or shard_batch(batch, mesh, rules)."
            )
            return leaf

        placed = dict(inputs)
        for name, shardings in self._input_shardings.items():
            flat, treedef = jax.tree_util.tree_flatten_with_path(inputs[name])
            told = jax.tree.leaves(
                jax.tree.broadcast(shardings, inputs[name], is_leaf=lambda x: x is None),
                is_leaf=lambda x: x is None,
            )
            placed[name] = jax.tree.unflatten(
                treedef,
                [place(path, leaf, t, name) for (path, leaf), t in zip(flat, told, strict=True)],
            )
        raise_all(ShardingError, "some inputs do not lie as declared:", problems)
        return placed

    def _inline(self, flat: FlatState, inputs: dict[str, Any]) -> tuple[TrainState, Any]:
        """The step as part of a surrounding trace, which owns layout and compilation."""
        stepped = [with_strong_type(leaf) for leaf in flat.stepped]
        kept = [as_array(leaf) for leaf in flat.kept]
        with auto_context():
            new, aux = _flat_step(self._computation, flat.structure, stepped, kept, inputs)
            declared = self._declared_shardings(flat.structure)
            if declared is not None:
                new = [
                    leaf if told is None else jax.lax.with_sharding_constraint(leaf, told)
                    for leaf, told in zip(new, declared[0], strict=True)
                ]
        return from_flat(FlatState(flat.structure, new, kept)), aux


class _Program:
    """The step for one structure and one layout of a state."""

    def __init__(
        self,
        owner: TrainStep,
        structure: StateStructure,
        shardings: list[Sharding | None] | None,
        kept_index: tuple[int, ...],
    ) -> None:
        self.owner = owner
        self.free = shardings is None
        computation = owner._computation

        def train_step(stepped: list[Any], passed: list[Any], inputs: dict[str, Any]) -> Any:
            kept = [passed[i] for i in kept_index]
            return _flat_step(computation, structure, stepped, kept, inputs)

        def eager_train_step(stepped: list[Any], passed: list[Any], inputs: dict[str, Any]) -> Any:
            new, aux = train_step(stepped, passed, inputs)
            if shardings is None:
                return new, aux
            return [jax.device_put(x, s) for x, s in zip(new, shardings, strict=True)], aux

        self.run: Any = eager_train_step
        if owner._jit:
            self.run = jax.jit(
                train_step,
                donate_argnums=(0,) if owner._donate else (),
                out_shardings=(shardings, None),
            )


def _flat_step(
    computation: GradientStep,
    structure: StateStructure,
    stepped: list[Any],
    kept: list[Any],
    inputs: dict[str, Any],
) -> tuple[list[Any], Any]:
    """One step on flat lists."""
    new, aux = computation(
        {section: structure.build(section, stepped, kept) for section in STEPPED_SECTIONS},
        {section: structure.build(section, stepped, kept) for section in KEPT_SECTIONS},
        inputs,
        structure.variables,
        structure.optimizer_def,
    )
    leaves: list[Any] = []
    for section in STEPPED_SECTIONS:
        leaves.extend(structure.treedefs[section].flatten_up_to(new[section]))
    return leaves, aux


def _is_committed(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(leaf.committed)


def _is_explicit(leaf: Any) -> bool:
    sharding = jax.typeof(leaf).sharding if is_traced([leaf]) else getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and has_explicit_axes(sharding.mesh)


def _flat_of(train_state: Any) -> FlatState:
    if not isinstance(train_state, TrainState):
        raise ShardingError(
            f"a train step takes a TrainState, not a {type(train_state).__name__}. "
            "Make one: TrainState.initial_state(model, optimizer, jax.random.key(0))."
        )
    return to_flat(train_state)
