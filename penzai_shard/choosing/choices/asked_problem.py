"""The training step that ``choose_layout`` is asked about, read from its arguments."""

import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz

from penzai_shard.array_kinds import is_array_like
from penzai_shard.choosing.training_problem import TrainingProblem
from penzai_shard.equinox_modules import are_arrays, leaves_in_modules
from penzai_shard.errors import RuleTypeError, raise_all
from penzai_shard.layouts.model_roles import Names, groups_of
from penzai_shard.named_arrays import named_array
from penzai_shard.named_leaves import NamedLeaf, is_named_unit, leaves_of
from penzai_shard.named_nodes import is_named_node, named_like, node_data, node_names
from penzai_shard.placement import described_array
from penzai_shard.planning import without_names
from penzai_shard.training import TrainState
from penzai_shard.training.loss_contract import CONTRACT, RESERVED, note_plain_arrays
from penzai_shard.tree_arguments import refuse_builder

TOKENS = ("batch", "seq")
"""The logical axes of inputs of which sizes alone are given."""


@dataclasses.dataclass(frozen=True)
class AskedProblem:
    """A training step that a layout is looked for.

    Attributes:
        problem: The step, abstract, all of whose inputs have names.
        step_options: What a train step of the caller's own is to be given for it to be this one.
        words: Its inputs in words.
    """

    problem: TrainingProblem
    step_options: Mapping[str, Any]
    words: str

    @property
    def sizes(self) -> dict[Any, int]:
        """The lengths of the logical axes of the inputs."""
        return {
            name: size
            for leaf in leaves_of(dict(self.problem.inputs))
            for name, size in zip(leaf.names or (), leaf.shape, strict=False)
            if name is not None
        }


def read_problem(
    model: Any,
    loss_fn: Any,
    optimizer: Any,
    batch: Any,
    seq: Any,
    plain_arrays: bool,
    names: Names | None = None,
) -> AskedProblem:
    """Reads the arguments of ``choose_layout`` that say what is computed.

    Raises:
        RuleTypeError: They cannot be read; all that is wrong at once.
    """
    refuse_builder("choose_layout", model)
    problems = [*_unfit_functions(model, loss_fn, optimizer)]
    inputs: dict[str, Any] = {}
    if not problems:
        inputs, problems = _read_inputs(loss_fn, batch, seq)
    raise_all(RuleTypeError, "choose_layout cannot read what it was given:", problems)
    _refuse_unnamed(model, inputs)
    abstract = _abstract(pz.freeze_variables(model))
    is_given_plain = plain_arrays or not _computes_with_names(model)
    from_numbers = not isinstance(batch, Mapping)
    plain = frozenset(
        name
        for name, value in inputs.items()
        if (is_given_plain if from_numbers else not is_named_node(value))
    )
    named = {name: _named(value) for name, value in inputs.items()}
    called = _with_plain_arrays(loss_fn, plain, plain_arrays)
    batch_axis = _batch_axis(named, names or {})
    options: dict[str, Any] = {"batch_axis": batch_axis} if batch_axis != "batch" else {}
    if plain:
        options["batch_axis"] = 0
    if plain_arrays:
        options["plain_arrays"] = True
    problem = TrainingProblem(abstract, called, optimizer, named, batch_axis)
    return AskedProblem(problem, options, _words(named))


def _unfit_functions(model: Any, loss_fn: Any, optimizer: Any) -> list[str]:
    problems = []
    if isinstance(model, TrainState):
        problems.append(
            "model: is a train state, whose parameters are laid out already. Give the model "
            "that it was made of, such as abstract_model(build_model, ...)."
        )
    if not callable(loss_fn):
        problems.append(f"loss_fn: is {_kind(loss_fn)}, and must be {CONTRACT}.")
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        problems.append(
            f"optimizer: is {_kind(optimizer)}, and must be one of optax: optax.adamw(1e-3)."
        )
    return problems


def _kind(value: Any) -> str:
    if value is None:
        return "not given"
    name = type(value).__name__
    return f"an {name}" if name[0] in "AEIOUaeiou" else f"a {name}"


