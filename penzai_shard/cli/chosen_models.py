"""MODEL on the command line: a published model by name, or a function that builds one."""

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from penzai_shard.checkpointing import param_dict
from penzai_shard.cli.answers import print_table, printed
from penzai_shard.cli.model_references import ModelReference, read_literals
from penzai_shard.errors import RuleTypeError
from penzai_shard.named_leaves import leaves_of
from penzai_shard.pretrained.published_models import PUBLISHED, PublishedModel, find_published
from penzai_shard.text_tables import PreparedTable
from penzai_shard.training import TrainState

_MODEL_HELP = (
    "a published model, such as llama-3-70b, or with other sizes "
    "'llama-3-70b(num_hidden_layers=2)'; or file.py:function or module:function, which builds a "
    "model, with arguments in brackets if it takes some. Nothing is initialised or downloaded"
)

_NAME = re.compile(r"(?P<name>[\w./-]+)\s*(?P<call>\(.*\))?", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class ChosenModel:
    """A model that was asked for.

    Attributes:
        name: As people call it.
        model: It, with structs in place of arrays.
        dtype: The dtype of its parameters; several if it has several.
        published: What is published of it, if it is a published one.
        called_with: What its function says that it is called with, as ``lint`` takes it.
        problem: All that its function says that ``choose_layout`` is called with.
    """

    name: str
    model: Any
    dtype: str
    published: PublishedModel | None = None
    called_with: Any = None
    problem: Mapping[str, Any] | None = None

    @property
    def parameter_count(self) -> int:
        """How many numbers its parameters hold."""
        model = self.model.model if isinstance(self.model, TrainState) else self.model
        return sum(math.prod(leaf.shape) for leaf in leaves_of(param_dict(model)))

    def said(self) -> dict[str, Any]:
        """What it is, for programs."""
        return {
            "model": self.name,
            "parameters": self.parameter_count,
            "dtype": self.dtype,
            "source": self.published.source if self.published else None,
        }

    def headline(self) -> str:
        """What it is, in a line."""
        count = self.parameter_count
        text = f"{self.name}: {count:,} parameters, {self.dtype}"
        if self.published is None or not self.published.parameters:
            return text
        text += f"; {self.published.parameters} are published"
        if count > 1.05 * _number(self.published.parameters):
            text += " (tokens in and out share a table there, and have one each in Penzai's model)"
        return f"{text} ({self.published.source})"


class _ListAction(argparse.Action):
    """Prints the published models, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.exit(printed(_print_published))


def _print_published() -> int:
    print_table(published_table())
    return 0


def add_model_arguments(parser: argparse.ArgumentParser, others: str = "") -> argparse.Action:
    """Adds the model, and how it is built; ``others`` is what else may stand there.

    Returns:
        The model's.
    """
    model = parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP + others)
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default=None,
        help="of the parameters of a published model (default bfloat16)",
    )
    parser.add_argument(
        "--list", action=_ListAction, nargs=0, help="list the published models, and do no more"
    )
    return model


def chosen_model(
    text: str,
    dtype: str | None = None,
    *,
    stacked: bool | None = False,
    is_called: bool = False,
    is_trained: bool = False,
) -> ChosenModel:
    """Builds the model that was asked for.

    Args:
        text: As for ``MODEL`` on the command line.
        dtype: The dtype of the parameters of a published model.
        stacked: Whether its blocks are one ``pz.nn.LayerStack``; None where they can be.
        is_called: Whether its function may say too what the model is called with.
        is_trained: Whether its function may give all that ``choose_layout`` is called with.

    Raises:
        RuleTypeError: There is no such model, or it cannot be built.
    """
    reference = ModelReference.read(text)
    if reference is not None:
        if dtype is not None:
            raise RuleTypeError(
                f"--dtype {dtype}: is for published models, and {text} says itself of which dtype "
                "its model is. Leave it out."
            )
        if stacked:
            raise RuleTypeError(
                f"--stacked: is for published models, and {text} says itself how its blocks are "
                "kept. Leave it out."
            )
        if is_trained:
            model, problem = reference.problem()
            return ChosenModel(text, model, _dtypes(model), problem=problem)
        model, called_with = reference.called_model() if is_called else (reference.model(), None)
        return ChosenModel(text, model, _dtypes(model), called_with=called_with)
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise RuleTypeError(
            f"cannot read the model {text!r}. Write for instance llama-3-8b, "
            "'llama-3-8b(num_hidden_layers=2)', model.py:build or module:build."
        )
    if match["name"].endswith(".py"):
        raise RuleTypeError(
            f"{text} is a file, and its function that builds the model is needed too: "
            f"{match['name']}:build_model."
        )
    published = find_published(match["name"])
    example = "Write for instance 'llama-3-8b(num_hidden_layers=2)'."
    positional, changes = read_literals(text, match["call"], example)
    if positional:
        raise RuleTypeError(f"{text}: what is changed has a name. {example}")
    published = published.with_changes(changes)
    use_stack = published.can_be_stacked if stacked is None else stacked
    dtype = dtype or "bfloat16"
    model = published.model(dtype, use_layer_stack=use_stack)
    return ChosenModel(published.name, model, dtype, published)


class PublishedTable(PreparedTable):
    """The models that are known by name."""

    headings = ("model", "parameters", "layers", "embedding", "source")
    right_aligned = frozenset({"parameters", "layers", "embedding"})
    below = "source"


def published_table() -> PublishedTable:
    """All published models."""
    rows: Sequence[tuple[str, ...]] = [
        (
            each.name,
            each.parameters,
            str(each.config["num_hidden_layers"]),
            str(each.config["hidden_size"]),
            each.source,
        )
        for each in PUBLISHED.values()
    ]
    return PublishedTable(tuple(rows), f"{len(rows)} published models")


def _number(published: str) -> float:
    """A number as it is published.

    >>> _number("406B")
    406000000000.0
    """
    factor = {"B": 1e9, "M": 1e6}.get(published[-1], 1.0)
    return float(published.rstrip("BM").replace(",", "")) * factor


def _dtypes(model: Any) -> str:
    found = dict.fromkeys(str(leaf.dtype) for leaf in leaves_of(model) if leaf.dtype is not None)
    return " and ".join(found) or "no dtype"
