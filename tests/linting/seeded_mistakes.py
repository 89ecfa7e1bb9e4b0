"""Mistakes in rules, layouts and meshes, each with the kind of finding that it is."""

import functools

import jax
import optax
from penzai import pz

import penzai_shard as pzs
from tests import model_families


def mesh(**shape):
    return pzs.make_mesh(shape, abstract=True)


def weights(**arrays):
    return {
        name: pz.nx.NamedArray(axes, jax.ShapeDtypeStruct(tuple(axes.values()), "float32"))
        for name, axes in arrays.items()
    }


def plain(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}


def blocks(count, **arrays):
    return {f"block_{i}": weights(**arrays) for i in range(count)}


def state_of(params):
    """A train state of AdamW, without its values."""

    def made(arrays):
        return pzs.TrainState.initial_state(arrays, optax.adamw(1e-3), jax.random.key(0))

    return jax.eval_shape(made, params)


@functools.cache
def small_transformer(family="llama", **options):
    build = functools.partial(model_families.transformer, family, **options)
    return pzs.abstract_model(build, jax.random.key(0))


SMALL = weights(up={"embedding": 8, "neurons": 16}, down={"neurons": 16, "embedding": 8})
ODD = weights(up={"embedding": 8, "neurons": 10}, down={"neurons": 10, "embedding": 8})
OTHER_NAMES = weights(up={"embed": 8, "mlp": 16})
LARGE = weights(
    table={"vocabulary": 4096, "embedding": 512},
    up={"embedding": 512, "neurons": 2048},
    down={"neurons": 2048, "embedding": 512},
)
HEAD = weights(head={"rank": 1024, "vocabulary": 1024})
LARGE_BLOCKS = blocks(
    6, up={"embedding": 512, "neurons": 2048}, out={"heads": 512, "embedding": 1024}
)
D4M2, D8 = mesh(data=4, model=2), mesh(data=8)
OPTIMIZER_ALONE = {"parameters": {}, "compute": {"batch": "data"}}
NO_HEADS = {"neurons": "mpl", "heads": None}

