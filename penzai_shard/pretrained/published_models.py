"""Models whose sizes are published, by name: abstract ones, to plan and to price.

Each is a configuration as Hugging Face has it, of a family that ``load_safetensors`` makes models
of; so what is planned here is what is loaded later. The sizes are in ``published_sizes``.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any

from penzai_shard.errors import RuleTypeError, raise_all
from penzai_shard.pretrained.conversion import configuration_of, family_of, model_of_configuration
from penzai_shard.pretrained.published_sizes import PUBLISHED_SIZES


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A model whose sizes are published.

    Attributes:
        name: What it is called here.
        config: Its configuration, as Hugging Face has it.
        parameters: How many it has, as it is published; without what is there for images. A
            parameter that has two uses counts once.
        source: Where the sizes are from.
    """

    name: str
    config: Mapping[str, Any]
    parameters: str
    source: str

    @property
    def is_tied(self) -> bool:
        """Whether it has one table for tokens that go in and for those that come out."""
        return bool(configuration_of(self.config, self.name)["tie_word_embeddings"])

    @property
    def can_be_stacked(self) -> bool:
        """Whether its blocks can be one ``pz.nn.LayerStack``."""
        configuration = configuration_of(self.config, self.name)
        return family_of(self.config, self.name).stacks(configuration)

    def with_changes(self, changes: Mapping[str, Any]) -> "PublishedModel":
        """The model with other values of some attributes of its configuration.

        Raises:
            RuleTypeError: The configuration has no such attribute.

        >>> find_published("llama-3-8b").with_changes({"num_hidden_layers": 2}).name
        'llama-3-8b(num_hidden_layers=2)'
        """
        if not changes:
            return self
        problems = []
        for name in changes.keys() - self.config.keys():
            near = difflib.get_close_matches(name, self.config, 1, 0.5)
            meant = f"Did you mean {near[0]}?" if near else f"It has {', '.join(self.config)}."
            problems.append(f"{name}: the configuration of {self.name} does not have it. {meant}")
        raise_all(RuleTypeError, f"{self.name} cannot be changed so:", sorted(problems))
        listed = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        return dataclasses.replace(
            self, name=f"{self.name}({listed})", config={**self.config, **changes}, parameters=""
        )

    def model(self, dtype: str = "bfloat16", *, use_layer_stack: bool = False) -> Any:
        """The model, without values; see ``published_model``."""
        return model_of_configuration(
            self.config, dtype, use_layer_stack=use_layer_stack, source=self.name
        )


def published_model(name: str, dtype: str = "bfloat16", *, use_layer_stack: bool = False) -> Any:
    """A model in the sizes that were published, without values: to plan, and to price.

    It is the one that ``load_safetensors`` makes of its weights. Nothing is read or downloaded.

    Args:
        name: For instance ``"llama-3-70b"``; ``penzai-shard plan --list`` shows all.
        dtype: ``"bfloat16"`` or ``"float32"``.
        use_layer_stack: Whether its blocks are one ``pz.nn.LayerStack``.

    Returns:
        The model, its parameters frozen and with ``jax.ShapeDtypeStruct`` objects in place of
        arrays. Where the publication has one table for tokens in and out, Penzai's Llama has two.

    Raises:
        RuleTypeError: There is no model of that name.
        CheckpointMismatchError: Its blocks differ, and cannot be one stack.

    >>> from penzai_shard.checkpointing import param_dict
    >>> llama = published_model("llama-3-70b")
    >>> len(param_dict(llama))
    723
    """
    return find_published(name).model(dtype, use_layer_stack=use_layer_stack)


def find_published(name: str) -> PublishedModel:
    """Looks a model up; large letters, ``_`` and ``meta-`` make no difference.

    Raises:
        RuleTypeError: There is none of that name; with the names most like it.

    >>> find_published("Llama_3_8B").config["hidden_size"]
    4096
    """
    key = name.lower().replace("_", "-").rpartition("/")[2].removeprefix("meta-")
    key = re.sub(r"^(llama|gemma)(?=\d)", r"\1-", key).removesuffix("-hf")
    if key in PUBLISHED:
        return PUBLISHED[key]
    near = difflib.get_close_matches(key, PUBLISHED, 4, 0.6)
    families = ("llama", "mistral", "gemma", "gpt-neox", "pythia")
    known = f"Did you mean {', '.join(near)}?" if near else f"There are {', '.join(families)}."
    raise RuleTypeError(
        f"there is no published model {name!r} here. {known} penzai-shard plan --list shows all; "
        "one of your own is file.py:function, or module:function."
    )


PUBLISHED: dict[str, PublishedModel] = {
    name: PublishedModel(name, config, parameters, source)
    for name, (parameters, source, config) in PUBLISHED_SIZES.items()
}
"""The models, by name."""
