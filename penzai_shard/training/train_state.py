"""The state of a training run as one pytree.

The method is the usual one of JAX training loops: everything that changes is a value that goes
into a step and comes out of it.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from penzai_shard.training.model_variables import (
    TrainablePredicate,
    VariableTable,
    split_model,
)
from penzai_shard.training.state_placement import place_initial_parts
from penzai_shard.training.state_structure import (
    FIELD_OF_SECTION,
    SECTIONS,
    STEPPED_SECTIONS,
    FlatState,
    intern_structure,
)

if TYPE_CHECKING:
    import optax

FIELDS = (
    "step",
    "params",
    "opt_state",
    "state_vars",
    "root_rng",
    "loss_fn_state",
    "unbound_model",
)
_STATIC = ("optimizer_def", "variables")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrainState:
    """Everything that a training run carries from step to step: a pytree.

    It is an ordinary frozen dataclass to its user. A state that a train step returned holds a
    flat list of arrays and builds a field when it is first read; a field that was read is what
    counts from then on, so a change made in place to ``state.params`` is seen by the next step.
    Reading ``step`` and ``root_rng``, ``model``, and going over the state as a pytree cost the
    next step nothing.

    Attributes:
        step: Number of steps done, an int32 scalar.
        params: Value of every parameter by name, trainable or not.
        opt_state: The optimizer's state for the trainable parameters.
        state_vars: Value of every state variable by its label, or by its path in the model where
            Penzai made the label up.
        root_rng: Key that each step derives its own from.
        loss_fn_state: Whatever the loss function carries along.
        unbound_model: The model with slots instead of variables.
        optimizer_def: The optax optimizer (static).
        variables: What the model's variables were (static).

    >>> import optax
    >>> state = TrainState.initial_state({"w": jnp.ones(3)}, optax.sgd(0.1), jax.random.key(0))
    >>> list(state.params), int(state.step)
    (['w'], 0)
    >>> state.model["w"].shape
    (3,)
    """

    step: Any
    params: dict[str, Any]
    opt_state: Any
    state_vars: dict[str, Any]
    root_rng: Any
    loss_fn_state: Any
    unbound_model: Any
    optimizer_def: Any
    variables: VariableTable

    @classmethod
    def initial_state(
        cls,
        model: Any,
        optimizer_def: "optax.GradientTransformation",
        root_rng: jax.Array,
        loss_fn_state: Any = None,
        *,
        trainable: TrainablePredicate | None = None,
    ) -> "TrainState":
        """The state before the first step.

        If any array of the model lies on a mesh, nothing of the state is left on one device:
        the optimizer's state is made already laid out as the parameters it belongs to, and
        everything else is replicated over the mesh. An Explicit mesh is replaced by its Auto
        twin, which moves no data.

        Args:
            model: A Penzai model, a ``penzai.deprecated.v1`` model, or a tree of weights. Its
                arrays are not copied: a step that donates takes them from the model too.
            optimizer_def: An optax optimizer; its ``init`` gets the trainable parameters as a
                dictionary by name.
            root_rng: Random key of the whole run.
            loss_fn_state: What the loss function gets as ``state`` in the first step.
            trainable: Which parameters to train; see `split_model`. By default all whose
                metadata does not say ``{"trainable": False}``.

        Returns:
            The state. Of an abstract model (``ShapeDtypeStruct`` leaves, or under
            ``jax.eval_shape``) the state is abstract too.

        Raises:
            ShardingError: The model has no values, a name is used twice, or a parameter that
                should be trained is not floating.
        """
        unbound_model, params, state_vars, variables = split_model(model, trainable)
        changing = {
            "step": jnp.zeros((), jnp.int32),
            "params": params,
            "state_vars": state_vars,
            "loss_fn_state": loss_fn_state,
        }
        constant = {"root_rng": root_rng, "unbound_model": unbound_model}

        def build(changing: Any, constant: Any) -> TrainState:
            changing, constant, opt_state = place_initial_parts(
                changing, constant, optimizer_def.init, variables.trainable_names
            )
            return cls(
                opt_state=opt_state,
                optimizer_def=optimizer_def,
                variables=variables,
                **changing,
                **constant,
            )

        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((changing, constant))):
            return jax.eval_shape(build, changing, constant)
        return build(changing, constant)

    @property
    def model(self) -> Any:
        """The model with the current values in new variables, their metadata kept."""
        return self.variables.bind(
            peek(self, "unbound_model"), peek(self, "params"), peek(self, "state_vars")
        )

    def __getattr__(self, name: str) -> Any:
        # Only reached while a field is not there: the state came out of a train step.
        flat = self.__dict__.get("_flat")
        if flat is None or name not in FIELDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = flat.field(name)
        if name == "params" or not jax.tree_util.all_leaves([value]):
            # The caller may change these containers in place, so they count from now on.
            object.__setattr__(self, name, value)
        return value

    def __repr__(self) -> str:
        return f"TrainState(step={self.step}, {self.variables!r})"

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from treescope import repr_lib

        return repr_lib.render_object_constructor(
            object_type=type(self),
            attributes={name: peek(self, name) for name in FIELDS + _STATIC},
            path=path,
            subtree_renderer=subtree_renderer,
            roundtrippable=True,
        )


def peek(state: TrainState, field: str) -> Any:
    """A field, without making it what counts."""
    if field in state.__dict__:
        return state.__dict__[field]
    return state.__dict__["_flat"].field(field)


def _flatten_with_keys(state: TrainState) -> tuple[Sequence[Any], Any]:
    children = [(jax.tree_util.GetAttrKey(name), peek(state, name)) for name in FIELDS]
    return children, (state.optimizer_def, state.variables)


def _flatten(state: TrainState) -> tuple[Sequence[Any], Any]:
    return [peek(state, name) for name in FIELDS], (state.optimizer_def, state.variables)


def _unflatten(static: tuple[Any, VariableTable], children: Iterable[Any]) -> TrainState:
    fields = dict(zip((*FIELDS, *_STATIC), (*children, *static), strict=True))
    return TrainState(**fields)


jax.tree_util.register_pytree_with_keys(TrainState, _flatten_with_keys, _unflatten, _flatten)


def from_flat(flat: FlatState) -> TrainState:
    """A state whose fields are built when they are read."""
    state = object.__new__(TrainState)
    state.__dict__["_flat"] = flat
    state.__dict__["optimizer_def"] = flat.structure.optimizer_def
    state.__dict__["variables"] = flat.structure.variables
    return state


def to_flat(state: TrainState) -> FlatState:
    """The flat form of a state; no work if it came from a step and no field was read.

    Args:
        state: Any train state.

    Returns:
        Its flat form. Fields that were handed out are flattened again, since they may have been
        changed in place; if they were not, the flat form that the state had is returned.
    """
    fields = state.__dict__
    flat: FlatState | None = fields.get("_flat")
    if flat is not None and not any(name in fields for name in FIELDS):
        return flat
    treedefs = []
    stepped: list[Any] = []
    kept: list[Any] = []
    for section in SECTIONS:
        into = stepped if section in STEPPED_SECTIONS else kept
        if flat is not None and FIELD_OF_SECTION[section] not in fields:
            where = (
                flat.stepped[flat.structure.stepped_slices[section]]
                if section in STEPPED_SECTIONS
                else flat.kept[flat.structure.kept_slices[section]]
            )
            into.extend(where)
            treedefs.append(flat.structure.treedefs[section])
            continue
        leaves, treedef = jax.tree.flatten(section_of(state, section))
        into.extend(leaves)
        treedefs.append(treedef)
    structure = intern_structure(tuple(treedefs), state.variables, state.optimizer_def)
    if (
        flat is not None
        and structure is flat.structure
        and all(map(_is, stepped, flat.stepped))
        and all(map(_is, kept, flat.kept))
    ):
        return flat
    return FlatState(structure, stepped, kept)


def section_of(state: TrainState, section: str) -> Any:
    """The tree of one section of a state."""
    if section not in ("trainable", "frozen"):
        return peek(state, section)
    wanted = section == "trainable"
    trainable = state.variables.trainable_names
    return {
        name: value
        for name, value in peek(state, "params").items()
        if (name in trainable) == wanted
    }


def _is(a: Any, b: Any) -> bool:
    return a is b
