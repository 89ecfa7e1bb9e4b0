"""Declares the subcommands and their options."""

import click

from penzai_shard.cli import demo as demo_module
from penzai_shard.cli import plan as plan_module


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="penzai-shard")
def penzai_shard() -> None:
    """Lay JAX models over a mesh by axis name, and read the layout before anything runs."""


@penzai_shard.command()
@click.argument("model")
@click.option("--mesh", required=True, help="Sizes by name: data=4,model=2. No devices are needed.")
@click.option("--rules", help="embedding=data,neurons=model, or file.py:NAME. Without: same names.")
@click.option("--on-indivisible", default="error", show_default=True, help="error or replicate.")
@click.option("--on-unnamed", default="error", show_default=True, help="error or replicate.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
@click.option("--all", "show_all", is_flag=True, help="One row for each array; do not fold blocks.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def plan(**options: object) -> None:
    """Print where every array of MODEL lies.

    MODEL is file.py:name or module:name, of a function without arguments that builds a model, or of
    a model. Its arrays are not made.
    """
    options.pop("debug")
    plan_module.print_plan(**options)  # type: ignore[arg-type]


@penzai_shard.command()
def demo() -> None:
    """Plan, build, edit and run a small transformer on 8 simulated devices."""
    demo_module.run_demo()
