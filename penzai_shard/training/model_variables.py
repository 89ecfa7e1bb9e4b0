"""Taking the variables out of a model, and putting values back in.

A train state keeps a model as three things: what is left of the model when its variables are
gone, the variables' values in plain dictionaries by name, and a table that says what each
variable was. Three kinds of models are read: Penzai models, models of ``penzai.deprecated.v1``,
and trees of bare weights, in which every leaf counts as a parameter named by its path.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.core.variables import (
    AbstractVariable,
    AbstractVariableSlot,
    AbstractVariableValue,
    ParameterSlot,
    StateVariableSlot,
)

from penzai_shard.array_kinds import is_array_like
from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.training.variable_copies import is_copy
from penzai_shard.tree_paths import path_text

TrainablePredicate = Callable[[Any], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class VariableEntry:
    """What one variable of a model was, without its value.

    Attributes:
        name: Its key in ``params`` or ``state_vars``.
        kind: ``"parameter"`` or ``"state"``.
        template: The frozen variable, or v1 parameter, with ``None`` for its value; ``None``
            itself for a bare weight.
        mutable: Whether the model held it as a mutable variable.
        trainable: Whether the optimizer changes it.
    """

    name: str
    kind: str
    template: Any
    mutable: bool
    trainable: bool

    def slot(self) -> AbstractVariableSlot:
        """The placeholder that stands in the model where the variable was."""
        slot_type = ParameterSlot if self.kind == "parameter" else StateVariableSlot
        return slot_type(label=self.name)

    def frozen(self, value: Any) -> Any:
        """The frozen variable with a value."""
        if self.template is None:
            return value
        return dataclasses.replace(self.template, value=value)

    def thawed(self, value: Any) -> Any:
        """The variable as the model held it: a new mutable one if it was mutable."""
        frozen = self.frozen(value)
        if not self.mutable or not all(_is_array(leaf) for leaf in jax.tree.leaves(value)):
            # Shape structs and shardings cannot be put into a mutable variable.
            return frozen
        variable = frozen.unfreeze_as_copy()
        variable.metadata = dict(variable.metadata)
        return variable

    def same_as(self, other: "VariableEntry") -> bool:
        """Whether both describe the same variable, labels that Penzai made up left aside."""
        if (self.name, self.kind, self.mutable, self.trainable) != (
            other.name,
            other.kind,
            other.mutable,
            other.trainable,
        ):
            return False
        mine, theirs = self.template, other.template
        if type(mine) is not type(theirs):
            return False
        return _same(getattr(mine, "metadata", None), getattr(theirs, "metadata", None))


@jax.tree_util.register_static
class StaticLeaf:
    """Stands in a model for a leaf that is not an array, such as a function: static data.

    >>> jax.tree.leaves(StaticLeaf(max)), StaticLeaf(max) == StaticLeaf(max)
    ([], True)
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticLeaf) or type(self.value) is not type(other.value):
            return False
        return _same(self.value, other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return f"StaticLeaf({self.value!r})"


class VariableTable:
    """The variables that were taken out of one model, in the model's order.

    It is static data of a train state: comparable, without arrays, and equal for two models of
    the same make even where Penzai labelled their state variables by object identity.
    """

    def __init__(self, entries: tuple[VariableEntry, ...]) -> None:
        self.entries = entries
        self.parameters = tuple(e for e in entries if e.kind == "parameter")
        self.states = tuple(e for e in entries if e.kind == "state")
        self.trainable_names = frozenset(e.name for e in self.parameters if e.trainable)
        self._hash = hash(tuple((e.name, e.kind, e.trainable) for e in entries))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, VariableTable) or len(self.entries) != len(other.entries):
            return False
        return all(a.same_as(b) for a, b in zip(self.entries, other.entries, strict=True))

    def __hash__(self) -> int:
        return self._hash

    def counts(self) -> str:
        """How many variables there are of each kind, in words."""
        frozen = len(self.parameters) - len(self.trainable_names)
        return (
            f"{len(self.trainable_names)} trainable, {frozen} frozen, "
            f"{len(self.states)} state variables"
        )

    def __repr__(self) -> str:
        return f"VariableTable({self.counts()})"

    def bind(
        self,
        unbound_model: Any,
        params: Mapping[str, Any],
        state_vars: Mapping[str, Any],
    ) -> Any:
        """Puts values back, as new variables of the kind that the model held.

        Args:
            unbound_model: What was left of the model.
            params: Value of every parameter by name.
            state_vars: Value of every state variable by name.

        Returns:
            A model that shares no mutable object with any other.
        """
        values = {
            e.slot(): e.thawed((params if e.kind == "parameter" else state_vars)[e.name])
            for e in self.entries
        }
        return fill_slots(unbound_model, values)

    def bind_for_loss(
        self,
        unbound_model: Any,
        params: Mapping[str, Any],
        state_vars: Mapping[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        """Puts values back for one evaluation of a loss.

        Parameters are bound frozen, so that a loss which assigns to one fails instead of losing
        the assignment; state variables are bound mutable and returned, to read their new values.

        Args:
            unbound_model: What was left of the model.
            params: Value of every parameter by name.
            state_vars: Value of every state variable by name.

        Returns:
            The model, and its mutable state variables by name.
        """
        values: dict[AbstractVariableSlot, Any] = {
            e.slot(): e.frozen(params[e.name]) for e in self.parameters
        }
        variables = {}
        for entry in self.states:
            bound = entry.thawed(state_vars[entry.name])
            values[entry.slot()] = bound
            variables[entry.name] = bound
        return fill_slots(unbound_model, values), variables


def fill_slots(tree: Any, values: Mapping[AbstractVariableSlot, Any]) -> Any:
    """Replaces each slot that has a value, and puts leaves that are not arrays back.

    >>> fill_slots([ParameterSlot(label="w"), 2], {ParameterSlot(label="w"): 1})
    [1, 2]
    """

    def fill(leaf: Any) -> Any:
        if isinstance(leaf, StaticLeaf):
            return leaf.value
        return values.get(leaf, leaf) if isinstance(leaf, AbstractVariableSlot) else leaf

    is_leaf = (AbstractVariableSlot, StaticLeaf)
    return jax.tree.map(fill, tree, is_leaf=lambda x: isinstance(x, is_leaf))


def split_model(
    model: Any, trainable: TrainablePredicate | None = None
) -> tuple[Any, dict[str, Any], dict[str, Any], VariableTable]:
    """Takes the variables out of a model.

    Args:
        model: A Penzai model, a v1 model with initialised parameters, or a tree of weights.
        trainable: Decides which parameters the optimizer changes. It gets the parameter as the
            model holds it: a ``pz.Parameter``, a v1 parameter, or, for a tree of weights, a
            ``pz.ParameterValue`` labelled with the path. By default a parameter is trainable
            unless it is frozen (a ``pz.ParameterValue``, as ``pz.freeze_params`` gives; v1: a
            ``FrozenParameter``) or its metadata says ``{"trainable": False}``; bare weights are
            if they are floating. Parameters of shape structs, which can only be frozen ones,
            count as if they were not.

    Returns:
        The model with slots for variables, parameter values by name, state variables' values by
        name, and the table to put them back with.

    Raises:
        ShardingError: The model is unbound or uninitialised, two variables have the same name,
            a parameter that should be trained is not floating, or by default nothing
            would be trained.

    >>> unbound, params, state_vars, table = split_model({"layer": {"w": jnp.ones(3)}})
    >>> list(params), table.trainable_names
    (['layer/w'], frozenset({'layer/w'}))
    """
    v1_parameters, v1_frozen, v1_unready = _v1_types()
    is_variable = (
        AbstractVariable,
        AbstractVariableValue,
        AbstractVariableSlot,
        *v1_parameters,
        *v1_frozen,
        *v1_unready,
    )
    flat, treedef = jax.tree_util.tree_flatten_with_path(
        model, is_leaf=lambda x: isinstance(x, is_variable)
    )
    if not any(isinstance(leaf, is_variable) for _, leaf in flat):
        return _split_weights(model, trainable)

    problems: list[str] = []
    entries: dict[str, VariableEntry] = {}
    seen: dict[str, Any] = {}
    params: dict[str, Any] = {}
    state_vars: dict[str, Any] = {}
    names_by_identity: dict[int, str] = {}
    leaves: list[Any] = []
    for key_path, leaf in flat:
        path = path_text(key_path)
        if not isinstance(leaf, is_variable):
            leaves.append(leaf if is_array_like(leaf) else StaticLeaf(leaf))
            continue
        if isinstance(leaf, (AbstractVariableSlot, *v1_unready)):
            problems.append(
                f"{path}: a {type(leaf).__name__} has no value. "
                "Bind the model's variables or initialise its parameters first."
            )
            continue
        if id(leaf) in names_by_identity:
            leaves.append(entries[names_by_identity[id(leaf)]].slot())
            continue
        entry = _entry(leaf, path, trainable, v1_frozen)
        if entry is None:
            problems.append(
                f"{path}: a {type(leaf).__name__} is neither a parameter nor a state variable. "
                "Take it out of the model with pz.unbind_variables."
            )
            continue
        if entry.name in entries:
            if is_copy(leaf, seen[entry.name]):
                leaves.append(entry.slot())
            else:
                problems.append(
                    f"{path}: another variable of the model is named {entry.name!r} too. "
                    "Give each its own label, or use the same object in both places."
                )
            continue
        if entry.trainable and not _is_floating(leaf.value):
            problems.append(
                f"{entry.name}: a trainable parameter must be floating. "
                'Give it metadata={"trainable": False}, or leave it out with trainable=.'
            )
        names_by_identity[id(leaf)] = entry.name
        entries[entry.name] = entry
        seen[entry.name] = leaf
        (params if entry.kind == "parameter" else state_vars)[entry.name] = leaf.value
        leaves.append(entry.slot())
    raise_all(ShardingError, "cannot make a train state of this model:", problems)
    if trainable is None:
        _refuse_untrained(entries.values())
    unbound = jax.tree.unflatten(treedef, leaves)
    return unbound, params, state_vars, VariableTable(tuple(entries.values()))


def _split_weights(
    model: Any, trainable: TrainablePredicate | None
) -> tuple[Any, dict[str, Any], dict[str, Any], VariableTable]:
    """Takes every leaf of a tree of bare weights out as a parameter named by its path."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(model, is_leaf=pz.nx.is_namedarray)
    params: dict[str, Any] = {}
    entries = []
    problems = []
    leaves: list[Any] = []
    for key_path, leaf in flat:
        name = path_text(key_path)
        if not pz.nx.is_namedarray(leaf) and not is_array_like(leaf):
            leaves.append(StaticLeaf(leaf))
            continue
        if name in params:
            problems.append(
                f"{name}: two weights have this path. Rename one of the keys that contain '/'."
            )
            continue
        floating = _is_floating(leaf)
        wanted = floating
        if trainable is not None:
            wanted = _asked(trainable, pz.ParameterValue(label=name, value=leaf), name)
        if wanted and not floating:
            problems.append(f"{name}: a trainable weight must be floating. Exclude it.")
        params[name] = leaf
        entries.append(VariableEntry(name, "parameter", None, False, wanted))
        leaves.append(entries[-1].slot())
    raise_all(ShardingError, "cannot make a train state of these weights:", problems)
    if trainable is None:
        _refuse_untrained(entries)
    unbound = jax.tree.unflatten(treedef, leaves)
    return unbound, params, {}, VariableTable(tuple(entries))


def _entry(
    variable: Any,
    path: str,
    trainable: TrainablePredicate | None,
    v1_frozen: tuple[type, ...],
) -> VariableEntry | None:
    """The table entry of one variable; None if it is of a kind that is not known."""
    mutable = isinstance(variable, AbstractVariable)
    frozen = variable.freeze() if mutable else variable
    template = dataclasses.replace(frozen, value=None) if hasattr(frozen, "value") else None
    if isinstance(frozen, pz.StateVariableValue):
        label = frozen.label
        # Labels that Penzai made up differ from run to run, paths do not.
        name = label if isinstance(label, str) else (path or "state")
        return VariableEntry(name, "state", template, mutable, False)
    if isinstance(frozen, pz.ParameterValue):
        name = frozen.label if isinstance(frozen.label, str) else str(frozen.label)
        default = bool(frozen.metadata.get("trainable", True))
        # A shape struct cannot be in a mutable variable, so of an abstract model it says nothing.
        default = default and (mutable or _is_abstract(frozen.value))
    elif isinstance(frozen, AbstractVariableValue):
        return None
    else:
        name = frozen.name
        default = not isinstance(frozen, v1_frozen)
    wanted = default if trainable is None else _asked(trainable, variable, name)
    return VariableEntry(name, "parameter", template, mutable, wanted)


def _asked(trainable: TrainablePredicate, parameter: Any, name: str) -> bool:
    try:
        return bool(trainable(parameter))
    except Exception as error:
        error.add_note(f"This was raised while trainable= was asked about the parameter {name!r}.")
        raise


def _refuse_untrained(entries: Iterable[VariableEntry]) -> None:
    """Raises if by default nothing of a model would be trained."""
    entries = list(entries)
    parameters = [entry for entry in entries if entry.kind == "parameter"]
    if any(entry.trainable for entry in parameters):
        return
    if not entries:
        raise ShardingError("nothing of this model would be trained: it has no parameters.")
    if not parameters:
        return  # A model of state variables alone.
    raise ShardingError(
        f"nothing of this model would be trained: all of its {len(parameters)} parameters are "
        f"frozen or not floating, such as {parameters[0].name!r}. Say which to train: "
        "TrainState.initial_state(..., trainable=lambda parameter: True)."
    )


def _v1_types() -> tuple[tuple[type, ...], tuple[type, ...], tuple[type, ...]]:
    """Parameter, frozen and uninitialised parameter types of v1, if it was ever imported."""
    module = sys.modules.get("penzai.deprecated.v1.nn.parameters")
    if module is None:
        return (), (), ()
    return (module.Parameter,), (module.FrozenParameter,), (module.UninitializedParameter,)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and not isinstance(leaf, jax.ShapeDtypeStruct)


def _is_abstract(value: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(value))


def _is_floating(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(jnp.issubdtype(_dtype_of(leaf), jnp.inexact) for leaf in leaves)


def _dtype_of(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def _same(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except (TypeError, ValueError):
        return False  # Metadata may hold arrays, whose comparison has no truth value.
