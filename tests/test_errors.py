"""The error family and the one form of its messages."""

import re

import pytest

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
def test_all_offenders_are_told_in_one_error_in_their_order(error):
    with pytest.raises(error, match=re.escape("told here:\n  first.\n  second.")) as caught:
        errors.raise_all(error, "told here:", ["first.", "second."])
    assert caught.value.problems == ("first.", "second.")
    # A lookup error must not show its text quoted, as KeyError does.
    assert str(caught.value) == "told here:\n  first.\n  second."


def test_no_offender_is_no_error():
    assert errors.raise_all(errors.PlanError, "told here:", []) is None


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
