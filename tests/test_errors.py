"""The error family and the one form of its messages."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penzai_shard import errors

FAMILY = [
    errors.RuleTypeError,
    errors.MeshError,
    errors.PlanError,
    errors.SelectionError,
    errors.CheckpointMismatchError,
]


@pytest.mark.parametrize("error", FAMILY)
def test_every_error_is_a_sharding_error_and_a_value_error(error):
    assert issubclass(error, errors.ShardingError)
    assert issubclass(error, ValueError)


def test_wrong_types_and_failed_lookups_can_be_caught_as_such():
    assert issubclass(errors.RuleTypeError, TypeError)
    assert issubclass(errors.SelectionError, LookupError)
    assert issubclass(errors.MissingExtraError, ImportError)
    assert issubclass(errors.ShardingWarning, UserWarning)


@pytest.mark.parametrize("error", FAMILY)
def test_all_offenders_are_reported_in_one_error_in_their_order(error):
    with pytest.raises(error, match=re.escape("reported:\n  first.\n  second.")) as caught:
        errors.raise_all(error, "reported:", ["first.", "second."])
    assert caught.value.problems == ("first.", "second.")
    # A lookup error must not show its text quoted, as KeyError does.
    assert str(caught.value) == "reported:\n  first.\n  second."


def test_no_offender_is_no_error():
    assert errors.raise_all(errors.PlanError, "reported:", []) is None


def test_an_error_without_offenders_is_its_headline():
    error = errors.MeshError("no mesh.")
    assert str(error) == "no mesh."
    assert error.problems == ()


def test_an_absent_module_names_the_extra_that_brings_it():
    with pytest.raises(
        errors.MissingExtraError, match=r"pip install 'penzai-shard\[train\]'"
    ) as caught:
        errors.require_extra("no_such_module_anywhere", "train")
    assert "'no_such_module_anywhere'" in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_present_module_is_returned():
    assert errors.require_extra("json", "train").dumps([1]) == "[1]"


def indivisible(path):
    return (
        f"{path}: logical axis 'heads' (3) does not divide over mesh axis 'model' (2), asked by "
        "rule 'heads' -> 'model'. Pad it to 4, or map 'heads' to None. Or store it padded: "
        'on_indivisible="pad".'
    )


def test_offenders_alike_in_equal_blocks_are_one_line_with_a_count_and_all_are_kept():
    names = ("query", "key", "value", "output")
    problems = [indivisible(f"lm/block_{i}/attention/{n}.w") for i in range(96) for n in names]
    error = errors.PlanError("no valid layout:", problems)
    assert error.problems == tuple(problems)
    assert str(error).splitlines() == [
        "no valid layout:",
        *(
            "  " + indivisible(f"lm/block_*/attention/{name}.w (96 times, * = 0-95)")
            for name in names
        ),
    ]


def test_a_plan_of_96_blocks_with_an_indivisible_axis_is_refused_in_a_handful_of_lines():
    import jax
    from penzai import pz

    from penzai_shard import make_plan

    weights = {
        f"block_{i}": {
            "attention": {"query": pz.nx.zeros({"heads": 3}), "up": pz.nx.ones({"a": 8})}
        }
        for i in range(96)
    }
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    with pytest.raises(errors.PlanError) as caught:
        make_plan(weights, mesh, {"heads": "model", "a": "data"})
    assert str(caught.value) == "no valid layout for some arrays:\n  " + indivisible(
        "block_*/attention/query (96 times, * = 0-95)"
    )
    assert len(caught.value.problems) == 96
    expected = {indivisible(f"block_{i}/attention/query") for i in range(96)}
    assert set(caught.value.problems) == expected


def test_different_messages_are_never_one_line():
    problems = [f"block_{i}/up: length {i} does not divide." for i in range(5)]
    assert str(errors.PlanError("no:", problems)).splitlines()[1:] == [f"  {p}" for p in problems]


def test_one_or_two_offenders_keep_their_whole_path():
    problems = [indivisible("block_0/w"), indivisible("block_1/w")]
    assert str(errors.PlanError("no:", problems)).splitlines()[1:] == [f"  {p}" for p in problems]


def test_where_there_are_many_lines_two_that_differ_in_one_number_are_one():
    names = ("query", "key", "value", "output", "up")
    problems = [indivisible(f"block_{i}/{name}") for i in (0, 7) for name in names]
    others = [indivisible(path) for path in ("stage_0/block_3/w", "stage_1/block_5/w", "head")]
    assert str(errors.PlanError("no:", [*problems, *others])).splitlines()[1:] == [
        *("  " + indivisible(f"block_*/{name} (2 times, * = 0, 7)") for name in names),
        *(f"  {other}" for other in others),
    ]


def test_only_the_numbers_that_differ_are_folded():
    problems = [indivisible(f"stage_2/block_{i}/w") for i in (0, 1, 2, 5, 7, 8)]
    line = "stage_2/block_*/w (6 times, * = 0-2, 5, 7-8)"
    assert str(errors.PlanError("no:", problems)).splitlines()[1:] == ["  " + indivisible(line)]
    problems = [indivisible(f"stage_{i}/block_{j}/w") for i in range(2) for j in range(2)]
    line = "stage_*/block_*/w (4 times)"
    assert str(errors.PlanError("no:", problems)).splitlines()[1:] == ["  " + indivisible(line)]


def test_a_path_repeated_in_the_message_is_folded_with_it():
    problems = [
        f"block_{i}.up: not in the checkpoint, which has 'block_{i}/up' of 32 by 1.5."
        for i in range(4)
    ]
    assert str(errors.CheckpointMismatchError("no:", problems)).splitlines()[1:] == [
        "  block_*.up (4 times, * = 0-3): not in the checkpoint, which has 'block_*/up' of 32 by "
        "1.5."
    ]


def test_a_number_in_which_a_group_does_not_differ_stays_in_the_fix_too():
    problems = [
        f"layers.{i}.linear{part}.w: no pattern matches. "
        f"Add 'layers.{i}.linear{part}.w': ({name},)."
        for i in range(3)
        for part, name in ((1, "'up'"), (2, "'down'"))
    ]
    assert str(errors.PlanError("no:", problems)).splitlines()[1:] == [
        "  layers.*.linear1.w (3 times, * = 0-2): no pattern matches. "
        "Add 'layers.*.linear1.w': ('up',).",
        "  layers.*.linear2.w (3 times, * = 0-2): no pattern matches. "
        "Add 'layers.*.linear2.w': ('down',).",
    ]


def test_a_long_message_ends_after_about_40_lines_and_says_where_the_rest_is():
    problems = [f"name{'x' * i}: wrong." for i in range(1000)]
    error = errors.PlanError("no:", problems)
    lines = str(error).splitlines()
    assert len(lines) == 40
    assert lines[-1] == "  and 962 more; all are in error.problems"
    assert error.problems == tuple(problems)


def test_an_error_survives_pickling_whole():
    import pickle

    error = errors.PlanError("no:", [indivisible(f"block_{i}/w") for i in range(5)])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.problems == error.problems


@given(
    st.lists(
        st.builds(
            "{}{}/{}{}: {}".format,
            st.sampled_from(["block_", "layers.", "b"]),
            st.integers(0, 30),
            st.sampled_from(["w", "up_", "x."]),
            st.integers(0, 3),
            st.sampled_from(["is 3 long.", "is 4 long.", "see b1/w2.", "see b2/w2.", ""]),
        ),
        max_size=40,
    )
)
def test_folding_loses_no_offender_and_invents_none(problems):
    lines = errors.grouped_problems(problems)
    assert sum(count for _, count in lines) == len(problems)
    covered = set()
    for line, count in lines:
        message = re.sub(r" \(\d+ times(, \* = [^)]*)?\)", "", line)
        pattern = re.escape(message).replace(r"\*", r"\d+")
        stands_for = [problem for problem in problems if re.fullmatch(pattern, problem)]
        assert len(stands_for) >= count
        covered.update(stands_for)
    assert covered == set(problems)
