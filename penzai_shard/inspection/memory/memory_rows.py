"""What a step needs of a device's memory as rows of a tree: by layer, and what belongs to none."""

from collections.abc import Iterable, Iterator, Mapping

from penzai_shard.inspection.memory.memory_groups import MemoryGroup
from penzai_shard.inspection.memory.temporaries import TemporaryGroup
from penzai_shard.inspection.steps.layer_scopes import LayerScopes
from penzai_shard.planning.plan_table import SCALARS
from penzai_shard.report_trees import TreeFigure, TreeRow, bytes_text, count_text

MEMORY = "memory"
# Divided among layers; the memory of all temporaries is the compiler's own figure.
TEMPORARIES = "temporaries (estimated)"

_OF_THE_PROGRAM = ("padding", "outputs", "donated", "temporaries", "generated_code")


def memory_rows(
    items: Mapping[str, int],
    held: Iterable[MemoryGroup],
    temporaries: Iterable[TemporaryGroup],
    scopes: LayerScopes,
    collapse: bool = True,
) -> Iterator[TreeRow]:
    """The rows; their memory adds up to the step's total.

    Args:
        items: Every item of the report by its name, in bytes.
        held: What is resident and what comes in beside that, each array of its own.
        temporaries: Each layer's own.
        scopes: The step's layers.
        collapse: Put all scalars of a part into one row.
    """
    others: dict[str, list[MemoryGroup]] = {}
    for group in held:
        if group.part == "parameters":
            yield _parameter_row(group, scopes)
        else:
            others.setdefault(group.part, []).append(group)
    for part, groups in others.items():
        # Of a function without layers its arguments are what owns collectives.
        is_outermost = part == "inputs" and not scopes.paths
        yield from _part_rows("" if is_outermost else part, groups, collapse)
    for name in _OF_THE_PROGRAM:
        if size := items[name]:
            sign = -1 if name == "donated" else 1
            yield TreeRow(name.replace("_", " "), figures=_memory(sign * size))
    for each in temporaries:
        figures = (TreeFigure(TEMPORARIES, each.bytes),)
        yield TreeRow(each.label or "temporaries", item=each.kind, figures=figures)


def model_path(path: str, scopes: LayerScopes) -> str:
    """The path of a parameter in its model, where the step's layers are called by that.

    >>> model_path("params/mlp/up.weights", LayerScopes(holders={"mlp/up.weights": {}}))
    'mlp/up.weights'
    """
    _, _, name = path.partition("/")
    return name if path not in scopes.holders and name in scopes.holders else path


def model_order(scopes: LayerScopes) -> Iterable[str]:
    """The layers of a step's models in their order, by what people call them."""
    return map(scopes.label, scopes.paths)


def _parameter_row(group: MemoryGroup, scopes: LayerScopes) -> TreeRow:
    detail = f"{bytes_text(group.array_bytes)} for each such array"
    if group.optimizer_bytes:
        detail += f", and {bytes_text(group.optimizer_bytes)} for the optimizer's state of it"
    return TreeRow(
        model_path(group.path, scopes),
        line=f"{group.axes_text}  {group.dtype}",
        figures=_memory(group.bytes),
        details=(detail,),
    )


def _part_rows(part: str, groups: list[MemoryGroup], collapse: bool) -> Iterator[TreeRow]:
    """The rows of what is no parameter, below its part, if that has a name."""
    scalars = [group for group in groups if not group.shape]
    if collapse and len(scalars) > 1:
        size = sum(group.bytes for group in scalars)
        line = count_text(len(scalars), "array")
        yield TreeRow(SCALARS, group=part, line=line, figures=_memory(size))
        groups = [group for group in groups if group.shape]
    for group in groups:
        path, line = group.path.removeprefix("inputs/"), f"{group.axes_text}  {group.dtype}"
        yield TreeRow(path, group=part, line=line, figures=_memory(group.bytes))


def _memory(size: int) -> tuple[TreeFigure, ...]:
    return (TreeFigure(MEMORY, size),)
