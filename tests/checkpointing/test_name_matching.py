"""Which stored array goes where, against a definition by trial that shares no code with it."""

import itertools
import re

import hypothesis
import hypothesis.strategies as st
import pytest

from penzai_shard.checkpointing.array_records import ArrayRecord
from penzai_shard.checkpointing.comparison import RESTORING, Tolerance, compare
from penzai_shard.checkpointing.name_matching import Selection, matched_names, matched_state_names
from penzai_shard.checkpointing.name_suggestions import suggested_names
from penzai_shard.errors import CheckpointMismatchError, RuleTypeError
from penzai_shard.tree_paths import path_matches, wildcard_texts

BLOCKS = [f"transformer/block_{i}/mlp/up.weights" for i in range(3)]
LAYERS = [f"model.layers.{i}.mlp.w" for i in range(3)]


def test_wildcards_are_carried_over_in_order():
    names = {"model.layers.*.mlp.w": "transformer/block_*/mlp/up.weights"}
    assert matched_names(LAYERS, BLOCKS, names) == dict(zip(BLOCKS, LAYERS, strict=True))
    two = {"*.layer?.w": "blocks/*/*/w"}
    with pytest.raises(CheckpointMismatchError, match=r"has '\*', '\?' and the name '\*', '\*'"):
        matched_names(["enc.layer1.w"], ["blocks/enc/1/w"], two)
    names = {"*.layer?.w": "blocks/*/?/w"}
    assert matched_names(["enc.layer1.w"], ["blocks/enc/1/w"], names) == {
        "blocks/enc/1/w": "enc.layer1.w"
    }


def test_names_without_a_rule_stay_and_extra_ones_are_there_under_their_own():
    assert matched_names(["a", "b", "c"], ["x", "b"], {"a": "x"}) == {"x": "a", "b": "b", "c": "c"}


def test_two_names_can_be_exchanged():
    assert matched_names(["a", "b"], ["a", "b"], {"a": "b", "b": "a"}) == {"b": "a", "a": "b"}


def test_a_name_to_the_letter_means_that_array_alone():
    stored = ["a/b.c", "a/b/c", "w*"]
    names = {"a/b.c": "x", "a/b/c": "y", "w*": "z"}
    assert matched_names(stored, ["x", "y", "z"], names) == dict(
        zip("xyz", ("a/b.c", "a/b/c", "w*"), strict=True)
    )
    assert matched_names(["a"], ["u/v.w", "u/v/w"], {"a": "u/v.w"}) == {"u/v.w": "a"}


def test_none_leaves_arrays_where_they_are_whatever_other_patterns_say():
    names = {"model.layers.*.mlp.w": "transformer/block_*/mlp/up.weights", LAYERS[1]: None}
    assert list(matched_names(LAYERS, BLOCKS, names)) == [BLOCKS[0], BLOCKS[2]]
    assert matched_names(["a", "b"], ["a"], {"b": "a", "a": None}) == {"a": "b"}


def test_arrays_may_be_left_whose_new_name_the_model_lacks():
    names = {"model.layers.*.mlp.w": "transformer/block_*/mlp/up.weights"}
    with pytest.raises(CheckpointMismatchError, match=r"layers\.2\.mlp\.w: .* has no such array"):
        matched_names(LAYERS, BLOCKS[:2], names)
    found = matched_names(LAYERS, BLOCKS[:2], names, leave_unknown=True)
    assert found == dict(zip(BLOCKS[:2], LAYERS[:2], strict=True))
    with pytest.raises(CheckpointMismatchError, match="has no such array"):
        matched_names(LAYERS, ["other"], names, leave_unknown=True)
    # Left out, it is still one array under two rules.
    with pytest.raises(CheckpointMismatchError, match="several rules match it"):
        matched_names(["a"], ["x"], {"a": "x", "?": "y?"}, leave_unknown=True)


