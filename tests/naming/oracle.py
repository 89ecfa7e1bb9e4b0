"""Judges labels of dimensions by what the author of a model calls them, in pairs and one by one.

It knows of no program, and shares no code with what it judges. A dimension without a label is tied
to none; one that its author leaves without a name is an axis of its own.
"""

import itertools


def compare_ties(labels, names):
    """The pairs of dimensions that have one label and two names, and those with one name and two
    labels.

    Args:
        labels: For each path a label per dimension, None for an open one.
        names: The author's.
    """
    places = [(path, dim) for path, axes in names.items() for dim in range(len(axes))]
    wrong, missed = [], []
    for pair in itertools.combinations(places, 2):
        (a, b), (first, second) = (
            [each[path][dim] for path, dim in pair] for each in (labels, names)
        )
        is_one = first is not None and first == second
        if (a is not None and a == b) != is_one:
            (missed if is_one else wrong).append((*pair, a))
    return wrong, missed


def find_wrong_names(found, names):
    """The dimensions with a name that is not their author's: path, number and name."""
    return {
        (path, dim, name)
        for path, axes in names.items()
        for dim, (name, own) in enumerate(zip(found[path], axes, strict=True))
        if name not in (None, own)
    }
