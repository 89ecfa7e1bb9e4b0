"""Reads the step that a layout is looked for, and builds it in a layout without devices.

What is priced is what ``Choice.build`` makes: both go through ``Layout.build``. All arrays are
structs, and each input has names, also where the loss function gets plain arrays.
"""

import dataclasses
import inspect
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from penzai import pz

from penzai_shard.arrays.kinds import device_dtype, is_array
from penzai_shard.arrays.structure import Leaf, flatten, leaves_of
from penzai_shard.errors import Problems, RuleTypeError, ShardingError
from penzai_shard.layouts.axis_roles import axes_of_role
from penzai_shard.layouts.layout import Layout
from penzai_shard.meshes import make_mesh
from penzai_shard.planning.arguments import check_tree
from penzai_shard.planning.name_axes import without_names
from penzai_shard.readers.penzai import make_named
from penzai_shard.training.model_parts import split_model
from penzai_shard.training.step import RESERVED
from penzai_shard.training.train_state import TrainState

_REST = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """A train step that a layout is looked for; hashed by identity.

    Attributes:
        model: The model, with structs in place of arrays.
        loss_fn: As for ``build_train_step_fn``.
        optimizer: An optimizer of optax.
        inputs: What the loss function gets besides, by name, for a whole batch: trees of named
            arrays of structs.
        batch_axis: The logical axis of the examples in the inputs.
        step_options: What ``Layout.build`` gets for this step.
        blocks: The layers that a layout edits, as ``Layout.blocks``; () if it knows none.
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
        dims = [zip(x.names or (), x.shape, strict=True) for x in leaves_of(self.inputs)]
        return {name: size for own in dims for name, size in own if name is not None}

    @property
    def words(self) -> str:
        """The inputs for people: ``"batch 256 x seq 2,048"``."""
        dims = [zip(x.names or (), x.shape, strict=True) for x in leaves_of(self.inputs)]
        texts = [" x ".join(f"{name or ''} {n:,}".strip() for name, n in own) for own in dims]
        return ", ".join(dict.fromkeys(filter(None, texts)))

    def as_given(self, inputs: Any) -> Any:
        """Inputs as the loss function gets them: plain arrays, or named ones."""
        # A number is the dimension of the examples of plain arrays.
        return without_names(inputs) if self.step_options["batch_axis"] == 0 else inputs

    def build(self, candidate: Any, *, model: Any = None) -> tuple[Any, TrainState, dict[str, Any]]:
        """The step in a layout, and what it is called with, as structs on the mesh.

        Args:
            candidate: The layout, with the mesh and the number of microbatches.
            model: A model in place of the workload's, such as one with fewer blocks.

        Returns:
            Step, state and inputs, for ``step(state, **inputs)``.

        Raises:
            PlanError, MeshError, RuleTypeError: As ``Layout.build``.
        """
        model = self.model if model is None else model
        options = {"loss_fn": self.loss_fn, "optimizer": self.optimizer, **self.step_options}
        options |= {"rng": jax.random.key(0), "mesh": candidate.mesh}
        options |= {"accumulate_steps": candidate.microbatches}
        state, step = candidate.layout.build(lambda shapes: shapes, model, **options)
        inputs = candidate.layout.shard_batch(self.inputs, candidate.mesh)
        return step, state, self.as_given(inputs)


def read_workload(
    model: Any,
    loss_fn: Any,
    optimizer: Any,
    batch: Any,
    seq: Any = None,
    plain_arrays: bool = False,
    names: Mapping[str, Any] | None = None,
    blocks: Any = None,
    problems: Problems | None = None,
) -> Workload:
    """Reads the arguments of ``choose_layout`` that say what is computed.

    Args:
        model: The model, concrete or abstract, whose arrays have names.
        loss_fn: As for ``build_train_step_fn``.
        optimizer: An optimizer of optax.
        batch: The number of examples, each input being tokens; or the inputs of the loss function
            by name: arrays or structs, all of them named, or plain ones with the batch in front.
        seq: With a number, the number of tokens of an example.
        plain_arrays: As for ``TrainState.initial_state``.
        names: As ``Layout.names``.
        blocks: As ``Layout.blocks``.
        problems: What is wrong in other arguments.

    Raises:
        RuleTypeError: They cannot be read; all that is wrong is in it.

    >>> import optax
    >>> from penzai import pz
    >>> def loss_fn(model, rng, state, x):
    ...     return (model["w"] * x).unwrap("batch", "embed").sum(), state, {}
    >>> model = {"w": pz.nx.ones({"embed": 4})}
    >>> read_workload(model, loss_fn, optax.sgd(0.1), {"x": pz.nx.ones({"batch": 8})}).words
    'batch 8'
    """
    check_tree("choose_layout", model)
    problems = Problems("choose_layout cannot read its workload:") if problems is None else problems
    leaves, form = flatten(model)
    if isinstance(model, TrainState) or not leaves:
        what = f"a {type(model).__name__} is no model with arrays"
        problems.add("model", what, "Write abstract_model(build, ...), or state.model.")
    try:
        inspect.signature(loss_fn).bind_partial(**dict.fromkeys(RESERVED))
    except (TypeError, ValueError) as error:
        what = f"it is called with {', '.join(RESERVED)}: {error}"
        problems.add("loss_fn", what, "Write def loss_fn(model, rng, state, tokens).")
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        what = f"{reprlib.repr(optimizer)} is no optimizer of optax"
        problems.add("optimizer", what, "Write optimizer=optax.adamw(1e-3).")
    problems.raise_if_any(RuleTypeError)

    model = form.fill([_make_struct(leaf) for leaf in leaves])
    blocks = _read_blocks(model, blocks, names or {}, problems)
    names = dict(names) if isinstance(names, Mapping) else {}
    batch_axes, seq_axes = (axes_of_role(role, names) or (role,) for role in ("batch", "seq"))
    read = _read_inputs(loss_fn, batch, seq, (batch_axes[0], seq_axes[0]), problems)
    problems.raise_if_any(RuleTypeError)
    given, structure = flatten(read)
    inputs = structure.fill([_make_struct(leaf, batch_axes[0]) for leaf in given])
    is_plain = not any(leaf.names for leaf in given)
    if not isinstance(batch, Mapping):
        is_plain = not _has_names_in_loss(model, optimizer, plain_arrays)
    elif not is_plain and any(leaf.shape and not leaf.names for leaf in given):
        problems.add("batch", "some of it has names, some has none", "Name all, or none.")
    present = {name for leaf in leaves_of(inputs) for name in leaf.names or ()} - {None}
    batch_axis = next((name for name in batch_axes if name in present), None)
    if batch_axis is None:
        known = sorted(map(str, present))
        what = f"no input has the logical axis {batch_axes[0]!r}; they have {known}"
        problems.add("batch", what, "Write names={'batch': 'examples'}, with what they call it.")
    _check_names(leaves, problems)
    problems.raise_if_any(RuleTypeError)
    options = {"batch_axis": 0 if is_plain else batch_axis, "plain_arrays": plain_arrays or None}
    return Workload(model, loss_fn, optimizer, inputs, batch_axis, options, blocks, names)


def _read_blocks(model: Any, blocks: Any, names: Any, problems: Problems) -> Any:
    """The layers that a layout edits; () if it knows none."""
    try:
        # Without blocks nothing can be computed again.
        policy = None if blocks else "dots"
        layout = Layout.data_parallel(rematerialise=policy, blocks=blocks, names=names)
        layout.recipe(model, make_mesh({"data": 1}, abstract=True)).apply(model)
    except ShardingError as error:
        if [problem.path for problem in error.problems] == ["rematerialise"]:
            return ()
        problems.extend(error.problems)
    return blocks


def _make_struct(leaf: Leaf, batch_axis: Any = None) -> Any:
    """A leaf as a struct; the first dimension of a plain input is the batch."""
    if not is_array(leaf.value):
        return leaf.value  # A number, which is a setting.
    # Where an array lies now does not matter.
    struct = jax.ShapeDtypeStruct(leaf.shape, device_dtype(leaf.dtype))
    if batch_axis is None or leaf.names is not None or not leaf.shape:
        return struct
    return make_named(struct, (batch_axis, *(None,) * (len(leaf.shape) - 1)))


def _has_names_in_loss(model: Any, optimizer: Any, plain_arrays: bool) -> bool:
    """Whether a loss function gets the model with Penzai's named arrays."""
    arrays, template = split_model(model, optimizer, None, plain_arrays or None)
    bound = template.bind_for_loss({k: x for kind in arrays.values() for k, x in kind.items()})
    is_named: Any = pz.nx.is_namedarray
    return any(map(is_named, jax.tree.leaves(bound, is_leaf=is_named)))


