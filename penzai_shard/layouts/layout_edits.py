"""The edits by which a model computes in a layout.

Three kinds of place matter. *Blocks* are what parameters are gathered for. *Regions* are the layers
that read activations and give what is added to them, attention and feed-forward: a layout that
splits layers says what flows into them and out of them, so that the compiler reduces there and
nowhere else. *Vocabulary layers* look tokens up, or give logits.
"""

import dataclasses
from typing import Any

from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock, TransformerFeedForward

from penzai_shard.axis_rules import AxisRules
from penzai_shard.equinox_modules import is_equinox_module
from penzai_shard.errors import RuleTypeError, raise_all, warn_caller
from penzai_shard.layers import (
    Checkpointed,
    ConstrainActivations,
    GatherParameters,
    compute_dtypes,
    laid_out,
)
from penzai_shard.layouts.vocabulary_layers import vocabulary_layers
from penzai_shard.meshes import AnyMesh, mesh_shape_of
from penzai_shard.model_variables import is_parameter, value_of, variable_name
from penzai_shard.named_leaves import leaves_of
from penzai_shard.planning import Planner
from penzai_shard.rule_kinds import LogicalAxis, OnIndivisible
from penzai_shard.surgery import (
    Recipe,
    axes_in_place,
    constrain_blocks,
    manual_fsdp,
    rematerialise_blocks,
    wrap,
)
from penzai_shard.surgery.tree_nodes import is_layer, nodes_of
from penzai_shard.tree_paths import paths_and_leaves

BLOCKS = (TransformerBlock,)
REGIONS = (pz.nn.Attention, pz.nn.KVCachingAttention, TransformerFeedForward)


@dataclasses.dataclass(frozen=True)
class EditRequest:
    """What the edits of a layout follow from, in the model's own names.

    Attributes:
        parameters: How parameters are stored.
        compute: How layers compute: what flows into and out of them, and their parameters.
        between: How activations are laid out between layers, if not as ``compute`` says.
        rematerialise: What blocks keep for the backward pass, as ``Checkpointed`` takes it; None
            keeps all.
        gather_again: Whether gathered parameters are gathered again in the backward pass.
        manual: Whether blocks run per device, and gather by themselves.
        blocks: Where the blocks are, as a place of an edit; None for those of Penzai, ``()`` to
            edit none.
        batch_axes: The mesh axes that the batch is split over.
        split_in_layers: The logical axes that regions split: neurons, heads and experts.
        vocabulary: The logical axis of the vocabulary, whether it is split or not.
        splits_vocabulary: Whether it is split.
        on_indivisible: What becomes of lengths that do not divide, of activations and of
            parameters while they are used.
        used: How parameters are laid out while they are used, if not as ``compute`` says.
    """

    parameters: AxisRules
    compute: AxisRules
    between: AxisRules | None
    rematerialise: Any
    gather_again: bool
    manual: bool
    blocks: Any
    batch_axes: tuple[str, ...]
    split_in_layers: tuple[LogicalAxis, ...]
    vocabulary: LogicalAxis
    splits_vocabulary: bool
    on_indivisible: OnIndivisible
    used: AxisRules | None = None

    @property
    def pinning(self) -> dict[str, Any]:
        """What is not as by default of the options that all layers have which pin arrays."""
        return {"on_indivisible": "pad"} if self.on_indivisible == "pad" else {}


def with_whole_batch(compute: AxisRules, model: Any, batch: LogicalAxis) -> AxisRules:
    """Rules of parameters' axes alone, with the batch as one that is whole.

    Where they are followed by activations that have none of these axes, such as tokens, nothing is
    forgotten then: the copies are meant.

    Args:
        compute: How layers compute, by rules that do not split the batch.
        model: The model.
        batch: What it calls the batch.
    """
    if not compute.rules or any(rule.yields for rule in compute.name_rules):
        return compute  # Those that yield are followed where there are such axes.
    known = {name for leaf in leaves_of(model) for name in leaf.names or ()}
    return compute | {batch: None} if known >= set(compute.logical_axes) else compute


