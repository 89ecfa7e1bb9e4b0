"""The state of a training run as one pytree.

The method is the usual one of JAX training loops: everything that changes is a value that goes
into a step and comes out of it.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from penzai_shard.array_kinds import is_array_like, is_concrete, is_deleted
from penzai_shard.errors import RuleTypeError, ShardingError, raise_all
from penzai_shard.model_variables import (
    TrainablePredicate,
    VariableTable,
    split_model,
)
from penzai_shard.planning import parts_with_gradients
from penzai_shard.rule_kinds import OnIndivisible, OnUnnamed, check_option
from penzai_shard.text_tables import NotebookView
from penzai_shard.training.flat_state import (
    CONSTANT_FIELDS,
    FIELDS,
    FlatState,
    Flattened,
    StateForm,
)
from penzai_shard.training.loss_contract import not_arrays
from penzai_shard.training.loss_scaling import DynamicLossScaling
from penzai_shard.training.optimizer_calls import check_optimizer
from penzai_shard.training.optimizer_identity import OptimizerIdentity
from penzai_shard.training.state_layout import deleted, own_copy
from penzai_shard.training.state_placement import place_initial_fields
from penzai_shard.training.state_table import PARTS, StateTable
from penzai_shard.training.update_guards import initial_guards
from penzai_shard.tree_arguments import refuse_builder
from penzai_shard.tree_paths import paths_and_leaves

if TYPE_CHECKING:
    import optax

_STATIC = ("optimizer_def", "variables")
# The fields that consist of containers, which whoever reads them may change in place.
_TREES = tuple(name for name in FIELDS if name not in ("step", "root_rng"))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TrainState(NotebookView):
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
        optimizer_def: The optax optimizer (static). Two states of equal optimizers have the same
            structure.
        variables: What the model's variables were (static).
        guards: What steps keep to guard the update: ``loss_scale`` and ``finite_steps`` where the
            loss is scaled dynamically, ``skipped_steps`` and ``skipped_in_a_row`` where steps that
            are not finite are skipped; empty otherwise. A run that began without takes those of a
            new state: ``dataclasses.replace(state, guards=new.guards)``.

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
    guards: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def initial_state(
        cls,
        model: Any,
        optimizer_def: "optax.GradientTransformation",
        root_rng: jax.Array,
        loss_fn_state: Any = None,
        *,
        trainable: TrainablePredicate | None = None,
        on_unnamed: OnUnnamed = "error",
        optimizer_rules: Any = None,
        on_indivisible: OnIndivisible = "error",
        loss_scaling: "str | float | DynamicLossScaling | None" = "auto",
        skip_nonfinite: bool = False,
        plain_arrays: bool | None = None,
    ) -> "TrainState":
        """The state before the first step.

        If any array of the model is on a mesh, nothing of the state is left on one device:
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
            trainable: Whether to train a parameter, which it is called with. By default all
                that are not frozen, and whose metadata does not say ``{"trainable": False}``.
            on_unnamed: What becomes of arrays that the optimizer keeps and that are not made of
                a parameter's dimensions, if the model is on a mesh: an error, or a copy on
                every device (``"replicate"``).
            optimizer_rules: How the optimizer's state is laid out, if the model is on a mesh;
                rules in any form that ``AxisRules`` reads. None lays it out as its parameters.
            on_indivisible: As for ``make_plan``, for ``optimizer_rules``.
            loss_scaling: Whether the state keeps a loss scale for its steps: ``"auto"``, if a
                trained parameter or an ``InPrecision`` layer is in float16; ``"dynamic"`` or a
                `DynamicLossScaling`, always; None or a number, never.
            skip_nonfinite: Whether the state counts the steps that are skipped, as
                ``build_train_step_fn(..., skip_nonfinite=True)`` asks for.
            plain_arrays: Whether a loss function gets the model with plain arrays in place of
                those that ``name_axes`` named, as ``without_names`` gives them, because the model's
                code computes with such. By default modules of Equinox are given so, and anything
                else, such as a dictionary, as it is here. ``model`` of the state has names always.

        Returns:
            The state. Of an abstract model (``ShapeDtypeStruct`` leaves, or under
            ``jax.eval_shape``) the state is abstract too. If its structs have shardings, as those
            of ``make_plan(model, mesh, rules).restore_structs()`` do, every array of the state has
            the one that it would get: a state to price a step with, on a mesh that need not be
            there.

        Raises:
            ShardingError: The model has no values, a name is used twice, a parameter that
                should be trained is not floating, or every parameter is frozen.
            RuleTypeError: The optimizer or the key is something else.
        """
        check_optimizer(optimizer_def, model)
        refuse_builder("TrainState.initial_state", model, as_model=True)
        _refuse_train_state(model)
        _check_key(root_rng)
        check_option("on_unnamed", on_unnamed)
        check_option("on_indivisible", on_indivisible)
        raise_all(
            ShardingError,
            "the loss function's state must be made of arrays:",
            not_arrays(loss_fn_state, "loss_fn_state", "Keep it where the loss is defined."),
        )
        if trainable is not None and not callable(trainable):
            raise RuleTypeError(
                f"trainable must be a predicate, not {trainable!r}. Write for instance "
                "trainable=lambda parameter: 'LoRA' in parameter.label."
            )
        if not (plain_arrays is None or isinstance(plain_arrays, bool)):
            raise RuleTypeError(f"plain_arrays is True, False or None, not {plain_arrays!r}.")
        unbound_model, params, state_vars, variables = split_model(model, trainable, plain_arrays)
        trained = variables.trainable_names
        _refuse_deleted({"params": params, "state_vars": state_vars, "model": unbound_model})
        fields = {
            "step": jnp.zeros((), jnp.int32),
            "params": params,
            "state_vars": state_vars,
            "root_rng": root_rng,
            "loss_fn_state": loss_fn_state,
            "unbound_model": unbound_model,
            "guards": initial_guards(
                loss_scaling,
                skip_nonfinite,
                unbound_model,
                {name: params[name] for name in trained},
            ),
        }

        placed = place_initial_fields(
            fields, optimizer_def, trained, on_unnamed, optimizer_rules, on_indivisible
        )
        return cls(optimizer_def=optimizer_def, variables=variables, **placed)

    @property
    def model(self) -> Any:
        """The model with the current values in new variables, their metadata kept.

        Raises:
            ShardingError: The state was donated to a step.
        """
        if is_donated(self):
            raise ShardingError(donation_text(self))
        return self.variables.bind(
            peek(self, "unbound_model"), peek(self, "params"), peek(self, "state_vars")
        )

    def __getattr__(self, name: str) -> Any:
        # Only reached while a tree is not built: a train step returned the state.
        if name not in _TREES or "_flat" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        # The caller may change containers of the tree in place, so it counts from now on.
        return self.__dict__.setdefault(name, peek(self, name))

    def __reduce__(self) -> Any:
        # For copies: the fields are the state, and not the program that made them.
        names = (field.name for field in dataclasses.fields(self))
        return type(self), tuple(peek(self, name) for name in names)

    def __repr__(self) -> str:
        if is_donated(self):
            return f"TrainState(donated: {donation_text(self)})"
        return f"TrainState(step={self.step}, {self.variables!r})"

    def notebook_table(self) -> StateTable:
        """What the state holds and how it is laid out, arrays alike in one row."""
        if is_donated(self):
            return StateTable((), donation_text(self))
        at = f"step {int(self.step)}" if is_concrete(self.step) else "a step not known yet"
        return StateTable.of(
            f"TrainState at {at}, {self.variables.counts()}",
            {name: peek(self, name) for name in PARTS},
            self.variables.trainable_names,
        )

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from treescope import repr_lib

        return repr_lib.render_object_constructor(
            object_type=type(self),
            attributes={name: _seen_from_here(peek(self, name)) for name in FIELDS + _STATIC},
            path=path,
            subtree_renderer=subtree_renderer,
            roundtrippable=True,
        )


def _seen_from_here(tree: Any) -> Any:
    """A tree with what is known of them in place of arrays that other processes have parts of."""

    def is_elsewhere(leaf: Any) -> bool:
        if not is_concrete(leaf) or leaf.is_deleted():
            return False
        return not (leaf.is_fully_addressable or leaf.is_fully_replicated)

    if not any(map(is_elsewhere, jax.tree.leaves(tree))):
        return tree
    return jax.tree.map(
        lambda leaf: (
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            if is_elsewhere(leaf)
            else leaf
        ),
        tree,
    )


def peek(state: TrainState, field: str) -> Any:
    """A field, without making it what counts if it was not read before."""
    fields = state.__dict__
    return fields[field] if field in fields else fields["_flat"].field(field)


def _flatten(state: TrainState) -> tuple[Sequence[Any], Any]:
    children = [(jax.tree_util.GetAttrKey(name), peek(state, name)) for name in FIELDS]
    return children, (optimizer_of(state), state.variables)


def _unflatten(
    static: tuple[OptimizerIdentity, VariableTable], children: Iterable[Any]
) -> TrainState:
    optimizer, variables = static
    values = (*children, optimizer.definition, variables)
    state = TrainState(**dict(zip((*FIELDS, *_STATIC), values, strict=True)))
    state.__dict__["_optimizer"] = optimizer
    return state


jax.tree_util.register_pytree_with_keys(TrainState, _flatten, _unflatten)


@parts_with_gradients.register
def _(state: TrainState) -> dict[str, Any]:
    trained = state.variables.trainable_names
    return {"params": {name: x for name, x in peek(state, "params").items() if name in trained}}


def with_own_buffers(state: TrainState) -> TrainState:
    """A state like another, in which all that a step would donate is copied."""
    flat = to_flat(state)
    copied = [own_copy(leaf) for leaf in flat.changing]
    return from_flat(FlatState(flat.form, copied, flat.constant, flat.program, flat.packed))


def optimizer_of(state: TrainState) -> OptimizerIdentity:
    """The identity of a state's optimizer, read once per state."""
    known: OptimizerIdentity | None = state.__dict__.get("_optimizer")
    if known is None or known.definition is not state.optimizer_def:
        known = state.__dict__["_optimizer"] = OptimizerIdentity.of(state.optimizer_def)
    return known