def _read_inputs(
    loss_fn: Any, batch: Any, seq: Any, token_axes: Any, problems: Problems
) -> dict[str, Any]:
    """The inputs of the loss function by name; tokens of a number have names."""
    signature = inspect.signature(loss_fn)
    others = [x for name, x in signature.parameters.items() if name not in RESERVED]
    needed = [x.name for x in others if x.default is x.empty and x.kind not in _REST]
    example = ", ".join(f"{name!r}: jax.ShapeDtypeStruct((256, 2048), 'int32')" for name in needed)
    fix = f"Write batch=256, seq=2048, or batch={{{example}}}."
    if not isinstance(batch, Mapping):
        for path, count in (("batch", batch), ("seq", seq)):
            if not _are_counts([count]):
                problems.add(path, f"{reprlib.repr(count)} is no positive number", fix)
        if len(problems):
            return {}
        tokens = jax.ShapeDtypeStruct((int(batch), int(seq)), "int32")
        return dict.fromkeys(needed, make_named(tokens, token_axes))
    if seq is not None:
        problems.add("seq", "it is for a batch that is a number", "Leave it out.")
    try:
        signature.bind(**dict.fromkeys(RESERVED), **batch)
    except TypeError as error:
        problems.add("batch", f"loss_fn cannot be called with it: {error}", fix)
    for name, value in batch.items():
        leaves, structure = flatten(value)
        if structure.statics or not all(is_array(leaf.value) for leaf in leaves):
            problems.add("batch", f"{name!r} is {reprlib.repr(value)}, no array", fix)
    return dict(batch)


