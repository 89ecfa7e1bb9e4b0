"""Recipes for what most models need: one edit each, to read, to add to, and to take as a pattern.

Their functions are public, so that the recipes can be written as JSON and read by anybody.
"""

from typing import Any

from penzai import pz

from penzai_shard.arrays.structure import flatten
from penzai_shard.layers.axis_order import KeepAxisOrder, moves_axes
from penzai_shard.layers.constraints import ConstrainShardingByName
from penzai_shard.layers.in_precision import InPrecision, is_sensitive
from penzai_shard.layers.jitted import Jitted
from penzai_shard.layers.remat import Checkpointed
from penzai_shard.layers.rolled_layer_stack import RolledLayerStack
from penzai_shard.layers.shard_mapped import ShardMapped
from penzai_shard.layers.wrapper import Scoped, WrapperLayer
from penzai_shard.meshes import AnyMesh
from penzai_shard.planning import arguments
from penzai_shard.rules import IDENTITY, AxisRules
from penzai_shard.surgery.edits import insert_after, replace, wrap
from penzai_shard.surgery.inserted import CONSTRAINTS, InsertedSequence
from penzai_shard.surgery.recipe import Recipe
from penzai_shard.surgery.where import ROOT, Place


def constrain_blocks(where: Place, mesh: AnyMesh, rules: Any = None) -> Recipe:
    """Pins the layout of what comes out of each block.

    Otherwise the compiler may move activations from one layout to another in every layer; fully
    sharded training needs at least the batch pinned. Name the embedding lookup too, so that the
    first block gets its input in that layout: ``constrain_blocks((Block, pz.nn.EmbeddingLookup),
    ...)``.

    Args:
        where: The type of the blocks, or any place that edits take.
        mesh: The mesh.
        rules: Which logical axis of the activations goes to which mesh axis, in any form that
            ``make_plan`` takes.

    Raises:
        RuleTypeError, MeshError: As ``make_plan``.

    >>> import penzai_shard as pzs
    >>> pzs.constrain_blocks(pz.nn.Linear, pzs.make_mesh({"data": 8}), {"batch": "data"})
    Recipe(
        insert_after(Linear, ConstrainShardingByName(...)),
    )
    """
    return Recipe(insert_after(where, ConstrainShardingByName(mesh, rules)))


def rematerialise_blocks(where: Place, policy: Any = "nothing") -> Recipe:
    """Computes the intermediates of each block again in the backward pass, to save memory.

    Args:
        where: The type of the blocks, or any place that edits take.
        policy: What may be kept, as for ``Checkpointed``, such as ``"dots"``; by default nothing
            but the input of each block.

    >>> rematerialise_blocks(pz.nn.Attention, "dots")
    Recipe(
        wrap(Attention, Checkpointed, policy='dots'),
    )
    """
    return Recipe(wrap(where, Checkpointed, policy=policy))


def jit_root() -> Recipe:
    """Compiles the whole model.

    >>> jit_root()
    Recipe(
        wrap(ROOT, Jitted),
    )
    """
    return Recipe(wrap(ROOT, Jitted))


def is_model_layer(layer: Any) -> bool:
    """Whether a layer is one of the model, and not one that edits have put in.

    >>> is_model_layer(pz.nn.Identity()), is_model_layer(Jitted(pz.nn.Identity()))
    (True, False)
    """
    return not isinstance(layer, (WrapperLayer, InsertedSequence, *CONSTRAINTS))


def scope_by_path(layer: Any, path: str) -> Scoped:
    """The layer, with its path as the name of its operations; the root's is the name of its type.

    >>> scope_by_path(pz.nn.Identity(), "").name
    'Identity'
    """
    return Scoped(layer, path or type(layer).__name__)


def scope_layers() -> Recipe:
    """Names the operations of each layer by its path, for profiles and compiled programs.

    Put it first in a longer recipe: then the names are the paths in the model as it was.

    >>> edited = scope_layers().apply(pz.nn.Sequential([pz.nn.Identity()]))
    >>> edited.name, edited.body.sublayers[0].name
    ('Sequential', 'sublayers/0')
    """
    return Recipe(wrap(is_model_layer, scope_by_path, nested=True))


