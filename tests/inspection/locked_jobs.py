"""A small job whose layout can be made worse in many ways, for the tests of locks.

Blocks of two matrices on a mesh (data=4, model=2): FSDP over data, tensor parallelism over
model, and one step of gradient descent with momentum written by hand.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from penzai import pz

import penzai_shard as pzs
from benchmarks import compiled_collectives
from penzai_shard.inspection.program_view import CompiledProgram
from penzai_shard.inspection.steps.lowered_steps import lower_step
from penzai_shard.library_apis.compiler_api import bytecode_of, compile_bytecode

RULES = {"embedding": "data", "neurons": "model"}
ACTIVATIONS = {"batch": "data", "neurons": "model"}
SIZES = {"data": 4, "model": 2}


@functools.cache
def mesh(order: tuple[str, ...] = ("data", "model")) -> jax.sharding.Mesh:
    return pzs.make_mesh({axis: SIZES[axis] for axis in order})


@dataclasses.dataclass(frozen=True)
class Job:
    """What a user may change, by accident or on purpose."""

    rules: Any = dataclasses.field(default_factory=lambda: dict(RULES))
    momentum_rules: Any = None
    batch: str | None = "data"
    batch_size: int = 8
    constraint: Mapping[str, str] | None = dataclasses.field(
        default_factory=lambda: dict(ACTIVATIONS)
    )
    blocks: int = 1
    up: str = "up"
    bias: bool = False
    dtype: str = "float32"
    edit: Callable[[Any], Any] = lambda model: model
    loss: Callable[[Any, Any], Any] = lambda model, x: mean_square(model(x))
    donate: bool = True
    seed: int = 0
    learning_rate: float = 0.1
    concrete: bool = False
    on: Any = None
    wrapped: Callable[[Any], Any] = lambda step: step
    arrange: Callable[..., Any] = lambda model, momentum, x: ((model, momentum), {"x": x})

    def build(self) -> Any:
        keys = iter(jax.random.split(jax.random.key(self.seed), 3 * self.blocks))
        return pz.nn.Sequential([self._block(i, keys) for i in range(self.blocks)])

    def _block(self, i: int, keys: Any) -> Any:
        sizes = {"embedding": 16}, {"neurons": 32}

        def linear(name: str, ins: Any, outs: Any) -> Any:
            return pz.nn.Linear.from_config(
                f"block_{i}/{name}", next(keys), ins, outs, dtype=jnp.dtype(self.dtype)
            )

        layers = [
            linear(self.up, *sizes),
            pz.nn.Elementwise(jnp.tanh),
            linear("down", *sizes[::-1]),
        ]
        if self.constraint is not None:
            layers.insert(1, pzs.ConstrainShardingByName(self.on or mesh(), dict(self.constraint)))
        if self.bias:
            layers.append(
                pz.nn.AddBias.from_config(
                    f"block_{i}/bias", next(keys), {"embedding": 16}, dtype=jnp.dtype(self.dtype)
                )
            )
        return pz.nn.Residual(pz.nn.Sequential(layers))

    def call(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The step, and what it is called with."""
        on = self.on or mesh()
        model = self.edit(pzs.abstract_model(self.build))

        def placed(rules: Any) -> Any:
            plan = pzs.make_plan(model, on, rules, on_unnamed="replicate")
            if self.concrete:
                return pz.freeze_variables(pzs.place(self.edit(self.build()), plan))
            return plan.restore_structs()

        def state(rules: Any) -> Any:
            return pzs.param_dict(placed(rules))

        state_rules = self.rules if self.momentum_rules is None else self.momentum_rules
        shape = (self.batch_size, 16)
        spec = (
            jax.sharding.PartitionSpec(self.batch) if self.batch else jax.sharding.PartitionSpec()
        )
        sharding = jax.sharding.NamedSharding(on, spec)
        data: Any = jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype), sharding=sharding)
        if self.concrete:
            data = jax.device_put(jnp.ones(shape, self.dtype), sharding)
        sizes = collections.OrderedDict(batch=self.batch_size, embedding=16)
        x = pz.nx.NamedArray(sizes, data)
        donated = (0, 1) if self.donate else ()
        step = jax.jit(self.wrapped(self.step), donate_argnums=donated)
        return step, *self.arrange(placed(self.rules), state(state_rules), x)

    def step(self, model: Any, momentum: Any, x: Any) -> Any:
        gradient = jax.grad(lambda model: self.loss(model, x), allow_int=True)(model)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, pzs.param_dict(gradient))
        params = jax.tree.map(
            lambda w, m: w - self.learning_rate * m, pzs.param_dict(model), momentum
        )
        return pzs.with_params(model, params), momentum


def mean_square(y: Any) -> Any:
    return (y * y).untag(*y.named_shape).mean().unwrap().astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step's lock, and what somebody else reads in its program.

    Attributes:
        lock: The lock.
        executed: How many collectives run, by kind and mesh axes.
        sent: What one device sends, in bytes.
    """

    lock: pzs.ShardingLock
    executed: Mapping[Any, int]
    sent: float

    @classmethod
    def of(cls, step: Any, *args: Any, **kwargs: Any) -> "Compiled":
        lowered = lower_step(step, args, kwargs)
        devices = jax.devices()[: lowered.mesh.size]
        compiled = compile_bytecode(bytecode_of(lowered.lowered), devices)
        lock = pzs.ShardingLock.of(CompiledProgram.of(lowered, compiled, "cpu"))
        text = compiled.module.to_string()
        judged = compiled_collectives.read_collectives(text, lowered.mesh)
        return cls(
            lock,
            compiled_collectives.counts(judged, as_meant=False),
            compiled_collectives.bytes_moved(judged),
        )


def compiled(**changes: Any) -> Compiled:
    step, args, kwargs = Job(**changes).call()
    return Compiled.of(step, *args, **kwargs)
