"""Chooses a layout from the command line, for devices that need not be there."""

from typing import Any

from penzai_shard.choosing.choices import choose_layout
from penzai_shard.cli import inputs
from penzai_shard.pretrained.families import model_of_config
from penzai_shard.training.cross_entropy import cross_entropy


def predict_tokens(model: Any, rng: Any, state: Any, tokens: Any, targets: Any) -> Any:
    """The loss of a language model, with the token behind each token as its target."""
    loss = cross_entropy(model(tokens), targets)
    return loss, state, {"loss": loss}


def print_choices(
    model: str, loss: str, optimizer: str, keep: str, as_json: bool, out: str, **options: Any
) -> None:
    """Prints the layouts that fit, the best first, and writes the best to a file.

    Raises:
        NothingFitsError: None fits.
    """
    update = inputs.read_object(optimizer if ":" in optimizer else f"optax:{optimizer}")
    choices = choose_layout(
        inputs.read_model(model) if ":" in model else model_of_config(model),
        inputs.read_object(loss) if loss else predict_tokens,
        update if ":" in optimizer else update(1e-3),
        keep={rule.logical_axis: rule.mesh_axes for rule in inputs.read_rules(keep).rules},
        **options,
    )
    print(choices.to_json() if as_json else choices)
    if out:
        choices.best.save(out)