@pytest.mark.parametrize(
    ("stored", "wanted", "names", "said"),
    [
        (LAYERS, BLOCKS, {"model.layer.*.mlp.w": "x*"}, "matches no array of the checkpoint. Did"),
        (LAYERS, BLOCKS, {"q": "x"}, "matches no array of the checkpoint. The nearest of 3 are"),
        (LAYERS, BLOCKS, {"transformer/block_*/**": "model.layers.*.**"}, "write names={'model.l"),
        (LAYERS, BLOCKS, {"model.layers.*.mlp.w": BLOCKS[0]}, "'*' and the name no wildcard"),
        (LAYERS, BLOCKS, {"model.layers.**.w": "transformer/*/w"}, "'**' and the name '*'"),
        (LAYERS, BLOCKS, {LAYERS[0]: "transformer/block_*/mlp/up.weights"}, "has no such array"),
        (["a"], ["block_1/w"], {"a": "block_1/v"}, "no such array. Did you mean 'block_1/w'?"),
        (["a_b_c"], ["a/b_c", "a_b/c"], {"*_*": "*/*"}, "make it 'a/b_c' or 'a_b/c'"),
        (["a/b"], ["a/b/c", "a/c/b"], {"**/**": "**/c/**"}, "in several ways"),
        (["a"], ["u/v.w", "u/v/w"], {"*": "u.v/w"}, "has '*' and the name no wildcard"),
        (["w"], ["u/v.w", "u/v/w"], {"*": "u.v.*"}, "the model has 'u/v.w' and 'u/v/w'. Give it"),
        (["a", "b"], ["x"], {"a": "x", "b": "x"}, "2 stored arrays go here, 'a' by 'a': 'x' and"),
        (["a", "x"], ["x"], {"a": "x"}, "'x' by its own name. To leave one where it is, write"),
        (["a"], ["x", "y"], {"a": "x", "?": "?"}, "several rules match it, 'a': 'x' and '?': '?'"),
        (["a"], ["x", "y"], {"a": "x", "**": "**"}, "names={..., 'a': None}"),
    ],
)
def test_what_is_wrong_with_names_is_refused(stored, wanted, names, said):
    with pytest.raises(CheckpointMismatchError, match=re.escape(said)):
        matched_names(stored, wanted, names)


def test_everything_wrong_is_said_at_once():
    names = {"nothing": "x", "b*": "y", "c": "nowhere", "d?": "e?"}
    with pytest.raises(CheckpointMismatchError) as caught:
        matched_names(["a", "b1", "c", "d1", "e1"], ["a", "e1"], names)
    assert [problem.partition(": ")[0] for problem in caught.value.problems] == [
        "'nothing'",
        "'b*'",
        "c",
        "e1",
    ]


@pytest.mark.parametrize("names", [[("a", "b")], "a", {"a": 1}, {1: "a"}, {"a": ("b",)}, True])
def test_names_in_another_form_are_refused(names):
    with pytest.raises(RuleTypeError, match=r"names must be a mapping|both must be texts"):
        matched_names(["a"], ["b"], names)


def test_a_pattern_that_can_be_read_without_end_ends():
    name = "/".join("a" * 30)
    with pytest.raises(CheckpointMismatchError, match="in several ways"):
        matched_names([name], [name], {"/".join(["**", "a"] * 15): "/".join(["**", "a"] * 15)})


def test_rules_of_a_state_are_of_parameters_and_what_is_kept_for_them_follows():
    stored = ["step", "params/a/w", "opt/mu/a/w", "opt/hyper/rate", "params/rate", "opt/mu/rate"]
    wanted = ["step", "params/b/w", "opt/mu/b/w", "opt/hyper/rate", "params/r", "opt/mu/r"]
    assert matched_state_names(stored, wanted, {"a/**": "b/**", "rate": "r"}) == {
        "step": "step",
        "params/b/w": "params/a/w",
        "opt/mu/b/w": "opt/mu/a/w",
        # Not a parameter's, though it is called like one.
        "opt/hyper/rate": "opt/hyper/rate",
        "params/r": "params/rate",
        "opt/mu/r": "opt/mu/rate",
    }
    left = matched_state_names(stored, wanted, {"a/**": None, "rate": "r"})
    assert left.keys() == {"step", "opt/hyper/rate", "params/r", "opt/mu/r"}
    with pytest.raises(
        CheckpointMismatchError, match=r"Did you mean 'a/\*\*', which matches 1 of 2"
    ):
        matched_state_names(stored, wanted, {"params/a/**": "params/b/**"})
    assert matched_state_names(["x/a"], ["y/a"], {"x/*": "y/*"}) == {"y/a": "x/a"}


# The definition, by trial: a wildcard stands for whatever makes the pattern the name.
def parts_of(name):
    return [part for part in re.split(r"[./]", name) if part]


def readings(pattern, name):
    parts = parts_of(name)
    texts = {part[i:j] for part in parts for i in range(len(part)) for j in range(i, len(part) + 1)}
    runs = {"/".join(parts[i:j]) for i in range(len(parts)) for j in range(i, len(parts) + 1)}
    stands_for = {"*": texts | {""}, "?": {t for t in texts if len(t) == 1}, "**": runs | {""}}
    found = []
    for filled in itertools.product(*(stands_for[place] for place in places_in(pattern))):
        if parts_of(fill(pattern, filled)) == parts and is_whole(pattern, filled):
            found.append(filled)
    return found


def places_in(pattern):
    return re.findall(r"\*\*|\*|\?", pattern)


def fill(pattern, texts):
    remaining = list(texts)
    return re.sub(r"\*\*|\*|\?", lambda _: remaining.pop(0), pattern)


