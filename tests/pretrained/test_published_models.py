"""Published models have the sizes that were published."""

import math

import pytest

import penzai_shard as pzs
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError
from penzai_shard.pretrained import conversion
from penzai_shard.pretrained.conversion import configuration_of, family_of
from penzai_shard.pretrained.published_models import PUBLISHED, find_published, published_model


def stored_parameters(published):
    """How many numbers a checkpoint of a model holds; tensors that share values count once."""
    family = family_of(published.config)
    shapes, tied = conversion._tensors_of(family, configuration_of(published.config))
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in tied)


def within_rounding(count, published):
    """Whether a number is what was published, to its last digit."""
    digits = published.rstrip("MB").replace(",", "")
    factor = {"M": 10**6, "B": 10**9}.get(published[-1], 1)
    decimals = len(digits.partition(".")[2])
    return abs(count - float(digits) * factor) <= 0.5 * factor / 10**decimals


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_has_as_many_parameters_as_published(name):
    published = PUBLISHED[name]
    assert within_rounding(stored_parameters(published), published.parameters)


def test_a_wrong_size_is_not_within_the_rounding():
    other = PUBLISHED["llama-3-8b"].with_changes({"intermediate_size": 14080})
    assert not within_rounding(stored_parameters(other), "8.03B")


# Embeddings and the rest, in millions, as table 1 of arXiv:2503.19786 and table 2 of
# arXiv:2408.00118 and arXiv:2403.08295 have the rest.
WITHOUT_EMBEDDINGS = {
    "gemma-2b": 1_981_884_416,
    "gemma-7b": 7_751_248_896,
    "gemma-2-2b": 2_024_517_888,
    "gemma-2-9b": 8_324_201_984,
    "gemma-2-27b": 26_047_480_320,
    "pythia-70m": 18_915_328,
    "pythia-160m": 85_056_000,
    "pythia-410m": 302_311_424,
    "pythia-1b": 805_736_448,
    "pythia-1.4b": 1_208_602_624,
    "pythia-2.8b": 2_517_652_480,
    "pythia-6.9b": 6_444_163_072,
    "pythia-12b": 11_327_027_200,
}


@pytest.mark.parametrize("name", WITHOUT_EMBEDDINGS)
def test_the_parameters_that_are_not_embeddings_are_published_exactly(name):
    published = PUBLISHED[name]
    embeddings = published.config["vocab_size"] * published.config["hidden_size"]
    tables = 1 if published.is_tied else 2
    assert stored_parameters(published) - tables * embeddings == WITHOUT_EMBEDDINGS[name]


@pytest.mark.parametrize(
    ("name", "stacked"),
    [("llama-3.2-1b", True), ("mistral-7b", True), ("gemma-3-1b", False), ("pythia-70m", False)],
)
def test_penzais_model_has_them_too(name, stacked):
    """Of Llama 3.2 it has a second table, for the tokens that come out."""
    published = find_published(name)
    held = pzs.param_dict(published_model(name, use_layer_stack=stacked)).values()
    count = sum(math.prod(array.named_shape.values()) for array in held)
    second = published.is_tied and name.startswith("llama")
    config = published.config
    more = config["vocab_size"] * config["hidden_size"] if second else 0
    assert count == stored_parameters(published) + more


def test_other_sizes_are_given_by_the_names_of_the_configuration():
    model = find_published("pythia-14m").with_changes({"num_hidden_layers": 1}).model("float32")
    held = pzs.param_dict(model)
    assert {str(array.dtype) for array in held.values()} == {"float32"}
    assert not [name for name in held if "block_1" in name]


def test_unlike_blocks_are_not_stacked():
    assert not find_published("gemma-2-2b").can_be_stacked
    with pytest.raises(CheckpointMismatchError, match="the layers of this Gemma 2 differ"):
        published_model("gemma-2-2b", use_layer_stack=True)


@pytest.mark.parametrize(
    "text", ["Meta-Llama-3-8B", "llama3-8b", "meta-llama/Llama_3-8B", "llama-3-8b-hf"]
)
def test_other_spellings_of_a_name_are_understood(text):
    assert find_published(text).name == "llama-3-8b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llama-3-7b", "no published model 'llama-3-7b' here. Did you mean llama-"),
        ("gpt-4", "plan --list shows all"),
        ("zzz", "There are llama, mistral, gemma, gpt-neox, pythia."),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(text, message):
    with pytest.raises(RuleTypeError, match=message):
        find_published(text)


def test_an_unknown_attribute_is_answered_with_the_nearest():
    with pytest.raises(RuleTypeError, match=r"layers: .* Did you mean num_hidden_layers\?"):
        find_published("llama-3-8b").with_changes({"layers": 2})


def test_every_source_names_a_model_card_and_most_a_paper():
    assert not [each.name for each in PUBLISHED.values() if "model card" not in each.source]
    without = [each.name for each in PUBLISHED.values() if "arXiv:" not in each.source]
    assert without == ["llama-3.2-1b", "llama-3.2-3b", "llama-3.3-70b", "pythia-14m"]
