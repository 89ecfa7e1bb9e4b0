"""``penzai-shard choose``: the layout for a model on some devices, found among all sane ones."""

import argparse
import ast
import dataclasses
import json
import re
import sys
from typing import Any, get_args

from penzai_shard.choosing.candidates.enumerating import OnUnfit
from penzai_shard.choosing.candidates.kept_axes import Keep
from penzai_shard.choosing.choices import Choices, choose_layout
from penzai_shard.choosing.choices.choose import COMPILED, PROPAGATED
from penzai_shard.cli.answers import add_answer_options, print_lines, print_table
from penzai_shard.cli.chosen_layouts import for_shell, read_rules
from penzai_shard.cli.chosen_models import ChosenModel, add_model_arguments, chosen_model
from penzai_shard.cli.chosen_steps import (
    add_batch_arguments,
    batch_of_tokens,
    less_than_one,
    next_token_loss,
    not_of_tokens,
    optimizer_of,
    refuse_said_twice,
)
from penzai_shard.cli.mesh_arguments import mesh_shape
from penzai_shard.cli.model_references import ModelReference
from penzai_shard.errors import MeshError, NothingFitsError, PlanError, RuleTypeError, raise_all
from penzai_shard.meshes import make_mesh
from penzai_shard.named_leaves import leaves_of
from penzai_shard.report_trees import count_text
from penzai_shard.whole_files import refuse_unwritable

_EXAMPLE_PROBLEM = (
    "what choose_layout is called with: {'model': ..., 'loss_fn': ..., 'optimizer': ..., 'batch': "
    "{'x': ...}}"
)

_KEPT = re.compile(r"\bkeep=(?P<kept>\{[^{}]*\})|\bkeep\[(?P<name>'[^']*')\]")
_ALL_ROWS = re.compile(r", up to choices\[\d+\]: .* at the shell\.")
_OPTION = re.compile(
    r"\b(?P<name>hardware|memory|propagated|compiled|compile_for)=['\"]?(?P<value>[\w.:]*\w)['\"]?"
)


def add_choose_command(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "choose",
        help="find the mesh and the layout for training a model on some devices",
        description=(
            "Lists every sane layout of a model over the devices, which need not be there, prices "
            "them all, the best of them more and more exactly, and says which take the least time "
            "of those that fit. Ctrl-C ends it with the best so far. Exit status 0, 1 if none "
            "fits, 2 after a mistake in the command line."
        ),
        epilog=(
            "For example: penzai-shard choose llama-3-8b --devices v5e:32 --batch 32 --seq 2048 "
            "--write rules.toml; then penzai-shard price llama-3-8b --rules rules.toml"
        ),
    )
    model = add_model_arguments(
        parser,
        "; for a model that is not one of tokens, with logits, a function that returns "
        + _EXAMPLE_PROBLEM.replace("%", "%%")
        + ", and --batch is left out",
    )
    # Whether a batch is needed depends on the model, so what is missing is told here, all at once.
    model.required = False
    parser.add_argument(
        "--devices",
        metavar="v5e:32",
        help="a kind of device and how many (needed): v5e:32, v5p:4x4x8, h100:16; with --mesh the "
        "kind alone will do",
    )
    parser.add_argument(
        "--mesh",
        metavar="data=8,model=4",
        help="sizes of the mesh axes, if they are decided already; by default all are tried",
    )
    add_batch_arguments(parser, default=" (needed for a model of tokens)")
    parser.set_defaults(
        of_models={name: parser.get_default(name) for name in ("batch", "seq", "optimizer")}
    )
    parser.add_argument(
        "--memory",
        metavar="16GiB",
        help="what a step may need of a device's memory (default: what programs can have of it)",
    )
    parser.add_argument(
        "--keep",
        metavar="batch=data,heads=none",
        help="pairs of a logical axis and a mesh axis that are decided already",
    )
    parser.add_argument(
        "--on-indivisible",
        choices=get_args(OnUnfit),
        default="error",
        help="pad: also try layouts that store parameters padded whose lengths do not divide; by "
        "default they are left out, and listed",
    )
    _add_search_arguments(parser)
    parser.add_argument(
        "--write", metavar="rules.toml", help="write the best to this file, for --rules"
    )
    add_answer_options(parser, "a row for each of the best 24 layouts, also of those alike")
    parser.set_defaults(run=_choose)