def _check_names(leaves: Any, problems: Problems) -> None:
    """Refuses arrays without names, with a line that gives them some."""
    unnamed = [x for x in leaves if x.names is None and x.shape and is_array(x.value)]
    # What infer_names did not decide, for instance. None is for a dimension that stays whole.
    patterns = {leaf.path: (None,) * len(leaf.shape) for leaf in unnamed}
    fix = f"Write model = penzai_shard.name_axes(model, {patterns})."
    if not any(leaf.names for leaf in leaves):
        fix = (
            "Write model = penzai_shard.name_axes(model, penzai_shard.infer_names(f, model, x)), "
            "where f(model, x) gives the logits; a dictionary then needs plain_arrays=True."
        )
    for leaf in unnamed:
        problems.add(leaf.path, "it has no logical axes", fix, "unnamed")


# What is tried


def read_options(
    compiled: Any, microbatches: Any, rematerialise: Any, keep: Any, problems: Problems
) -> dict[str, Any]:
    """Reads the arguments of ``choose_layout`` that say what is tried.

    Args:
        compiled: About how many layouts are compiled.
        microbatches: The numbers of microbatches to try.
        rematerialise: The policies to try.
        keep: What is decided: logical axis to mesh axis, to several, or to None.
        problems: Gets what is wrong.

    Returns:
        The options of ``make_candidates``.
    """
    options = {"microbatches": microbatches, "rematerialise": rematerialise, "keep": keep}
    kept = keep.values() if isinstance(keep, Mapping) else ()
    are_axes = all(isinstance(over, str | list | tuple | None) for over in kept)
    are_policies = isinstance(rematerialise, list | tuple) and len(rematerialise) > 0
    are_kept, example = isinstance(keep, Mapping | None) and are_axes, {"mlp": "model", "seq": None}
    checks = {
        "compiled": (compiled, _are_counts([compiled]), "compiled=12"),
        "microbatches": (microbatches, _are_counts(microbatches), "microbatches=(1, 2)"),
        "rematerialise": (rematerialise, are_policies, "rematerialise=(None, 'dots')"),
        "keep": (keep, are_kept, f"keep={example}"),
    }
    for name, (value, is_right, fix) in checks.items():
        if not is_right:
            problems.add(name, f"it cannot be {reprlib.repr(value)}", f"Write {fix}.")
    return options


def _are_counts(given: Any) -> bool:
    are_numbers = isinstance(given, Sequence) and len(given) > 0
    return are_numbers and all(isinstance(n, int | np.integer) and n > 0 for n in given)
