"""Lint finds mistakes that were written without knowing it, and is silent about what is fine."""

import penzai_shard as pzs
from tests.findings.held_out import HARMLESS, MISTAKES


def find(build):
    """What lint says of a set-up, also where it refuses to go on."""
    options = build()
    try:
        return pzs.lint(options.pop("model"), options.pop("mesh"), **options).findings
    except pzs.ShardingError as error:
        return error.problems


def names(finding, words):
    return all(word in f"{finding.path} {finding.what} {finding.fix}" for word in words)


def test_lint_finds_27_of_30_mistakes():
    found = {name: (words, find(build)) for name, build, words in MISTAKES}
    missed = {
        name: [str(finding) for finding in findings]
        for name, (words, findings) in found.items()
        if not any(names(finding, words) for finding in findings)
    }
    assert len(MISTAKES) == 30
    assert len(missed) <= 3, missed


def test_lint_says_nothing_of_30_harmless_set_ups():
    alarms = {name: list(map(str, found)) for name, build in HARMLESS if (found := find(build))}
    assert len(HARMLESS) == 30
    assert not alarms, alarms
