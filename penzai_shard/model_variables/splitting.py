"""Taking the variables out of a model, and putting values back in.

A train state keeps a model as three things: what is left of the model when its variables are
gone, the variables' values in plain dictionaries by name, and a table that says what each
variable was. Three kinds of models are read: Penzai models, models of Penzai's first API, and
trees of bare weights, in which every leaf counts as a parameter named by its path.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz
from penzai.core.variables import (
    AbstractVariable,
    AbstractVariableSlot,
    AbstractVariableValue,
)

from penzai_shard.array_kinds import is_abstract, is_array_like
from penzai_shard.equinox_modules import initial_states, is_module_value, leaves_in_modules
from penzai_shard.errors import ShardingError, raise_all
from penzai_shard.model_variables import first_api
from penzai_shard.model_variables.bound_model import BoundModel
from penzai_shard.model_variables.slots import StaticLeaf, fill_slots
from penzai_shard.model_variables.variable_collections import (
    BoundCollections,
    roles_of_collections,
)
from penzai_shard.model_variables.variable_entries import VariableEntry
from penzai_shard.model_variables.variables import (
    is_copy,
    is_parameter,
    variable_name,
    with_value,
)
from penzai_shard.named_nodes import is_named_node, value_in_node
from penzai_shard.readers import (
    ReadArray,
    is_foreign,
    leaves_in_shared_objects,
    not_a_tree,
    reader_of,
    with_repeats,
    without_bare_arrays,
    without_repeats,
)
from penzai_shard.tree_paths import join_paths, path_text

TrainablePredicate = Callable[[Any], bool]


@dataclasses.dataclass(frozen=True, repr=False)
class VariableTable:
    """The variables that were taken out of one model, in the model's order.

    It is static data of a train state: comparable, without arrays, and equal for two models of
    the same make even where Penzai labelled their state variables by object identity.

    Attributes:
        entries: What each variable was.
    """

    entries: tuple[VariableEntry, ...]

    @functools.cached_property
    def parameters(self) -> tuple[VariableEntry, ...]:
        """The entries of parameters."""
        return tuple(entry for entry in self.entries if entry.kind == "parameter")

    @functools.cached_property
    def states(self) -> tuple[VariableEntry, ...]:
        """The entries of state variables."""
        return tuple(entry for entry in self.entries if entry.kind == "state")

    @functools.cached_property
    def trainable_names(self) -> frozenset[str]:
        """The names of the parameters that the optimizer changes."""
        return frozenset(entry.name for entry in self.parameters if entry.trainable)

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
        self, unbound_model: Any, params: Mapping[str, Any], state_vars: Mapping[str, Any]
    ) -> Any:
        """Puts values back, as new variables of the kind that the model held.

        Args:
            unbound_model: What was left of the model.
            params: Value of every parameter by name.
            state_vars: Value of every state variable by name.

        Returns:
            A model that shares no mutable object with any other.
        """
        parameters = {e.slot(): e.thawed(params[e.name]) for e in self.parameters}
        states = {e.slot(): e.thawed(state_vars[e.name]) for e in self.states}
        return with_repeats(fill_slots(unbound_model, parameters | states))

    def bind_for_loss(
        self, unbound_model: Any, params: Mapping[str, Any], state_vars: Mapping[str, Any]
    ) -> BoundModel:
        """Puts values back for one evaluation of a loss.

        Parameters are bound frozen, so that a loss which assigns to one fails instead of losing
        the assignment; state variables are bound mutable, to read their new values. Variables of
        other libraries are all mutable, and what became of them is found out afterwards.
        Modules of Equinox get plain arrays, with which their code computes.

        Args:
            unbound_model: What was left of the model.
            params: Value of every parameter by name.
            state_vars: Value of every state variable by name.

        Returns:
            The model, with the means to read what the loss did to it.
        """
        parameters = {e.slot(): e.for_loss(params[e.name]) for e in self.parameters}
        variables = {e.name: e.thawed(state_vars[e.name]) for e in self.states}
        states = {e.slot(): variables[e.name] for e in self.states}
        model = with_repeats(fill_slots(unbound_model, parameters | states))
        if any(e.in_collection for e in self.entries):
            # One that the loss can assign to, whatever kind of mapping it is.
            model = dict(model)
            return BoundModel(model, {}, {}, BoundCollections(model, {**params, **state_vars}))
        own = {e.name: variables[e.name] for e in self.states if not is_foreign(e.template)}
        others = {
            e.name: params[e.name] if e.kind == "parameter" else state_vars[e.name]
            for e in self.entries
            if (reader := reader_of(e.template)) is not None and reader.shares
        }
        return BoundModel(model, own, others)


def held_by_templates(variables: Any) -> dict[str, ReadArray]:
    """What other libraries say of the arrays of a train state, which holds them by name.

    Args:
        variables: The table of the state's variables; of anything else nothing is known.

    Returns:
        What their readers say, without the data, by the path in the state.

    >>> held_by_templates(None)
    {}
    """
    fields = {"parameter": "params", "state": "state_vars"}
    entries = variables.entries if isinstance(variables, VariableTable) else ()
    return {
        join_paths(fields[entry.kind], entry.name): reader.read(entry.template)
        for entry in entries
        if (reader := reader_of(entry.template)) is not None
    }


def split_model(
    model: Any,
    trainable: TrainablePredicate | None = None,
    plain_arrays: bool | None = None,
) -> tuple[Any, dict[str, Any], dict[str, Any], VariableTable]:
    """Takes the variables out of a model.

    Args:
        model: A Penzai model of either API with initialised parameters, or a tree of weights; of
            Flax linen's variables those outside of ``params`` are state variables.
        trainable: Decides which parameters the optimizer changes. It gets the parameter as the
            model holds it: a ``pz.Parameter``, a parameter of the first API, or, for a tree of
            weights, a ``pz.ParameterValue`` labelled with the path. By default a parameter is
            trainable unless it is frozen (a ``pz.ParameterValue``, as ``pz.freeze_params`` gives;
            a ``FrozenParameter``) or its metadata says ``{"trainable": False}``; bare weights are
            if they are floating. Parameters of shape structs, which can only be frozen ones,
            count as if they were not.
        plain_arrays: Whether code of a tree of weights computes with plain arrays; None for Yes in
            modules of Equinox alone.

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
    kinds = (
        AbstractVariable,
        AbstractVariableValue,
        AbstractVariableSlot,
        *first_api.parameter_types(),
    )

    def is_unit(node: Any) -> bool:
        return isinstance(node, kinds)

    model = without_repeats(without_bare_arrays(model, "TrainState.initial_state"))
    splitting = _Splitting(trainable, plain_arrays)
    flat, treedef = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_unit)
    if any(is_unit(leaf) for _, leaf in flat):
        what = "this model"
        if plain_arrays:
            splitting.problems.append(
                "plain_arrays=True: layers of Penzai compute with named arrays. Leave it out."
            )
        splitting.problems += _of_other_libraries(model, is_unit)
        leaves = [splitting.without_variable(path_text(path), leaf) for path, leaf in flat]
    else:
        what = "these weights"
        roles = roles_of_collections(model)
        splitting.problems += map(_has_initial_state, initial_states(model))
        flat, treedef = jax.tree_util.tree_flatten_with_path(model, is_leaf=is_named_node)
        leaves = [
            splitting.without_weight(
                path_text(path), leaf, in_module, roles.get(path_text(path[:1]), ""), in_object
            )
            for (path, leaf), in_module, in_object in zip(
                flat,
                leaves_in_modules(model, is_named_node),
                leaves_in_shared_objects(model, is_named_node),
                strict=True,
            )
        ]
    raise_all(ShardingError, f"cannot make a train state of {what}:", splitting.problems)
    table = VariableTable(tuple(splitting.entries.values()))
    if trainable is None:
        _refuse_untrained(table)
    unbound = jax.tree.unflatten(treedef, leaves)
    return unbound, splitting.values["parameter"], splitting.values["state"], table


