"""A few damages of every kind to files of weights, other ones than the script draws first.

All of them: ``python -m tests.pretrained.damaged_weights``.
"""

import functools
import gc
import os

import pytest

from tests.checkpointing.damage_verdicts import GOOD, SLOWLY, judged
from tests.checkpointing.damages import Damage
from tests.pretrained.damaged_weights import KINDS, made_weights, verdicts
from tests.pretrained.safetensors_editing import read_file, write_file

SEED = 1


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    made = made_weights(tmp_path_factory.mktemp("weights"))
    # The judge collects what nobody needs after each: not what exists already.
    gc.freeze()
    yield made
    gc.unfreeze()


def test_every_kind_of_damage_to_weights_is_refused_by_name(weights, tmp_path):
    found = list(verdicts(weights, tmp_path, SEED, 2 * len(KINDS)))
    assert not [verdict for verdict in found if verdict.what.removesuffix(SLOWLY) not in GOOD]
    assert len(found) > 25
    assert sum(v.what.removesuffix(SLOWLY) == "refused" for v in found) > len(found) // 2


def test_nothing_that_never_ends_is_opened(weights, tmp_path):
    found = []
    for how in weights:
        for file in sorted(entry.name for entry in how.save.path.iterdir()):
            edit = functools.partial(put_a_pipe, file)
            damage = Damage("a pipe", how.save, (file,), file, edit)
            found.append(judged(damage, how, tmp_path))
    assert {verdict.what.removesuffix(SLOWLY) for verdict in found} == {"refused"}
    assert len(found) > 6


def put_a_pipe(file, copy):
    (copy / file).unlink()
    os.mkfifo(copy / file)


def test_whole_weights_are_judged_exact(weights):
    for how in weights:
        assert how.is_exact(how.restore(how.save.path))


def test_values_of_other_weights_are_judged_wrong(weights, tmp_path):
    how = weights[0]
    header, data = read_file(how.save.path / "model.safetensors")
    write_file(tmp_path / "model.safetensors", header, data[:-4] + b"\0\0\0\0")
    assert not how.is_exact(how.restore(tmp_path))
