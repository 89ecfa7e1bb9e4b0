"""What both programs make of one model: to be compared, and the same if all is well."""

import dataclasses
import inspect
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

import penzai_shard as pzs
from benchmarks.flax_guide import by_flax, by_penzai_shard
from benchmarks.flax_guide.work import Work, parameter_count
from penzai_shard.partition_specs import canonical_spec

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one program.

    Attributes:
        parameters: The number of trained numbers.
        planned: The planned spec of every parameter, without trailing None, by its path.
        placed: The specs of parameters and of the optimizer's state after training, in order.
        boxes: The type and axis names of the box of every parameter after training.
        initial: The initial parameters.
        losses: The losses of three steps, and of one more: by penzai_shard after the state was
            saved and restored onto the mesh.
    """

    parameters: int
    planned: dict[str, PartitionSpec]
    placed: list[PartitionSpec]
    boxes: list[tuple[str, tuple[Any, ...]]]
    initial: list[np.ndarray]
    losses: list[float]


def outcome_by_flax(work: Work) -> Outcome:
    """What comes of the guide's own program."""
    layout, state, train_step = by_flax.program(*work.arguments)
    initial = jax.device_get(jax.tree.leaves(state.params))
    losses = []
    with jax.set_mesh(work.mesh):
        for _ in range(STEPS + 1):
            state, loss = train_step(state, work.x)
            losses.append(float(loss))
    return Outcome(
        parameter_count(state.params),
        _specs_by_path(layout.params),
        _specs([state.params, state.opt_state]),
        _boxes(state.params),
        initial,
        losses,
    )


def outcome_by_penzai_shard(work: Work, folder: pathlib.Path) -> Outcome:
    """What comes of the same model with penzai_shard.

    Args:
        work: What is trained.
        folder: Where the state is saved to.
    """
    plan, state, train_step = by_penzai_shard.program(*work.arguments)
    _, start, _ = by_penzai_shard.program(*work.arguments)
    initial = jax.device_get(jax.tree.leaves(state.model["params"]))
    losses = []
    for _ in range(STEPS):
        state, loss = train_step(state, x=work.x)
        losses.append(float(loss))
    pzs.save_train_state(folder / "state", state)
    state = pzs.restore_train_state(folder / "state", start, work.mesh, work.rules)
    state, loss = train_step(state, x=work.x)
    losses.append(float(loss))
    params = state.model["params"]
    return Outcome(
        parameter_count(params),
        _specs_by_path(plan.sharding_tree()["params"]),
        _specs([params, state.opt_state]),
        _boxes(params),
        initial,
        losses,
    )


def spec_differences(work: Work) -> list[str]:
    """Where ``make_plan`` and Flax' helpers differ over the guide's abstract train state."""
    layout, state, _ = by_flax.program(*work.arguments)
    abstract = jax.eval_shape(lambda: state)
    plan = pzs.make_plan(abstract, work.mesh, work.rules)
    own, theirs = (_specs_by_path(tree) for tree in (plan.sharding_tree(), layout))
    paths = own.keys() | theirs.keys()
    return [
        f"{path}: {own.get(path)} and {theirs.get(path)}"
        for path in sorted(paths)
        if own.get(path) != theirs.get(path)
    ]


def lines_of(program: Any) -> int:
    """How many lines of code a program has, without its docstring and empty lines."""
    lines = inspect.getsource(program).splitlines()
    return sum(bool(line.strip()) and '"""' not in line for line in lines)


def _specs_by_path(tree: Any) -> dict[str, PartitionSpec]:
    # A box is a node of a state, and none in what Flax' helpers give of it.
    return {
        jax.tree_util.keystr(path).replace(".value", ""): canonical_spec(sharding.spec)
        for path, sharding in jax.tree_util.tree_leaves_with_path(tree)
    }


def _specs(tree: Any) -> list[PartitionSpec]:
    return [canonical_spec(leaf.sharding.spec) for leaf in jax.tree.leaves(tree)]


def _boxes(params: Any) -> list[tuple[str, tuple[Any, ...]]]:
    boxes = jax.tree.leaves(params, is_leaf=lambda node: hasattr(node, "names"))
    return [(type(box).__name__, box.names) for box in boxes]
