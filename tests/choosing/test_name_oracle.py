"""The judge of inferred names sees what is wrong."""

import pytest

from tests.choosing.name_oracle import by_factor, compared, ties

NAMES = {"up": ("embed", "mlp"), "q": ("embed", "heads*kv"), "o": ("heads*kv", "embed")}


def test_pairs_are_right_wrong_or_missed():
    assert ties(NAMES, NAMES).right == 4
    assert ties(NAMES, NAMES).precision == ties(NAMES, NAMES).recall == 1
    merged = ties(NAMES | {"up": ("embed", "embed")}, NAMES)
    assert len(merged.wrong) == 3
    assert merged.precision == 4 / 7
    assert str(merged.wrong[0]) == "up[0] embed = up[1] mlp: embed"
    unnamed = ties(NAMES | {"o": (None, None)}, NAMES)
    assert (unnamed.right, unnamed.wrong, len(unnamed.missed)) == (1, (), 3)
    assert unnamed.recall == 1 / 4


def test_nothing_known_is_no_tie():
    nothing = dict.fromkeys(NAMES, (None, None))
    assert ties(nothing, NAMES).wrong == ()


def test_names_of_their_author_are_read_in_the_words_of_the_library():
    words = {"embed": "embedding", "mlp": "neurons", "kv": "projection"}
    found = {
        "up": ("embedding", "neurons"),
        "q": ("embedding", None),
        "o": ("projection*heads", None),
    }
    judged = compared(found, NAMES, words)
    assert judged.complete == ("up",)
    assert judged.share == 1 / 3
    assert judged.incomplete == {
        "q": (("embedding", None), ("embedding", "heads*projection")),
        "o": (("projection*heads", None), ("heads*projection", "embedding")),
    }
    assert [line.partition(":")[0] for line in judged.misnamed] == ["o"]
    with pytest.raises(AssertionError, match="two words of the author are one"):
        compared(found, NAMES, words | {"heads": "projection"})


def test_parts_are_judged_by_factor_where_they_are_the_factors():
    lengths = {"heads": 4, "kv": 6}
    parts = {
        "up": [[("e", 8)], [("m", 8)]],
        "q": [[("e", 8)], [("h", 4), ("d", 2), ("f", 3)]],
        "o": [[("x", 8), ("y", 3)], [("e", 8), ("1", 1)]],
    }
    labels, names = by_factor(NAMES, parts, lengths)
    assert labels == {
        "up": (("e",), ("m",)),
        "q": (("e",), ("h",), ("d", "f")),
        "o": (("x", "y"), ("e",)),
    }
    assert names == NAMES | {"q": ("embed", "heads", "kv")}
