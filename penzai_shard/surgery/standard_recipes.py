"""Recipes for what most models need; each is a short list of edits to read, add to and change."""

from typing import Any

from penzai import pz

from penzai_shard.axis_rules import AxisRules
from penzai_shard.layers import (
    AxesInPlace,
    Checkpointed,
    ConstrainShardingByName,
    InPrecision,
    Jitted,
    RolledLayerStack,
    Scoped,
    ShardMapped,
    StackPolicyLike,
    resolve_stack_policy,
)
from penzai_shard.layers.in_precision import is_sensitive
from penzai_shard.layers.manual_region import check_manual_axes, mesh_axis_names
from penzai_shard.meshes import AnyMesh
from penzai_shard.named_leaves import leaves_of
from penzai_shard.rule_kinds import LargestDimensionRule
from penzai_shard.surgery.inserted_layers import library_role
from penzai_shard.surgery.making_edits import insert_after, replace, wrap
from penzai_shard.surgery.places import ROOT, PlaceLike
from penzai_shard.surgery.recipe import Recipe
from penzai_shard.surgery.tree_nodes import kind_of, snake_case


def constrain_blocks(block_type: PlaceLike, mesh: AnyMesh, rules: Any = None) -> Recipe:
    """Pins the layout of what comes out of each block.

    Without it the compiler may move activations between layouts in every layer; fully sharded
    training needs at least the batch pinned. Give the embedding lookup as well, so that the first
    block gets its input in that layout: ``constrain_blocks((Block, pz.nn.EmbeddingLookup), ...)``.

    Args:
        block_type: The type of the blocks, or several, or any place that edits take.
        mesh: The mesh.
        rules: Which logical axis of the activations goes to which mesh axis, in any form that
            ``AxisRules`` reads.

    Returns:
        The recipe, one edit.

    >>> from penzai_shard.meshes import make_mesh
    >>> constrain_blocks("pz.nn:Linear", make_mesh({"data": 8}), {"batch": "data"})
    Recipe(insert_after('pz.nn:Linear', ConstrainShardingByName(mesh=make_mesh({'data': 8}),
    axis_name_to_mesh_name=AxisRules({'batch': 'data'}))))
    """
    read = None if rules is None else AxisRules.of(rules)
    return Recipe(insert_after(block_type, ConstrainShardingByName(mesh, read)))


def rematerialise_blocks(block_type: PlaceLike, policy: Any = None) -> Recipe:
    """Computes the intermediates of each block again in the backward pass, to save memory.

    Args:
        block_type: The type of the blocks, or any place that edits take.
        policy: What may be kept, as ``Checkpointed`` takes it, such as ``"dots"``; None keeps
            nothing but each block's input.

    Returns:
        The recipe, one edit.

    >>> rematerialise_blocks("pz.nn:Attention", "dots")
    Recipe(wrap('pz.nn:Attention', Checkpointed, policy='dots'))
    """
    if policy is None:
        return Recipe(wrap(block_type, Checkpointed))
    return Recipe(wrap(block_type, Checkpointed, policy=policy))


def axes_in_place(where: PlaceLike = ROOT) -> Recipe:
    """Leaves the axes of a model's arrays where they are in memory, instead of moving them around.

    Penzai's ``nmap`` moves logical axes to the front in every layer; without that a train step of
    a transformer moves as few bytes as one that is written by hand on raw arrays.

    What other recipes put into the model, such as ``Checkpointed`` blocks, rolled stacks and
    constraints, is run the same way. Only ``ShardMapped`` needs it on the inside: give the place
    of the layers that it wraps, and put this recipe after that one.

    Args:
        where: The layer, or any place that edits take; by default the whole model.

    Returns:
        The recipe, one edit.

    >>> axes_in_place()
    Recipe(wrap(ROOT, AxesInPlace))
    """
    return Recipe(wrap(where, AxesInPlace))


def jit_root() -> Recipe:
    """Compiles the whole model.

    Returns:
        The recipe, one edit.

    >>> jit_root()
    Recipe(wrap(ROOT, Jitted))
    """
    return Recipe(wrap(ROOT, Jitted))


def is_model_layer(node: Any) -> bool:
    """Whether a node is a layer of the model itself, and not one that this library put in.

    >>> is_model_layer(pz.nn.Identity()), is_model_layer(Jitted(pz.nn.Identity()))
    (True, False)
    """
    return kind_of(node).is_layer and library_role(type(node)) is None


def scoped_by_path(layer: Any, path: str) -> Scoped:
    """A layer whose operations carry its path as a name; the root's is that of its type.

    >>> scoped_by_path(pz.nn.Identity(), "body/sublayers/0").name
    'body/sublayers/0'
    """
    return Scoped(layer, path or snake_case(type(layer).__name__))


def scope_layers() -> Recipe:
    """Names the operations of each layer by the layer's path, for profiles and compiled programs.

    Put it first in a longer recipe: the names are then the paths of the model as it was.

    Returns:
        The recipe, one edit, which finds layers inside of layers too.

    >>> edited = scope_layers().apply(pz.nn.Sequential([pz.nn.Identity()]))
    >>> edited.name, edited.body.sublayers[0].name
    ('sequential', 'sublayers/0')
    """
    return Recipe(wrap(is_model_layer, scoped_by_path, nested=True))


