"""Names inferred for the models of a corpus, against the names of their authors."""

import jax
import pytest

import penzai_shard as pzs
from penzai_shard.choosing.dimensions import ProgramDimensions
from penzai_shard.sharding_propagation import PropagatedProgram
from penzai_shard.tree_paths import paths_and_leaves
from tests.choosing.model_corpus import MODELS, TRANSFORMERS
from tests.choosing.name_oracle import by_factor, compared, ties
from tests.choosing.named_models import LENGTHS
from tests.choosing.tricks import TRICKS
from tests.choosing.tricks_on_roles import TRICKS_ON_ROLES

JUDGED = {**MODELS, **{trick.__name__: trick for trick in (*TRICKS, *TRICKS_ON_ROLES)}}


@pytest.fixture(scope="module", params=JUDGED)
def title(request):
    return request.param


@pytest.fixture(scope="module")
def model(title):
    return JUDGED[title]()


@pytest.fixture(scope="module")
def found(model):
    """The names inferred for each weight."""
    inferred = pzs.infer_names(
        model.function, model.weights, *model.inputs, input_names=model.input_names
    )
    return {path: inferred[path] or (None,) * len(axes) for path, axes in model.names.items()}


def _classes(model):
    """The parts of each weight's dimensions, by path."""
    flat = dict(paths_and_leaves(model.weights))

    def function(weights, *inputs):
        nested = jax.tree.unflatten(jax.tree.structure(model.weights), weights.values())
        return model.function(nested, *inputs)

    numbered = {f"w{i:03}": leaf for i, leaf in enumerate(flat.values())}
    traced = jax.jit(function, keep_unused=True).trace(numbered, *model.inputs)
    program = PropagatedProgram.of(traced.lower(lowering_platforms=("cpu",)))
    dimensions = ProgramDimensions.of(program)
    values = {path: program.arguments[f"weights['w{i:03}']"] for i, path in enumerate(flat)}
    return {
        path: [[(part.number, part.size) for part in parts] for parts in dimensions.of_value(value)]
        for path, value in values.items()
    }


def test_no_two_dimensions_that_their_author_tells_apart_are_one_class(model):
    labels, names = by_factor(model.names, _classes(model), LENGTHS)
    assert [str(tie) for tie in ties(labels, names).wrong] == []


def test_no_two_dimensions_that_their_author_tells_apart_have_one_name(model, found):
    assert [str(tie) for tie in ties(found, model.names).wrong] == []


def test_every_name_is_that_of_the_author(model, found):
    assert compared(found, model.names, model.words).misnamed == ()


def test_nearly_all_weights_of_transformers_have_all_their_names(title, model, found):
    judged = compared(found, model.names, model.words)
    least = 0.95 if title in TRANSFORMERS else 0
    assert judged.share >= least, judged.incomplete
