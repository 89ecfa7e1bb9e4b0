"""Reads the step that a layout is looked for, and builds it in a layout without devices.

What is priced is what ``Choice.build`` makes: both go through ``Layout.build``. All arrays are
structs, and each input has names, also where the loss function gets plain arrays.
"""

import dataclasses
import inspect
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz

from penzai_shard.arrays.kinds import device_dtype, is_array
from penzai_shard.arrays.structure import Leaf, flatten, leaves_of
from penzai_shard.errors import Problems, RuleTypeError
from penzai_shard.layouts.axis_roles import axes_of_role
from penzai_shard.layouts.layout import Layout
from penzai_shard.planning.arguments import check_tree
from penzai_shard.planning.name_axes import without_names
from penzai_shard.readers.penzai import make_named
from penzai_shard.training.model_parts import split_model
from penzai_shard.training.train_state import TrainState

_RESERVED = ("model", "rng", "state")
_LOSS = "def loss_fn(model, rng, state, tokens)"


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A train step that a layout is looked for.

    Attributes:
        model: The model, with structs in place of arrays.
        loss_fn: As for ``build_train_step_fn``.
        optimizer: An optimizer of optax.
        inputs: What the loss function gets besides, by name, for a whole batch: trees of named
            arrays of structs.
        batch_axis: The logical axis of the examples in the inputs.
        step_options: What ``Layout.build`` gets for this step.
        blocks: The layers that a layout edits, as ``Layout.blocks``.
        names: What the model and its inputs call the axes, as ``Layout.names``.
    """

    model: Any
    loss_fn: Callable[..., Any]
    optimizer: Any
    inputs: Mapping[str, Any]
    batch_axis: Any
    step_options: Mapping[str, Any]
    blocks: Any
    names: Mapping[str, Any]

    @property
    def sizes(self) -> dict[Any, int]:
        """The lengths of the logical axes of the inputs."""
        pairs = (zip(x.names or (), x.shape, strict=True) for x in leaves_of(dict(self.inputs)))
        return {name: size for pair in pairs for name, size in pair if name is not None}

    @property
    def words(self) -> str:
        """The inputs for people: ``"batch 256 x seq 2,048"``."""
        texts = []
        for leaf in leaves_of(dict(self.inputs)):
            dims = zip(leaf.names or (), leaf.shape, strict=True)
            texts.append(" x ".join(f"{'' if x is None else x} {n:,}".strip() for x, n in dims))
        return ", ".join(dict.fromkeys(filter(None, texts)))

    @property
    def loss_inputs(self) -> dict[str, Any]:
        """The inputs as the loss function gets them: plain arrays, or named ones."""
        return self._as_given(dict(self.inputs))

    def _as_given(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # A number is the dimension of the examples of plain arrays.
        is_plain = self.step_options.get("batch_axis") == 0
        return without_names(inputs) if is_plain else inputs

    def build(self, candidate: Any, *, model: Any = None) -> tuple[Any, TrainState, dict[str, Any]]:
        """The step in a layout, and what it is called with, as structs on the mesh.

        Args:
            candidate: The layout, with the mesh and the number of microbatches.
            model: A model in place of the problem's, such as one with fewer blocks.

        Returns:
            Step, state and inputs, for ``step(state, **inputs)``.

        Raises:
            PlanError, MeshError, RuleTypeError: As ``Layout.build``.
        """
        layout, mesh = candidate.layout, candidate.mesh
        state, step = layout.build(
            lambda shapes: shapes,
            self.model if model is None else model,
            mesh=mesh,
            loss_fn=self.loss_fn,
            optimizer=self.optimizer,
            rng=jax.random.key(0),
            accumulate_steps=candidate.microbatches,
            **self.step_options,
        )
        return step, state, self._as_given(layout.shard_batch(dict(self.inputs), mesh))


def read_problem(
    model: Any,
    loss_fn: Any,
    optimizer: Any,
    batch: Any,
    seq: Any = None,
    plain_arrays: bool = False,
    names: Mapping[str, Any] | None = None,
    blocks: Any = None,
) -> Problem:
    """Reads the arguments of ``choose_layout`` that say what is computed.

    Args:
        model: The model, concrete or abstract, whose arrays have names.
        loss_fn: As for ``build_train_step_fn``.
        optimizer: An optimizer of optax.
        batch: The number of examples, or the inputs of the loss function by name: arrays or
            structs, plain or named; of a plain one the first dimension is the batch.
        seq: With a number, the number of tokens of an example.
        plain_arrays: As for ``TrainState.initial_state``.
        names: As ``Layout.names``.
        blocks: As ``Layout.blocks``.

    Raises:
        RuleTypeError: They cannot be read; all that is wrong is in it.

    >>> import optax
    >>> from penzai import pz
    >>> def loss_fn(model, rng, state, x):
    ...     return (model["w"] * x).unwrap("batch", "embed").sum(), state, {}
    >>> model = {"w": pz.nx.ones({"embed": 4})}
    >>> read_problem(model, loss_fn, optax.sgd(0.1), {"x": pz.nx.ones({"batch": 8})}).words
    'batch 8'
    """
    names, problems = dict(names or {}), Problems("choose_layout cannot read what it was given:")
    _check_model(model, problems)
    _check_functions(loss_fn, optimizer, problems)
    try:
        Layout(parameters={}, compute={}, names=names, blocks=blocks)
    except RuleTypeError as error:
        problems.extend(error.problems)
    problems.raise_if_any(RuleTypeError)

    # The model, and the inputs as they are given.
    leaves, structure = flatten(model)
    model = structure.fill([_make_struct(x) if is_array(x.value) else x.value for x in leaves])
    axes = tuple((axes_of_role(role, names) or (role,))[0] for role in ("batch", "seq"))
    inputs = _read_inputs(loss_fn, batch, seq, axes, problems)
    given, structure = flatten(inputs)
    is_plain = _takes_plain(model, optimizer, plain_arrays)
    if isinstance(batch, Mapping):
        is_plain = _are_plain(given, problems)

    # Names for all of them.
    inputs = structure.fill([_add_names(leaf, axes[0]) for leaf in given])
    present = {name for leaf in leaves_of(inputs) for name in leaf.names or ()} - {None}
    known = axes_of_role("batch", names) or axes
    batch_axis = next((name for name in known if name in present), axes[0])
    if inputs and batch_axis not in present:
        what = f"no input has the axis {batch_axis!r}; they have {sorted(map(str, present))}"
        fix = f"Write names={{'batch': {min(map(str, present), default='examples')!r}}}."
        problems.add("batch", what, fix)
    _check_names(leaves, inputs, is_plain, problems)
    problems.raise_if_any(RuleTypeError)
    options = {"batch_axis": 0 if is_plain else batch_axis, "plain_arrays": plain_arrays or None}
    return Problem(model, loss_fn, optimizer, inputs, batch_axis, options, blocks, names)


def _make_struct(leaf: Leaf) -> jax.ShapeDtypeStruct:
    # Where an array lies now does not matter.
    return jax.ShapeDtypeStruct(leaf.shape, device_dtype(leaf.dtype))


def _check_model(model: Any, problems: Problems) -> None:
    try:
        check_tree("choose_layout", model)
    except RuleTypeError as error:
        problems.extend(dataclasses.replace(x, path="model") for x in error.problems)
    else:
        if isinstance(model, TrainState):
            what, fix = "it is a train state, which is laid out already", "Give state.model."
            problems.add("model", what, fix)
        elif not leaves_of(model):
            fix = "Give one with its parameters: abstract_model(build, ...)."
            problems.add("model", "it has no arrays, so that nothing is laid out", fix)


def _check_functions(loss_fn: Any, optimizer: Any, problems: Problems) -> None:
    missing = [*_RESERVED]
    if callable(loss_fn):
        known = inspect.signature(loss_fn).parameters
        takes_any = any(x.kind is x.VAR_KEYWORD for x in known.values())
        missing = [] if takes_any else [name for name in _RESERVED if name not in known]
    if missing:
        what = f"it is {reprlib.repr(loss_fn)}, and is called by name with {', '.join(_RESERVED)}"
        problems.add("loss_fn", what, f"Write {_LOSS}.")
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        what = f"it is {reprlib.repr(optimizer)}, no optimizer of optax"
        problems.add("optimizer", what, "Write optimizer=optax.adamw(1e-3).")


def _takes_plain(model: Any, optimizer: Any, plain_arrays: bool) -> bool:
    """Whether a loss function gets the model without Penzai's named arrays."""
    arrays, template = split_model(model, optimizer, None, plain_arrays or None)
    bound = template.bind_for_loss({k: x for kind in arrays.values() for k, x in kind.items()})
    return not any(map(_is_named, jax.tree.leaves(bound, is_leaf=_is_named)))