def _add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds how closely the search looks."""
    parser.add_argument(
        "--propagated",
        type=int,
        default=PROPAGATED,
        metavar="N",
        help=f"how many layouts are priced by propagation (default {PROPAGATED})",
    )
    parser.add_argument(
        "--compiled",
        type=int,
        default=COMPILED,
        metavar="N",
        help="how many layouts are compiled; 0 for none, which is quicker and less exact "
        f"(default {COMPILED})",
    )
    parser.add_argument(
        "--compile-for",
        choices=("simulated", "hardware"),
        default="simulated",
        help="compile for as many simulated devices (default), or for TPUs by their own compiler, "
        "which takes minutes and pip install 'penzai-shard[tpu]'",
    )


def _choose(options: argparse.Namespace) -> int:
    if options.model is None or options.devices is None:
        raise _required(*_missing(options))
    raise_all(RuleTypeError, "no layout can be chosen:", less_than_one(options, "batch", "seq"))
    if options.write is not None:
        refuse_unwritable(options.write, "--write ", "rules.toml", "table of rules")
    optimizer_of(options.optimizer)
    given = {**_devices(options), "keep": _kept(options.keep), "memory": options.memory}
    chosen = chosen_model(options.model, options.dtype, is_trained=True)
    problem = _problem(chosen, options)
    print(
        f"penzai-shard: choosing a layout of {chosen.name} for {options.devices} ...",
        file=sys.stderr,
        flush=True,
    )
    try:
        choices = choose_layout(
            chosen.model,
            **{
                **problem,
                **{name: each for name, each in given.items() if each is not None},
                # Lines now and then where standard error is no terminal.
                "progress": True,
                "propagated": options.propagated,
                "compiled": options.compiled,
                "compile_for": options.compile_for,
                "on_indivisible": options.on_indivisible,
            },
        )
    except (NothingFitsError, PlanError) as error:
        return _print_refusal(chosen, options, error)
    except (MeshError, RuleTypeError) as error:
        raise type(error)(_for_shell(str(error), options)) from error
    try:
        written = None if options.write is None else choices.best.save(options.write)
    finally:
        # What took minutes to find is told also where the disk turns out to be full.
        _print(chosen, options, choices)
    if written is not None:
        print(f"penzai-shard: the best is in {written}", file=sys.stderr, flush=True)
    return 0


def _missing(options: argparse.Namespace) -> list[str]:
    """What is not given and needed; a batch is not where a function may say of which it is."""
    is_function = options.model is not None and ModelReference.read(options.model) is not None
    given = {"MODEL": options.model, "--devices": options.devices, "--batch": options.batch}
    return [
        name
        for name, each in given.items()
        if each is None and not (is_function and name == "--batch")
    ]


def _required(*missing: str) -> RuleTypeError:
    """The error of arguments that are missing, in argparse's words."""
    example = {"MODEL": "llama-3-8b", "--devices": "--devices v5e:32", "--batch": "--batch 32"}
    return RuleTypeError(
        f"the following arguments are required: {', '.join(missing)}. Add for instance "
        f"{' '.join(map(example.__getitem__, missing))}. See penzai-shard choose --help"
    )


def _problem(chosen: ChosenModel, options: argparse.Namespace) -> dict[str, Any]:
    """What is computed with a model: what its function says, or a step on tokens.

    Raises:
        RuleTypeError: Something of it is missing, said twice, or the model has no names.
    """
    if chosen.problem is not None:
        refuse_said_twice(chosen, options, "no layout can be chosen:")
        _refuse_unnamed(chosen, "")
        return {name: each for name, each in chosen.problem.items() if name != "model"}
    if options.batch is None:
        raise _required("--batch")
    _refuse_unnamed(chosen, f", and return {_EXAMPLE_PROBLEM}")

    def loss_fn(model: Any, rng: Any, state: Any, tokens: Any) -> Any:
        try:
            return next_token_loss(model, rng, state, tokens)
        except Exception as error:
            raise not_of_tokens(chosen.name, error, _EXAMPLE_PROBLEM) from error

    return {
        "loss_fn": loss_fn,
        "optimizer": optimizer_of(options.optimizer),
        "batch": {"tokens": batch_of_tokens(options.batch, options.seq + 1)},
    }


