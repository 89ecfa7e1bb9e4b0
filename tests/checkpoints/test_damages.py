"""A damaged checkpoint is refused by the name of an array or a file, or restored exactly."""

from tests.checkpoints import damages


def test_restore_params_of_damaged_checkpoints(tmp_path):
    checkpoint = damages.Checkpoint(tmp_path)
    found = list(damages.draw_verdicts(checkpoint, seed=1, count=60))
    assert not [pair for pair in found if pair[1] not in ("exact", "refused")]
    # A judge that takes everything for exact would find nothing either.
    assert [verdict for _, verdict in found].count("refused") > 30
    assert checkpoint.judge(lambda rng, checkpoint: [], None) == "exact"
