"""A few damages of every kind to files of weights, other ones than the script draws first.

All of them: ``python -m tests.pretrained.damaged_weights``.
"""

import numpy as np
import pytest

from tests.checkpointing.damage_verdicts import GOOD, SLOW
from tests.pretrained import damaged_weights
from tests.pretrained.damaged_weights import KINDS, made_weights, verdicts

SEED = 1


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return made_weights(tmp_path_factory.mktemp("weights"))


def test_every_kind_of_damage_to_weights_is_refused_by_name(weights, tmp_path):
    found = list(verdicts(weights, tmp_path, SEED, 3 * len(KINDS)))
    assert not [verdict for verdict in found if verdict.what not in (*GOOD, SLOW)]
    assert len(found) > 40
    assert sum(verdict.what == "refused" for verdict in found) > len(found) // 2


def test_whole_weights_are_judged_exact(weights):
    for how in weights:
        assert how.is_exact(how.restore(how.save.path))


def test_values_of_other_weights_are_judged_wrong(weights, tmp_path):
    how = weights[0]
    file = tmp_path / "model.safetensors"
    tensors = {name: np.zeros(shape, "float32") for name, shape in (("up", (8, 12)),)}
    header, data = damaged_weights.read_file(how.save.path / "model.safetensors")
    assert header["up"]["shape"] == list(tensors["up"].shape)
    damaged_weights.write_file(file, header, data[:-4] + b"\0\0\0\0")
    assert not how.is_exact(how.restore(tmp_path))