def is_whole(pattern, filled):
    """Whether each part without a double star is still a part, though what it says may be empty."""
    remaining = list(filled)
    for part in parts_of(pattern):
        texts = [remaining.pop(0) for _ in places_in(part)]
        if part != "**" and not fill(part, texts):
            return False
    return True


def expected(stored, wanted, names):
    """Which wanted name takes which stored one, None if that is refused."""
    goes = {}
    for pattern, name in names.items():
        alone = pattern in stored
        matching = [s for s in stored if s == pattern] if alone else stored
        results = {s: [()] if alone else readings(pattern, s) for s in matching}
        results = {s: found for s, found in results.items() if found}
        if not results:
            return None
        if not alone and places_in(pattern) != places_in(name):
            return None
        for s, found in results.items():
            made = {tuple(parts_of(fill(name, texts) if texts else name)) for texts in found}
            fits = [w for w in wanted if tuple(parts_of(w)) in made]
            if len(made) > 1 or (len(fits) != 1 and name not in wanted):
                return None
            goes.setdefault(s, set()).add(name if name in wanted else fits[0])
    if any(len(found) > 1 for found in goes.values()):
        return None
    pairs = [(goes[s].copy().pop() if s in goes else s, s) for s in stored]
    return dict(pairs) if len({name for name, _ in pairs}) == len(pairs) else None


PARTS = st.sampled_from(["a", "b", "a1", "b_a"])
WILD = st.sampled_from(["a", "b", "*", "**", "?", "a*", "*_*", "?1", "x*"])
SEPARATORS = st.sampled_from(["/", "."])


def paths(parts, longest):
    def joined(drawn):
        return "".join(sum(zip(drawn[0], [*drawn[1], ""], strict=False), ()))

    return st.lists(parts, min_size=1, max_size=longest).flatmap(
        lambda chosen: st.tuples(
            st.just(chosen),
            st.lists(SEPARATORS, min_size=len(chosen) - 1, max_size=len(chosen) - 1),
        ).map(joined)
    )


@hypothesis.given(paths(WILD, 3), paths(PARTS, 3))
def test_wildcards_stand_for_what_makes_the_pattern_the_path(pattern, path):
    found = list(wildcard_texts(pattern, path))
    assert sorted(found) == sorted(set(found)) == sorted(readings(pattern, path))
    assert bool(found) == path_matches(pattern, path)


@st.composite
def requests(draw):
    """Stored names, names of a model and rules, of which about half are in order."""
    stored = draw(st.lists(paths(PARTS, 2), min_size=1, max_size=4, unique=True))
    rules = {}
    for pattern in draw(st.lists(paths(WILD, 2), min_size=1, max_size=2, unique=True)):
        # Mostly the same wildcards in other words.
        likely = st.sampled_from(["new/" + pattern, pattern.replace("a", "c"), pattern])
        rules[pattern] = draw(st.one_of(likely, likely, likely, paths(WILD, 2)))
    results = [
        fill(name, texts)
        for pattern, name in rules.items()
        for s in stored
        for texts in readings(pattern, s)
        if places_in(pattern) == places_in(name)
    ]
    wanted = [*results, *draw(st.lists(st.sampled_from(stored), max_size=2))]
    dropped = draw(st.sampled_from([None] * 6 + wanted))
    return stored, sorted({name for name in wanted if name and name != dropped}), rules


@hypothesis.settings(max_examples=150)
@hypothesis.given(requests())
def test_matching_any_names_agrees_with_the_definition(request):
    try:
        found = matched_names(*request)
    except CheckpointMismatchError:
        found = None
    assert found == expected(*request)


# Rules that mean something, and one thing.
RENAMINGS = [
    ("layers.*.w", "block_*/w"),
    ("**.gamma", "norm/**/scale"),
    ("enc?.*.b", "?/*/bias"),
    ("head", "lm_head"),
]


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(RENAMINGS), st.lists(PARTS, min_size=2, max_size=2)),
        min_size=1,
        max_size=8,
    ),
    st.lists(PARTS.map("other/{}".format), max_size=3, unique=True),
)
def test_renamed_arrays_are_all_found(drawn, others):
    pairs = dict(zip(others, others, strict=True))
    for (pattern, name), texts in drawn:
        texts = [
            texts[0][0] if wild == "?" else text
            for wild, text in zip(places_in(pattern), texts, strict=False)
        ]
        pairs[fill(name, texts)] = fill(pattern, texts)
    names = dict(rule for rule, _ in drawn)
    assert matched_names(list(pairs.values()), list(pairs), names) == pairs
    assert expected(list(pairs.values()), list(pairs), names) == pairs


def records(names, shape=(2,)):
    return dict.fromkeys(names, ArrayRecord(shape, "float32", ("a",) * len(shape)))


