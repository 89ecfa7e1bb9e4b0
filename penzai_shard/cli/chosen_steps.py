"""The step that is priced: a model's train state and what is done with it, all abstract."""

import argparse
import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz

from penzai_shard.choosing.choices.asked_problem import read_problem
from penzai_shard.cli.chosen_layouts import ChosenLayout
from penzai_shard.cli.chosen_models import ChosenModel
from penzai_shard.cli.model_references import ModelReference, is_step, step_arguments
from penzai_shard.errors import PlanError, RuleTypeError, raise_all, require_extra
from penzai_shard.layers import resolve_stack_policy
from penzai_shard.layouts import Layout
from penzai_shard.layouts.layout_edits import BLOCKS, REGIONS
from penzai_shard.layouts.rule_expressions import read_call
from penzai_shard.partition_specs import part_count
from penzai_shard.placement import described
from penzai_shard.placement.builders import is_model
from penzai_shard.rule_kinds import NameRule
from penzai_shard.surgery import roll_layer_stacks
from penzai_shard.training import (
    TrainState,
    build_train_step_fn,
    cross_entropy,
    train_state_sharding,
)

_OPTIMIZER_EXAMPLE = "Write for instance adamw, or 'adamw(1e-3, weight_decay=0.1)'."
_LEARNING_RATE = 1e-3
SEQUENCE_LENGTH = 2048
# Options of what is computed, which a function may say itself.
_OF_STEPS = ("batch", "seq", "optimizer", "remat", "unroll", "inference")
# What full rematerialisation of blocks is called for a stack of them, and for each of them.
_KEEPS_INPUTS = {"carries": "nothing"}


