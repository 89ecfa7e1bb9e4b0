"""Programs drawn at random, against Shardy without notes, and with their causes taken away."""

import collections
import re

import hypothesis
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from penzai_shard.library_apis.shardy_forms import bring_to_form_of_xla
from penzai_shard.sharding_propagation import PropagatedProgram
from tests.sharding_propagation.drawn_programs import drawn_programs, source_of

_SHARDING = re.compile(r"<@\w+, \[((?:\{[^}]*\}(?:, )?)*)\]")
_MESH_AXIS = re.compile(r'"(\w+)"((?::\(\d+\)\d+)?)')
SETTINGS = hypothesis.settings(max_examples=16)


def specs_in(attribute):
    """The layouts in an attribute of MLIR: the mesh axes of each dimension."""
    return [
        tuple(
            tuple("".join(each) for each in _MESH_AXIS.findall(dimension))
            for dimension in re.findall(r"\{([^}]*)\}", found)
        )
        for found in _SHARDING.findall(str(attribute))
    ]


def is_compared(kind):
    return kind.startswith("stablehlo.") and kind not in ("stablehlo.while", "stablehlo.case")


def layouts_by_shardy_alone(lowered):
    """The layouts of operations, and those of what goes in and comes out, as XLA has them."""
    operations = collections.Counter()
    outer = []

    def look(operation):
        attributes = operation.attributes
        if is_compared(operation.name) and "sdy.sharding" in attributes:
            specs = specs_in(attributes["sdy.sharding"])
            operations.update((operation.name, spec) for spec in specs if any(spec))
        elif operation.name == "func.func" and str(attributes["sym_name"]) == '"main"':
            outer.extend(specs_in(attributes["arg_attrs"]) + specs_in(attributes["res_attrs"]))
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir("stablehlo")
    with module.context:
        copied = module.operation.clone().operation
        # That the compiler has this form is the claim of a test of its own, by what it compiles.
        bring_to_form_of_xla(copied)
        passes = str(PassManager.parse("builtin.module(sdy-propagation-pipeline)"))
        # What is behind moves values to where each operation wants them.
        layouts = passes.partition(",func.func(sdy-insert-explicit-reshards")[0]
        layouts = re.sub(r"sdy-save-module(\{[^{}]*\})?,", "", layouts).removesuffix(
            ",sdy-save-module"
        )
        PassManager.parse(f"{layouts})").run(copied)
        copied.walk(look)
    return operations, [spec for spec in outer if any(spec)]


@SETTINGS
@hypothesis.given(drawn_programs())
def test_layouts_are_those_of_the_propagation_that_xla_runs(drawn):
    lowered = drawn.lowered()
    program = PropagatedProgram.of(lowered)
    operations, outer = layouts_by_shardy_alone(lowered)
    found = collections.Counter(
        (operation.kind, spec)
        for operation in program.operations
        for value in operation.results
        if is_compared(operation.kind) and any(spec := program.values[value].spec or ())
    )
    assert set(found) == set(operations)
    # Calls of one function with the same layouts have become one function again.
    assert found >= operations
    ends = [program.values[v].spec for v in (*program.arguments.values(), *program.results)]
    assert [spec for spec in ends if any(spec or ())] == outer


def mesh_axes_of_results(program):
    return [
        (number, dimension, mesh_axis)
        for number, result in enumerate(program.results)
        for dimension, mesh_axes in enumerate(program.values[result].spec or ())
        for mesh_axis in mesh_axes
    ]


def has(program, number, dimension, mesh_axis):
    spec = program.values[program.results[number]].spec
    return bool(spec) and mesh_axis in {each.partition(":")[0] for each in spec[dimension]}


def is_contested(program, mesh_axis):
    """Whether two dimensions of some value want a mesh axis, or two layouts a dimension.

    Who wins then depends on all sources together, so that taking one away says nothing of another.
    """
    return any(
        loss.mesh_axis.partition(":")[0] == mesh_axis and loss.kind in ("used", "conflict")
        for loss in program.losses()
    )


@SETTINGS
@hypothesis.given(drawn_programs())
def test_each_cause_alone_brings_the_mesh_axis_and_no_other_source_is_needed(drawn):
    program = PropagatedProgram.of(drawn.lowered())
    for number, dimension, found in mesh_axes_of_results(program)[:2]:
        mesh_axis = found.partition(":")[0]
        causes = [source_of(each) for each in program.causes(program.results[number], found)]
        sources = drawn.sources(mesh_axis)
        assert sources.issuperset(causes)
        for cause in causes:
            alone = PropagatedProgram.of(drawn.without(mesh_axis, sources - {cause}).lowered())
            assert has(alone, number, dimension, mesh_axis) or is_contested(alone, mesh_axis)


@SETTINGS
@hypothesis.given(drawn_programs())
def test_without_its_causes_a_mesh_axis_is_gone_or_comes_from_elsewhere(drawn):
    program = PropagatedProgram.of(drawn.lowered())
    for number, dimension, found in mesh_axes_of_results(program)[:2]:
        mesh_axis = found.partition(":")[0]
        result = program.results[number]
        causes = [source_of(each) for each in program.causes(result, found)]
        others = drawn.sources(mesh_axis) - set(causes)
        gone = PropagatedProgram.of(drawn.without(mesh_axis, set(causes)).lowered())
        if has(gone, number, dimension, mesh_axis):
            assert others
        for other in sorted(others)[:2]:
            still = PropagatedProgram.of(drawn.without(mesh_axis, {other}).lowered())
            if is_contested(program, mesh_axis) or is_contested(still, mesh_axis):
                continue
            assert has(still, number, dimension, mesh_axis)
            assert source_of(still.cause(still.results[number], mesh_axis)) == causes[0]
