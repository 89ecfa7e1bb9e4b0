"""Models of configurations: the paths and axes of Penzai's own, and what their layers compute."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from penzai import pz

from penzai_shard import make_mesh, make_plan, param_dict, sharded_init, tensor_parallel
from penzai_shard.arrays.structure import leaves_of
from penzai_shard.errors import RuleTypeError
from penzai_shard.placement.sharded_init import abstract_model
from penzai_shard.pretrained.families import (
    FAMILIES,
    ApplyScaledRoPE,
    build_model,
    family_of,
    model_of_config,
)
from penzai_shard.pretrained.model_configs import read_config
from tests.pretrained.models import CONFIGS, convert_by_penzai, draw_tensors, shapes

STACKS = [name for name in CONFIGS if name not in ("gemma2", "gemma3", "gemma3_images")]
EVERY = [(name, False) for name in CONFIGS] + [(name, True) for name in STACKS]


def rows(model):
    return [(x.path, x.names, x.shape, str(x.dtype), x.role) for x in leaves_of(model)]


@pytest.mark.parametrize(("name", "stacked"), EVERY)
def test_model_of_config_has_the_paths_axes_and_sizes_of_penzais_converter(name, stacked):
    converted = jax.eval_shape(
        lambda tensors: param_dict(convert_by_penzai(name, tensors, stacked)), draw_tensors(name)
    )
    expected = {path: dict(value.named_shape) for path, value in converted.items()}
    if name.startswith("gemma3"):
        for block in range(2):
            for norm in ("query_norm", "key_norm"):
                path = f"transformer/block_{block}/attention/{norm}/scale.weights"
                expected[path] = {"projection": 16}
    found = param_dict(model_of_config(CONFIGS[name], use_layer_stack=stacked))
    assert {path: dict(value.named_shape) for path, value in found.items()} == expected
    assert all(value.dtype == jnp.bfloat16 for value in found.values())


def penzais_builder(config, **fields):
    """A function of a random key that builds the model with real numbers of float32."""
    dtypes = {"parameter_dtype": jnp.float32, "activation_dtype": jnp.float32}
    return functools.partial(family_of(config).build, config, **dtypes, **fields)


@pytest.mark.parametrize(
    ("name", "stacked"),
    [*((name, False) for name in ("llama", "gemma2", "gemma3", "gpt_neox")), ("mistral", True)],
)
def test_build_model_is_penzais_model_without_values(name, stacked):
    config = read_config(CONFIGS[name])
    model = build_model(config, dtype="float32", use_layer_stack=stacked)
    built = abstract_model(penzais_builder(config, use_layer_stack=stacked), jax.random.key(0))
    assert rows(model) == rows(built)
    # It is called, with another dtype of what it computes with.
    options = {"dtype": "bfloat16", "use_layer_stack": stacked, "upcast_activations": True}
    model = build_model(config, **options)
    tokens = pz.nx.zeros({"batch": 1, "seq": 3}, jnp.int32)
    positions = pz.nx.arange("seq", 3)
    logits = jax.eval_shape(lambda model: model(tokens, token_positions=positions), model)
    assert dict(logits.named_shape) == {"batch": 1, "seq": 3, "vocabulary": 40}
    assert logits.dtype == jnp.float32


@pytest.mark.parametrize("name", CONFIGS)
def test_tables_name_every_tensor_and_every_parameter_once(name):
    config = read_config(CONFIGS[name])
    family = family_of(config)
    names, paths = [], []
    for table, place, block in [
        (family.tensors, "", ""),
        *((family.of_block, family.blocks.format(i), f"block_{i}/") for i in range(2)),
    ]:
        names += [f"{family.prefix}{place}{tensor}" for tensor in table]
        own = [line.split(": ")[0] for text in table.values() for line in text.split("; ")]
        paths += [f"transformer/{block}{path}" for path in own]
    stored = {tensor for tensor in shapes(name) if not tensor.startswith("vision")}
    tied = {f"{family.prefix}{tensor}" for tensor in family.tied}
    assert sorted(names) == sorted(stored | (tied if config["tie_word_embeddings"] else set()))
    assert sorted(paths) == sorted(param_dict(model_of_config(CONFIGS[name])))


def test_models_with_real_numbers_lie_as_planned_and_run():
    mesh, rules = make_mesh({"data": 4, "model": 2}), tensor_parallel("model")
    config = read_config(CONFIGS["gemma3"])
    model = sharded_init(penzais_builder(config), jax.random.key(0), mesh=mesh, rules=rules)
    plan = make_plan(build_model(config, dtype="float32"), mesh, rules)
    specs = {leaf.path: leaf.value.sharding.spec for leaf in leaves_of(model)}
    assert specs == {leaf.path: leaf.sharding.spec for leaf in plan.leaves}
    tokens = pz.nx.wrap(jnp.arange(10).reshape(2, 5)).tag("batch", "seq")

    @jax.jit
    def run(model):
        return model(tokens, token_positions=pz.nx.arange("seq", 5))

    unbound, frozen = pz.unbind_params(model, freeze=True)
    logits = run(pz.bind_variables(unbound, frozen)).unwrap("batch", "seq", "vocabulary")
    assert np.isfinite(logits).all()
    assert np.std(logits) > 0.1


def test_layers_of_gemma_3_have_positions_windows_and_norms_of_their_own():
    model = model_of_config(CONFIGS["gemma3"])
    sliding, full = pz.select(model).at_instances_of(pz.nn.Attention).get_sequence()
    for attention, window, theta, factor in ((sliding, 3, 1e4, 1.0), (full, None, 1e6, 8.0)):
        for sequence in (attention.input_to_query, attention.input_to_key):
            _, norm, rope, *_ = sequence.sublayers
            (standardize,) = (x for x in norm.sublayers if isinstance(x, pz.nn.RMSStandardize))
            assert standardize.epsilon == 1e-5
            assert getattr(rope, "factor", 1.0) == factor
            assert getattr(rope, "rope", rope).max_wavelength == theta
        masks = pz.select(attention).at_instances_of(pz.nn.ApplyCausalSlidingWindowAttentionMask)
        windows = [mask.sliding_window_size for mask in masks.get_sequence()]
        assert windows == ([window] if window else [])


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
    expected = [
        rotate_by_hand(head, position, 500.0, factor, bands)
        for head, position in zip(heads, positions, strict=True)
    ]
    np.testing.assert_allclose(found.unwrap("seq", "projection"), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "stacked", "count"), [("llama", False, 4), ("llama", True, 2), ("gemma2", False, 4)]
)
def test_positions_are_divided_in_every_block_as_those_of_llama_3_1(name, stacked, count):
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = CONFIGS[name] | {"rope_parameters": rope}
    model = model_of_config(config, use_layer_stack=stacked)
    layers = pz.select(model).at_instances_of(ApplyScaledRoPE).get_sequence()
    assert [(x.factor, x.bands) for x in layers] == [(8.0, (1.0, 4.0, 8192))] * count


@pytest.mark.parametrize(
    ("listed", "pattern", "windows"),
    [
        (None, None, [3, 3, 3, 3, 3, None, 3]),
        (None, 2, [3, None, 3, None, 3, None, 3]),
        (["full_attention"] * 6 + ["sliding_attention"], 2, [None] * 6 + [3]),
    ],
)
def test_layers_that_are_not_listed_follow_a_pattern(listed, pattern, windows):
    changes = {"num_hidden_layers": 7, "layer_types": listed, "sliding_window_pattern": pattern}
    config = read_config(CONFIGS["gemma3"] | changes)
    assert [layer.window for layer in config.layers] == windows
    build_model(config, dtype="float32")


@pytest.mark.parametrize(
    ("name", "approximate"), [("gelu_new", True), ("gelu_fast", True), ("gelu", False)]
)
def test_the_approximation_of_gelu_has_several_names(name, approximate):
    model = model_of_config(CONFIGS["gpt_neox"] | {"hidden_act": name})
    layer = pz.select(model).at_instances_of(pz.nn.Elementwise).get_sequence()[0]
    assert layer.fn.keywords == {"approximate": approximate}


def test_attention_of_gemma_2_is_scaled_and_capped():
    model = build_model(read_config(CONFIGS["gemma2"]), dtype="float32")
    attention = pz.select(model).at_instances_of(pz.nn.Attention).get_sequence()[0]
    scale = attention.input_to_query.sublayers[-1]
    np.testing.assert_allclose(scale.by, 24**-0.5, rtol=1e-6)
    caps = pz.select(model).at_instances_of(pz.nn.TanhSoftCap).get_sequence()
    assert [float(cap.soft_cap) for cap in caps] == [50.0, 50.0, 30.0]


def test_gpt_neox_rotates_a_part_of_each_head():
    model = model_of_config(CONFIGS["gpt_neox"] | {"rotary_emb_base": 500})
    ropes = pz.select(model).at_instances_of(pz.nn.ApplyRoPEToSubset).get_sequence()
    assert [(rope.rope_subset_size, rope.max_wavelength) for rope in ropes] == [(4, 500.0)] * 4


def test_every_norm_of_gpt_neox_has_the_epsilon_of_the_configuration():
    model = model_of_config(CONFIGS["gpt_neox"])
    norms = pz.select(model).at_instances_of(pz.nn.Standardize).get_sequence()
    assert {norm.epsilon for norm in norms} == {1e-3}


def test_a_vocabulary_can_be_longer():
    model = build_model(read_config(CONFIGS["llama"]), dtype="float32", vocabulary=48)
    found = param_dict(model)
    for path in ("transformer/embedder.embeddings", "transformer/lm_head.weights"):
        assert found[path].named_shape["vocabulary"] == 48
    assert model.metadata.vocab_size == 48


@pytest.mark.parametrize(
    ("name", "options", "path", "fix"),
    [
        ("llama", {"dtype": "float16"}, "dtype", "dtype='bfloat16'"),
        ("llama", {"dtype": "float17"}, "dtype", "dtype='bfloat16'"),
        ("llama", {"vocabulary": 39}, "vocabulary", "40 or more"),
        ("gemma2", {"use_layer_stack": True}, "use_layer_stack", "Leave"),
        ("gemma3", {"use_layer_stack": True}, "use_layer_stack", "Leave"),
        ("llama", {"vocabulary": "48"}, "vocabulary", "Write 40"),
    ],
)
def test_build_model_refuses_options_by_name(name, options, path, fix):
    with pytest.raises(RuleTypeError) as caught:
        build_model(read_config(CONFIGS[name]), **{"dtype": "float32", **options})
    (problem,) = caught.value.problems
    assert problem.path == path
    assert fix in problem.fix


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.dtype("bfloat16"), "bfloat16"])
def test_build_model_takes_a_dtype_in_any_form(dtype):
    model = build_model(read_config(CONFIGS["llama"]), dtype=dtype)
    assert all(value.dtype == jnp.bfloat16 for value in param_dict(model).values())


def test_families_are_those_of_configurations():
    names = {read_config(config).family for config in CONFIGS.values()}
    assert names == FAMILIES.keys()