@dataclasses.dataclass(frozen=True)
class ChosenStep:
    """A step that is priced, with what it is called with.

    Attributes:
        text: What it does, in a sentence.
        step: The step.
        args: Its arguments, structs in place of arrays.
        kwargs: The same by keyword.
    """

    text: str
    step: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def add_step_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what is done with the model."""
    add_batch_arguments(parser)
    parser.add_argument(
        "--microbatches",
        type=int,
        metavar="N",
        help="in how many parts, one after the other, a batch is computed (default 1, or what the "
        "file of rules says)",
    )
    parser.add_argument(
        "--remat",
        default=None,
        metavar="POLICY",
        help="what blocks keep for the backward pass: none for all, or a policy of "
        "RolledLayerStack such as carries, nested or dots (default carries, the input of each "
        "block; the rest is computed again)",
    )
    parser.add_argument(
        "--unroll",
        action="store_true",
        help="blocks one after the other in the program, instead of a loop; compiling then takes "
        "longer the more there are",
    )
    parser.add_argument(
        "--inference", action="store_true", help="a forward pass alone, instead of a training step"
    )


def add_batch_arguments(
    parser: argparse.ArgumentParser,
    default: str = " (default: one for each part that the batch is split into)",
) -> None:
    """Adds the batch and the optimizer.

    Args:
        parser: What to add them to.
        default: What is said of a batch that is not given.
    """
    parser.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help=f"sequences in a batch{default}",
    )
    parser.add_argument(
        "--seq",
        type=int,
        default=SEQUENCE_LENGTH,
        metavar="N",
        help=f"tokens in a sequence (default {SEQUENCE_LENGTH})",
    )
    parser.add_argument(
        "--optimizer",
        default="adamw",
        metavar="adamw",
        help="of optax, with arguments in brackets if it takes some (default adamw)",
    )


def training_step(
    chosen: ChosenModel, layout: ChosenLayout, options: argparse.Namespace
) -> ChosenStep:
    """One training step of a model of tokens, or one forward pass.

    Args:
        chosen: The model.
        layout: Mesh and layout.
        options: What was parsed.

    Raises:
        ShardingError: Something does not go together; the model or the batch has no valid layout.
    """
    _check_numbers(options)
    microbatches = options.microbatches or layout.microbatches or 1
    mesh = layout.mesh
    if isinstance(chosen.model, TrainState):
        raise RuleTypeError(
            f"{chosen.name} gives a train state, and what a step does with it is needed too. Give "
            "a function that returns (step, args), or (step, args, kwargs)."
        )
    edited, used, how = _edited(chosen.model, layout, options)
    relaxed: dict[str, Any] = {"on_indivisible": layout.on_indivisible}
    laid_out = used.for_model(chosen.model, mesh, **relaxed)
    shardings = laid_out.plan(edited, mesh, **relaxed).sharding_tree()
    model = described(pz.freeze_variables(edited), shardings, "price")
    batch = sequences(layout, options)
    _refuse_indivisible(batch, microbatches)
    tokens = batch_of_tokens(batch, options.seq + (not options.inference))
    tokens = used.shard_batch({"tokens": tokens}, mesh)["tokens"]
    size = f"batch {batch:,} x {options.seq:,} tokens"
    if options.inference:
        return ChosenStep(f"one forward pass of {size}; {how}", model, (tokens,))
    optimizer = optimizer_of(options.optimizer)
    state = TrainState.initial_state(
        model, optimizer, jax.random.key(0), optimizer_rules=laid_out.optimizer, **relaxed
    )
    of_state = train_state_sharding(state, mesh, laid_out.parameters, laid_out.optimizer, **relaxed)
    step = build_train_step_fn(
        used.computing(next_token_loss, mesh, **relaxed),
        train_state_shardings=of_state,
        donate_params_and_state=True,
        accumulate_steps=microbatches,
    )
    if microbatches > 1:
        size += f" in {microbatches} microbatches"
    text = f"one training step of {size} with {options.optimizer}, donated; {how}"
    return ChosenStep(text, step, (state,), {"tokens": tokens})


def step_of_problem(
    chosen: ChosenModel, layout: ChosenLayout, options: argparse.Namespace
) -> ChosenStep:
    """The training step that a function says all of, as ``choose_layout`` is called with it.

    Args:
        chosen: The model, with its problem.
        layout: Mesh and layout.
        options: What was parsed.

    Raises:
        ShardingError: Something does not go together; the model or the batch has no valid layout.
    """
    _check_numbers(options)
    refuse_said_twice(chosen, options, "this cannot be priced:")
    given = dict(chosen.problem or {})
    asked = read_problem(
        chosen.model,
        given["loss_fn"],
        given["optimizer"],
        given["batch"],
        given.get("seq"),
        given.get("plain_arrays", False),
        given.get("names"),
    )
    microbatches = options.microbatches or layout.microbatches or 1
    used = _for_known_blocks(layout.layout, chosen.model)
    relaxed = layout.on_indivisible
    step, state, inputs = asked.problem.built(used, layout.mesh, microbatches, relaxed)
    size = f" in {microbatches} microbatches" if microbatches > 1 else ""
    return ChosenStep(f"one training step of {asked.words}{size}, donated", step, (state,), inputs)


def refuse_said_twice(chosen: ChosenModel, options: argparse.Namespace, title: str) -> None:
    """Refuses options for what a function says itself that gives all of a training step.

    Args:
        chosen: What it gives.
        options: What was parsed.
        title: The first line of the error.

    Raises:
        RuleTypeError: Such options were given.
    """
    twice = [
        f"--{name}: {chosen.name} says itself what is computed. Leave it out."
        for name in _OF_STEPS
        if name in options.of_models and getattr(options, name) != options.of_models[name]
    ]
    raise_all(RuleTypeError, title, twice)


def step_of_reference(text: str) -> ChosenStep | None:
    """The step that a function gives with its arguments; None if the text is something else.

    Args:
        text: As for ``MODEL`` on the command line.

    Raises:
        RuleTypeError: There is no such function, or it fails.
    """
    reference = ModelReference.read(text)
    made = None if reference is None else reference.built()
    if callable(made) and not is_model(made):
        raise RuleTypeError(
            f"{text} gives {getattr(made, '__name__', type(made).__name__)} alone, and what it is "
            "called with is needed too: return (step, args), or (step, args, kwargs)."
        )
    if isinstance(made, tuple) and not is_step(made) and any(map(callable, made)):
        raise RuleTypeError(
            f"{text} gives a tuple of {len(made)} that does not begin with the step. Return "
            "(step, args), or (step, args, kwargs)."
        )
    if made is None or not is_step(made):
        return None
    step, *rest = made
    return ChosenStep(f"the step of {text}", step, *step_arguments(rest))


def not_of_tokens(name: str, error: Exception, instead: str) -> RuleTypeError:
    """What is said where a model cannot be called as one of tokens.

    Args:
        name: What was asked for.
        error: What was raised.
        instead: What a function returns for any other model.
    """
    return RuleTypeError(
        f"{name} cannot be called with numbers of tokens that have the logical axes batch and seq, "
        f"to give logits that have vocabulary too: {type(error).__name__}: "
        f"{str(error).partition(chr(10))[0].rstrip('.')}. For any other model give a function that "
        f"returns {instead}."
    )


def next_token_loss(model: Any, rng: Any, state: Any, tokens: Any) -> tuple[Any, Any, Any]:
    """The loss function of a model of tokens: the cross entropy of each next one."""
    del rng
    logits = model(tokens[{"seq": pz.slice[:-1]}])
    loss = cross_entropy(logits, tokens[{"seq": pz.slice[1:]}])
    return loss, state, {"loss": loss}


def _edited(
    model: Any, layout: ChosenLayout, options: argparse.Namespace
) -> tuple[Any, Layout, str]:
    """The model as it computes in the layout, the layout in full, and what was done in words."""
    used = _for_known_blocks(layout.layout, model)
    has_blocks = _has_blocks(model)
    has_stack = bool(pz.select(model).at_instances_of(pz.nn.LayerStack).count())
    is_said = used.rematerialise is not None or layout.says_step
    remat = options.remat or ("none" if is_said else "carries")
    keeps_all = remat == "none" or options.inference
    if not keeps_all:
        resolve_stack_policy(remat)
    rolled = has_stack and not options.unroll
    if not keeps_all and not rolled and has_blocks:
        used = dataclasses.replace(used, rematerialise=_KEEPS_INPUTS.get(remat, remat))
    recipe = used.recipe(model, layout.mesh, on_indivisible=layout.on_indivisible)
    if rolled:
        recipe += roll_layer_stacks(policy=False if keeps_all else remat)
    said = ["blocks in a loop" if rolled else "blocks one after the other"]
    if not has_blocks:
        said = ["no blocks that are known, so the compiler decides the layout of activations"]
    elif not options.inference:
        kept = "all" if remat == "none" else f"what {remat!r} says"
        said.append(f"for the backward pass they keep {used.rematerialise or kept}")
    return recipe.apply(model), used, ", ".join(said)


def _has_blocks(model: Any) -> bool:
    return bool(pz.select(model).at_instances_of((*BLOCKS, *REGIONS)).count())


def _for_known_blocks(layout: Layout, model: Any) -> Layout:
    """A layout that leaves the activations of a model without known blocks to the compiler."""
    if layout.blocks is not None or _has_blocks(model):
        return layout
    return dataclasses.replace(layout, blocks=())


def batch_of_tokens(batch: int, length: int) -> Any:
    """Tokens without their values, by the names that Penzai's transformers give their axes."""
    struct = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return pz.nx.NamedArray(collections.OrderedDict(batch=batch, seq=length), struct)


