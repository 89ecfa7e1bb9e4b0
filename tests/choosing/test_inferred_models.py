"""Names inferred for the models of a corpus, against the names of their authors."""

import jax
import pytest

from penzai_shard.choosing.dimensions import ProgramDimensions
from penzai_shard.sharding_propagation import PropagatedProgram
from penzai_shard.tree_paths import paths_and_leaves
from tests.choosing.model_corpus import MODELS
from tests.choosing.name_oracle import by_factor, ties
from tests.choosing.named_models import LENGTHS
from tests.choosing.tricks import TRICKS

# Weights that no operation reads have no classes.
JUDGED = {**MODELS, **{trick.__name__: trick for trick in TRICKS}}


@pytest.fixture(scope="module", params=JUDGED)
def model(request):
    return JUDGED[request.param]()


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
