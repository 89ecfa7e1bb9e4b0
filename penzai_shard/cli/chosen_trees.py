"""What ``plan`` and ``lint`` look at: a model, or its train state, with its layout."""

import argparse
from typing import Any, NamedTuple

from penzai_shard.cli.chosen_layouts import ChosenLayout, add_layout_arguments, chosen_layout
from penzai_shard.cli.chosen_models import ChosenModel, add_model_arguments, chosen_model
from penzai_shard.cli.chosen_steps import abstract_state


class ChosenTree(NamedTuple):
    """A model with its layout.

    Attributes:
        model: The model.
        layout: Its layout.
        tree: The model, or its train state if an optimizer was given.
    """

    model: ChosenModel
    layout: ChosenLayout
    tree: Any


def add_tree_arguments(parser: argparse.ArgumentParser, also: str, unnamed: str) -> None:
    """Adds the model, its layout, and which arrays are looked at.

    Args:
        parser: The parser.
        also: What is done with the optimizer's state too, such as ``"plan"``.
        unnamed: What arrays without names are by default, such as ``"an error"``.
    """
    add_model_arguments(parser)
    add_layout_arguments(parser)
    parser.add_argument(
        "--optimizer",
        metavar="adamw",
        help=f"also {also} the state of this optimizer of optax, and the gradients",
    )
    parser.add_argument(
        "--stacked",
        action="store_true",
        help="the blocks of a published model as one pz.nn.LayerStack, as price has them",
    )
    parser.add_argument(
        "--on-unnamed",
        choices=("error", "replicate", "infer"),
        default="error",
        help=f"what becomes of arrays without names; by default {unnamed}",
    )


def chosen_tree(options: argparse.Namespace, is_called: bool = False) -> ChosenTree:
    """Reads the model, its layout and the optimizer.

    Args:
        options: What was parsed.
        is_called: As for ``chosen_model``.

    Raises:
        ShardingError: One of them cannot be read, or they do not go together.
    """
    model = chosen_model(options.model, options.dtype, stacked=options.stacked, is_called=is_called)
    layout = chosen_layout(options, model.model)
    if options.optimizer is None:
        return ChosenTree(model, layout, model.model)
    return ChosenTree(model, layout, abstract_state(model.model, options.optimizer, layout.layout))
