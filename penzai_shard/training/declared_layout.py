"""The layouts that a train step was built with, against the arrays that it gets and makes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Sharding

from penzai_shard.array_kinds import is_abstract, is_traced
from penzai_shard.errors import RuleTypeError, ShardingError, raise_all
from penzai_shard.meshes import shardings_on_auto_twin
from penzai_shard.named_arrays import stored_with
from penzai_shard.padded_arrays import is_padded
from penzai_shard.placement import described_array
from penzai_shard.processes import put_all
from penzai_shard.training.flat_state import FIELDS, StateForm
from penzai_shard.training.state_layout import canonical, sharding_text
from penzai_shard.training.train_state import TrainState
from penzai_shard.tree_paths import join_paths, paths_and_leaves

_MAKE_STATE = "Make them: train_state_sharding(state, mesh, rules)."
_MAKE_ANEW = "Make them anew: train_state_sharding(state, mesh, rules)."
_STORE_PADDED = 'Store it as it is declared: place(state, mesh, rules, on_indivisible="pad").'
_MAKE_ONE = "Pass NamedSharding(mesh, PartitionSpec(...))"


def _read(argument: str, declared: Any, fix: str) -> Any:
    """A tree of shardings on the Auto twins of their meshes; None in it is left as it is."""
    raise_all(
        RuleTypeError,
        f"{argument} must hold shardings:",
        [
            f"{path or 'it'}: a {type(leaf).__name__} stands where a sharding should be. {fix}"
            for path, leaf in paths_and_leaves(declared)
            if not isinstance(leaf, Sharding)
        ],
    )
    return shardings_on_auto_twin(declared)


def _spread(prefix: Any, tree: Any) -> list[Sharding | None]:
    """For every leaf of a tree the leaf of a prefix that it is under; None is a leaf of a prefix.

    Raises:
        ValueError: It is not a prefix of the tree.

    >>> _spread({"a": None, "b": 2}, {"a": [5, 6], "b": 7})
    [None, None, 2]
    """
    found: list[Sharding | None] = []

    def repeat(leaf: Sharding | None, subtree: Any) -> None:
        found.extend([leaf] * len(jax.tree.leaves(subtree)))

    jax.tree.map(repeat, prefix, tree, is_leaf=lambda node: node is None)
    return found


def _as_declared(array: Any, wanted: Sharding) -> Any:
    """An array under the very sharding declared, if it has that layout; None if it has another.

    A struct without a layout is one of an array that is yet to be placed so.

    Raises:
        ValueError: The sharding fits no array of this shape.
    """
    if array.sharding == wanted:
        return array
    if len(getattr(wanted, "spec", ())) > array.ndim:
        return None
    if is_abstract(array):
        fits = array.sharding is None or canonical(array.sharding) == canonical(wanted)
        return described_array(array, wanted) if fits else None
    same = canonical(array.sharding).is_equivalent_to(wanted, array.ndim)
    return jax.device_put(array, wanted) if same else None


def _other_padding(tree: Any, declared: Any) -> str:
    """What is to be said of trees that are alike but for what is stored padded; empty otherwise."""

    def unpadded(tree: Any) -> Any:
        return jax.tree.map(
            lambda node: stored_with(node, None, None) if is_padded(node) else node,
            tree,
            is_leaf=is_padded,
        )

    shapes: list[Any] = [
        jax.tree.structure(unpadded(each), is_leaf=_is_none) for each in (tree, declared)
    ]
    if shapes[0] != shapes[1]:
        return ""
    return "what is declared as stored padded is not stored so, or the other way round"


def _is_none(node: Any) -> bool:
    return node is None


class DeclaredState:
    """The declared layout of a train state: one sharding for all, or a state of shardings.

    Args:
        declared: What ``build_train_step_fn`` got as ``train_state_shardings``, not None.

    Raises:
        RuleTypeError: It is something else.
    """

    def __init__(self, declared: Any) -> None:
        if not isinstance(declared, Sharding | TrainState):
            raise RuleTypeError(
                "train_state_shardings must be a train state of shardings, or one sharding for "
                f"everything, not {declared!r}. {_MAKE_STATE}"
            )
        self._declared = _read("train_state_shardings", declared, _MAKE_STATE)

    def of(self, form: StateForm) -> list[Sharding | None]:
        """The sharding of every leaf of a state, None where undeclared.

        Raises:
            ShardingError: The declared state is of another model, or its optimizer's state of
                another form. Whether it was made with the same optimizer does not matter.
        """
        shardings: list[Sharding | None] = []
        problems: list[str] = []
        fixes: set[str] = set()
        for name, treedef in zip(FIELDS, form.treedefs, strict=True):
            tree = self._declared
            if isinstance(tree, TrainState):
                tree = getattr(tree, name)
            if tree is None or isinstance(tree, Sharding):
                shardings += [tree] * treedef.num_leaves
                continue
            try:
                shardings += treedef.flatten_up_to(tree)
            except (ValueError, TypeError) as error:
                given = treedef.unflatten(range(treedef.num_leaves))
                padding = _other_padding(given, tree)
                fixes.add(_STORE_PADDED if padding else _MAKE_ANEW)
                problems.append(f"{name}: {padding or error}")
        raise_all(
            ShardingError,
            "train_state_shardings are not shaped like this train state. "
            + " ".join(sorted(fixes)),
            problems,
        )
        return shardings

    def checked(self, form: StateForm, leaves: list[Any]) -> list[Any]:
        """The leaves of a state with exactly the declared shardings, if they have that layout.

        Raises:
            ShardingError: Some arrays have another; all are reported.
        """
        problems = []
        checked = []
        for path, leaf, wanted in zip(form.paths(), leaves, self.of(form), strict=True):
            checked.append(leaf if wanted is None else _as_declared(leaf, wanted))
            if wanted is not None and checked[-1] is None:
                problems.append(
                    f"{path}: has {sharding_text(leaf.sharding)}, declared {sharding_text(wanted)}."
                )
        raise_all(
            ShardingError,
            "the train state is not laid out as declared in train_state_shardings. "
            "Place it once before training: state = jax.device_put(state, shardings).",
            problems,
        )
        return checked


class DeclaredInputs:
    """The declared layout of some inputs.

    Args:
        declared: What ``build_train_step_fn`` got as ``input_kwarg_shardings``.

    Raises:
        RuleTypeError: It is not a mapping from names to shardings or trees of them.
    """

    def __init__(self, declared: Any) -> None:
        if not isinstance(declared, Mapping):
            raise RuleTypeError(
                "input_kwarg_shardings must map names of inputs to shardings, not "
                f"{declared!r}. Write for instance {{'x': NamedSharding(mesh, spec)}}."
            )
        self._declared: dict[str, Any] = _read(
            "input_kwarg_shardings", dict(declared), f"{_MAKE_ONE}."
        )

    @property
    def names(self) -> frozenset[str]:
        """The names of the inputs that have a declared layout."""
        return frozenset(self._declared)

    def placed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs under their declared shardings.

        Raises:
            ShardingError: A declared input was not given, or has another layout.
        """
        if not self._declared:
            return inputs
        unknown = sorted(self._declared.keys() - inputs.keys())
        raise_all(
            ShardingError,
            "input_kwarg_shardings name inputs that this step did not get:",
            [f"{name}: the inputs are {sorted(inputs)}. Pass or drop it." for name in unknown],
        )
        problems: list[str] = []
        placed = dict(inputs)
        for name, shardings in self._declared.items():
            try:
                wanted = _spread(shardings, inputs[name])
            except ValueError as error:
                problems.append(f"input {name}: its shardings are not shaped like it: {error}")
                continue
            leaves = [
                leaf if w is None else _placed_input(leaf, w, join_paths(name, path), problems)
                for (path, leaf), w in zip(paths_and_leaves(inputs[name]), wanted, strict=True)
            ]
            placed[name] = jax.tree.unflatten(jax.tree.structure(inputs[name]), leaves)
        raise_all(ShardingError, "some inputs are not laid out as declared:", problems)
        return placed