def layout_edits(model: Any, mesh: AnyMesh, asked: EditRequest) -> Recipe:
    """The edits by which a model computes in a layout.

    Args:
        model: The model, not edited so yet.
        mesh: The mesh.
        asked: What is asked for.

    Returns:
        The recipe.

    Raises:
        RuleTypeError: The model has no blocks that are known, or a parameter that is split is
            in none of them.
    """
    gathered = gathering(model, mesh, asked)
    if _leaves_all_to_the_compiler(model, asked, bool(gathered)):
        return _nothing_moved(model) if is_layer(model) else Recipe()
    edits = Recipe()
    if asked.split_in_layers or asked.splits_vocabulary or asked.between is not None:
        edits += _vocabulary_edits(model, mesh, asked, gathered)
        if not asked.manual:
            edits += _region_edits(model, mesh, asked)
    else:
        if not asked.manual:
            edits += constrain_blocks(_blocks(model, asked), mesh, asked.compute)
        if _has(model, pz.nn.EmbeddingLookup):
            edits += constrain_blocks(pz.nn.EmbeddingLookup, mesh, asked.compute)
    if asked.rematerialise is not None:
        # Before the next edit, which then goes inside: what was gathered is not kept either.
        edits += rematerialise_blocks(_blocks(model, asked), asked.rematerialise)
    if asked.manual:
        blocks = _blocks(model, asked)
        edits += manual_fsdp(blocks, mesh, asked.compute | asked.parameters)
        # Within the region too, which the last edit does not look into.
        edits += axes_in_place(blocks)
    elif gathered:
        options = {"mesh": mesh, "rules": gathered["parameters"], **asked.pinning}
        if not gathered["gradients_as_used"]:
            options["gradients_as_used"] = False
        if "stored" in gathered:
            options["stored"] = gathered["stored"]
        edits += wrap(_blocks(model, asked), GatherParameters, **options)
        if asked.gather_again and asked.rematerialise is None:
            edits += wrap(GatherParameters, Checkpointed, policy="all_but_gathered")
    return edits + _nothing_moved(model)


def _nothing_moved(model: Any) -> Recipe:
    """The edit by which as few bytes are moved as by a step that is written by hand.

    It undoes what Penzai's named arrays cost. Models of other libraries stay as they are.
    """
    return axes_in_place() if _has(model, pz.nn.Layer) else Recipe()


def _leaves_all_to_the_compiler(model: Any, asked: EditRequest, gathers: bool) -> bool:
    """Whether there is nothing to edit, as was said by ``blocks=()``, or as there are no layers."""
    if asked.blocks != () and any(_is_editable(node) for _, node in nodes_of(model)):
        return False
    if asked.blocks and any(is_equinox_module(node) for _, node in nodes_of(model)):
        raise RuleTypeError(
            f"blocks={asked.blocks!r}: what a layout puts around blocks lays arrays out by name, "
            f"and the {type(model).__name__} computes with plain arrays, as all modules of Equinox "
            "do. Leave the layout of activations to the compiler: blocks=()."
        )
    given = {
        "rematerialise": asked.rematerialise is not None,
        "manual": asked.manual,
        "reshard_after_forward": asked.gather_again,
    }
    why = "blocks=() says that there are none"
    if asked.blocks != ():
        why = f"the {type(model).__name__} has none"
        if gathers or asked.split_in_layers:
            # Otherwise only gradients are summed, and there is one way to do that.
            warn_caller(
                [
                    f"{why.removesuffix('none')}no layers that a layout could edit, so the "
                    "compiler decides where parameters are gathered and activations reduced, "
                    "which may move more than it must. Say that this is meant, blocks=(), or pin "
                    "what the loss function computes: ConstrainShardingByName(mesh, rules)(x)."
                ]
            )
    raise_all(
        RuleTypeError,
        "this layout edits layers:",
        [
            f"{name}: it is done to blocks, and {why}. Leave it out."
            for name in given
            if given[name]
        ],
    )
    return True


def _is_editable(node: Any) -> bool:
    """Whether a node is a layer that computes with named arrays; those of Equinox do not."""
    return is_layer(node) and not is_equinox_module(node)


def gathering(model: Any, mesh: AnyMesh, asked: EditRequest) -> dict[str, Any]:
    """How parameters are gathered; empty if they are used as they are stored."""
    rules_of_use = asked.compute if asked.used is None else asked.used
    stored, used = (
        Planner(
            mesh,
            rules,
            on_indivisible="pad" if asked.on_indivisible == "pad" else "replicate",
            on_unnamed="replicate",
        ).examined(model)[0]
        for rules in (asked.parameters, rules_of_use)
    )
    if [leaf.spec for leaf in stored.leaves] == [leaf.spec for leaf in used.leaves]:
        return {}
    # Where the batch is split over all devices, gradients may be scattered while they are summed.
    # Where a mesh axis is idle, the compiler would use that freedom to move parts of them about.
    idle = {name for name, size in mesh_shape_of(mesh).items() if size > 1} - set(asked.batch_axes)
    options = {"parameters": rules_of_use, "gradients_as_used": bool(idle)}
    if any(dtype.itemsize < 4 for dtype in compute_dtypes(model)):
        # What is cast on the way is gathered after the cast, in fewer bytes.
        options["stored"] = asked.parameters
    return options