def _read_inputs(
    loss_fn: Callable[..., Any], batch: Any, seq: Any
) -> tuple[dict[str, Any], list[str]]:
    """The inputs of the loss function, and what is wrong with what was said of them."""
    names, takes_any = _inputs_of(loss_fn)
    if isinstance(batch, Mapping):
        if batch and TOKENS[0] not in names and all(name in TOKENS for name in batch):
            sizes = ", ".join(f"{name}={size!r:.80}" for name, size in batch.items())
            return {}, [f"batch: is {batch!r:.80}, sizes and no inputs. Write {sizes}."]
        problems = [
            f"batch: has {name!r}, and loss_fn takes {_listed(names)}."
            for name in batch
            if name not in names and not takes_any
        ]
        problems += [
            f"batch: loss_fn takes {name!r} too, which is not in it."
            for name in sorted(names - batch.keys())
        ]
        # One that is called otherwise has other inputs than it seems to have.
        problems = _unlike_the_signature(loss_fn, problems) or problems
        if seq is not None:
            problems.append("seq: is for a batch that is given as a number. Leave it out.")
        problems += [
            f"batch: {name!r} is {_kind(leaf)}, and must be an array or a jax.ShapeDtypeStruct."
            for name, value in batch.items()
            for leaf in jax.tree_util.tree_leaves(value)
            if not is_array_like(leaf)
        ]
        problems += [
            f"batch: {name!r} is the number {value!r}, and must be an array or a struct. Write "
            f"batch={value!r}, seq=2048 for tokens, or {name!r}: jax.ShapeDtypeStruct(({value!r}, "
            "2048), 'int32')."
            for name, value in batch.items()
            if isinstance(value, numbers.Number)
        ]
        problems += [
            f"batch: {name!r} is {_kind(value)} of numbers, and must be an array or a struct. Put "
            "numpy.array(...) around it."
            for name, value in batch.items()
            if isinstance(value, list | tuple) and not _is_shape(value) and _has_numbers(value)
        ]
        problems += [
            f"batch: {name!r} is a shape, and must be an array or a struct. Write "
            f"jax.ShapeDtypeStruct({value}, 'int32')."
            for name, value in batch.items()
            if _is_shape(value)
        ]
        return dict(batch), problems
    if names and _is_input(batch):
        written = f"jax.ShapeDtypeStruct({batch}, 'int32')" if _is_shape(batch) else "..."
        return {}, [
            "batch: is one input, and must be a number or the inputs by name. Write "
            f"batch={{{', '.join(f'{name!r}: {written}' for name in sorted(names))}}}."
        ]
    problems = [
        f"{argument}: is {given!r}, and must be a positive number"
        f"{', or a mapping of arrays' if argument == 'batch' else ''}. Write "
        f"{argument}={_count_meant(given) or example}."
        for argument, given, example in (("batch", batch, 32), ("seq", seq, 2048))
        if not _is_count(given)
    ]
    if not names:
        problems.append(
            f"loss_fn: takes no inputs by name, {inspect.signature(loss_fn)}, so that these have "
            "to be given: batch={'tokens': jax.ShapeDtypeStruct((32, 2048), 'int32')}."
        )
    if problems:
        return {}, problems
    tokens = jax.ShapeDtypeStruct((int(batch), int(seq)), jnp.int32)
    return {name: named_array(tokens, TOKENS) for name in sorted(names)}, []


def _unlike_the_signature(loss_fn: Callable[..., Any], problems: list[str]) -> list[str]:
    """Says how a loss function is called, if inputs do not fit one that does not take that."""
    parameters = inspect.signature(loss_fn).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    missing = [name for name in RESERVED if name not in parameters]
    if not problems or takes_any or not missing:
        return []
    return [
        f"loss_fn: has no parameter {' and none '.join(map(repr, missing))}. It is called by "
        f"keyword: {CONTRACT}."
    ]


def _inputs_of(loss_fn: Callable[..., Any]) -> tuple[set[str], bool]:
    """The inputs that a loss function takes by name, and whether it takes any other too."""
    parameters = inspect.signature(loss_fn).parameters.values()
    kinds = inspect.Parameter
    names = {
        parameter.name
        for parameter in parameters
        if parameter.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        and parameter.default is kinds.empty
        and parameter.name not in RESERVED
    }
    optional = any(
        parameter.kind is kinds.VAR_KEYWORD or parameter.default is not kinds.empty
        for parameter in parameters
    )
    return names, optional


def _is_shape(given: Any) -> bool:
    return isinstance(given, tuple) and len(given) > 1 and all(map(_is_count, given))


def _has_numbers(given: Any) -> bool:
    return any(isinstance(leaf, numbers.Number) for leaf in jax.tree_util.tree_leaves(given))


def _is_input(given: Any) -> bool:
    is_array = is_named_node(given) or is_array_like(given)
    return _is_shape(given) or (is_array and not isinstance(given, int | float))


def _is_count(given: Any) -> bool:
    return isinstance(given, numbers.Integral) and not isinstance(given, bool) and int(given) > 0


def _count_meant(given: Any) -> int | None:
    """The number that a text or another kind of number stands for.

    >>> _count_meant("16"), _count_meant(16.0), _count_meant(0.5), _count_meant(None)
    (16, 16, None, None)
    """
    if isinstance(given, str):
        given = int(given) if given.isdecimal() else None
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    is_whole = is_number and given >= 1 and given == given // 1
    return int(given) if is_whole else None


def _listed(names: set[str]) -> str:
    return " and ".join(map(repr, sorted(names))) or "no inputs"


