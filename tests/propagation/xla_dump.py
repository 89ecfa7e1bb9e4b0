"""Compares layouts with those that XLA writes down itself while it compiles train steps.

``python -m tests.propagation.xla_dump`` prints, as JSON, for each step how many operations
XLA has, how many of them have one of ours of the same kind, type and layout, and whether the
layouts of all compiled results are ours. Single numbers have no layout, and do not count.
"""

import collections
import json
import os
import pathlib
import re
import tempfile

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import penzai_shard as pzs
from penzai_shard.layouts.layout import Layout
from penzai_shard.propagation.flat import propagate_lowered
from tests.layouts.transformers import loss_fn, make_builder


def struct(shape, mesh, *spec, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def compile_llama(layout, sizes, is_rolled=False, accumulate_steps=1):
    mesh = pzs.make_mesh(sizes, abstract=True)
    make = make_builder(blocks=1 + is_rolled, stacked=is_rolled)
    state, step = layout.build(
        lambda: pzs.roll_layer_stacks().apply(make()) if is_rolled else make(),
        mesh=mesh,
        loss_fn=loss_fn,
        optimizer=optax.adamw(1e-2),
        rng=jax.random.key(1),
        batch_axis=0,
        accumulate_steps=accumulate_steps,
    )
    return pzs.compile_step(step, state, tokens=struct((16, 9), mesh, "data", dtype="int32"))


def compile_scanned():
    """Layers in a loop, whole weights, split momentum; no constraint, so that the form decides."""
    mesh = pzs.make_mesh(TWO, abstract=True)
    shapes = {"table": (32, 16), "up": (3, 16, 32), "down": (3, 32, 16)}
    specs = {"table": (None, "data"), "up": (None, "data"), "down": (None, None, "data")}

    def loss(w, tokens):
        turn = jax.checkpoint(lambda x, w: (x + jax.nn.gelu(x @ w[0]) @ w[1], None))
        x = jax.lax.scan(turn, w["table"][tokens], (w["up"], w["down"]))[0]
        logits = x @ w["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    @jax.jit
    def run_step(w, momentum, tokens):
        momentum = jax.tree.map(lambda m, g: m / 2 + g, momentum, jax.grad(loss)(w, tokens))
        return jax.tree.map(lambda w, m: w - m, w, momentum), momentum

    w = {name: struct(shape, mesh) for name, shape in shapes.items()}
    momentum = {name: struct(shape, mesh, *specs[name]) for name, shape in shapes.items()}
    tokens = struct((16, 8), mesh, "data", dtype="int32")
    return pzs.compile_step(run_step, w, momentum, tokens)


DATA, TWO = {"data": 8}, {"data": 4, "model": 2}
STEPS = {
    "data parallel": lambda: compile_llama(Layout.data_parallel(), DATA),
    "fully sharded": lambda: compile_llama(Layout.fully_sharded(min_size=128), DATA),
    "tensor parallel": lambda: compile_llama(Layout.tensor_parallel(), TWO),
    "rolled stack": lambda: compile_llama(Layout.zero1(min_size=128), TWO, True),
    "accumulation": lambda: compile_llama(
        Layout.two_dimensional(min_size=128), TWO, accumulate_steps=2
    ),
    "scanned": compile_scanned,
}
# Constants are copied at will; others hand on, or pin.
PASSED_BY = {"constant", "return", "reshard", "sharding_constraint", "mesh", "iota", "while"}
PASSED_BY |= {"optimization_barrier"}


def key(kind, type_text, spec):
    """What is compared of an operation; a layout without mesh axes counts as none."""
    return kind, type_text, str([*map(list, spec)]) if any(spec) else ""


def read_dump(text):
    """How often XLA's module has each kind of operation, with its last type and first layout."""
    found = collections.Counter()
    for line in text.splitlines():
        kind = re.search(r'= "?(?:stablehlo|sdy)\.(\w+)"?', line)
        types = re.findall(r"tensor<([^>]*)>", line)
        layout = re.search(r"sharding_per_value<\[<@\w+, \[([^\]]*)\]", line)
        dims = re.findall(r"\{([^}]*)\}", layout[1].replace('"', "") if layout else "")
        if kind and kind[1] not in PASSED_BY and "x" in "".join(types[-1:]):
            spec = [[axis for axis in dim.split(", ") if axis not in ("", "?")] for dim in dims]
            found[key(kind[1], types[-1], spec)] += 1
    return found


def read_ours(program):
    """The same of a propagated program."""
    found = collections.Counter()
    for operation in program.operations:
        kind = operation.kind.partition(".")[2]
        if kind and operation.results and kind not in PASSED_BY:
            first, last = (program.values[operation.results[n]] for n in (0, -1))
            type_text = "x".join([*map(str, last.shape), last.dtype])
            found[key(kind, type_text, first.spec or ())] += 1
    return found


def compare(name, folder):
    step = STEPS[name]().step
    dump = max(folder.glob("shardy/*run_step*/02*.mlir"), key=lambda path: path.stat().st_mtime_ns)
    program = propagate_lowered(step.lowered)
    xla, ours = read_dump(dump.read_text(encoding="utf-8")), read_ours(program)
    specs = [P(*program.values[number].spec or ()) for number in program.results]
    are_equal = all(
        array.sharding.is_equivalent_to(NamedSharding(step.mesh, spec), len(array.shape))
        for spec, array in zip(specs, step.results, strict=True)
    )
    return xla.total(), (xla & ours).total(), are_equal


def main():
    with tempfile.TemporaryDirectory() as folder:
        dumping = f"--xla_dump_hlo_pass_re=shardy.* --xla_dump_to={folder}"
        os.environ["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} {dumping}"
        found = {name: compare(name, pathlib.Path(folder)) for name in STEPS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