class _Splitting:
    """What was taken out of one model so far.

    Attributes:
        entries: The table entry of each variable by name.
        values: Of each kind of variable the values by name.
        problems: What is wrong with the model.
    """

    def __init__(
        self, trainable: TrainablePredicate | None, plain_arrays: bool | None = None
    ) -> None:
        self._trainable = trainable
        self._plain_arrays = plain_arrays
        self._first: dict[str, Any] = {}
        self._slots: dict[int, AbstractVariableSlot] = {}
        self.entries: dict[str, VariableEntry] = {}
        self.values: dict[str, dict[str, Any]] = {"parameter": {}, "state": {}}
        self.problems: list[str] = []

    def without_variable(self, path: str, leaf: Any) -> Any:
        """What stands in a model of variables in place of one of its leaves."""
        first_api_kind = first_api.parameter_kind(type(leaf))
        if isinstance(leaf, AbstractVariableSlot) or first_api_kind == "uninitialized":
            self.problems.append(
                f"{path}: a {type(leaf).__name__} has no value. "
                "Bind the model's variables or initialise its parameters first."
            )
            return leaf
        if not isinstance(leaf, AbstractVariable | AbstractVariableValue) and not first_api_kind:
            return leaf if is_array_like(leaf) else StaticLeaf(leaf)
        if id(leaf) not in self._slots:
            entry = self._entry(path, leaf)
            if entry is None:
                return leaf
            self._slots[id(leaf)] = entry.slot()
        return self._slots[id(leaf)]

    def _entry(self, path: str, variable: Any) -> VariableEntry | None:
        """The entry of a variable that was not met yet; None if it cannot be one."""
        entry = self._described(path, variable)
        if entry is None:
            self.problems.append(
                f"{path}: a {type(variable).__name__} is neither a parameter nor a state variable. "
                "Take it out of the model with pz.unbind_variables."
            )
        elif entry.name in self.entries:
            if is_copy(variable, self._first[entry.name]):
                return self.entries[entry.name]
            self.problems.append(
                f"{path}: another variable of the model is named {entry.name!r} too. "
                "Give each its own label, or use the same object in both places."
            )
        else:
            if entry.trainable and not _is_floating(variable.value):
                self.problems.append(
                    f"{entry.name}: a trainable parameter must be floating. "
                    'Give it metadata={"trainable": False}, or leave it out with trainable=.'
                )
            self._first[entry.name] = variable
            self._add(entry, variable.value)
        return entry

    def _described(self, path: str, variable: Any) -> VariableEntry | None:
        """What a variable is; None if it is of a kind that is not known."""
        mutable = isinstance(variable, AbstractVariable)
        if isinstance(variable, pz.StateVariable | pz.StateVariableValue):
            # Labels that Penzai made up differ from run to run, paths do not.
            name = variable.label if isinstance(variable.label, str) else (path or "state")
            return VariableEntry(name, "state", with_value(variable, None), mutable, False)
        if not is_parameter(variable):
            return None
        name = variable_name(variable)
        if isinstance(variable, pz.Parameter | pz.ParameterValue):
            # A shape struct cannot be in a mutable variable, so of an abstract model it says
            # nothing that a parameter is a frozen one.
            abstract = any(map(is_abstract, jax.tree.leaves(variable.value)))
            trained = bool(variable.metadata.get("trainable", True)) and (mutable or abstract)
        else:
            trained = first_api.parameter_kind(type(variable)) == "parameter"
        if self._trainable is not None:
            trained = _asked(self._trainable, variable, name)
        return VariableEntry(name, "parameter", with_value(variable, None), mutable, trained)

    def without_weight(
        self,
        path: str,
        leaf: Any,
        in_module: bool = False,
        of_collection: str = "",
        in_object: bool = False,
    ) -> Any:
        """What stands in a tree of bare weights in place of one of its leaves.

        ``of_collection`` is what the collection of variables holds that it is in, if in any.
        ``in_object`` is for modules whose variables say which of them are parameters: an array
        beside them, such as a table of positions, is none.
        """
        if in_module and not is_named_node(leaf) and is_module_value(leaf):
            return StaticLeaf(leaf)
        template, role = None, "parameter"
        reader = reader_of(leaf)
        if reader is not None:
            role = reader.role(leaf) or role
            template = reader.with_data(leaf, None)
            leaf, problem = value_in_node(reader, leaf)
            others = [part for part in jax.tree.leaves(leaf) if not is_array_like(part)]
            if others and not problem:
                problem = f"it holds a {type(others[0]).__name__}. Keep it in an attribute"
            if problem:
                self.problems.append(f"{path}: {problem}.")
        if problem := not_a_tree(leaf):
            self.problems.append(f"{path}: {problem}.")
        if not pz.nx.is_namedarray(leaf) and not is_array_like(leaf) and template is None:
            return StaticLeaf(leaf)
        if path in self.entries:
            self.problems.append(
                f"{path}: two weights have this path. Rename one of the keys that contain '/'."
            )
            return leaf
        role = of_collection or role
        trained = False
        if role == "parameter":
            floating = _is_floating(leaf)
            trained = floating and not (in_object and reader is None)
            if self._trainable is not None:
                trained = _asked(self._trainable, pz.ParameterValue(label=path, value=leaf), path)
            if trained and not floating:
                self.problems.append(f"{path}: a trainable weight must be floating. Exclude it.")
        computes_plain = in_module if self._plain_arrays is None else self._plain_arrays
        computes_plain = computes_plain and template is None
        entry = VariableEntry(
            path, role, template, False, trained, computes_plain, bool(of_collection)
        )
        return self._add(entry, leaf).slot()

    def _add(self, entry: VariableEntry, value: Any) -> VariableEntry:
        self.entries[entry.name] = entry
        self.values[entry.kind][entry.name] = value
        return entry


