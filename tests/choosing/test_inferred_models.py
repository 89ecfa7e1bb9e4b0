"""Names inferred for the models of a corpus, against the names of their authors."""

from unittest import mock

import pytest

import penzai_shard as pzs
from penzai_shard.choosing.naming import inferring
from penzai_shard.choosing.naming.traced_call import traced_call
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
def inferred(model):
    """The names inferred for each weight, and the parts of its dimensions, from one trace."""
    calls = []

    def remembered(*arguments):
        calls.append(traced_call(*arguments))
        return calls[-1]

    with mock.patch.object(inferring, "traced_call", remembered):
        found = pzs.infer_names(
            model.function, model.weights, *model.inputs, input_names=model.input_names
        )
    names = {path: found[path] or (None,) * len(axes) for path, axes in model.names.items()}
    parts = {
        weight.path: [
            [(part.number, part.size) for part in of_dimension]
            # A weight that nothing reads has none.
            for of_dimension in weight.parts or ((),) * len(weight.shape)
        ]
        for weight in calls[0].weights
    }
    return names, parts


@pytest.fixture(scope="module")
def found(inferred):
    return inferred[0]


def test_no_two_dimensions_that_their_author_tells_apart_are_one_class(title, model, inferred):
    labels, names = by_factor(model.names, inferred[1], LENGTHS)
    judged = ties(labels, names)
    assert [str(tie) for tie in judged.wrong] == []
    assert judged.right or title not in TRANSFORMERS


def test_no_two_dimensions_that_their_author_tells_apart_have_one_name(model, found):
    assert [str(tie) for tie in ties(found, model.names).wrong] == []


def test_every_name_is_that_of_the_author(model, found):
    assert compared(found, model.names, model.words).misnamed == ()


def test_nearly_all_weights_of_transformers_have_all_their_names(title, model, found):
    judged = compared(found, model.names, model.words)
    least = 0.95 if title in TRANSFORMERS else 0
    assert judged.share >= least, judged.incomplete
