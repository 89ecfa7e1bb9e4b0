"""Findings about the batch: what every device would compute whole, and what does not fit."""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz

from penzai_shard.array_kinds import is_abstract, is_array_like
from penzai_shard.axis_decisions import PADDING_FIX
from penzai_shard.axis_rules import AxisRules
from penzai_shard.linting.findings import Change, Finding
from penzai_shard.linting.lint_subject import LintSubject
from penzai_shard.linting.rule_changes import change_of_table, rules_text
from penzai_shard.linting.split_axes import axis_sizes
from penzai_shard.linting.subject_flows import SubjectFlows, placed_on
from penzai_shard.meshes import auto_context
from penzai_shard.named_leaves import NamedLeaf
from penzai_shard.partition_specs import part_count
from penzai_shard.planning import bytes_text
from penzai_shard.rule_kinds import LogicalAxis, NameRule, array_text, nearest_name
from penzai_shard.training import shard_batch
from penzai_shard.tree_paths import join_paths


def batches_that_do_not_fit(subject: LintSubject) -> Iterator[Finding]:
    """Arrays of the batch that the rules cannot lay out."""
    flows = subject.flows
    rules = flows.batch_rules
    table = subject.table_of_activations
    for leaf in flows.batch_leaves:
        if leaf.names is None or placed_on(leaf.array, subject.mesh) is not None:
            continue
        explained = rules.explain(leaf.names, leaf.shape, subject.mesh)
        sizes = axis_sizes(leaf.names, leaf.shape)
        for unfit in explained.unfit:
            name = unfit.logical_axis
            if subject.on_indivisible != "error" and name in subject.plan.logical_axes:
                continue  # Trainers leave it whole in a batch, as was asked for.
            problem = unfit.problem.replace(PADDING_FIX, "")
            yield Finding(
                unfit.misfit,
                _path(leaf),
                f"{array_text(leaf.names, leaf.shape)}: {problem}",
                figures={"length": sizes[name]},
                paths=(_path(leaf),),
                about=f"{name!r}",
                changes=_for_fitting(flows, table, leaf, name),
            )


def _for_fitting(
    flows: SubjectFlows, table: str, leaf: NamedLeaf, name: LogicalAxis
) -> Iterator[Change]:
    """Rules by which an axis of the batch goes to mesh axes that it divides over, or to none."""
    subject = flows.subject
    given = subject.given_tables[table].rules
    size = axis_sizes(leaf.names, leaf.shape)[name]

    def with_axes(mesh_axes: tuple[str, ...]) -> Change:
        kept = [r for r in given if not isinstance(r, NameRule) or r.logical_axis != name]
        return change_of_table(subject, table, [NameRule(name, mesh_axes), *kept])

    for axis in flows.free_mesh_axes:
        if size % flows.sizes[axis] == 0:
            yield with_axes((axis,))
    yield from _padded(flows, leaf, name)
    yield with_axes(())


def _padded(flows: SubjectFlows, leaf: NamedLeaf, name: LogicalAxis) -> Iterator[Change]:
    """The batch with more examples, if all of its arrays have as many."""
    batch = flows.subject.batch
    if name in flows.subject.plan.logical_axes:
        return  # The model could not be called with more.
    arrays = jax.tree.leaves(batch, is_leaf=pz.nx.is_namedarray)
    size = axis_sizes(leaf.names, leaf.shape)[name]
    if any(not pz.nx.is_namedarray(x) or x.named_shape.get(name) != size for x in arrays):
        return
    rules = [rule for rule in flows.batch_rules.name_rules if rule.logical_axis == name]
    missing = -size % part_count(rules[0].mesh_axes, flows.sizes)

    def padded(x: Any) -> Any:
        return pz.nx.nmap(jnp.pad)(x.untag(name), (0, missing)).tag(name)

    code = f"pz.nx.nmap(jnp.pad)(x.untag({name!r}), (0, {missing})).tag({name!r})"
    is_one = pz.nx.is_namedarray(batch)
    mapped = f"jax.tree.map(lambda x: {code}, batch, is_leaf=pz.nx.is_namedarray)"
    if any(map(is_abstract, jax.tree.leaves(batch))):
        mapped = f"jax.eval_shape(lambda batch: {mapped}, batch)"
    elif is_one:
        mapped = code.replace("(x.", "(batch.")
    with auto_context():
        made = jax.eval_shape(
            lambda given: jax.tree.map(padded, given, is_leaf=pz.nx.is_namedarray), batch
        )
    yield Change(f"batch = {mapped}", {"batch": made})