def roll_layer_stacks(unroll: int = 1, policy: Any = "everything") -> Recipe:
    """Runs each layer stack as a loop, so that compile time does not grow with depth.

    Args:
        unroll: How many layers one turn of the loop runs.
        policy: What is kept between forward and backward pass, as for ``RolledLayerStack``.

    >>> roll_layer_stacks()[0].options
    (('unroll', 1), ('policy', 'everything'))
    """
    # Stacks in stacks are rolled from the inside out.
    roll, options = RolledLayerStack.from_layer_stack, {"unroll": unroll, "policy": policy}
    return Recipe(replace(pz.nn.LayerStack, roll, nested=True, **options))


def shard_by_rules(layer: Any, mesh: AnyMesh, rules: AxisRules, min_size: int = 0) -> ShardMapped:
    """The layer in a ``ShardMapped``, its parameters and activations split by one set of rules.

    Logical axes that a parameter of the layer has stay whole in activations, as a device needs all
    of what the layer contracts. Rules for the largest dimension are for parameters.
    """
    parameters = [leaf for leaf in flatten(layer)[0] if leaf.role == "parameter"]
    whole = sorted({name for leaf in parameters for name in leaf.names or () if name}, key=str)
    # Of activations a rule for the largest dimension would split any, which nobody asked for.
    by_name = [rule for rule in rules.rules if rule.logical_axis is not None or rule == IDENTITY]
    activation_rules = AxisRules(dict.fromkeys(whole)) | AxisRules(by_name)
    return ShardMapped(layer, mesh, rules, activation_rules, min_size=min_size)


def manual_fsdp(where: Place, mesh: AnyMesh, rules: Any = None, *, min_size: int = 0) -> Recipe:
    """Runs each block per device, its parameters gathered when they are used.

    For fully sharded training where the compiler finds no good schedule by itself. All mesh axes
    are taken over; next to tensor parallelism use ``GatherParameters``.

    Source: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054); Zhao et al. 2023, "PyTorch FSDP"
    (arXiv:2304.11277).

    Args:
        where: The type of the blocks, or any place that edits take.
        mesh: The mesh.
        rules: Which logical axis goes to which mesh axis, in any form that ``make_plan`` takes,
            such as ``{"embedding": "data", "batch": "data"}``. Logical axes that the parameters of
            a block have are split in these, and all others in activations. For anything else write
            ``wrap(where, ShardMapped, ...)``.
        min_size: Parameters with fewer elements stay whole on every device.

    Raises:
        RuleTypeError, MeshError: As ``make_plan``.

    >>> import jax, penzai_shard as pzs
    >>> mesh, rules = pzs.make_mesh({"data": 8}), {"a": "data", "batch": "data"}
    >>> layer = pz.nn.Linear.from_config("w", jax.random.key(0), {"a": 8}, {"b": 4})
    >>> manual_fsdp(pz.nn.Linear, mesh, rules).apply(layer).activation_rules
    AxisRules('a' -> None; 'b' -> None; 'batch' -> 'data')
    """
    # Read here, so that a wrong rule is told where it is written.
    request = arguments.read("manual_fsdp", mesh, rules)
    options: dict[str, Any] = {"mesh": request.mesh, "rules": request.rules, "min_size": min_size}
    return Recipe(wrap(where, shard_by_rules, **options))


def keep_axis_order() -> Recipe:
    """Moves no large array only to bring its axes into another order; see ``KeepAxisOrder``.

    A transformer of Penzai then moves about as many bytes as one written by hand on raw arrays.

    >>> keep_axis_order()
    Recipe(
        wrap(moves_axes, KeepAxisOrder),
    )
    """
    return Recipe(wrap(moves_axes, KeepAxisOrder))


def mixed_precision(compute: Any = "bfloat16", keep: Any = is_sensitive) -> Recipe:
    """Computes the whole model in another precision; parameters and gradients keep theirs.

    Args:
        compute: The dtype to compute in.
        keep: Which layers stay in float32, as for ``InPrecision``: by default norms and softmax.

    >>> mixed_precision()
    Recipe(
        wrap(ROOT, InPrecision, compute_dtype='bfloat16', keep=is_sensitive),
    )
    """
    return Recipe(wrap(ROOT, InPrecision, compute_dtype=compute, keep=keep))