@pytest.mark.parametrize(
    ("left", "missing", "rules"),
    [
        (LAYERS, BLOCKS, {}),
        (
            LAYERS,
            [f"net/block_{i}/mlp/w" for i in range(3)],
            {"model/layers/*/**": "net/block_*/**"},
        ),
        (["a/up/w", "a/down/w"], ["b/up/w", "b/down/w"], {"a/**": "b/**"}),
        (["a/0/w", "q/v"], ["b/0/w", "r/v"], {"a/**": "b/**", "q/**": "r/**"}),
        (
            ["net/Linear.weight"],
            ["net/Linear.weights"],
            {"net/Linear/weight": "net/Linear/weights"},
        ),
        (["q"], ["w"], {}),
        ([], ["a"], {}),
    ],
)
def test_the_fewest_rules_are_suggested_that_fit(left, missing, rules):
    assert suggested_names(records(left), records(missing)) == rules
    found = matched_names(left, missing, rules)
    assert not rules or set(missing) <= found.keys()


def test_no_rule_is_suggested_for_arrays_that_differ():
    assert suggested_names(records(["a/w"]), records(["b/w"], (3,))) == {}
    left = records(["a/w"]) | records(["a/v"], (3,))
    assert suggested_names(left, records(["b/w", "b/v"])) == {}


@pytest.mark.parametrize(
    ("left", "missing", "rules"),
    [
        (["a/w", "c/w"], ["b/w"], {}),
        (["attn/q/w", "attn/k/w"], ["attention/key/w", "attention/query/w"], {}),
        (
            [f"a/{i}/{n}/w" for i in range(2) for n in "qk"],
            [f"b_{i}/{n}/w" for i in range(2) for n in "xy"],
            {},
        ),
        (["q/w", "k/w", "old/v"], ["x/w", "y/w", "new/v"], {"old/**": "new/**"}),
    ],
)
def test_no_rule_is_suggested_where_another_would_do_as_well(left, missing, rules):
    assert suggested_names(records(left), records(missing)) == rules


def test_one_more_key_is_not_said_where_there_are_two_of_them():
    wanted = records(["w"])
    options = {"headline": "no:", "wording": RESTORING, "tolerance": Tolerance()}
    with pytest.raises(CheckpointMismatchError, match="all names of the model under 'old'"):
        compare(records(["old/w"]), wanted, **options)
    with pytest.raises(CheckpointMismatchError) as refused:
        compare(records(["ema/w", "old/w"]), wanted, **options)
    assert "under" not in str(refused.value)
    assert [problem.partition(": ")[0] for problem in refused.value.problems] == [
        "w",
        "ema/w",
        "old/w",
    ]


def test_a_selection_is_what_only_matches_and_except_does_not():
    names = [f"block_{i}/{n}" for i in range(2) for n in ("mlp/w", "mlp/bias", "LoRA/w")]
    assert Selection.read("**/LoRA/**", None).of(names) == ["block_0/LoRA/w", "block_1/LoRA/w"]
    assert Selection.read(["block_0/**", "**/bias"], "**/w").of(names) == [
        "block_0/mlp/bias",
        "block_1/mlp/bias",
    ]
    assert Selection.read(None, None).of(names) == names
    assert Selection.read(None, None).is_everything


@pytest.mark.parametrize(
    ("only", "except_", "said"),
    [
        (
            "tower/**",
            None,
            "only='tower/**': the pattern matches no array of the model. The nearest of",
        ),
        (
            None,
            ["mlp/w", "q"],
            "except_='q': the pattern matches no array of the model. The nearest of",
        ),
        ("mpl/**", None, "Did you mean 'mlp/**', which matches 2 of 2?"),
        ("**lp**", None, "Did you mean '**/*lp*/**', which matches 2 of 2?"),
        (r"ml\w/(v|w)", None, "and are no regular expressions."),
        (r"m\w+/.*", None, "no regular expressions. Did you mean 'm*/**', which matches 2 of 2?"),
        ("mlp/.+", None, "no regular expressions. Did you mean 'mlp/**', which matches 2 of 2?"),
        ("mlp**", None, "Did you mean 'mlp*/**', which matches 2 of 2?"),
        ("mlp", None, "Did you mean 'mlp/**', which matches 2 of 2?"),
        ("w", None, "Did you mean '**/w', which matches 1 of 2?"),
        ("mlp/w", "mlp/*", "nothing of the model is left"),
    ],
)
def test_a_selection_of_nothing_is_refused(only, except_, said):
    with pytest.raises(CheckpointMismatchError, match=re.escape(said)):
        Selection.read(only, except_).of(["mlp/w", "mlp/v"])


@pytest.mark.parametrize("given", [[], 3, {"a": "b"}, [3], b"a"])
def test_selections_in_another_form_are_refused(given):
    with pytest.raises(RuleTypeError, match="give a pattern of names, or several"):
        Selection.read(given, None)