def whole_batches(subject: LintSubject) -> Iterator[Finding]:
    """Batches that no mesh axis splits, though one is free."""
    flows = subject.flows
    free = flows.free_mesh_axes
    if not free or flows.flows is None or _says_copies(subject):
        return
    for leaf in flows.batch_leaves:
        name = flows.batch_axis(leaf)
        if name is None or flows.of_batch(leaf).get(name):
            continue
        size = axis_sizes(leaf.names, leaf.shape)[name]
        rules = subject.name_rules(subject.table_of_activations)
        # One that is nearly called so is found among the rules.
        named = [rule for rule in rules if nearest_name(rule.logical_axis, [name])]
        placed = placed_on(leaf.array, subject.mesh)
        fitting = [axis for axis in free if size % flows.sizes[axis] == 0]
        if not fitting or (named and placed is None):
            continue  # Said to be whole, or to be split; what does not divide is found elsewhere.
        axis = fitting[0]
        largest = max(
            (array.nbytes for call in flows.calls for array in call.call.outputs
             if array.sizes.get(name) == size),
            default=0,
        )  # fmt: skip
        count = flows.sizes[axis]
        how = "is placed whole" if placed is not None else "has no rule"
        yield Finding(
            "whole batch",
            _path(leaf),
            f"logical axis {name!r} ({size}) of {array_text(leaf.names or (), leaf.shape)} {how}, "
            f"and nothing else is split over mesh axis {axis!r} ({count}): each device computes "
            f"the whole batch, and holds {bytes_text(largest)} of the largest activation where "
            f"{bytes_text(largest // count)} would do.",
            wasted_bytes=largest - largest // count,
            figures={"length": size, "mesh_axis": axis, "mesh_axis_size": count},
            paths=(_path(leaf),),
            about=f"{name!r}",
            changes=_for_splitting(flows, name, fitting, placed is not None),
        )


def _for_splitting(
    flows: SubjectFlows, name: LogicalAxis, free: list[str], is_placed: bool
) -> Iterator[Change]:
    subject = flows.subject
    table = subject.table_of_activations
    given = subject.given_tables.get(table, AxisRules({})).rules
    for axis in free:
        if is_placed:
            rules = AxisRules({name: axis})
            batch = shard_batch(subject.batch, subject.mesh, rules)
            yield Change(f"batch = shard_batch(batch, mesh, {rules_text(rules)})", {"batch": batch})
        yield change_of_table(subject, table, [*given, NameRule(name, (axis,))])


def _says_copies(subject: LintSubject) -> bool:
    """Whether the rules are empty, by which it is said that all is copied."""
    return not any(rules.rules for rules in subject.given_tables.values())


def _path(leaf: NamedLeaf) -> str:
    return join_paths("batch", leaf.path)


def uncallable_models(subject: LintSubject) -> Iterator[Finding]:
    """Models that cannot be called with the batch."""
    flows = subject.flows
    if flows.flows is None or flows.flows.error is None:
        return
    error, failed = flows.flows.error, flows.flows.failed
    where = "" if failed is None else failed.label
    given = ", ".join(
        array_text(array.names, array.shape) if array.names else f"{array.dtype}{list(array.shape)}"
        for array in (failed.inputs if failed is not None else ())
    )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # What stands for an array while the model is traced.
    said = f"{type(error).__name__}: {_TRACER.sub('array', ' '.join(lines[:3]))}"
    has_names = any(leaf.names for leaf in flows.batch_leaves)
    unnamed = "" if has_names else ". No array of the batch has logical axes."
    layer = "it" if failed is None else f"this {type(failed.layer).__name__}"
    yield Finding(
        "uncallable",
        where or "batch",
        f"the model cannot be called with this batch: {layer} gets {given or 'nothing'}, and says "
        f"{said}{unnamed}",
        paths=(where,) if where else (),
        about="batch",
        changes=tuple(_for_calling(flows)),
    )


_TRACER = re.compile(r"\b\w+Tracer\b")


def _for_calling(flows: SubjectFlows) -> Iterator[Change]:
    """The batch with other names for its axes, or with names."""
    batch = flows.subject.batch
    known = {name for name in flows.subject.plan.logical_axes if isinstance(name, str)}
    known |= {"batch", "seq"}
    if pz.nx.is_namedarray(batch):
        for name in batch.named_shape:
            near = nearest_name(name, known - set(batch.named_shape))
            if near is not None:
                code = f"batch = batch.untag({name!r}).tag({near!r})"
                yield Change(code, {"batch": batch.untag(name).tag(near)})
    elif isinstance(batch, list):
        yield Change("batch = tuple(batch)", {"batch": tuple(batch)})
    elif getattr(batch, "shape", ()) and (is_array_like(batch) or is_abstract(batch)):
        for names in _likely_names(flows, batch):
            wrapped = f"pz.nx.wrap(batch, {', '.join(map(repr, names))})"
            made = jax.eval_shape(functools.partial(_wrapped, names=names), batch)
            if is_abstract(batch):
                wrapped = f"jax.eval_shape(lambda batch: {wrapped}, batch)"
            yield Change(f"batch = {wrapped}", {"batch": made})


def _wrapped(array: Any, names: tuple[str, ...]) -> Any:
    return pz.nx.wrap(array, *names)


def _likely_names(flows: SubjectFlows, array: Any) -> Iterator[tuple[str, ...]]:
    """Names for the dimensions of a plain array, by what the model's parameters are called."""
    ndim = len(array.shape)
    in_front: Mapping[int, tuple[str, ...]] = {0: (), 1: ("batch",), 2: ("batch", "seq")}
    if ndim in in_front:
        yield in_front[ndim]
    for leaf in flows.subject.plan.leaves:
        for name, size in zip(leaf.names or (), leaf.shape, strict=False):
            if isinstance(name, str) and ndim and size == array.shape[-1] and ndim - 1 in in_front:
                yield (*in_front[ndim - 1], name)