def _refuse_unnamed(chosen: ChosenModel, else_needed: str) -> None:
    """Refuses a model with arrays without names; in a line, where choose_layout writes code."""
    arrays = [leaf for leaf in leaves_of(chosen.model) if leaf.shape and leaf.dtype is not None]
    unnamed = [leaf for leaf in arrays if leaf.names is None]
    if not unnamed:
        return
    whole = {unnamed[0].path: (None,) * len(unnamed[0].shape)}
    fix = (
        "name_axes(model, infer_names(...))"
        if len(unnamed) == len(arrays)
        else f"name_axes(model, {whole}), None for a dimension that stays whole"
    )
    raise RuleTypeError(
        f"{chosen.name}: {count_text(len(unnamed), 'array')} without logical axis names, such "
        f"as {unnamed[0].path!r}. Give names in the function, {fix}{else_needed}."
    )


def _devices(options: argparse.Namespace) -> dict[str, Any]:
    """The devices, and the mesh over them if that is decided."""
    if options.mesh is None:
        return {"devices": options.devices}
    mesh = make_mesh(mesh_shape(options.mesh), abstract=True)
    return {"devices": mesh, "hardware": options.devices}


def _kept(text: str | None) -> Keep | None:
    if text is None:
        return None
    if ":" in text:
        meant = re.sub(r"[{}'\"\s]", "", text).replace(":", "=")
        raise RuleTypeError(f"--keep {text!r}: write {meant}.")
    rules = read_rules(text).parameters if "=" in text else None
    if rules is None or len(rules.name_rules) < len(rules.rules):
        raise RuleTypeError(
            f"--keep {text!r}: write pairs of a logical axis and a mesh axis: "
            "batch=data,heads=none."
        )
    return {rule.logical_axis: rule.mesh_axes or None for rule in rules.name_rules}


def _print(chosen: ChosenModel, options: argparse.Namespace, choices: Choices) -> None:
    if options.json:
        found = json.loads(choices.to_json())
        found["notes"] = [_for_shell(note, options) for note in found["notes"]]
        print(json.dumps({**chosen.said(), **found}, indent=2))
    else:
        # Sequences are a token longer than that.
        reads = f"which reads {options.seq:,} tokens of a sequence and predicts each next one"
        how = "" if chosen.problem is not None else f" with {options.optimizer}, {reads}"
        print_lines(chosen.headline(), f"one training step{how}", "")
        table = choices.table(collapse=not options.all)
        summary = tuple(_for_shell(line, options) for line in table.summary)
        print_table(dataclasses.replace(table, summary=summary))


def _print_refusal(
    chosen: ChosenModel, options: argparse.Namespace, error: NothingFitsError | PlanError
) -> int:
    """Says that no layout fits; gives the exit status."""
    if options.json:
        headline = _for_shell(str(error).partition("\n")[0], options)
        advice = [_for_shell(problem, options) for problem in error.problems]
        found = {"fits": False, "problem": headline, "help": advice}
        print(json.dumps({**chosen.said(), **found}, indent=2))
    else:
        lines = [_for_shell(line, options) for line in str(error).splitlines()]
        print_lines(chosen.headline(), *lines)
    return 1


def _for_shell(text: str, options: argparse.Namespace) -> str:
    """What ``choose_layout`` says of its arguments, said of the options that they are of."""
    text = for_shell(text).replace("the mesh, devices=", "--mesh")
    text = _ALL_ROWS.sub(": --all.", text)
    # What the function says itself that gives the model is no option.
    if options.keep is not None:
        text = _KEPT.sub(_kept_option, text)
    return _OPTION.sub(_option, text)


def _kept_option(found: re.Match[str]) -> str:
    if found["name"]:
        return f"--keep {ast.literal_eval(found['name'])}"
    kept = ast.literal_eval(found["kept"])
    pairs = (f"{name}={'+'.join(over) if over else 'none'}" for name, over in kept.items())
    return f"--keep {','.join(pairs)}"


def _option(found: re.Match[str]) -> str:
    name = "devices" if found["name"] == "hardware" else found["name"].replace("_", "-")
    return f"--{name} {found['value']}"