def _is_named(node: Any) -> bool:
    return isinstance(node, pz.nx.NamedArrayBase)


def _are_plain(leaves: Sequence[Leaf], problems: Problems) -> bool:
    """Whether inputs are plain arrays; refuses a batch of both kinds."""
    named, plain = ([x for x in leaves if x.shape and (x.names is None) == own] for own in (0, 1))
    if named and plain:
        what = f"{named[0].path!r} has names and {plain[0].path!r} has none"
        problems.add("batch", what, "Name all inputs, or none.")
    return not named


def _add_names(leaf: Leaf, batch_axis: Any) -> Any:
    """An input as a named struct; the first dimension of a plain one is the batch."""
    struct = _make_struct(leaf)
    if leaf.names is not None or not leaf.shape:
        return struct
    return make_named(struct, (batch_axis, *(None,) * (len(leaf.shape) - 1)))


# Inputs


def _read_inputs(
    loss_fn: Callable[..., Any], batch: Any, seq: Any, axes: Sequence[Any], problems: Problems
) -> dict[str, Any]:
    """The inputs of the loss function by name; those of a number have names."""
    known = [x for x in inspect.signature(loss_fn).parameters.values() if x.name not in _RESERVED]
    by_name = [x for x in known if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    takes_any = any(x.kind is x.VAR_KEYWORD for x in known)
    needed = [x.name for x in by_name if x.default is x.empty]
    if isinstance(batch, Mapping):
        if seq is not None:
            problems.add("seq", "it is for a batch that is a number", "Leave it out.")
        names = [x.name for x in by_name]
        for name in [] if takes_any else [x for x in batch if x not in names]:
            fix = f"Inputs are: {names}."
            if {*batch} <= {"batch", "seq"}:
                fix = f"Write {', '.join(f'{x}={size}' for x, size in batch.items())}."
            problems.add("batch", f"loss_fn takes no {name!r}", fix)
        for name in needed:
            if name not in batch:
                problems.add(
                    "batch", f"loss_fn takes {name!r}, which is not in it", f"Add {name!r}."
                )
        return {x: value for x, value in batch.items() if _is_input(x, value, problems)}

    struct = "jax.ShapeDtypeStruct((256, 2048), 'int32')"
    if not needed:
        fix = f"Write batch={{'tokens': {struct}}}."
        problems.add("batch", "loss_fn takes no inputs by name, so that a number says none", fix)
    fix = f"Write batch=256, or batch={{{next(iter(needed), 'tokens')!r}: {struct}}}."
    for path, count, own in (("batch", batch, fix), ("seq", seq, "Write seq=2048.")):
        if not isinstance(count, numbers.Integral) or isinstance(count, bool) or count < 1:
            problems.add(path, f"it is {reprlib.repr(count)}, no positive number", own)
    if len(problems):
        return {}
    tokens = jax.ShapeDtypeStruct((int(batch), int(seq)), jnp.int32)
    return {name: make_named(tokens, axes) for name in needed}


def _is_input(name: str, value: Any, problems: Problems) -> bool:
    leaves, structure = flatten(value)
    if not structure.statics and all(is_array(leaf.value) for leaf in leaves):
        return True
    is_shape = isinstance(value, tuple) and all(isinstance(n, int) for n in value)
    shape = value if is_shape else (256, 2048)
    fix = f"Write {name!r}: jax.ShapeDtypeStruct({shape}, 'int32')."
    problems.add("batch", f"{name!r} is {reprlib.repr(value)}, no array", fix)
    return False


# Models without names


def _check_names(
    leaves: Sequence[Leaf], inputs: Mapping[str, Any], is_plain: bool, problems: Problems
) -> None:
    """Refuses a model with arrays that have no names, with lines that give it some."""
    unnamed = [x for x in leaves if x.names is None and x.shape and is_array(x.value)]
    if any(x.names is not None for x in leaves) or not is_plain:
        # What infer_names did not decide, for instance.
        lines = [f"    {x.path!r}: {(None,) * len(x.shape)}," for x in unnamed]
        lines = ["model = penzai_shard.name_axes(model, {", *lines, "})"]
        fix = "None is for a dimension that stays whole:"
    else:
        lines = _inferring_lines(inputs)
        fix = "Infer them from what the loss function computes:"
    code = "\n".join(f"      {line}" for line in ("import penzai_shard", *lines))
    for leaf in unnamed:
        problems.add(leaf.path, "it has no logical axes", f"{fix}\n\n{code}\n", "unnamed")


class _Code(str):
    """An expression that stands in containers as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _inferring_lines(inputs: Mapping[str, Any]) -> list[str]:
    leaves, structure = flatten(dict(inputs))
    calls = [_Code(f"jax.ShapeDtypeStruct({x.shape}, {str(x.dtype)!r})") for x in leaves]
    structs = structure.fill(calls, plain=True)
    names = structure.fill([x.names for x in leaves], plain=True)
    keywords = "".join(f", {name}={name}" for name in inputs)
    call = f"loss_fn(model=model, rng=jax.random.key(0), state=None{keywords})[0]"
    return [
        "names = penzai_shard.infer_names(",
        f"    lambda {', '.join(('model', *inputs))}: {call},",
        "    model,",
        *(f"    {structs[name]!r}," for name in inputs),
        f"    input_names={tuple(names[name] for name in inputs)!r},",
        ")",
        "model = penzai_shard.name_axes(model, names)",
    ]
