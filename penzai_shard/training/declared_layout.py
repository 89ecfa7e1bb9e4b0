"""The layouts that a train step was built with, against the states and inputs that it gets."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Sharding

from penzai_shard.errors import RuleTypeError, ShardingError, raise_all
from penzai_shard.meshes import shardings_on_auto_twin
from penzai_shard.training.state_layout import canonical, sharding_text, spread
from penzai_shard.training.state_structure import (
    FIELD_OF_SECTION,
    KEPT_SECTIONS,
    STEPPED_SECTIONS,
    StateStructure,
)
from penzai_shard.training.train_state import TrainState
from penzai_shard.tree_paths import array_path_text, join_paths

Shardings = list[Sharding | None]

_MAKE = "train_state_sharding(state, mesh, rules)"


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
                f"everything, not {declared!r}. Make them: {_MAKE}."
            )
        flat, _ = jax.tree_util.tree_flatten_with_path(declared)
        raise_all(
            RuleTypeError,
            "train_state_shardings must hold shardings:",
            [
                f"{array_path_text(path)}: a {type(leaf).__name__} stands where a sharding should "
                f"be. Make them: {_MAKE}."
                for path, leaf in flat
                if not isinstance(leaf, Sharding)
            ],
        )
        self._declared = shardings_on_auto_twin(declared)

    def of(self, structure: StateStructure) -> tuple[Shardings, Shardings]:
        """The sharding of every stepped and every kept leaf, None where undeclared.

        Raises:
            ShardingError: The declared state is of another model, or its optimizer's state of
                another form. Whether it was made with the same optimizer does not matter.
        """
        problems: list[str] = []
        stepped, kept = (
            [
                sharding
                for section in sections
                for sharding in self._section(structure, section, problems)
            ]
            for sections in (STEPPED_SECTIONS, KEPT_SECTIONS)
        )
        raise_all(
            ShardingError,
            f"train_state_shardings are not shaped like this train state. Make them anew: {_MAKE}.",
            problems,
        )
        return stepped, kept

    def _section(self, structure: StateStructure, section: str, problems: list[str]) -> Shardings:
        treedef = structure.treedefs[section]
        field = FIELD_OF_SECTION[section]
        tree: Any = self._declared
        if isinstance(tree, TrainState):
            tree = getattr(tree, field)
        if tree is None or isinstance(tree, Sharding):
            return [tree] * treedef.num_leaves
        if field == "params" and isinstance(tree, Mapping):
            wanted = section == "trainable"
            names = structure.variables.trainable_names
            tree = {name: value for name, value in tree.items() if (name in names) == wanted}
        try:
            return list(treedef.flatten_up_to(tree))
        except (ValueError, TypeError) as error:
            problems.append(f"{field}: {error}")
            return []


def as_declared(
    structure: StateStructure,
    stepped: list[Any],
    kept: list[Any],
    declared: tuple[Shardings, Shardings],
) -> tuple[list[Any], list[Any]]:
    """The state with exactly the declared shardings, if it lies so already.

    Raises:
        ShardingError: Some arrays lie otherwise; all are reported.
    """
    problems = []
    results: list[list[Any]] = []
    for sections, leaves, shardings in (
        (STEPPED_SECTIONS, stepped, declared[0]),
        (KEPT_SECTIONS, kept, declared[1]),
    ):
        placed = []
        for i, (leaf, wanted) in enumerate(zip(leaves, shardings, strict=True)):
            if wanted is None or leaf.sharding == wanted:
                placed.append(leaf)
            elif _lies_so(leaf, wanted):
                placed.append(jax.device_put(leaf, wanted))
            else:
                path = list(structure.paths(sections))[i]
                problems.append(
                    f"{path}: has {sharding_text(leaf.sharding)}, declared {sharding_text(wanted)}."
                )
        results.append(placed)
    raise_all(
        ShardingError,
        "the train state does not lie as declared in train_state_shardings. "
        "Place it once before training: state = jax.device_put(state, shardings).",
        problems,
    )
    return results[0], results[1]


def _lies_so(leaf: Any, wanted: Sharding) -> bool:
    """Whether an array has the same layout under another name."""
    if len(getattr(wanted, "spec", ())) > leaf.ndim:
        return False
    return canonical(leaf.sharding).is_equivalent_to(wanted, leaf.ndim)


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
        flat, _ = jax.tree_util.tree_flatten_with_path(dict(declared))
        raise_all(
            RuleTypeError,
            "input_kwarg_shardings must hold shardings:",
            [
                f"{array_path_text(path)}: a {type(leaf).__name__} stands where a sharding should "
                "be. Pass NamedSharding(mesh, PartitionSpec(...))."
                for path, leaf in flat
                if not isinstance(leaf, Sharding)
            ],
        )
        self._declared: dict[str, Any] = shardings_on_auto_twin(dict(declared))

    def __bool__(self) -> bool:
        return bool(self._declared)

    def placed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs under their declared shardings.

        Raises:
            ShardingError: A declared input is not there, or lies otherwise.
        """
        unknown = sorted(self._declared.keys() - inputs.keys())
        raise_all(
            ShardingError,
            "input_kwarg_shardings name inputs that this step did not get:",
            [f"{name}: the inputs are {sorted(inputs)}. Pass or drop it." for name in unknown],
        )
        problems: list[str] = []
        placed = dict(inputs)
        for name, shardings in self._declared.items():
            flat, treedef = jax.tree_util.tree_flatten_with_path(inputs[name])
            try:
                wanted = spread(shardings, inputs[name])
            except ValueError as error:
                problems.append(f"input {name}: its shardings are not shaped like it: {error}")
                continue
            placed[name] = jax.tree.unflatten(
                treedef,
                [
                    _placed(leaf, w, join_paths(name, array_path_text(path)), problems)
                    for (path, leaf), w in zip(flat, wanted, strict=True)
                ],
            )
        raise_all(ShardingError, "some inputs do not lie as declared:", problems)
        return placed


def _placed(leaf: Any, wanted: Sharding, path: str, problems: list[str]) -> Any:
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
        return leaf
    try:
        if not isinstance(leaf, jax.Array) or not leaf.committed:
            return jax.device_put(leaf, wanted)
        if leaf.sharding == wanted:
            return leaf
        if _lies_so(leaf, wanted):
            return jax.device_put(leaf, wanted)
    except ValueError as error:
        problems.append(f"input {path}: {sharding_text(wanted)} does not fit it: {error}")
        return leaf
    problems.append(
        f"input {path}: has {sharding_text(leaf.sharding)}, declared {sharding_text(wanted)}. "
        "Place it so: jax.device_put(..., sharding), or shard_batch(batch, mesh, rules)."
    )
    return leaf
