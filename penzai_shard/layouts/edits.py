"""Makes the edits by which a model computes in a layout.

Three kinds of place matter. *Blocks* are what parameters are gathered for. *Regions*, attention and
feed-forward, read activations and give what is added to them: where layers are split, the compiler
is told what flows in and out of them, so that it reduces there and nowhere else. *Vocabulary
layers* look tokens up, or give logits. The model is wrapped once at each place.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from penzai import pz
from penzai.models.transformer.model_parts import TransformerBlock, TransformerFeedForward

from penzai_shard.arrays.structure import leaves_of
from penzai_shard.errors import Problem, Problems, RuleTypeError, warn_caller
from penzai_shard.layers.axis_order import moves_axes
from penzai_shard.layers.constraints import ConstrainActivations
from penzai_shard.layers.gather_parameters import GatherParameters, gather
from penzai_shard.layers.remat import Checkpointed
from penzai_shard.layers.shard_mapped import ShardMapped
from penzai_shard.layouts.axis_roles import FoundRoles, axes_of_role, mesh_axes_of
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import arguments
from penzai_shard.planning.planner import examine
from penzai_shard.rules import AxisRules
from penzai_shard.surgery.edits import Edit, find_matches, wrap
from penzai_shard.surgery.recipe import Recipe
from penzai_shard.surgery.rewriting import is_layer
from penzai_shard.surgery.standard_recipes import keep_axis_order, manual_fsdp, mixed_precision
from penzai_shard.surgery.where import ROOT, Place, Where, type_names

_BLOCKS = (TransformerBlock,)
_REGIONS = (pz.nn.Attention, pz.nn.KVCachingAttention, TransformerFeedForward)
# What parameters lie in where the model's own code pins activations by name: linen, Haliax.
_PINNED = ("flax.core.meta", "flax.linen.spmd", "haliax.core")
_HEADLINE = "this layout edits layers:"


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


def _describe(**options: Any) -> str:
    """The wrappers of ``lay_out``, for the text of an edit."""
    *names, _ = type_names(lay_out(pz.nn.Identity(), **options))
    return "(".join(names) + "(...)" + ")" * (len(names) - 1)


lay_out.describe_edit = _describe  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class RecipeMaker:
    """A model that is to compute in a layout.

    Attributes:
        model: The model.
        mesh: The mesh, with Auto axes.
        layout: The layout.
        found: Its roles in the model.
    """

    model: Any
    mesh: AnyMesh
    layout: Any
    found: FoundRoles

    def make(self) -> Recipe:
        """The edits.

        Raises:
            RuleTypeError: The model is in a layout already, or parameters that are split are in no
                block.
        """
        layout, model = self.layout, self.model
        if find_matches(model, (GatherParameters, ConstrainActivations, ShardMapped)):
            what, fix = "it is in a layout already", "Write layout.recipe(strip(model), mesh)."
            raise RuleTypeError(_HEADLINE, [Problem("", what, fix)])
        if not self._has_layers:
            self._check_rest()
            edits = Recipe()
        elif layout.manual:
            rules = self.found.tables["compute"] | self.found.tables["parameters"]
            edits = manual_fsdp(self._find_place(_BLOCKS), self.mesh, rules)
            edits = Recipe(edits, *self._edit_vocabulary())
        else:
            edits = Recipe(*self._edit_layers(), *self._edit_vocabulary())
        if layout.precision is not None:
            edits = Recipe(edits, mixed_precision(layout.precision))
        return Recipe(edits, keep_axis_order()) if find_matches(model, moves_axes) else edits

    def make_gathering(self) -> Callable[..., Any] | None:
        """What gathers all parameters in front of the loss, in a model without known layers."""
        if self._has_layers or self._is_pinned or self._gathering is None:
            return None
        return functools.partial(gather, mesh=self.mesh, **self._gathering)

    @functools.cached_property
    def _is_pinned(self) -> bool:
        """Whether the model's own code pins activations, so that parameters come to these."""
        is_box = lambda x: type(x).__module__ in _PINNED  # noqa: E731
        return any(map(is_box, jax.tree.leaves(self.model, is_leaf=is_box)))

    @functools.cached_property
    def _has_layers(self) -> bool:
        """Whether there are layers to edit; modules of Equinox are of plain arrays, or Haliax's."""
        return self._find_place(_BLOCKS) != () and bool(find_matches(self.model, pz.nn.Layer))

    def _check_rest(self) -> None:
        """Warns where the compiler decides, of a model without layers to edit.

        Raises:
            RuleTypeError: The layout does to blocks what cannot be done without them.
        """
        layout, name = self.layout, type(self.model).__name__
        # Only such layers can be blocks.
        has_layers = bool(find_matches(self.model, pz.nn.Layer))
        problems = Problems(_HEADLINE)
        for option in ("blocks", "rematerialise", "manual", "reshard_after_forward", "precision"):
            # Layers of Penzai outside of blocks take a precision.
            if getattr(layout, option) and not (option == "precision" and has_layers):
                what = f"it is for layers of Penzai, and the {name} is left to the compiler"
                fix = "Leave it out, or write blocks=MyBlock." if has_layers else "Leave it out."
                problems.add(option, what, "Write blocks=()." if option == "blocks" else fix)
        problems.raise_if_any(RuleTypeError)
        # Layers of Penzai's first API are none that an edit gathers for.
        is_first_api = any(
            "penzai.deprecated" in kind.__module__ for kind in type(self.model).mro()
        )
        gathers = self._is_pinned and self._gathering is not None
        gathers |= is_first_api and any(rule.mesh_axes for rule in layout.parameters.rules)
        if layout.blocks is None and (gathers or self.found.split_in_layers):
            # Otherwise gradients are summed, and there is one way to do that.
            fact = f"a layout knows no layers of the {name}: the compiler decides where it reduces"
            ways = "blocks=MyBlock, or blocks=()" if has_layers else "blocks=()"
            warn_caller([f"{fact}. Write {ways} if that is meant."])

    # What the edits follow from

    @functools.cached_property
    def _flows(self) -> tuple[Any, Any]:
        """How activations lie inside of layers, and between them, if not so."""

        def read(table: AxisRules) -> AxisRules:
            # Tokens have none of the axes of parameters, which is no mistake.
            return AxisRules([dataclasses.replace(x, for_activations=True) for x in table.rules])

        between = self.found.tables.get("between_blocks")
        return read(self.found.tables["compute"]), between and read(between)

    @property
    def _vocabulary(self) -> tuple[Any, ...]:
        return axes_of_role("vocabulary", self.layout.names)

    @property
    def _around(self) -> dict[str, Any]:
        """The options of ``lay_out`` at blocks and at vocabulary layers."""
        gathering = {} if self._gathering is None else {"gathering": self._gathering}
        return {"mesh": self.mesh, **gathering}

    @functools.cached_property
    def _gathering(self) -> dict[str, Any] | None:
        """The options of ``GatherParameters``; None if parameters are used as they are stored."""
        options: dict[str, Any] = {"on_indivisible": "replicate", "on_unnamed": "replicate"}
        specs = []
        for name in ("parameters", "compute"):
            request = arguments.read("Layout", self.mesh, self.found.tables[name], **options)
            specs.append([leaf.spec for leaf in examine(self.model, request)[0].leaves])
        if specs[0] == specs[1]:
            return None
        gathering: dict[str, Any] = {"rules": self._flows[0]}
        # Where the batch is split over all devices, gradients may be scattered while they are
        # summed. Where a mesh axis is idle, XLA would use that freedom to move parts of them about.
        in_use = {name for name, size in self.mesh.shape.items() if size > 1}
        if in_use <= {*mesh_axes_of("batch", [self.layout.compute])}:
            gathering["gradients_as_used"] = False
        if self.layout.precision is not None:
            # What is cast on the way is gathered after the cast, in fewer bytes.
            gathering["stored"] = self.found.tables["parameters"]
        return gathering

    # Blocks and regions

    def _edit_layers(self) -> list[Edit]:
        layout, (inside, between) = self.layout, self._flows
        options = self._around
        again = "all_but_gathered" if layout.reshard_after_forward and self._gathering else None
        if policy := layout.rematerialise or again:
            options["policy"] = policy
        blocks = self._find_place(_BLOCKS)
        if not self.found.pins_regions:
            return [wrap(blocks, lay_out, outputs=(inside,), **options)]

        regions = self._find_place(_REGIONS)
        self._check_covered(regions)
        inputs = (inside,) if between is None else (between, inside)
        flow: dict[str, Any] = {"inputs": inputs, "outputs": inputs[::-1]}
        if regions == blocks:
            return [wrap(blocks, lay_out, **options, **flow)]
        edit = wrap(regions, lay_out, mesh=self.mesh, **flow)
        return [wrap(blocks, lay_out, **options), edit] if len(options) > 1 else [edit]

    def _find_place(self, kinds: tuple[type, ...]) -> Place:
        """Where blocks or regions are; in a model without blocks the regions are the blocks."""
        if self.layout.blocks is not None:
            return self.layout.blocks
        for known in (kinds, _REGIONS):
            if found := tuple(kind for kind in known if find_matches(self.model, kind)):
                return found
        # Of any other sequence each layer is gathered by itself; of what is none, all would be.
        layers = getattr(self.model, "sublayers", ())
        found = tuple(dict.fromkeys(type(layer) for layer in layers if self._is_block(layer)))
        return Where.of(found, within=ROOT) if found else ()

    def _is_block(self, layer: Any) -> bool:
        names = {name for leaf in leaves_of(layer) for name in leaf.names or ()}
        return bool(names) and names.isdisjoint(self._vocabulary)

    def _check_covered(self, regions: Place) -> None:
        """Refuses a model with parameters that are split in layers and are in no region."""
        matches = find_matches(self.model, regions)
        covered = {leaf.path for match in matches for leaf in leaves_of(match.before)}
        problems = Problems("this layout would reduce in unknown places:")
        for leaf in leaves_of(self.model):
            names = {*(leaf.names or ())}
            split = sorted(names & self.found.split_in_layers, key=str)
            is_outside = leaf.path not in covered and not names & {*self._vocabulary}
            if split and is_outside and leaf.role == "parameter":
                what = f"{', '.join(map(repr, split))} is split, and it is in no known layer"
                problems.add(leaf.path, what, "Name its layer, too: blocks=(..., MyLayer).")
        problems.raise_if_any(RuleTypeError)

    # The vocabulary

    def _edit_vocabulary(self) -> list[Edit]:
        """The lookup of tokens and the logits.

        With the vocabulary split, each device looks up the tokens of its part, and gives the logits
        of its part, for the whole sequence; else all logits of its part of the sequence.
        """
        inside, between = self._flows
        part: tuple[Any, ...] = (inside,) if between is None else (between,)
        if between is not None and self.found.split["vocabulary"]:
            part = (between, inside)
        edits = []
        for place, looks_up in self._find_vocabulary_layers().items():
            # Tokens are never split along the sequence, and logits not if their vocabulary is.
            inputs, outputs = ((inside,), part[::-1]) if looks_up else (part, part[-1:])
            edits.append(wrap(place, lay_out, inputs=inputs, outputs=outputs, **self._around))
        return edits

    def _find_vocabulary_layers(self) -> dict[Place, bool]:
        """The innermost layers with a parameter that has the vocabulary; whether they look up.

        Penzai's own are found by type, which still means the same layers in a deeper model.
        """

        def has_vocabulary(layer: Any) -> bool:
            leaves = leaves_of(layer) if is_layer(layer) else ()
            return any({*self._vocabulary} & {*(leaf.names or ())} for leaf in leaves)

        found: dict[Place, bool] = {}
        inner: list[str] = []
        for match in find_matches(self.model, has_vocabulary, "inner first"):
            if any(not match.path or path.startswith(f"{match.path}/") for path in inner):
                continue
            inner.append(match.path)
            own = (pz.nn.EmbeddingLookup, pz.nn.EmbeddingDecode)
            kind = next((kind for kind in own if isinstance(match.before, kind)), None)
            found[kind or match.path or ROOT] = kind is pz.nn.EmbeddingLookup
        return found
