"""Changes of the constraint layers of a model, as lines of code."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from penzai import pz

from penzai_shard.axis_rules import AxisRules
from penzai_shard.errors import ShardingError
from penzai_shard.layers import ConstrainActivations, ConstrainSharding, ConstrainShardingByName
from penzai_shard.linting.findings import Change
from penzai_shard.linting.lint_subject import LintSubject
from penzai_shard.linting.pins import Pin
from penzai_shard.linting.rule_changes import rules_text
from penzai_shard.surgery import Recipe, replace
from penzai_shard.surgery.tree_nodes import nodes_of
from penzai_shard.training import TrainState

Function = Callable[[Any], Any]


def change_of_layers(
    subject: LintSubject, places: Sequence[str], code: str, function: Function
) -> Iterator[Change]:
    """Other layers in some places of the model; nothing if that cannot be done.

    Args:
        subject: The subject. The model of a train state cannot be changed without the state.
        places: The paths of the layers, which are of one type.
        code: What stands for a layer afterwards, where ``layer`` is what is there now.
        function: What the code says.
    """
    if isinstance(subject.model, TrainState):
        return
    with contextlib.suppress(ShardingError, TypeError):
        recipe, text = _recipe(subject.model, places, code, function)
        yield Change(f"model = {text}.apply(model)", {"model": recipe.apply(subject.model)})


def _recipe(model: Any, places: Sequence[str], code: str, function: Function) -> tuple[Recipe, str]:
    """The edits, as short as they can be said."""
    nodes = {"/".join(map(str, keys)): node for keys, node in nodes_of(model)}
    kind = type(nodes[places[0]])
    same = [place for place, node in nodes.items() if type(node) is kind]
    if (places[0] and same != list(places)) or (len(same) == 1 and same[0]):
        edits = [replace(place, function) for place in places]
        if len(places) == 1:
            return Recipe(*edits), f"Recipe(replace({places[0]!r}, lambda layer: {code}))"
        listed = ", ".join(map(repr, places))
        return (
            Recipe(*edits),
            f"Recipe(*(replace(place, lambda layer: {code}) for place in ({listed})))",
        )
    edit = replace(kind, function, nested=True)
    return Recipe(edit), f"Recipe(replace({kind.__name__}, lambda layer: {code}, nested=True))"


def with_other_rules(
    subject: LintSubject, layer: Any, pin: Pin, places: Sequence[str], rules: AxisRules
) -> Iterator[Change]:
    """The same constraint layers with other rules in the place of those of one pin."""
    text = rules_text(rules)
    if isinstance(layer, ConstrainShardingByName):
        options = "".join(
            f", {option}={value!r}"
            for option in ("on_indivisible", "on_unnamed")
            if (value := getattr(layer, option)) != "error"
        )

        def constraint(layer: Any) -> Any:
            return ConstrainShardingByName(
                subject.mesh,
                rules,
                on_indivisible=layer.on_indivisible,
                on_unnamed=layer.on_unnamed,
            )

        code = f"ConstrainShardingByName(mesh, {text}{options})"
        yield from change_of_layers(subject, places, code, constraint)
    if isinstance(layer, ConstrainActivations):
        yield from _with_other_tables(subject, layer, pin, places, [rules], text)


def without_pin(
    subject: LintSubject, layer: Any, pin: Pin, places: Sequence[str]
) -> Iterator[Change]:
    """The model without that pin."""
    if isinstance(layer, ConstrainActivations):
        yield from _with_other_tables(subject, layer, pin, places, [], "")
    else:
        yield from change_of_layers(
            subject, places, "pz.nn.Identity()", lambda layer: pz.nn.Identity()
        )


def _with_other_tables(
    subject: LintSubject,
    layer: ConstrainActivations,
    pin: Pin,
    places: Sequence[str],
    new: Sequence[AxisRules],
    text: str,
) -> Iterator[Change]:
    """Constraints of what flows into and out of layers with other tables in the place of one."""
    side, number = pin.side, pin.number
    texts = list(map(rules_text, getattr(layer, side)))
    texts[number : number + 1] = [text] * len(new)
    listed = f"({', '.join(texts)}{',' * (len(texts) == 1)})"

    def function(layer: Any) -> Any:
        tables = list(getattr(layer, side))
        tables[number : number + 1] = new
        return dataclasses.replace(layer, **{side: tuple(tables)})

    code = f"dataclasses.replace(layer, {side}={listed})"
    yield from change_of_layers(subject, places, code, function)


def on_mesh(
    subject: LintSubject, layer: Any, places: Sequence[str], rules: Iterable[AxisRules | None]
) -> Iterator[Change]:
    """The same layers for the subject's mesh, with their own rules or others.

    Args:
        subject: The subject.
        layer: One of the layers.
        places: Where they are.
        rules: Rules for it; None for its own.
    """
    mesh = subject.mesh
    if isinstance(layer, ConstrainSharding):
        return
    for table in rules:
        if table is None:
            code = "dataclasses.replace(layer, mesh=mesh)"
            yield from change_of_layers(
                subject, places, code, lambda layer: dataclasses.replace(layer, mesh=mesh)
            )
        elif isinstance(layer, ConstrainShardingByName):
            yield from with_other_rules(subject, layer, Pin(mesh), places, table)
