"""A few damages of every kind, other ones than the script draws first.

All of them: ``python -m tests.checkpointing.damage_verdicts``.
"""

import functools
import gc
import subprocess
import sys

import numpy as np
import pytest
from penzai import pz

import penzai_shard as pzs
from tests.checkpointing import checkpoint_editing as editing
from tests.checkpointing.damage_verdicts import GOOD, SLOWLY, judged, made_saves, named, verdicts
from tests.checkpointing.damages import KINDS, THINGS, Damage

SEED = 1


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    made = made_saves(tmp_path_factory.mktemp("saves"), ["split params", "train state"])
    gc.freeze()
    yield made
    gc.unfreeze()


def test_every_kind_of_damage_is_refused_by_name_or_harmless(saves, tmp_path):
    found = list(verdicts(saves, tmp_path, SEED, len(KINDS)))
    assert not [verdict for verdict in found if verdict.what.removesuffix(SLOWLY) not in GOOD]
    assert len(found) == len(KINDS) > 20
    assert sum(v.what.removesuffix(SLOWLY) == "refused" for v in found) > len(found) // 3


def test_what_is_judged_exact_is_exact(saves):
    for how in saves:
        restored = how.restore(how.save.path)
        assert how.is_exact(restored)
        assert not how.is_exact(how.restore(how.save.twin))


def test_an_edit_of_nothing_with_all_checksums_anew_changes_no_byte(saves):
    path = saves[0].save.path
    before = {file: (path / file).read_bytes() for file in editing.files_of(path)}
    for file in (editing.METADATA, editing.SEAL):
        editing.edit_json(path, file, lambda content: None, checksums=True)
        assert (path / file).read_bytes() == before[file], file


def test_a_refusal_must_name_what_is_concerned(saves):
    damage = Damage("", saves[0].save, ("mlp/bias", "state/d/1f"), "", lambda path: None)
    for text in ("at /p: mlp/bias: changed", "at /p: state/d/1f is", "/p/state/d/1f: is"):
        assert named(damage, text, "/p")
    for text in ("at /p: mlp/biases", "at /p: state/d/1f2", "at /p: bias"):
        assert not named(damage, text, "/p")


def test_nothing_that_never_ends_is_opened(saves, tmp_path):
    save = saves[0].save
    damages = [
        Damage(
            "another thing", save, (file, *save.arrays), what, functools.partial(put, file, what)
        )
        for file in save.files()
        for what in ("a FIFO", "a socket")
    ]
    found = [judged(damage, saves[0], tmp_path) for damage in damages]
    assert {verdict.what.removesuffix(SLOWLY) for verdict in found} == {"refused"}


def put(file, what, copy):
    (copy / file).unlink()
    THINGS[what](copy / file)


SCRIPT = """
import sys
import penzai_shard as pzs
from penzai import pz
like = {"w": pz.nx.zeros({"a": 8, "b": 2}), "v": pz.nx.zeros({"a": 8})}
print(pzs.restore_params(sys.argv[1], like, pzs.make_mesh({"data": 8}), {"a": "data"}))
"""


def test_a_script_that_meets_damage_ends_with_ten_lines(tmp_path, wide):
    like = {"w": pz.nx.ones({"a": 8, "b": 2}), "v": pz.nx.ones({"a": 8})}
    path = tmp_path / "params"
    pzs.save_params(path, pzs.place(like, wide, {"a": "data"}))
    store = editing.StoredArrays(path)
    rng = np.random.default_rng(0)
    store.write({key: rng.bytes(30) for name in like for key in store.chunks(name)[1:]})
    editing.seal_anew(path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) <= 10, done.stderr
    *_, headline, first, second = lines
    assert headline.startswith("penzai_shard.errors.CheckpointDamagedError: the checkpoint at ")
    assert first.startswith("  v: its numbers cannot be read: ")
    assert second.startswith("  w: its numbers cannot be read: ")