def _placed_input(leaf: Any, wanted: Sharding, path: str, problems: list[str]) -> Any:
    """A leaf of an input under its declared sharding, if it has that layout or none yet."""
    if is_traced(leaf):
        return leaf
    try:
        if not is_abstract(leaf) and not (isinstance(leaf, jax.Array) and leaf.committed):
            return put_all([leaf], [wanted], lambda: [path], "the step")[0]
        placed = _as_declared(leaf, wanted)
    except ValueError as error:
        problems.append(f"input {path}: {sharding_text(wanted)} does not fit it: {error}")
        return leaf
    if placed is None:
        problems.append(
            f"input {path}: has {sharding_text(leaf.sharding)}, declared {sharding_text(wanted)}. "
            "Place it so: jax.device_put(..., sharding), or shard_batch(batch, mesh, rules)."
        )
    return placed


class DeclaredAux:
    """The declared layout of auxiliary outputs.

    Args:
        declared: A sharding for all, or a tree of shardings that the outputs extend; None, also
            in the tree, leaves the layout to JAX.

    Attributes:
        tree: The same, on the Auto twins of the meshes.

    Raises:
        RuleTypeError: Something else stands where a sharding should be.

    >>> DeclaredAux(None).tree is None
    True
    """

    def __init__(self, declared: Any) -> None:
        fix = f"{_MAKE_ONE}, or None to leave it to JAX."
        self.tree = _read("aux_output_shardings", declared, fix)

    def place(self, aux: Any, put: Callable[[Any, Sharding], Any]) -> Any:
        """The outputs, ``put(output, sharding)`` in place of each that has one declared."""
        leaves, treedef = jax.tree.flatten(aux)
        wanted = self.of(aux)
        return jax.tree.unflatten(
            treedef,
            [x if w is None else put(x, w) for x, w in zip(leaves, wanted, strict=True)],
        )

    def of(self, aux: Any) -> list[Sharding | None]:
        """The declared sharding of every array of some outputs, in order.

        Args:
            aux: The outputs, concrete or traced.

        Raises:
            ShardingError: The declaration is not shaped like the outputs, or does not fit them.
        """
        flat = paths_and_leaves(aux)
        try:
            shardings = _spread(self.tree, aux)
        except ValueError as error:
            known = ", ".join(repr(path) for path, _ in flat[:5]) or "none"
            known += ", ..." if len(flat) > 5 else ""
            raise ShardingError(
                "aux_output_shardings are not shaped like the auxiliary outputs, which are "
                f"{known}: {error}"
            ) from error
        problems = []
        for (path, leaf), sharding in zip(flat, shardings, strict=True):
            text = f"{path or 'the output'}: of shape {leaf.shape}"
            spec = getattr(sharding, "spec", ())
            if len(spec) > leaf.ndim:
                problems.append(f"{text} has fewer dimensions than {spec}.")
            elif sharding is not None:
                try:
                    sharding.shard_shape(leaf.shape)
                except ValueError as error:
                    problems.append(f"{text}: {error}")
        raise_all(ShardingError, "aux_output_shardings do not fit:", problems)
        return shardings
