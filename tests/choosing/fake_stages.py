"""A search without a model: candidates whose costs are given, and stages that know them."""

import functools
import itertools

import jax
import optax

import penzai_shard as pzs
from penzai_shard.choosing.candidates import Candidate
from penzai_shard.choosing.choices.asked_devices import read_devices
from penzai_shard.choosing.choices.asked_problem import read_problem
from penzai_shard.choosing.choices.choose import searched
from penzai_shard.choosing.step_costs import Sent, StepCost

GIB = 2**30
MOST = {"propagation": 8, "compiled": 4}


def candidates():
    """Thirty-six layouts of eight devices."""
    sizes = [(("data", 8),), (("data", 4), ("model", 2)), (("data", 2), ("model", 4))]
    tables = [{}, {"embedding": "data"}, {"neurons": "data"}, {"embedding": "data", "mlp": "data"}]
    return [
        Candidate(mesh, pzs.Layout(parameters=table, compute={"batch": "data"}), parts)
        for mesh, table, parts in itertools.product(sizes, tables, (1, 2, 4))
    ]


def cost(candidate, memory_factor=1.0, traffic_factor=1.0):
    """Splitting more parameters and in more parts holds less and sends more."""
    names = [str(name) for name in candidate.layout.parameters.logical_axes]
    gathered = tuple(
        Sent("parameter", f"lm/block_*/{name}", (name, "x"), ("data",), traffic_factor * 1e10)
        for name in names
    )
    held = {
        "parameters": memory_factor * GIB * (4 - len(names)),
        "activations": memory_factor * GIB * 2 / candidate.microbatches,
    }
    flops = 1e12 * (1 + 0.1 * candidate.microbatches) * dict(candidate.mesh_axes)["data"]
    return StepCost(flops, gathered, held)


class FakeStage:
    """A stage whose prices are given by a function, and which remembers what it priced."""

    def __init__(self, name, price=cost):
        self.name, self.price = name, price
        self.seen = []

    def costs(self, some):
        for one in some:
            self.seen.append(one)
            yield self.price(one)

    def close(self):
        self.is_closed = True


class ExtrapolatingFakeStage(FakeStage):
    """A stage that extrapolates: closer from one block more, exact from all blocks."""

    is_extrapolating = True

    def __init__(self, name, price=cost, closer_price=cost, whole_price=cost):
        super().__init__(name, price)
        self.closer_price, self.whole_price = closer_price, whole_price
        self.seen_closer, self.seen_whole = [], []

    def closer_costs(self, some):
        for one in some:
            self.seen_closer.append(one)
            yield self.closer_price(one)

    def whole_costs(self, some):
        for one in some:
            self.seen_whole.append(one)
            yield self.whole_price(one)


@functools.cache
def asked_problem():
    """A step of which nothing is looked at: the stages know what it costs."""
    model = pzs.name_axes({"w": jax.ShapeDtypeStruct((4, 4), "float32")}, {"w": ("a", "b")})

    def loss_fn(model, rng, state, tokens):
        return 0.0, state, {}

    return read_problem(model, loss_fn, optax.sgd(1.0), 8, 16, False)


def choose(problem, *stages, devices="v5e:8", memory="16GiB", among=None, most=None, **options):
    devices = read_devices(devices, None, memory)
    stages = stages or [FakeStage(name) for name in ("names", "propagation", "compiled")]
    among = candidates() if among is None else among
    options = {"most": most or MOST, "progress": False} | options
    return searched(problem, devices, among, stages, **options)
