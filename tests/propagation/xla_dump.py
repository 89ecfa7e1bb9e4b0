"""Compares layouts with those that XLA writes down itself while it compiles train steps.

``python -m tests.propagation.xla_dump NAME...`` prints, as JSON, for each step how many operations
XLA has, how many of them have one of ours of the same kind, type and layout, for how many of its
results the layouts agree, and the seconds that our side takes.
"""

import collections
import json
import os
import pathlib
import re
import sys
import tempfile
import time

# Constants are copied at will; the others only hand on or pin.
PASSED_BY = {"constant", "return", "reshard", "sharding_constraint", "mesh", "iota", "while"}
PASSED_BY |= {"optimization_barrier"}


def read_dump(text):
    """How often XLA's module has each kind of operation, last type and first layout."""
    found = collections.Counter()
    for line in text.splitlines():
        operation = re.search(r'= "?(?:stablehlo|sdy)\.(\w+)"?', line)
        types = re.findall(r"tensor<([^>]*)>", line)
        if operation and types and operation[1] not in PASSED_BY:
            layout = re.search(r"sharding_per_value<\[<@\w+, \[([^\]]*)\]", line)
            dims = re.findall(r"\{([^}]*)\}", layout[1] if layout else "")
            spec = [" ".join(re.findall(r'"[^"]+"(?::\(\d+\)\d+)?', dim)) for dim in dims]
            found[operation[1], types[-1], ",".join(spec).strip(",")] += 1
    return found


def read_ours(program):
    """The same of a propagated program."""
    found = collections.Counter()
    for operation in program.operations:
        kind = operation.kind.partition(".")[2]
        if kind and operation.results and kind not in PASSED_BY:
            last, first = (program.values[operation.results[n]] for n in (-1, 0))
            spec = [" ".join(re.sub(r"^([^:]+)", r'"\1"', a) for a in axes) for axes in first.spec or ()]
            kind_of_values = "x".join([*map(str, last.shape), last.dtype])
            found[kind, kind_of_values, ",".join(spec).strip(",")] += 1
    return found


def compare(name, folder):
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from penzai_shard.propagation import flat
    from tests.propagation.steps import STEPS

    lowered, mesh = STEPS[name]()
    compiled = lowered.compile()
    dump = max(folder.glob("shardy/*/02*.mlir"), key=lambda path: path.stat().st_mtime)
    xla = read_dump(dump.read_text())
    start = time.perf_counter()
    program = flat.propagate_lowered(lowered)
    seconds = time.perf_counter() - start
    ours = read_ours(program)
    if os.environ.get("V"):
        print(name, (xla - ours).most_common(12), (ours - xla).most_common(12), sep="\n ")
    results = [program.values[number] for number in program.results]
    import jax

    shardings = jax.tree.leaves(compiled.output_shardings)
    equal = [
        theirs.is_equivalent_to(NamedSharding(mesh, P(*(value.spec or ()))), len(value.shape))
        for value, theirs in zip(results, shardings, strict=True)
    ]
    return {
        "operations": sum(xla.values()),
        "alike": sum((xla & ours).values()),
        "ours": sum(ours.values()),
        "results": len(equal),
        "results alike": sum(equal),
        "seconds": seconds,
    }


def main():
    with tempfile.TemporaryDirectory() as folder:
        flags = "--xla_force_host_platform_device_count=8 --xla_dump_hlo_pass_re=shardy.*"
        os.environ["XLA_FLAGS"] = f"{flags} --xla_dump_to={folder}"
        # What is read from a cache is not written down.
        os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
        print(json.dumps({n: compare(n, pathlib.Path(folder)) for n in sys.argv[1:]}))


if __name__ == "__main__":
    main()
