"""The layout for a training step, found among all sane ones."""

from penzai_shard.choosing.choices.choice import Choice
from penzai_shard.choosing.choices.choices import Choices
from penzai_shard.choosing.choices.choose import choose_layout

__all__ = ["Choice", "Choices", "choose_layout"]
