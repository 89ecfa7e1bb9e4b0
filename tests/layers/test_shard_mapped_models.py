"""Penzai's model families in a region, and calls that cannot be made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from penzai import pz
from penzai.models.transformer import model_parts, sampling_mode

import penzai_shard as pzs
from penzai_shard.errors import MeshError, RuleTypeError
from penzai_shard.layers import Jitted, ShardMapped
from penzai_shard.library_apis.jax_api import UNOPTIMISED_COMPILATION
from penzai_shard.meshes import make_mesh
from tests.model_families import drawn_transformer

MESH = make_mesh({"data": 4, "model": 2})
RULES = {"embedding": "data"}
BATCH = {"batch": "data"}
TOKENS = pz.nx.wrap(jnp.arange(32).reshape(8, 4) % 16, "batch", "seq")
UP = pz.nn.Linear.from_config("up", jax.random.key(0), {"embedding": 8}, {"neurons": 16})
X = pz.nx.wrap(jax.random.normal(jax.random.key(9), (8, 8))).tag("batch", "embedding")


FAMILIES = {
    "llama": lambda: drawn_transformer("llama", num_decoder_blocks=1),
    "gemma": lambda: drawn_transformer("gemma_2", num_kv_heads=1),
    "layer stack": lambda: drawn_transformer("llama", num_decoder_blocks=1, use_layer_stack=True),
    "gpt-neox": lambda: drawn_transformer("gpt_neox", num_decoder_blocks=1),
}


@pytest.mark.parametrize(
    ("family", "blocks"),
    [("llama", True), ("gemma", False), ("layer stack", True), ("gpt-neox", False)],
)
def test_every_family_runs_with_a_split_batch_and_equals_the_bare_model(family, blocks):
    model = FAMILIES[family]()
    mesh = MESH if blocks else make_mesh({"data": 8})  # Parts of 2, or of 1.

    def wrap(layer):
        return ShardMapped(layer, mesh, RULES, BATCH)

    kind = model_parts.TransformerBlock
    edited = pz.select(model).at_instances_of(kind).apply(wrap) if blocks else wrap(model)
    found, expected = (
        jax.jit(lambda x, m=m: m(x), compiler_options=UNOPTIMISED_COMPILATION)(TOKENS)
        for m in (edited, model)
    )
    assert found.named_shape == expected.named_shape
    np.testing.assert_allclose(found.data_array, expected.data_array, rtol=1e-5, atol=1e-5)


def test_blocks_with_a_cache_of_keys_and_values_run_and_equal_the_bare_model():
    def cached():
        return sampling_mode.KVCachingTransformerLM.from_uncached(
            FAMILIES["llama"](), cache_len=8, batch_axes={"batch": 8}, variable_name_prefix="cache"
        )

    kind = model_parts.TransformerBlock
    edited = (
        pz.select(cached())
        .at_instances_of(kind)
        .apply(lambda layer: ShardMapped(layer, MESH, RULES, BATCH))
    )
    bare = Jitted(cached())
    for _ in range(2):
        found, expected = edited(TOKENS), bare(TOKENS)
        np.testing.assert_allclose(found.data_array, expected.data_array, rtol=1e-5, atol=1e-5)


# Calls that cannot be made.


def placed(sharding):
    return pz.nx.NamedArray(X.named_axes, jax.device_put(X.data_array, sharding))


ELSEWHERE = {
    "device 3": lambda: placed(jax.devices()[3]),
    r"a mesh \(data=4\) of 4 devices": lambda: placed(
        NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec("data"))
    ),
    r"a mesh \(data=8\) of 8 devices": lambda: placed(
        NamedSharding(make_mesh({"data": 8}), PartitionSpec("data"))
    ),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_an_input_on_other_devices_is_refused_by_its_path(where):
    with pytest.raises(
        MeshError,
        match=r"not on its mesh, a mesh \(data=4, model=2\) of 8 devices:\n  argument: is on "
        + where
        + r"\. Place it there: place\(x, mesh, rules\)",
    ):
        ShardMapped(UP, MESH, RULES, BATCH)(ELSEWHERE[where]())


def test_an_abstract_model_is_refused_by_its_parameters():
    abstract = pzs.abstract_model(
        lambda: pz.nn.Linear.from_config("up", jax.random.key(0), {"embedding": 8}, {"neurons": 4})
    )
    layer = ShardMapped(abstract, MESH, RULES, BATCH)
    with pytest.raises(RuleTypeError, match=r"up\.weights: build it with sharded_init"):
        layer(X)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mesh": None}, MeshError, r"takes a jax\.sharding\.Mesh, not None\. Make one"),
        ({"mesh": "data"}, MeshError, "not 'data'"),
        ({"min_size": "1k"}, RuleTypeError, "min_size must be int, not '1k'"),
        ({"per_device": "no"}, RuleTypeError, "per_device must be bool, not 'no'"),
        ({"manual_axes": 3}, RuleTypeError, r"not 3\. Write for instance manual_axes=\('data',\)"),
        ({"keep_split": 3}, RuleTypeError, r"keep_split=\('neurons',\)"),
        ({"assume_independent": (3,)}, RuleTypeError, r"assume_independent=\('rev',\)"),
    ],
)
def test_an_unfit_option_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        ShardMapped(
            UP, **({"mesh": MESH, "parameter_rules": RULES, "activation_rules": BATCH} | options)
        )(X)


def test_what_is_not_an_array_comes_out_as_it_is():
    @pz.pytree_dataclass
    class Named(pz.nn.Layer):
        def __call__(self, x, /, **side_inputs):
            return x, "logits", None, len(x.named_shape)

    output = ShardMapped(Named(), MESH, {}, BATCH)(X)
    assert output[1:] == ("logits", None, 2)
    assert isinstance(output[3], int)
    assert jnp.array_equal(output[0].data_array, X.data_array)