def is_donated(state: TrainState) -> bool:
    """Whether a train step took the memory of a state."""
    flat = _unread(state)
    if flat is not None:
        return deleted(flat.changing)
    changing = [peek(state, name) for name in FIELDS if name not in CONSTANT_FIELDS]
    return deleted(jax.tree.leaves(changing))


def donation_text(state: TrainState) -> str:
    """By which step a state was donated, and what to keep."""
    step = state.step
    # A step does not take the memory of its number, so that messages can still say it.
    by = "a step" if deleted([step]) else f"the step from {int(step)} to {int(step) + 1}"
    return (
        f"this train state was donated to {by}, which reused its memory. Keep the state that the "
        "step returned: state, aux = step(state, ...). To go on from this one too, copy it before "
        "the step, jax.tree.map(jnp.copy, state), or build the step with "
        "donate_params_and_state=False."
    )


def _refuse_deleted(parts: dict[str, Any]) -> None:
    raise_all(
        ShardingError,
        "the memory of this model is gone, for instance since a train step that donates took it:",
        [
            f"{path}: is deleted. Use the model of the last state, state.model."
            for path, leaf in paths_and_leaves(parts)
            if is_deleted(leaf)
        ],
    )


def _refuse_train_state(model: Any) -> None:
    if not (hasattr(model, "params") and hasattr(model, "opt_state")):
        return
    kind = f"{type(model).__module__}.{type(model).__name__}"
    raise RuleTypeError(
        "TrainState.initial_state takes a model, and makes an optimizer's state for it; this "
        f"{kind} has one already. Give the model in it: "
        + ("state.model." if isinstance(model, TrainState) else "{'params': state.params}.")
    )


