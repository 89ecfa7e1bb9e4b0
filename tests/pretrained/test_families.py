"""Models of configurations: those of Penzai's builders, and what their layers compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

from penzai_shard import param_dict
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.errors import RuleTypeError
from penzai_shard.placement.sharded_init import abstract_model
from penzai_shard.pretrained import model_of_config
from penzai_shard.pretrained.families import FAMILIES, ApplyScaledRoPE
from penzai_shard.pretrained.model_configs import read_config
from tests.pretrained.models import CONFIGS
from tests.refusals import refused


@pytest.mark.parametrize(("name", "stacked"), [("gemma3", False), ("gpt_neox", True)])
def test_model_of_config_is_penzais_model_without_values(name, stacked):
    def rows(model):
        return [(x.path, x.names, x.shape, str(x.dtype), x.role) for x in leaves_of(model)]

    config, options = read_config(CONFIGS[name]), {"use_layer_stack": stacked}
    dtypes = {"parameter_dtype": jnp.float32, "activation_dtype": jnp.float32}
    build = functools.partial(FAMILIES[config.family].build, config, **dtypes, **options)
    built = abstract_model(build, jax.random.key(0))
    assert rows(model_of_config(config, dtype="float32", **options)) == rows(built)
    # It is called, with another dtype of what it computes with.
    model = model_of_config(config, upcast_activations=True, **options)
    tokens = pz.nx.zeros({"batch": 1, "seq": 3}, jnp.int32)
    positions = pz.nx.arange("seq", 3)
    logits = jax.eval_shape(lambda model: model(tokens, token_positions=positions), model)
    assert dict(logits.named_shape) == {"batch": 1, "seq": 3, "vocabulary": 40}
    assert logits.dtype == jnp.float32


# The dtype of the configuration, or bfloat16 where Penzai has no other.
@pytest.mark.parametrize(
    ("said", "given", "expected"),
    [
        ("float32", None, "float32"),
        ("float16", None, "bfloat16"),
        ("float32", jnp.bfloat16, "bfloat16"),
        (None, jnp.dtype("float32"), "float32"),
    ],
)
def test_model_of_config_has_the_dtype_that_is_said(said, given, expected):
    found = param_dict(model_of_config(CONFIGS["gpt_neox"] | {"dtype": said}, dtype=given))
    assert {str(value.dtype) for value in found.values()} == {expected}


def rotate_by_hand(vector, position, theta, factor, bands):
    """One head at one position, frequency by frequency, in float64."""
    half = len(vector) // 2
    rotated = np.zeros(2 * half)
    for i in range(half):
        frequency = theta ** (-i / half)
        wavelength = 2 * np.pi / frequency
        slow, fast, length = bands or (np.inf, np.inf, 1)
        if wavelength > length / slow:
            frequency /= factor
        elif wavelength >= length / fast:
            share = (length / wavelength - slow) / (fast - slow)
            frequency = (1 - share) * frequency / factor + share * frequency
        turn = np.exp(1j * position * frequency) * (vector[i] + 1j * vector[half + i])
        rotated[i], rotated[half + i] = turn.real, turn.imag
    return rotated


@pytest.mark.parametrize(
    ("factor", "bands"), [(8.0, None), (32.0, (1.0, 4.0, 64.0)), (8.0, (1.0, 4.0, 8192.0))]
)
def test_positions_of_longer_texts_are_divided_for_all_or_for_slow_rotations(factor, bands):
    rope = pz.nn.ApplyRoPE("projection", 500.0, "token_positions")
    heads = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    positions = np.array([0, 7, 300])
    found = ApplyScaledRoPE(rope, factor, bands)(
        pz.nx.wrap(jnp.asarray(heads)).tag("seq", "projection"),
        token_positions=pz.nx.wrap(jnp.asarray(positions)).tag("seq"),
    )
    pairs = zip(heads, positions, strict=True)
    expected = [rotate_by_hand(head, position, 500.0, factor, bands) for head, position in pairs]
    np.testing.assert_allclose(found.unwrap("seq", "projection"), expected, atol=1e-4)


# Of Llama 3.1, and older ones of a part of the dimensions.
BANDS = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {"rope_parameters": BANDS | {"original_max_position_embeddings": 8192}}
SUBSET = {"rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 500}


# What the configuration says, and what is called so of the layers that compute with it.
@pytest.mark.parametrize(
    ("name", "changes", "stacked", "kind", "expected"),
    [
        ("gpt_neox", {"hidden_act": "gelu_new"}, False, pz.nn.Elementwise, [True] * 2),
        ("gpt_neox", {"hidden_act": "gelu"}, False, pz.nn.Elementwise, [False] * 2),
        ("gpt_neox", SUBSET, False, pz.nn.ApplyRoPEToSubset, [(2, 500.0)] * 4),
        ("llama", SCALED, False, ApplyScaledRoPE, [(8.0, (1.0, 4.0, 8192))] * 4),
        ("llama", SCALED, True, ApplyScaledRoPE, [(8.0, (1.0, 4.0, 8192))] * 2),
        ("gemma2", SCALED, False, ApplyScaledRoPE, [(8.0, (1.0, 4.0, 8192))] * 4),
    ],
)
def test_layers_compute_with_the_numbers_of_a_config(name, changes, stacked, kind, expected):
    read = {
        pz.nn.Elementwise: lambda x: x.fn.keywords["approximate"],
        pz.nn.ApplyRoPEToSubset: lambda x: (x.rope_subset_size, x.max_wavelength),
        ApplyScaledRoPE: lambda x: (x.factor, x.bands),
    }[kind]
    model = model_of_config(CONFIGS[name] | changes, use_layer_stack=stacked)
    layers = pz.select(model).at_instances_of(kind).get_sequence()
    assert [read(layer) for layer in layers] == expected


@pytest.mark.parametrize(
    ("name", "options", "fixes"),
    [
        ("llama", {"dtype": "float16"}, {"dtype": "dtype='bfloat16'"}),
        ("gemma2", {"use_layer_stack": True}, {"use_layer_stack": "use_layer_stack=False"}),
        (
            "gemma3",
            {"use_layer_stack": True, "dtype": "f"},
            {"use_layer_stack": "=False", "dtype": "rite"},
        ),
    ],
)
def test_model_of_config_refuses_all_that_is_wrong_by_option(name, options, fixes):
    problems = refused(RuleTypeError, model_of_config, CONFIGS[name], **options)
    assert problems.keys() == fixes.keys()
    assert all(fix in problems[path].fix for path, fix in fixes.items())
