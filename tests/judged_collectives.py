"""What the library reads of a compiled program, beside what the judge of the benchmarks reads."""

import pytest

from benchmarks.compiled_collectives import bytes_by_kind, read_collectives
from penzai_shard.compiled_programs import Module
from penzai_shard.inspection.program_view import CompiledProgram
from penzai_shard.inspection.steps.layer_scopes import LayerScopes
from penzai_shard.inspection.steps.lowered_steps import LoweredStep
from penzai_shard.inspection.traffic.collective_report import CollectiveReport


def report_of_text(text, mesh):
    """The report of a program of which there is the text alone: nothing is known of its layers."""
    step = LoweredStep(None, mesh, {}, (), LayerScopes())
    program = CompiledProgram(step, Module.from_text(text), None, "cpu")
    return CollectiveReport.of(program)


def sent_by_kind(report):
    """What one device sends by kind and mesh axes, as ``bytes_by_kind`` has it."""
    sent = {}
    for one in report.collectives:
        # The judge names no mesh axes of groups that are a part of them.
        is_part = "(" in one.axes_text and one.kind != "collective-permute"
        key = (one.kind, None if is_part else one.mesh_axes)
        sent[key] = sent.get(key, 0) + one.wire_bytes * one.times
    return sent


def assert_report_is_as_judged(text, mesh):
    """Sums by kind and mesh axes, and the places, are those that the judge finds in the text."""
    judged = read_collectives(text, mesh)
    report = report_of_text(text, mesh)
    assert sent_by_kind(report) == bytes_by_kind(judged)
    assert sum(sent_by_kind(report).values()) == report.wire_bytes
    names = ("name", "times", "group_size", "scattered_bytes")
    ours, theirs = (
        sorted(tuple(getattr(one, name) for name in names) for one in each)
        for each in (report.collectives, judged)
    )
    assert ours == theirs
    for one in report.collectives:
        assert sum(part.payload_bytes for part in one.parts) == one.payload_bytes, one.name
    for totals in (report.by_layer(), report.by_phase()):
        sent = sum(total.wire_bytes for total in totals.values())
        assert sent == pytest.approx(report.wire_bytes, rel=1e-12)