def _region_edits(model: Any, mesh: AnyMesh, asked: EditRequest) -> Recipe:
    """Activations that are whole inside of regions, as far as parameters do not split them."""
    inside, between = asked.compute, asked.between
    regions = _known(model, asked.blocks, REGIONS)
    edits = Recipe(
        wrap(
            regions,
            ConstrainActivations,
            mesh=mesh,
            inputs=(inside,) if between is None else (between, inside),
            outputs=(inside,) if between is None else (inside, between),
            **asked.pinning,
        )
    )
    _check_covered(model, edits, asked)
    return edits


def _vocabulary_edits(
    model: Any, mesh: AnyMesh, asked: EditRequest, gathered: dict[str, Any]
) -> Recipe:
    """The lookup of tokens and the logits.

    With the vocabulary split, each device looks up the tokens of its part, and gives the logits of
    its part, for the whole sequence; otherwise each gives all logits of its part of the sequence.
    """
    inside, between = asked.compute, asked.between
    edits = Recipe()
    for layer in vocabulary_layers(model, asked.vocabulary):
        inputs: tuple[AxisRules, ...]
        outputs: tuple[AxisRules, ...]
        inputs = outputs = (inside,) if between is None else (between,)
        if between is not None and asked.splits_vocabulary:
            inputs, outputs = (between, inside), (inside,)
        if layer.looks_up:
            # Tokens are never split along the sequence.
            inputs = (inside,)
            if between is not None:
                outputs = (inside, between) if asked.splits_vocabulary else (between,)
        options = {"mesh": mesh, "inputs": inputs, "outputs": outputs, **gathered, **asked.pinning}
        edits += wrap(layer.place, laid_out, **options)
    return edits


def _has(model: Any, kinds: Any) -> bool:
    return bool(pz.select(model).at_instances_of(kinds).count())


def _blocks(model: Any, asked: EditRequest) -> Any:
    """Where the blocks are; in a model without Penzai's, the regions are the blocks."""
    has_regions = not _has(model, BLOCKS) and _has(model, REGIONS)
    return _known(model, asked.blocks, REGIONS if has_regions else BLOCKS)


def _known(model: Any, given: Any, kinds: tuple[type, ...]) -> Any:
    """The place of the blocks or regions that was given, or that of those of Penzai's kinds."""
    if given is not None:
        return given
    found = tuple(kind for kind in kinds if _has(model, kind))
    if not found:
        names = " or ".join(kind.__name__ for kind in kinds)
        raise RuleTypeError(
            f"this layout edits the layers that read activations and give what is added to them, "
            f"and the {type(model).__name__} has no {names}. Say which layers they are, as a place "
            "of an edit: blocks=MyBlock, blocks=(MyAttention, MyFeedForward) or "
            "blocks='**/my_block'; or leave the layout of activations to the compiler: blocks=()."
        )
    return found[0] if len(found) == 1 else found


def _check_covered(model: Any, edits: Recipe, asked: EditRequest) -> None:
    """Refuses a model with parameters that are split and are in no region."""
    regions = [path for row in edits.report(model).rows for path in row.paths]
    problems = []
    for path, leaf in paths_and_leaves(model, is_leaf=is_parameter):
        if not is_parameter(leaf) or any(
            path == region or not region or path.startswith(f"{region}/") for region in regions
        ):
            continue
        names = {name for part in leaves_of(value_of(leaf)) for name in part.names or ()}
        split = [name for name in asked.split_in_layers if name in names]
        if split and asked.vocabulary not in names:
            problems.append(
                f"{variable_name(leaf, path)}: logical axis {split[0]!r} is split, and the "
                f"parameter is in no layer that the layout knows ({path}). Give that layer too: "
                "blocks=(..., MyLayer), each a layer that reads activations and gives what is "
                "added to them."
            )
    raise_all(RuleTypeError, "this layout would reduce in unknown places:", problems)