def sequences(layout: ChosenLayout, options: argparse.Namespace) -> int:
    """How many sequences a batch has; one for each part that it is split into if not said."""
    if options.batch is not None:
        return int(options.batch)
    axes = [
        name
        for rule in layout.layout.batch_rules.rules
        if isinstance(rule, NameRule)
        for name in rule.mesh_axes
    ]
    return part_count(tuple(dict.fromkeys(axes)), layout.mesh.shape)


def _check_numbers(options: argparse.Namespace) -> None:
    problems = less_than_one(options, "batch", "seq", "microbatches")
    raise_all(RuleTypeError, "this cannot be priced:", problems)


def _refuse_indivisible(batch: int, microbatches: int) -> None:
    if batch % microbatches:
        raise PlanError(
            f"--batch {batch} cannot be divided into {microbatches} microbatches. "
            f"Give --batch {-(-batch // microbatches) * microbatches}."
        )


def less_than_one(options: argparse.Namespace, *names: str) -> list[str]:
    """What is said of options that are less than 1; those that were not given are not looked at.

    >>> less_than_one(argparse.Namespace(batch=0, seq=None), "batch", "seq")
    ['--batch must be at least 1, not 0.']
    """
    return [
        f"--{name} must be at least 1, not {value}."
        for name in names
        if (value := getattr(options, name)) is not None and value < 1
    ]


def optimizer_of(text: str) -> Any:
    """An optimizer of optax.

    Args:
        text: Its name, with arguments in brackets or without.

    Raises:
        RuleTypeError: There is no such optimizer, or it does not take the arguments.
    """
    optax = require_extra("optax", "train")
    # Aliases are the functions that optax has one module of.
    known = {name: value for name, value in vars(optax).items() if _is_alias(value)}
    # The learning rate does not change what a step needs or moves.
    call = text if "(" in text else f"{text}({_LEARNING_RATE})"
    return read_call(call, text, known, _OPTIMIZER_EXAMPLE)


def _is_alias(value: Any) -> bool:
    return callable(value) and getattr(value, "__module__", "") == "optax._src.alias"


def abstract_state(model: Any, optimizer: str, layout: Layout) -> TrainState:
    """A model's train state, without values and layouts.

    Args:
        model: The model, with structs in place of arrays; or its train state.
        optimizer: The optimizer's name, as for ``optimizer_of``.
        layout: What lays out its state.
    """
    if isinstance(model, TrainState):
        return model
    return TrainState.initial_state(
        model, optimizer_of(optimizer), jax.random.key(0), optimizer_rules=layout.optimizer
    )