# Kind, model or a function that makes it, mesh, rules, and the batch, if it is given.
MISTAKES = {
    # Mesh axes that there are not.
    "misspelt mesh axis": ("unknown", SMALL, D4M2, {"embedding": "data", "neurons": "modle"}),
    "reversed rule": ("unknown", SMALL, D4M2, {"data": "embedding", "neurons": "model"}),
    "foreign mesh axis": ("unknown", SMALL, D4M2, {"embedding": "data", "neurons": "tensor"}),
    "one of two mesh axes": (
        "unknown",
        SMALL,
        D4M2,
        {"neurons": ("data", "tp"), "embedding": "model"},
    ),
    "preset for another mesh": (
        "unknown",
        LARGE,
        mesh(x=4, y=2),
        pzs.AxisRules({"embedding": "x"}) | pzs.tensor_parallel(),
    ),
    "fully sharded over nothing": ("unknown", LARGE, mesh(fsdp=8), pzs.fully_sharded()),
    "layout for another mesh": (
        "unknown",
        small_transformer,
        mesh(data=2, tensor=2),
        pzs.Layout.two_dimensional(min_size=1),
    ),
    "misspelt mesh axis of the optimizer": (
        "unknown",
        SMALL,
        D8,
        pzs.Layout(**OPTIMIZER_ALONE, optimizer={"embedding": "dta"}),
    ),
    "beside a batch with a name of its own": (
        "unknown",
        SMALL,
        D4M2,
        pzs.data_parallel(batch_axis="examples") | {"neurons": "modle"},
    ),
    "misspelt beside an idle mesh axis": (
        "unknown",
        SMALL,
        mesh(data=2, model=2, expert=2),
        {"batch": "data", "embedding": "dta", "neurons": "model"},
    ),
    # One mesh axis twice.
    "doubled": (
        "doubled",
        SMALL,
        D4M2,
        {"batch": "data", "embedding": "model", "neurons": "model"},
    ),
    "doubled with a mesh axis to spare": (
        "doubled",
        LARGE,
        D4M2,
        {"embedding": "data", "neurons": "data", "vocabulary": "model"},
    ),
    "doubled by two mesh axes": (
        "doubled",
        SMALL,
        D4M2,
        {"embedding": ("data", "model"), "neurons": "model"},
    ),
    "doubled in blocks": (
        "doubled",
        blocks(4, up={"embedding": 8, "neurons": 16}),
        D8,
        {"embedding": "data", "neurons": "data"},
    ),
    # Lengths that do not divide.
    "indivisible": ("indivisible", ODD, mesh(model=4), {"neurons": "model"}),
    "indivisible over two mesh axes": (
        "indivisible",
        weights(w={"embedding": 12}),
        D4M2,
        {"embedding": ("data", "model")},
    ),
    "indivisible in one array": (
        "indivisible",
        weights(a={"embedding": 16, "neurons": 16}, b={"embedding": 16, "neurons": 6}),
        D8,
        {"neurons": "data"},
    ),
    "too few heads": (
        "indivisible",
        weights(q={"heads": 2, "embedding": 16}, o={"neurons": 16, "embedding": 16}),
        mesh(data=2, model=4),
        {"batch": "data", "heads": "model", "neurons": "model"},
    ),
    "layout with too few heads": (
        "indivisible",
        small_transformer,
        mesh(data=2, model=8),
        pzs.Layout.tensor_parallel(),
    ),
    "indivisible in the optimizer's state": (
        "indivisible",
        lambda: state_of(ODD),
        mesh(data=4),
        pzs.Layout(**OPTIMIZER_ALONE, optimizer={"neurons": "data"}),
    ),
    # Rules for nothing, and layouts for other models.
    "misspelt logical axis": ("unused", SMALL, D4M2, {"embeding": "data", "neurons": "model"}),
    "logical axis of another model": (
        "unused",
        SMALL,
        D8,
        {"embedding": "data", "hidden": "data"},
    ),
    "singular": ("unused", SMALL, D4M2, {"embedding": "data", "neuron": "model"}),
    "preset for other names": (
        "unused",
        OTHER_NAMES,
        D4M2,
        pzs.data_parallel() | pzs.tensor_parallel(),
    ),
    "unused beside a batch": (
        "unused",
        SMALL,
        D4M2,
        {"batch": "data", "neurons": "model", "rows": "data"},
        weights(x={"batch": 8, "embedding": 8}),
    ),
    "layout with a misspelt name": (
        "misfit",
        OTHER_NAMES,
        D4M2,
        pzs.Layout.tensor_parallel(names=NO_HEADS),
    ),
    "layout for a model without heads": (
        "misfit",
        SMALL,
        D4M2,
        pzs.Layout.tensor_parallel(blocks=()),
    ),
    "layout with names of its own": (
        "unknown",
        OTHER_NAMES,
        D4M2,
        pzs.Layout.tensor_parallel(model="modle", names={"neurons": "mlp", "heads": None}),
    ),
    # Waste.
    "forgotten table": ("under-sharded", LARGE, D4M2, {"batch": "data", "neurons": "model"}),
    "forgotten mesh axis": ("under-sharded", LARGE, D4M2, {"embedding": "data"}),
    "array forgotten by FSDP": (
        "under-sharded",
        LARGE | HEAD,
        D8,
        {"batch": "data", "embedding": "data"},
    ),
    "min_size too large": ("under-sharded", LARGE, D8, pzs.fully_sharded(min_size=2**30)),
    "waste in every block": (
        "under-sharded",
        LARGE_BLOCKS,
        D4M2,
        {"batch": "data", "neurons": "model"},
    ),
    "waste in the optimizer's state": (
        "under-sharded",
        lambda: state_of(LARGE),
        D8,
        pzs.Layout(**OPTIMIZER_ALONE, optimizer={"neurons": "data"}),
    ),
    "waste beside a preset": (
        "under-sharded",
        LARGE,
        D4M2,
        pzs.fully_sharded("model") | pzs.AxisRules({"vocabulary": "model"}),
    ),
    "waste in a train state": (
        "under-sharded",
        lambda: state_of(LARGE),
        D4M2,
        {"batch": "data", "neurons": "model"},
    ),
    # Mesh axes for nothing.
    "idle mesh axis": ("idle mesh axis", SMALL, D4M2, {"batch": "data"}),
    "no rules": ("idle mesh axis", SMALL, D8, None),
    "layout for one mesh axis": (
        "idle mesh axis",
        small_transformer,
        mesh(data=2, model=2),
        pzs.Layout.data_parallel(),
    ),
    "third mesh axis": (
        "idle mesh axis",
        SMALL,
        mesh(data=2, model=2, expert=2),
        {"embedding": "data", "neurons": "model"},
    ),
    # Arrays without names, and rules that are none.
    "no names": ("unnamed", plain(w=(512, 1024), b=(1024,)), D8, {"embedding": "data"}),
    "no names for a preset": ("unnamed", plain(w=(512, 1024)), D8, pzs.fully_sharded()),
    "not a mesh axis": ("unreadable", SMALL, D8, {"embedding": 3}),
    "preset that was not called": ("unreadable", SMALL, D8, pzs.fully_sharded),
    "mesh axis twice in a rule": (
        "unreadable",
        SMALL,
        D4M2,
        {"embedding": ("data", "data"), "neurons": "model"},
    ),
}
