"""Is the list of sane layouts complete? Every table from logical axes to mesh axes is compiled.

Each problem stands here a second time, in plain JAX, and each mesh axis may split any logical axis:
of what is stored, of the optimizer's state, of what flows, and of what flows between layers. The
program is constrained to that and nothing else, and judged like those of the library's layouts.
What is faster than all of these, or as fast in less memory, is what the list lacks.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from benchmarks.choosing import models
from benchmarks.choosing.judge import COMPILER_OPTIONS, Verdict, verdict, verdict_on
from penzai_shard import make_mesh
from penzai_shard.choosing.candidates import candidates, mesh_shapes
from penzai_shard.choosing.choices.asked_problem import AskedProblem
from penzai_shard.inspection.devices.hardware import Hardware

Names = tuple[str, ...]
Constrain = Callable[[Any, Names], Any]

# Memory that differs by less is the same: the compiler's buffers fall now so, now so.
_MEMORY_ALIKE = 1.02


@dataclasses.dataclass(frozen=True)
class PlainStep:
    """A training step in plain JAX.

    Attributes:
        weights: The logical axes of each weight.
        lengths: Of each logical axis.
        inputs: The logical axes of each input, and whether it is of tokens.
        flowing: The logical axes of what flows inside of layers.
        between: Of what flows between them.
        loss: Takes weights, inputs, and what constrains an array of either kind by its axes.
        same: The same step for ``choose_layout``.
    """

    weights: Mapping[str, Names]
    lengths: Mapping[str, int]
    inputs: Mapping[str, tuple[Names, bool]]
    flowing: Sequence[Names]
    between: Names
    loss: Callable[[Mapping[str, Any], Mapping[str, Any], Constrain, Constrain], Any]
    same: Callable[[], AskedProblem]

    def struct(self, names: Names, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        """An array of some logical axes."""
        return jax.ShapeDtypeStruct([self.lengths[name] for name in names], dtype)


@dataclasses.dataclass(frozen=True)
class Use:
    """What one mesh axis splits; of each array at most one logical axis.

    Attributes:
        stored: Logical axes of weights as they are stored.
        optimizer: Of the optimizer's state.
        flowing: Of what flows inside of layers, and of weights where they are used.
        between: Of what flows between layers.
    """

    stored: frozenset[str]
    optimizer: frozenset[str]
    flowing: frozenset[str]
    between: frozenset[str]

    def __str__(self) -> str:
        parts = (
            f"{field.name} {'+'.join(sorted(getattr(self, field.name))) or 'whole'}"
            for field in dataclasses.fields(self)
        )
        return ", ".join(parts)


def _splits(arrays: Sequence[Names]) -> list[frozenset[str]]:
    """Every set of logical axes of which no array has two."""
    names = sorted({name for axes in arrays for name in axes})
    return [
        frozenset(chosen)
        for count in range(len(names) + 1)
        for chosen in itertools.combinations(names, count)
        if all(len(set(axes) & set(chosen)) <= 1 for axes in arrays)
    ]


def uses_of(step: PlainStep) -> list[Use]:
    """Everything that one mesh axis may be used for.

    The optimizer's state is split as the weights are, or where these are whole.
    """
    weights = list(step.weights.values())
    stored, flowing, between = map(_splits, (weights, step.flowing, [step.between]))
    return [
        Use(one, kept, inside, outside)
        for one in stored
        for kept in (stored if not one else [one])
        for inside in flowing
        for outside in between
    ]


def judged_table(
    step: PlainStep, mesh: Mesh, hardware: Hardware, uses: Sequence[Use], *, gathered: bool
) -> Verdict:
    """What the step costs with each mesh axis used in one way.

    Args:
        step: The step.
        mesh: The mesh.
        hardware: What its devices are meant to be.
        uses: For each mesh axis.
        gathered: Whether weights are laid out as what flows where they are used; else it is left to
            the compiler.
    """

    def sharding(names: Names, kind: str) -> NamedSharding:
        split = [
            tuple(
                axis
                for axis, use in zip(mesh.axis_names, uses, strict=True)
                if name in getattr(use, kind)
            )
            or None
            for name in names
        ]
        return NamedSharding(mesh, jax.P(*split))

    def constrain(kind: str) -> Constrain:
        return lambda x, names: jax.lax.with_sharding_constraint(x, sharding(names, kind))

    def laid_out(tree: Mapping[str, Any], kind: str) -> dict[str, Any]:
        return {path: constrain(kind)(x, step.weights[path]) for path, x in tree.items()}

    optimizer = optax.adamw(1e-3)

    def train(weights: Any, kept: Any, inputs: Any) -> Any:
        def loss(given: Any) -> Any:
            used = laid_out(given, "flowing") if gathered else given
            return step.loss(used, inputs, constrain("flowing"), constrain("between"))

        value, gradients = jax.value_and_grad(loss)(weights)
        changes, kept = optimizer.update(laid_out(gradients, "optimizer"), kept, weights)
        return optax.apply_updates(weights, changes), kept, value

    weights = {
        path: jax.ShapeDtypeStruct(
            step.struct(names).shape, jnp.float32, sharding=sharding(names, "stored")
        )
        for path, names in step.weights.items()
    }
    where = {
        step.struct(names).shape: sharding(names, "optimizer") for names in step.weights.values()
    }
    whole = NamedSharding(mesh, jax.P())
    kept = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where.get(x.shape, whole)),
        jax.eval_shape(optimizer.init, weights),
    )
    inputs = {
        name: jax.ShapeDtypeStruct(
            step.struct(axes).shape,
            jnp.int32 if is_tokens else jnp.float32,
            sharding=sharding(axes, "between"),
        )
        for name, (axes, is_tokens) in step.inputs.items()
    }
    results = (*jax.tree.map(lambda x: x.sharding, (weights, kept)), whole)
    jitted = jax.jit(train, out_shardings=results, donate_argnums=(0, 1))
    lowered = jitted.lower(weights, kept, inputs)
    program = lowered.compile(compiler_options=dict(COMPILER_OPTIONS))
    return verdict_on(program, dict(mesh.shape), hardware, kept)


@dataclasses.dataclass(frozen=True)
class Compared:
    """Every table beside every layout of the list.

    Attributes:
        tables: What each table costs.
        listed: What each layout of the list costs.
    """

    tables: Mapping[str, Verdict]
    listed: Sequence[Verdict]

    @property
    def faster(self) -> float:
        """By which part the fastest table is faster than the fastest layout; negative if slower."""
        best = min(one.time for one in self.listed)
        return 1 - min(one.time for one in self.tables.values()) / best

    def lacking(self, allowed: float) -> dict[str, float]:
        """The tables that are faster than each layout which needs no more memory, by more than so.

        Of tables with nearly the same memory the fastest alone; with the part by which it is.
        """
        found: dict[str, float] = {}
        best = math.inf
        for name, one in sorted(self.tables.items(), key=lambda item: item[1].memory):
            fitting = [
                each.time for each in self.listed if each.memory <= one.memory * _MEMORY_ALIKE
            ]
            faster = 1.0 if not fitting else 1 - one.time / min(fitting)
            if faster > allowed and one.time < best * (1 - allowed):
                found[name], best = faster, one.time
        return found


def compared(
    step: PlainStep, devices: str, mesh_shape: Mapping[str, int], most: int | None = None
) -> Compared:
    """Compiles every table on a mesh, and every layout of the list on every mesh of the devices.

    Args:
        step: The step.
        devices: What they are.
        mesh_shape: The mesh for the tables; its axes are alike.
        most: So many tables, drawn by chance; None for all.
    """
    hardware = Hardware.read(devices)
    mesh = make_mesh(mesh_shape, jax.devices("cpu")[: hardware.device_count])
    tables = dict(_judged_tables(step, mesh, hardware, _chosen(step, len(mesh_shape), most)))
    asked = step.same()
    found = candidates(
        asked.problem,
        mesh_shapes(hardware),
        hardware=hardware,
        rematerialise=(None,),
        microbatches=(1,),
    )
    return Compared(tables, [verdict(asked.problem, one, hardware) for one in found])


def _chosen(
    step: PlainStep, mesh_axes: int, most: int | None
) -> list[tuple[tuple[Use, ...], bool]]:
    combined = itertools.combinations_with_replacement(uses_of(step), mesh_axes)
    everything = list(itertools.product(combined, (False, True)))
    if most is None or most >= len(everything):
        return everything
    return random.Random(0).sample(everything, most)


def _judged_tables(
    step: PlainStep,
    mesh: Mesh,
    hardware: Hardware,
    chosen: Sequence[tuple[tuple[Use, ...], bool]],
) -> Iterator[tuple[str, Verdict]]:
    for uses, gathered in chosen:
        name = " | ".join(map(str, uses)) + (" | gathered for use" if gathered else "")
        yield name, judged_table(step, mesh, hardware, uses, gathered=gathered)


def plain_mlp(batch: int) -> PlainStep:
    """One layer that widens and one that narrows."""

    def loss(w: Any, inputs: Any, flowing: Constrain, between: Constrain) -> Any:
        x = between(inputs["x"], ("batch", "embedding"))
        hidden = flowing(jnp.tanh(x @ w["up"]), ("batch", "neurons"))
        return (between(hidden @ w["down"], ("batch", "embedding")) ** 2).mean()

    return PlainStep(
        {"up": ("embedding", "neurons"), "down": ("neurons", "embedding")},
        {"batch": batch, "embedding": 1024, "neurons": 4096},
        {"x": (("batch", "embedding"), False)},
        [("batch", "neurons"), ("embedding", "neurons")],
        ("batch", "embedding"),
        loss,
        lambda: models.mlp(batch, 1024, 4096, layers=1),
    )


def plain_experts(batch: int, seq: int) -> PlainStep:
    """A table, experts that all compute every token, and logits, as ``models.experts`` has them."""
    names = {
        "emb": ("vocabulary", "embedding"),
        "router": ("embedding", "experts"),
        "up": ("experts", "embedding", "neurons"),
        "down": ("experts", "neurons", "embedding"),
        "head": ("embedding", "vocabulary"),
    }
    flowing = [("batch", "seq", "experts", "neurons"), ("batch", "seq", "vocabulary")]

    def loss(w: Any, inputs: Any, inside: Constrain, between: Constrain) -> Any:
        tokens = inputs["tokens"]
        x = between(w["emb"][tokens], ("batch", "seq", "embedding"))
        share = jax.nn.softmax(x @ w["router"])
        hidden = jax.nn.silu(inside(jnp.einsum("bse,xen->bsxn", x, w["up"]), flowing[0]))
        y = x + jnp.einsum("bsxn,xne,bsx->bse", hidden, w["down"], share)
        logits = inside(between(y, ("batch", "seq", "embedding")) @ w["head"], flowing[1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    return PlainStep(
        names,
        {
            "batch": batch,
            "seq": seq,
            "embedding": 1024,
            "experts": 8,
            "neurons": 2048,
            "vocabulary": 8192,
        },
        {"tokens": (("batch", "seq"), True)},
        flowing,
        ("batch", "seq", "embedding"),
        loss,
        lambda: models.experts(batch, seq),
    )


# Each with devices, the mesh of the tables, and how many of these are drawn; None for all.
PROBLEMS: dict[str, tuple[Callable[[], PlainStep], str, Mapping[str, int], int | None]] = {
    "MLP, one mesh axis": (lambda: plain_mlp(4096), "v5e:4", {"x": 4}, None),
    "MLP, two mesh axes": (lambda: plain_mlp(64), "v5e:4", {"x": 2, "y": 2}, 400),
    "experts": (lambda: plain_experts(16, 512), "v5e:4", {"x": 4}, 250),
}
