"""The subcommands: their options, and what they print.

Each imports what it runs when it is called: the demo chooses its devices before JAX is imported.
"""

import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

import click

from penzai_shard.errors import PlanError
from penzai_shard.progress import progress

_FILE, _RELAXED = click.Path(dir_okay=False), click.Choice(["error", "replicate"])
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_ALL = click.option("--all", "show_all", is_flag=True, help="A row for each array of equal blocks.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="penzai-shard")
def penzai_shard() -> None:
    """Lay JAX models over a mesh by axis name, and read the layout before anything runs.

    With --debug errors show where they come from.
    """


@penzai_shard.command()
@click.argument("model")
@click.option("--mesh", required=True, help="Sizes by name: data=4,model=2. No devices are needed.")
@click.option("--rules", help="embedding=data,neurons=model, a preset, or file.py:NAME.")
@click.option("--on-indivisible", type=_RELAXED, default="error", help="For lengths.")
@click.option("--on-unnamed", type=_RELAXED, default="error", help="For arrays without names.")
@_JSON
@_ALL
def plan(
    model: str, mesh: str, rules: str | None, as_json: bool, show_all: bool, **modes: Any
) -> None:
    """Print where every array of MODEL lies.

    MODEL is a published name such as llama-3-70b, the path of a config.json, or file.py:name or
    module:name, of a model or of a function without arguments that builds one. Its arrays are not
    made.
    """
    from penzai_shard.cli import inputs
    from penzai_shard.planning import arguments
    from penzai_shard.planning.planner import examine

    given = inputs.read_mesh(mesh), inputs.read_rules(rules)
    request = arguments.read("plan", *given, **modes)
    made, problems, doubts = examine(inputs.read_model(model), request)
    if as_json:
        rows = [{"path": p.path, "what": p.what, "fix": p.fix, "kind": p.kind} for p in problems]
        data = {**made.to_data(), "problems": rows, "doubts": doubts}
        print(json.dumps(data, indent=2, default=str))
    problems.raise_if_any(PlanError)
    if not as_json:
        print(made.table(collapse=not show_all), *doubts, sep="\n")


@penzai_shard.command()
@click.argument("model")
@click.option("--mesh", required=True, help="Sizes by name: data=4,model=2. No devices are needed.")
@click.option("--rules", help="embedding=data,neurons=model, a preset, or file.py:NAME.")
@click.option("--batch", help="file.py:NAME of what the model is called with, or of what makes it.")
@click.option("--on-indivisible", type=_RELAXED, default="error", help="For lengths.")
@click.option("--on-unnamed", type=_RELAXED, default="error", help="For arrays without names.")
@_JSON
def lint(
    model: str, mesh: str, rules: str | None, batch: str | None, as_json: bool, **modes: Any
) -> None:
    """Print what is probably a mistake or a waste in how MODEL is laid out.

    MODEL is as for "plan"; file.py:NAME of --rules may be a layout. The exit status is 1 if
    something was found.
    """
    from penzai_shard.cli import inputs
    from penzai_shard.findings.lint import lint as find

    called_with = None if batch is None else inputs.read_shapes(batch)
    set_up = inputs.read_model(model), inputs.read_mesh(mesh), inputs.read_rules(rules)
    report = find(*set_up, batch=called_with, **modes).report()
    _print_report(report, as_json, show_all=True)


@penzai_shard.command()
@click.argument("step")
@click.option("--json", "lock", type=_FILE, help="Write the step's lock here; - prints it.")
@click.option("--all", "show_all", is_flag=True, help="Each array and collective, not layers only.")
def price(step: str, lock: str | None, show_all: bool) -> None:
    """Print the memory and the collectives of STEP, which is not run.

    STEP is file.py:name or module:name, of a function without arguments that returns what
    compile_step or compile_ahead gives, or of such a value. The exit status is 1 if it does not
    fit into its devices.
    """
    from penzai_shard.cli import inputs
    from penzai_shard.inspection.compiling import CompiledStep
    from penzai_shard.inspection.locks import ShardingLock

    found = inputs.read_object(step)
    with progress(None, "compiling", shown=None):
        compiled = inputs.run_user_code(step, found) if callable(found) else found
    if not isinstance(compiled, CompiledStep):
        what = f"{step} gives a {type(compiled).__name__}, not a compiled step"
        fix = "Let it return compile_step(step, state, tokens=tokens)."
        raise inputs.make_error(what, fix)
    if lock == "-":
        print(ShardingLock.of(compiled).to_json(), end="")
    elif lock is not None:
        ShardingLock.of(compiled).save(lock)
    else:
        report = compiled.report()
        print(report)
        # Of what is too large there is no program, and its memory is what was printed.
        for part in (compiled.memory, compiled.collectives) if compiled.text else ():
            # What the first report has said already is left out.
            notes = [note for note in part.report().notes if note not in report.notes]
            rows = part.report().rows if show_all else ()
            print(f"\n{dataclasses.replace(part.report(), rows=rows, notes=notes)}")
        sys.exit(int(not report))


@penzai_shard.command()
@click.argument("model")
@click.option("--devices", required=True, help="v5e:32, h100:16. No devices are needed.")
@click.option("--batch", type=int, required=True, help="Examples of a batch.")
@click.option("--seq", type=int, help="Tokens of an example.")
@click.option("--memory", help="What a step may need on a device: 14GiB.")
@click.option("--keep", default="", help="What is decided: batch=data,heads=.")
@click.option("--optimizer", default="adamw", help="A name in optax, or file.py:NAME.")
@click.option("--loss", help="file.py:NAME of a loss; without, next tokens are predicted.")
@click.option("--out", type=_FILE, help="Write the best to this TOML file.")
@_JSON
def choose(
    model: str, loss: str, optimizer: str, keep: str, as_json: bool, out: str, **options: Any
) -> None:
    """Print the layouts for training MODEL that fit, the best first.

    MODEL is as for "plan". The exit status is 1 if no layout fits.
    """
    from penzai_shard.choosing.choose import choose_layout
    from penzai_shard.cli import inputs
    from penzai_shard.pretrained.models import model_of_config
    from penzai_shard.rules import AxisRules
    from penzai_shard.training.cross_entropy import cross_entropy

    def predict_tokens(model: Any, rng: Any, state: Any, tokens: Any, targets: Any) -> Any:
        loss = cross_entropy(model(tokens), targets)
        return loss, state, {"loss": loss}

    name = optimizer if ":" in optimizer else f"optax:{optimizer}"
    update = inputs.read_object(name)
    try:
        choices = choose_layout(
            inputs.read_model(model) if ":" in model else model_of_config(model),
            inputs.read_object(loss) if loss else predict_tokens,
            update if ":" in optimizer else inputs.run_user_code(name, lambda: update(1e-3)),
            keep={x.logical_axis: x.mesh_axes for x in AxisRules(inputs.read_rules(keep)).rules},
            **options,
        )
    except KeyboardInterrupt:
        print("interrupted before a layout that fits was compiled", file=sys.stderr)
        sys.exit(130)
    print(choices.to_json() if as_json else choices)
    if out:
        choices.best.save(out)


@penzai_shard.command()
@click.argument("base")
@click.argument("head")
@click.option("--tolerance", default=0.05, help="By which fraction bytes may differ.")
def bill(base: str, head: str, tolerance: float) -> None:
    """Print as Markdown what differs between two locks: BASE and HEAD.

    The locks are files of "penzai-shard price --json". The exit status is 1 if something grew.
    """
    from penzai_shard.cli.bill import write_bill
    from penzai_shard.inspection.locks import ShardingLock

    text, grew = write_bill(ShardingLock.load(base), ShardingLock.load(head), tolerance)
    print(text)
    sys.exit(int(grew))


@penzai_shard.group()
def checkpoint() -> None:
    """Look at checkpoints and safetensors files."""


def _print_report(report: Any, as_json: bool, show_all: bool) -> None:
    """Prints a report as a table or as JSON; its truth value is the exit status."""
    print(report.to_json() if as_json else dataclasses.replace(report, collapse=not show_all))
    sys.exit(int(not report))


@checkpoint.command()
@click.argument("path")
@_JSON
@_ALL
def show(path: str, **options: bool) -> None:
    """Print what PATH holds: a checkpoint, safetensors files, or the folder of a run."""
    from penzai_shard.checkpoints.reports import describe_checkpoint

    _print_report(describe_checkpoint(path), **options)


@checkpoint.command()
@click.argument("first")
@click.argument("second")
@_JSON
@_ALL
def compare(first: str, second: str, **options: bool) -> None:
    """Print in what two checkpoints differ. The exit status is 1 if they do."""
    from penzai_shard.checkpoints.reports import compare_checkpoints

    _print_report(compare_checkpoints(first, second), **options)


@checkpoint.command()
@click.argument("path")
@_JSON
@_ALL
def verify(path: str, **options: bool) -> None:
    """Read every number of PATH. The exit status is 1 if some are not as they were saved."""
    from penzai_shard.checkpoints.reports import verify_checkpoint

    _print_report(verify_checkpoint(path), **options)


@penzai_shard.command()
@click.option("--out", type=click.Path(path_type=pathlib.Path), help="Keep the checkpoint here.")
def demo(out: pathlib.Path | None) -> None:
    """Plan, initialise, edit, train, save and restore a small model.

    It runs on the devices that there are, at most 8, and on 8 simulated ones if there are none but
    the CPU.
    """
    # Before JAX is imported, which reads it once. A user's own number comes last and counts.
    simulate = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{simulate} {os.environ.get('XLA_FLAGS', '')}"
    from penzai_shard.cli.demo import run_demo

    run_demo(out)