def _refuse_unnamed(model: Any, inputs: Mapping[str, Any]) -> None:
    """Refuses a model of which no array has names, with the lines that give it some."""
    arrays = [leaf for leaf in leaves_of(model) if leaf.shape and leaf.dtype is not None]
    unnamed = [leaf for leaf in arrays if leaf.names is None]
    if not arrays:
        raise RuleTypeError(
            "choose_layout: the model has no arrays, so that there is nothing to lay out. Give one "
            "with its parameters, such as abstract_model(build_model, ...)."
        )
    if not unnamed:
        return
    # Where others have names, what has none may be what was not decided when they were inferred.
    fix = (
        f"Infer them from the program of the loss, and look at them:\n\n{_lines_that_infer(inputs)}"
        if len(unnamed) == len(arrays)
        else "Name what infer_names did not decide; None is for a dimension that stays whole:\n\n"
        f"{_lines_that_name(unnamed)}"
    )
    raise RuleTypeError(
        "choose_layout maps logical axes to mesh axes, and arrays of this model have none. "
        f"{fix}\n  These have none:",
        [f"{leaf.path}: shape {leaf.shape}." for leaf in unnamed],
    )


def _lines_that_name(unnamed: Sequence[NamedLeaf]) -> str:
    """Code that says of arrays that they stay whole, to be edited or pasted."""
    by_path = {leaf.path: (None,) * len(leaf.shape) for leaf in unnamed}
    entries = "".join(f"        {path!r}: {names},\n" for path, names in by_path.items())
    return f"    model = penzai_shard.name_axes(model, {{\n{entries}    }})\n"


def _lines_that_infer(inputs: Mapping[str, Any]) -> str:
    """Code that gives a model names, to be pasted."""
    structs = [described_array(node_data(value), None) for value in inputs.values()]
    calls = [f"jax.ShapeDtypeStruct({struct.shape}, {str(struct.dtype)!r})" for struct in structs]
    names = [node_names(_named(value)) for value in inputs.values()]
    listed = ", ".join(inputs)
    keywords = ", ".join(f"{name}={name}" for name in inputs)
    lines = [
        "names = penzai_shard.infer_names(",
        f"    lambda model, {listed}: loss_fn(model=model, rng=jax.random.key(0), state=None, "
        f"{keywords})[0],",
        "    model,",
        *(f"    {call}," for call in calls),
        f"    input_names={names!r},",
        ")",
        "print(names)  # overrides={'path': ('name', None)} decides what this leaves open",
        "model = penzai_shard.name_axes(model, names)",
    ]
    return "".join(f"    {line}\n" for line in lines)


def _abstract(tree: Any) -> Any:
    """A tree with structs in place of its arrays."""
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    structs = [
        described_array(leaf, None) if is_array and hasattr(leaf, "shape") else leaf
        for leaf, is_array in zip(leaves, are_arrays(tree), strict=True)
    ]
    return jax.tree_util.tree_unflatten(treedef, structs)


def _computes_with_names(model: Any) -> bool:
    """Whether a loss function gets the model with Penzai's named arrays."""
    nodes = jax.tree_util.tree_leaves(model, is_leaf=is_named_unit)
    inside = leaves_in_modules(model, is_named_unit)
    return any(
        not in_module and is_named_unit(node) and not _is_foreign(node)
        for node, in_module in zip(nodes, inside, strict=True)
    )


def _is_foreign(node: Any) -> bool:
    return is_named_node(node) and not pz.nx.is_namedarray(node)


def _named(value: Any) -> Any:
    """An input as named arrays of structs; the first dimension of a plain one is the batch."""

    def one(node: Any) -> Any:
        struct = described_array(node_data(node), None)
        if is_named_node(node):
            return named_like(node, struct)
        rank = len(struct.shape)
        return named_array(struct, ("batch", *(None,) * (rank - 1))[:rank])

    return jax.tree_util.tree_map(one, value, is_leaf=is_named_node)


def _batch_axis(inputs: Mapping[str, Any], names: Names) -> str:
    """What the inputs call the axis of the batch."""
    called = [n for group in groups_of("batch", names) for n in group if isinstance(n, str)]
    present = {name for leaf in leaves_of(dict(inputs)) for name in leaf.names or ()}
    return next((name for name in called if name in present), "batch")


def _with_plain_arrays(
    loss_fn: Callable[..., Any], plain: frozenset[str], plain_model: bool
) -> Callable[..., Any]:
    """The loss function for named inputs, which gives it those plain that it takes so."""
    if not plain and not plain_model:
        return loss_fn

    @functools.wraps(loss_fn)
    def called(*, model: Any, rng: Any, state: Any, **inputs: Any) -> Any:
        given = {
            name: without_names(value) if name in plain else value for name, value in inputs.items()
        }
        used = without_names(model) if plain_model else model
        try:
            return loss_fn(model=used, rng=rng, state=state, **given)
        except Exception as error:
            if plain_model:
                note_plain_arrays(error, given)
            raise

    return called


def _words(inputs: Mapping[str, Any]) -> str:
    shapes = []
    for leaf in leaves_of(dict(inputs)):
        names = [str(name) if name is not None else "" for name in leaf.names or ()]
        sizes = [f"{name} {size:,}".strip() for name, size in zip(names, leaf.shape, strict=True)]
        shapes.append(" x ".join(sizes))
    return ", ".join(dict.fromkeys(filter(None, shapes)))