def _asked(trainable: TrainablePredicate, parameter: Any, name: str) -> bool:
    try:
        return bool(trainable(parameter))
    except Exception as error:
        # Whatever the caller's function raises goes on to the caller, who learns what for.
        error.add_note(f"This was raised while trainable= was asked about the parameter {name!r}.")
        raise


def _refuse_untrained(table: VariableTable) -> None:
    """Raises if by default nothing of a model would be trained."""
    if table.trainable_names:
        return
    if not table.entries:
        raise ShardingError("nothing of this model would be trained: it has no parameters.")
    if not table.parameters:
        return  # A model of state variables alone.
    raise ShardingError(
        f"nothing of this model would be trained: all of its {len(table.parameters)} parameters "
        f"are frozen or not floating, such as {table.parameters[0].name!r}. Say which to train: "
        "TrainState.initial_state(..., trainable=lambda parameter: True)."
    )


def _of_other_libraries(model: Any, is_unit: Callable[[Any], bool]) -> list[str]:
    """Says what other libraries hold beside Penzai's variables, which alone are trained."""
    flat, _ = jax.tree_util.tree_flatten_with_path(
        model, is_leaf=lambda node: is_unit(node) or is_foreign(node)
    )
    return [
        f"{path_text(path)}: this {type(node).__name__} is beside variables of Penzai, which alone "
        "are trained and carried on. Put its array into one, "
        "pz.Parameter(value=pz.nx.wrap(array, ...), label=...) or a pz.StateVariable, or take it "
        "out of the model."
        for path, node in flat
        if not is_unit(node) and is_foreign(node)
    ]


def _has_initial_state(path: str) -> str:
    return (
        f"{path}: this eqx.nn.StateIndex holds the initial value of a state, which is not trained. "
        "Make module and state with eqx.nn.make_with_state(Model)(...), and give the state to "
        "TrainState.initial_state as loss_fn_state."
    )


def _is_floating(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    dtypes = map(jax.dtypes.result_type, leaves)
    return bool(leaves) and all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)