def roll_layer_stacks(unroll: int = 1, policy: StackPolicyLike = False) -> Recipe:
    """Runs each layer stack as a loop, so that compile time does not grow with depth.

    Args:
        unroll: How many layers one turn of the loop runs.
        policy: What is kept between forward and backward pass, as for ``RolledLayerStack``: False
            for everything, ``"carries"``, ``"nested"`` and others by name, or a
            ``LayerStackPolicy``.

    Returns:
        The recipe, one edit.

    Raises:
        RuleTypeError: The policy cannot be read.

    >>> roll_layer_stacks()
    Recipe(replace('pz.nn:LayerStack', RolledLayerStack.from_layer_stack, nested=True))
    """
    resolve_stack_policy(policy)
    options: dict[str, Any] = {} if unroll == 1 else {"unroll": unroll}
    if policy is not False and policy is not None:
        options["policy"] = policy
    return Recipe(
        replace(pz.nn.LayerStack, RolledLayerStack.from_layer_stack, nested=True, **options)
    )


def shard_mapped_by_rules(
    layer: Any,
    mesh: AnyMesh,
    rules: AxisRules,
    min_size: int = 0,
    manual_axes: str | tuple[str, ...] | None = None,
) -> ShardMapped:
    """A layer run per device, its parameters laid out and its activations split by one table.

    Logical axes that a parameter of the layer has are left whole in its activations: a device
    needs all of what the layer contracts.

    Args:
        layer: The layer.
        mesh: The mesh.
        rules: Which logical axis goes to which mesh axis.
        min_size: As in ``ShardMapped``.
        manual_axes: As in ``manual_fsdp``.

    Returns:
        The layer, wrapped.
    """
    parameters = pz.unbind_params(layer)[1]
    names = {name for leaf in leaves_of(list(parameters)) for name in leaf.names or () if name}
    whole = AxisRules(dict.fromkeys(sorted(names, key=str)))
    # Storage may be split along whatever dimension is largest; a computation may not.
    of_names = AxisRules.from_rules(
        rule for rule in rules.rules if not isinstance(rule, LargestDimensionRule)
    )
    options: dict[str, Any] = {"only_where_split": True}
    if manual_axes is not None:
        options = {"manual_axes": manual_axes}
    return ShardMapped(layer, mesh, rules, whole | of_names, min_size=min_size, **options)


def manual_fsdp(
    block_type: PlaceLike,
    mesh: AnyMesh,
    rules: Any = None,
    *,
    min_size: int = 0,
    manual_axes: str | tuple[str, ...] | None = None,
) -> Recipe:
    """Runs each block per device, its parameters gathered when they are used.

    For fully sharded training where the compiler finds no good schedule by itself. Next to it a
    mesh axis may be for tensor parallelism: what rules split over that one alone stays split, and
    the compiler moves the activations.

    Source: Zhao et al. 2023, "PyTorch FSDP"; Rajbhandari et al. 2020, "ZeRO".

    Args:
        block_type: The type of the blocks, or any place that edits take.
        mesh: The mesh.
        rules: Which logical axis goes to which mesh axis, in any form that ``AxisRules`` reads,
            such as ``{"embedding": "data", "batch": "data"}``. Logical axes that a block's
            parameters have are split in the parameters, and all others in the activations; a rule
            for the largest dimension is for parameters. For anything else write
            ``wrap(block_type, ShardMapped, ...)``.
        min_size: Parameters with fewer elements than this stay copies on every device.
        manual_axes: The mesh axes that are taken over, over which parameters are gathered. By
            default as ``only_where_split`` of ``ShardMapped`` says.

    Returns:
        The recipe, one edit.

    Raises:
        MeshError: A rule or ``manual_axes`` names a mesh axis that the mesh does not have.

    >>> import jax
    >>> from penzai_shard.meshes import make_mesh
    >>> mesh = make_mesh({"data": 4, "model": 2})
    >>> rules = {"a": "data", "b": "model", "batch": "data"}
    >>> layer = pz.nn.Linear.from_config("w", jax.random.key(0), {"a": 8}, {"b": 4})
    >>> layer = manual_fsdp(pz.nn.Linear, mesh, rules).apply(layer)
    >>> layer.activation_rules, layer.only_where_split
    (AxisRules({'a': None, 'b': None, 'batch': 'data'}), True)
    """
    read = AxisRules.of(rules)
    read.check_mesh(mesh)
    options: dict[str, Any] = {"mesh": mesh, "rules": read}
    if min_size:
        options["min_size"] = min_size
    if manual_axes is not None:
        options["manual_axes"] = mesh_axis_names("manual_axes", manual_axes)
        check_manual_axes(options["manual_axes"], mesh)
    return Recipe(wrap(block_type, shard_mapped_by_rules, **options))


def mixed_precision(compute: Any = "bfloat16", keep: Any = is_sensitive) -> Recipe:
    """Computes the whole model in another precision; parameters and gradients keep theirs.

    Args:
        compute: The dtype to compute in.
        keep: Which layers stay in float32: a type, a tuple of types, or a predicate. By default
            norms and softmax.

    Returns:
        The recipe, one edit.

    Raises:
        RuleTypeError: The dtype is not a floating-point one, or ``keep`` cannot be read.

    >>> mixed_precision()
    Recipe(wrap(ROOT, InPrecision, compute_dtype='bfloat16'))
    """
    InPrecision(pz.nn.Identity(), compute, keep=keep)  # It says now what it cannot read.
    options: dict[str, Any] = {} if keep is is_sensitive else {"keep": keep}
    return Recipe(wrap(ROOT, InPrecision, compute_dtype=compute, **options))
