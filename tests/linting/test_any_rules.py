"""Whatever the rules are: nothing raises, and what is found is what a plan refuses."""

import warnings

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penzai import pz

import penzai_shard as pzs
from tests.linting.seeded_mistakes import mesh
from tests.linting.test_seeded_mistakes import keys, pasted

# Findings that make_plan raises for.
ERRORS = {"unknown", "doubled", "indivisible", "misfit", "unnamed", "unreadable"}

named = st.lists(st.sampled_from(["embedding", "neurons", "heads"]), max_size=3, unique=True)
arrays = named.flatmap(
    lambda names: st.fixed_dictionaries({n: st.sampled_from([2, 3, 4, 6, 8, 12]) for n in names})
)
models = st.dictionaries(st.sampled_from(["up", "down", "table"]), arrays, min_size=1)
logical = st.sampled_from(["embedding", "neurons", "heads", "batch", "neuron", "embeding"])
split = st.sampled_from(["data", "model", "modle", None, ("data", "model"), ("model", "pipe"), 3])
presets = [pzs.tensor_parallel(), pzs.fully_sharded(min_size=4), pzs.fully_sharded]
tables = st.one_of(
    st.dictionaries(logical, split, max_size=4),
    st.lists(st.tuples(logical, split), max_size=5),
    st.sampled_from([None, *presets]),
)
sizes = st.sampled_from([1, 2, 4])


def subject_of(arrays, data, model, rules):
    tree = {
        path: pz.nx.NamedArray(dims, jax.ShapeDtypeStruct(tuple(dims.values()), "float32"))
        for path, dims in arrays.items()
    }
    return {"model": tree, "mesh": mesh(data=data, model=model), "rules": rules, "batch": None}


def linted(subject):
    return pzs.lint(subject["model"], subject["mesh"], subject["rules"], min_bytes=1)


@settings(max_examples=80)
@given(st.builds(subject_of, models, sizes, sizes, tables))
def test_a_plan_is_refused_exactly_where_an_error_is_found(subject):
    found = {finding.kind for finding in linted(subject).findings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pzs.ShardingWarning)
        if found & ERRORS:
            with pytest.raises(pzs.ShardingError):
                pzs.make_plan(subject["model"], subject["mesh"], subject["rules"])
        else:
            pzs.make_plan(subject["model"], subject["mesh"], subject["rules"])


@settings(max_examples=40)
@given(st.builds(subject_of, models, sizes, sizes, tables))
def test_every_fix_mends_what_it_is_for_and_in_the_end_nothing_is_found(subject):
    for finding in linted(subject).findings:
        assert finding.key not in keys(linted(pasted(subject, finding)))
    for _ in range(20):
        report = linted(subject)
        if report.ok:
            return
        subject = pasted(subject, report.findings[0])
    raise AssertionError(report)
