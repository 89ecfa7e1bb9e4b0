"""Makes the edits by which a model computes in a layout.

Three kinds of place matter. *Blocks* are what parameters are gathered for. *Regions*, attention and
feed-forward, read activations and give what is added to them: where layers are split, the compiler
is told what flows in and out of them, so that it reduces there and nowhere else. *Vocabulary
layers* look tokens up, or give logits. The model is wrapped once at each place.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock, TransformerFeedForward

from penzai_shard.arrays.structure import leaves_of
from penzai_shard.errors import Problem, Problems, RuleTypeError, warn_caller
from penzai_shard.layers.constraints import ConstrainActivations
from penzai_shard.layers.gather_parameters import GatherParameters
from penzai_shard.layers.remat import Checkpointed
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import arguments
from penzai_shard.planning.planner import examine
from penzai_shard.rules import AxisRules
from penzai_shard.surgery.edits import wrap
from penzai_shard.surgery.recipe import Recipe
from penzai_shard.surgery.rewriting import Match, Rewriter, is_layer
from penzai_shard.surgery.standard_recipes import keep_axis_order, manual_fsdp, mixed_precision
from penzai_shard.surgery.where import ROOT, Place, Where

BLOCKS = (TransformerBlock,)
REGIONS = (pz.nn.Attention, pz.nn.KVCachingAttention, TransformerFeedForward)


@dataclasses.dataclass(frozen=True)
class EditRequest:
    """What the edits follow from, in the model's own names.

    Attributes:
        parameters: How parameters are stored.
        compute: How layers compute: what flows into and out of them, and their parameters.
        between: How activations lie between layers, if not as ``compute`` says.
        batch_axes: The mesh axes over which the batch is split.
        in_layers: The logical axes that layers split.
        vocabulary: The logical axes that the vocabulary may have; the first is the one.
        splits_vocabulary: Whether it is split.
        layout: The other fields of the layout.
    """

    parameters: AxisRules
    compute: AxisRules
    between: AxisRules | None
    batch_axes: tuple[str, ...]
    in_layers: tuple[Any, ...]
    vocabulary: tuple[Any, ...]
    splits_vocabulary: bool
    layout: Any

    @property
    def flows(self) -> tuple[Any, Any]:
        """How activations lie inside of layers, and between them if not so."""
        # Tokens have none of the axes of parameters, which is no mistake.
        inside, between = (
            None
            if table is None
            else AxisRules(
                [dataclasses.replace(rule, for_activations=True) for rule in table.rules]
            )
            for table in (self.compute, self.between)
        )
        return inside, between


def lay_out(
    layer: Any,
    mesh: AnyMesh,
    inputs: tuple[Any, ...] = (),
    outputs: tuple[Any, ...] = (),
    gathering: Mapping[str, Any] | None = None,
    policy: str | None = None,
) -> Any:
    """A layer in all that a layout puts around it: one wrapper of an edit.

    Args:
        layer: The layer.
        mesh: The mesh.
        inputs: As for ``ConstrainActivations``.
        outputs: As for ``ConstrainActivations``.
        gathering: The options of ``GatherParameters``; None uses parameters as they are stored.
        policy: What is kept for the backward pass, as for ``Checkpointed``; None keeps all.
    """
    if gathering is not None:
        layer = GatherParameters(layer, mesh, **gathering)
    if policy is not None:
        # Around the gathering, so that gathered parameters are not kept.
        layer = Checkpointed(layer, policy)
    if inputs or outputs:
        layer = ConstrainActivations(layer, mesh, inputs, outputs)
    return layer


def make_recipe(model: Any, mesh: AnyMesh, request: EditRequest) -> Recipe:
    """The edits by which a model computes in a layout.

    Raises:
        RuleTypeError: The model has no blocks that are known, or parameters that are split are in
            none of them.
    """
    layout = request.layout
    gathering = _find_gathering(model, mesh, request)
    edits = Recipe()
    if _has_layers(model, request, is_gathering=gathering is not None):
        if layout.manual:
            edits = manual_fsdp(
                _find_place(model, request, BLOCKS), mesh, request.compute | request.parameters
            )
        else:
            edits = _edit_layers(model, mesh, request, gathering)
        edits = Recipe(edits, *_edit_vocabulary(model, mesh, request, gathering))
    if _find(model, is_layer):
        if layout.precision is not None:
            edits = Recipe(edits, mixed_precision(layout.precision))
        if _find(model, pz.nn.Layer):
            edits = Recipe(edits, keep_axis_order())
    return edits


def _find_gathering(model: Any, mesh: AnyMesh, request: EditRequest) -> dict[str, Any] | None:
    """The options of ``GatherParameters``; None if parameters are used as they are stored."""
    options: dict[str, Any] = {"on_indivisible": "replicate", "on_unnamed": "replicate"}
    stored, used = (
        examine(model, arguments.read("Layout.recipe", mesh, rules, **options))[0]
        for rules in (request.parameters, request.compute)
    )
    if [leaf.spec for leaf in stored.leaves] == [leaf.spec for leaf in used.leaves]:
        return None
    gathering: dict[str, Any] = {"rules": request.compute}
    # Where the batch is split over all devices, gradients may be scattered while they are summed.
    # Where a mesh axis is idle, the compiler would use that freedom to move parts of them about.
    if not {name for name, size in mesh.shape.items() if size > 1} - {*request.batch_axes}:
        gathering["gradients_as_used"] = False
    if request.layout.precision is not None:
        # What is cast on the way is gathered after the cast, in fewer bytes.
        gathering["stored"] = request.parameters
    return gathering


def _has_layers(model: Any, request: EditRequest, is_gathering: bool) -> bool:
    """Whether there are layers to edit; without, the compiler decides, which a warning says once.

    Raises:
        RuleTypeError: The layout does to blocks what cannot be done without them.
    """
    layout, name = request.layout, type(model).__name__
    if layout.blocks != () and has_editable_layers(model):
        return True
    problems = Problems("this layout edits layers:")
    fix = "Leave it out."
    why = "blocks=() says that there are none" if layout.blocks == () else f"the {name} has none"
    given = {
        "blocks": bool(layout.blocks),
        "rematerialise": layout.rematerialise is not None,
        "manual": layout.manual,
        "reshard_after_forward": layout.reshard_after_forward,
    }
    for option in (option for option, is_given in given.items() if is_given):
        problems.add(option, f"it is done to layers of named arrays, and {why}", fix)
    problems.raise_if_any(RuleTypeError)
    if layout.blocks is None and (is_gathering or request.in_layers):
        # Otherwise only gradients are summed, and there is one way to do that.
        text = (
            f"the {name} has no layers that a layout could edit, so the compiler decides where "
            "parameters are gathered and activations reduced, by what the model itself says of "
            "its activations. Write blocks=() if that is meant."
        )
        warn_caller([text])
    return False


def has_editable_layers(model: Any) -> bool:
    """Whether a model has layers of named arrays; those of Equinox compute with plain ones."""
    equinox = sys.modules.get("equinox")
    others: tuple[Any, ...] = () if equinox is None else (equinox.Module,)
    return any(not isinstance(match.before, others) for match in _find(model, is_layer))


def _find(model: Any, place: Place, order: Any = "outermost") -> list[Match]:
    """The layers of a model at a place."""
    finder = Where.of(place).find(layers_only=True)
    rewriter = Rewriter(finder, lambda node, keys: (node,), order=order)
    rewriter.run(model)
    return rewriter.matches


# Blocks and regions


def _edit_layers(
    model: Any, mesh: AnyMesh, request: EditRequest, gathering: dict[str, Any] | None
) -> Recipe:
    layout, (inside, between) = request.layout, request.flows
    options: dict[str, Any] = {} if gathering is None else {"gathering": gathering}
    if layout.rematerialise is not None:
        options["policy"] = layout.rematerialise
    elif layout.reshard_after_forward and gathering is not None:
        options["policy"] = "all_but_gathered"
    blocks = _find_place(model, request, BLOCKS)
    if not (request.in_layers or request.splits_vocabulary or between is not None):
        return Recipe(wrap(blocks, lay_out, mesh=mesh, outputs=(inside,), **options))

    regions = _find_place(model, request, REGIONS)
    _check_covered(model, regions, request)
    inputs = (inside,) if between is None else (between, inside)
    flow: dict[str, Any] = {"mesh": mesh, "inputs": inputs, "outputs": inputs[::-1]}
    if regions == blocks:
        return Recipe(wrap(blocks, lay_out, **flow, **options))
    edits = Recipe(wrap(regions, lay_out, **flow))
    return Recipe(wrap(blocks, lay_out, mesh=mesh, **options), edits) if options else edits


def _find_place(model: Any, request: EditRequest, kinds: Sequence[type]) -> Place:
    """Where the blocks or regions are; in a model without blocks the regions are the blocks."""
    if request.layout.blocks is not None:
        return request.layout.blocks
    for known in (kinds, REGIONS):
        found = tuple(kind for kind in known if _find(model, kind))
        if found:
            return found
    names = " or ".join(kind.__name__ for kind in kinds)
    what = f"the {type(model).__name__} has no {names}"
    fix = "Write blocks=(MyAttention, MyFeedForward), or blocks=() to leave it to the compiler."
    raise RuleTypeError("this layout edits the blocks of a model:", [Problem("blocks", what, fix)])


def _check_covered(model: Any, regions: Place, request: EditRequest) -> None:
    """Refuses a model with parameters that are split in layers and are in no region."""
    covered = {leaf.path for match in _find(model, regions) for leaf in leaves_of(match.before)}
    problems = Problems("this layout would reduce in unknown places:")
    for leaf in leaves_of(model):
        names = {*(leaf.names or ())}
        is_split = leaf.role == "parameter" and names & {*request.in_layers}
        if is_split and leaf.path not in covered and not names & {*request.vocabulary}:
            fix = "Name its layer, too: blocks=(..., MyLayer)."
            what = f"{sorted(is_split, key=str)} are split, and it is in no layer that is known"
            problems.add(leaf.path, what, fix)
    problems.raise_if_any(RuleTypeError)


# The vocabulary


def _edit_vocabulary(
    model: Any, mesh: AnyMesh, request: EditRequest, gathering: dict[str, Any] | None
) -> list[Any]:
    """The lookup of tokens and the logits.

    With the vocabulary split, each device looks up the tokens of its part, and gives the logits of
    its part, for the whole sequence; otherwise each gives all logits of its part of the sequence.
    """
    (inside, between), edits = request.flows, []
    for place, looks_up in _find_vocabulary_layers(model, request.vocabulary):
        whole: tuple[AxisRules, ...] = (inside,)
        part = whole if between is None else (between,)
        if between is not None and request.splits_vocabulary:
            part = (between, inside)
        # Tokens are never split along the sequence, and logits not if their vocabulary is.
        inputs, outputs = (whole, part[::-1]) if looks_up else (part, part[-1:])
        options: dict[str, Any] = {"mesh": mesh, "inputs": inputs, "outputs": outputs}
        if gathering is not None:
            options["gathering"] = gathering
        edits.append(wrap(place, lay_out, **options))
    return edits


def _find_vocabulary_layers(model: Any, axes: Sequence[Any]) -> list[tuple[Place, bool]]:
    """The innermost layers with a parameter that has the vocabulary axis; whether they look up.

    Penzai's own are found by type, which still means the same layers in a deeper model.
    """

    def has_axis(layer: Any) -> bool:
        leaves = leaves_of(layer) if is_layer(layer) else ()
        return any({*axes[:1]} & {*(leaf.names or ())} for leaf in leaves)

    found: dict[Any, bool] = {}
    inner: list[str] = []
    for match in _find(model, has_axis, "inner first"):
        if any(path.startswith(f"{match.path}/") or not match.path for path in inner):
            continue
        inner.append(match.path)
        own = (pz.nn.EmbeddingLookup, pz.nn.EmbeddingDecode)
        kind = next((kind for kind in own if isinstance(match.before, kind)), None)
        found[kind or match.path or ROOT] = kind is pz.nn.EmbeddingLookup
    return [*found.items()]
