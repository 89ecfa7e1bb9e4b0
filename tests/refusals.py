"""What a call is refused for: the problems of its error, and their paths."""

import pytest


def problems_of(error, call, *args, **kwargs):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    return caught.value.problems


def refused(error, call, *args, **kwargs):
    """The problems by path."""
    return {problem.path: problem for problem in problems_of(error, call, *args, **kwargs)}


def problem_paths(error, call, *args, **kwargs):
    return [problem.path for problem in problems_of(error, call, *args, **kwargs)]
