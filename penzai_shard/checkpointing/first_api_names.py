"""Names of parameters that were saved from a model of Penzai's first API, in one of the second."""

from collections.abc import Collection
from typing import Any

from penzai_shard.checkpointing.array_records import record_of
from penzai_shard.checkpointing.arrays_by_name import ArraysByName
from penzai_shard.checkpointing.block_conversion import other_forms
from penzai_shard.checkpointing.locations import PathLike
from penzai_shard.checkpointing.manifest import read_manifest
from penzai_shard.checkpointing.parameter_dict import param_dict
from penzai_shard.errors import CheckpointMismatchError, raise_all
from penzai_shard.model_variables.first_api import parts_in_second_api
from penzai_shard.rule_kinds import nearest_name
from penzai_shard.tree_paths import split_path


def first_api_names(path: PathLike, model: Any) -> dict[str, str]:
    """What the parameters of a model of ``penzai.deprecated.v1`` are called in one of today's.

    For a checkpoint that was saved from the former and is restored into the latter, where both have
    the same layers: ``simple_mlp.MLP``, ``GemmaTransformer`` and
    ``build_llamalike_transformer``, and whatever is made of ``pz.nn.Linear``, ``AddBias``,
    ``RMSLayerNorm`` and the like under the same names. Both APIs name a parameter by the layers
    that it is in; the second has the model's name before that, and calls Gemma's ``attn``
    ``attention``.

    Args:
        path: The checkpoint's directory.
        model: The model of the second API, concrete or abstract; its blocks may be stacked.

    Returns:
        The names in the model by the names in the checkpoint, for ``restore_params(names=)``. Where
        one logical axis has another name, as the heads of a Gemma with one key head have, pass
        ``rename_axes`` too: its error says which.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at the path.
        CheckpointDamagedError: The checkpoint is not as it was saved.
        CheckpointMismatchError: With one line per parameter that the model does not have, or has at
            several places.

    >>> import tempfile
    >>> from penzai import pz
    >>> from penzai_shard.checkpointing import save_params
    >>> old = {"Affine_0.Linear.weights": pz.nx.ones({"a": 2})}
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     path = save_params(f"{directory}/params", old)
    ...     first_api_names(path, {"mlp/Affine_0/Linear.weights": pz.nx.ones({"a": 2})})
    {'Affine_0.Linear.weights': 'mlp/Affine_0/Linear.weights'}
    """
    manifest = read_manifest(path)
    part = manifest.part("params") if manifest.kind == "train_state" else manifest
    leaves = ArraysByName(param_dict(model)).leaves
    records = {name: record_of(leaf) for name, leaf in leaves.items()}
    return _paired(manifest.path, list(part.records), [*records, *other_forms(records)])


def _paired(where: str, stored: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """The wanted name for each stored one, all under one name of a model."""
    by_parts = {split_path(name): name for name in wanted}
    # What stands before the name of each stored parameter where the model has it.
    before: dict[str, set[tuple[str, ...]]] = {}
    for name in stored:
        ending = parts_in_second_api(split_path(name))
        before[name] = {
            parts[: len(parts) - len(ending)]
            for parts in by_parts
            if parts[-len(ending) :] == ending
        }
    headline = f"the checkpoint at {where} does not hold the parameters of this model:"
    raise_all(
        CheckpointMismatchError,
        headline,
        [
            f"{name}: the model has no parameter of this name in any of its layers."
            f"{_nearest('/'.join(parts_in_second_api(split_path(name))), wanted)}"
            for name in stored
            if not before[name]
        ],
    )
    common = set.intersection(*before.values()) if before else set()
    if len(common) != 1:
        listed = ", ".join(repr("/".join(prefix)) for prefix in sorted(common))
        found = f"all under each of {listed}" if common else "in different layers"
        fix = "Give the one of them that is meant, or write names= yourself."
        raise CheckpointMismatchError(headline, [f"the model has these names {found}. {fix}"])
    (prefix,) = common
    return {name: by_parts[(*prefix, *parts_in_second_api(split_path(name)))] for name in stored}


def _nearest(name: str, wanted: Collection[str]) -> str:
    near = nearest_name(name, wanted)
    return f" The nearest is {near!r}." if near else ""
