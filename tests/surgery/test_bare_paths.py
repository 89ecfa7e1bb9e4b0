"""What a layer of an edited model is called: as ``strip`` would leave it."""

import jax
from penzai import pz

import penzai_shard as pzs
from penzai_shard.layers import Checkpointed, ConstrainSharding, Jitted, Scoped
from penzai_shard.surgery.bare_paths import bare_paths
from penzai_shard.surgery.tree_nodes import keys_text, nodes_of

MESH = jax.sharding.AbstractMesh((2,), ("data",))
CONSTRAINT = ConstrainSharding(jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec()))


def layer(number):
    return pz.nn.ConstantRescale(by=float(number))


def model():
    blocks = [pz.nn.Sequential([layer(10 * i), layer(10 * i + 1)]) for i in range(3)]
    return pz.nn.Sequential([layer(100), *blocks, pz.nn.Residual(delta=layer(200))])


def places(tree, paths=None):
    """Where each rescaling layer is, by the number in it, which no edit changes."""
    return {
        float(node.by): keys_text(keys) if paths is None else paths[keys_text(keys)]
        for keys, node in nodes_of(tree)
        if isinstance(node, pz.nn.ConstantRescale)
    }


def is_block(node):
    return isinstance(node, pz.nn.Sequential) and len(node.sublayers) == 2


EDITS = {
    "nothing": (),
    "around the root": (pzs.wrap(pzs.ROOT, Jitted),),
    "around each block, twice": (
        pzs.wrap(is_block, Checkpointed),
        pzs.wrap(is_block, Scoped, name="block"),
    ),
    "before each layer in a list": (
        pzs.insert_before(pz.nn.ConstantRescale, CONSTRAINT, within=is_block),
    ),
    "after each layer, in a list and elsewhere": (
        pzs.insert_after(pz.nn.ConstantRescale, CONSTRAINT),
    ),
    "a layer of somebody else's after the blocks": (pzs.insert_after(is_block, pz.nn.Identity()),),
    "a wrapper of somebody else's": (pzs.wrap(is_block, pz.nn.Residual),),
    "one in the other": (
        pzs.wrap(is_block, pz.nn.Residual),
        pzs.wrap(pz.nn.ConstantRescale, pz.nn.Residual),
        pzs.insert_before(is_block, CONSTRAINT),
        pzs.wrap(pzs.ROOT, Jitted),
    ),
}


def test_layers_are_called_as_in_the_model_that_strip_gives_back():
    for name, edits in EDITS.items():
        edited = pzs.Recipe(*edits).apply(model())
        assert places(edited, bare_paths(edited)) == places(pzs.strip(edited)), name
        assert places(pzs.strip(edited)) == places(model()), name


def is_last(node):
    return isinstance(node, pz.nn.ConstantRescale) and float(node.by) == 200


ADDED = {
    "before_2/constant_rescale": pzs.insert_after(is_block, pz.nn.ConstantRescale(by=300.0)),
    "before_1/constrain_sharding": pzs.insert_before(is_block, CONSTRAINT),
    "4/delta/inserted/constrain_sharding": pzs.insert_before(is_last, CONSTRAINT),
    "4/delta/inserted/residual": pzs.wrap(is_last, pz.nn.Residual),
}


def test_what_was_put_in_is_called_by_its_type_and_by_what_it_is_before():
    own = {keys_text(keys) for keys, _ in nodes_of(model())}
    for name, edit in ADDED.items():
        edited = pzs.Recipe(edit, pzs.wrap(pzs.ROOT, Jitted)).apply(model())
        paths = set(bare_paths(edited).values())
        assert paths >= own
        assert f"sublayers/{name}" in paths - own
        assert all("inserted" in path or "before_" in path for path in paths - own), paths - own