def _check_key(root_rng: Any) -> None:
    dtype = getattr(root_rng, "dtype", None) if is_array_like(root_rng) else None
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and root_rng.shape == ():
        return
    if dtype == jnp.uint32 and root_rng.ndim == 1:
        return  # A key of jax.random.PRNGKey.
    if dtype is not None:
        got = f"an array of {dtype}{list(root_rng.shape)}"
    elif isinstance(root_rng, int | str | None):
        got = f"{root_rng!r}"
    else:  # Such as nnx.Rngs, which has every attribute.
        got = f"the {type(root_rng).__name__}"
    seed = root_rng if isinstance(root_rng, int) and not isinstance(root_rng, bool) else 0
    raise RuleTypeError(f"root_rng must be a random key, not {got}. Write jax.random.key({seed}).")


def from_flat(flat: FlatState) -> TrainState:
    """A state whose trees are built when they are read."""
    state = object.__new__(TrainState)
    state.__dict__.update(
        _flat=flat,
        _optimizer=flat.form.optimizer,
        step=flat.changing[0],
        root_rng=flat.constant[flat.form.key_index],
        optimizer_def=flat.form.optimizer.definition,
        variables=flat.form.variables,
    )
    return state


def _unread(state: TrainState) -> FlatState | None:
    """The flat form of a state that a step returned and of which no tree was read."""
    fields = state.__dict__
    return None if any(name in fields for name in _TREES) else fields["_flat"]


def to_flat(state: TrainState) -> FlatState:
    """The flat form of a state; no work if a step returned it and no tree of it was read.

    Args:
        state: Any train state.

    Returns:
        Its flat form. Trees that were handed out are flattened again, since they may have been
        changed in place; if they were not, the flat form that the state had is returned.
    """
    flat = _unread(state)
    if flat is not None:
        return flat
    fields = state.__dict__
    for name, entries in (
        ("params", state.variables.parameters),
        ("state_vars", state.variables.states),
    ):
        if name in fields:
            _check_names(name, fields[name], [entry.name for entry in entries])
    _check_key(state.root_rng)
    flat = fields.get("_flat")
    before = {} if flat is None else flat.fields()
    now = before | {
        name: Flattened(*jax.tree.flatten(fields[name])) for name in FIELDS if name in fields
    }
    if flat is not None and all(now[name].same_objects(before[name]) for name in FIELDS):
        return flat
    treedefs = tuple(now[name].treedef for name in FIELDS)
    form = StateForm(treedefs, state.variables, optimizer_of(state))
    return FlatState(form, *form.parted(leaf for name in FIELDS for leaf in now[name].leaves))


def _check_names(field: str, values: Any, names: list[str]) -> None:
    if not isinstance(values, dict):
        raise ShardingError(
            f"{field} of a train state must be a dictionary of {len(names)} values by name, not "
            f"{type(values).__name__}."
        )
    if list(values) == names:
        return
    wanted = set(names)
    problems = [
        f"{name}: went missing. Put its value back." for name in names if name not in values
    ]
    problems += [
        f"{name}: is not in the model. Make the state anew: "
        "TrainState.initial_state(model, optimizer, key)."
        for name in values
        if name not in wanted
    ]
    raise_all(ShardingError, f"{field} of this train state are not those of its model:", problems)
