"""Mistakes and harmless set-ups that were written before anybody saw what lint finds.

Rows of ``MISTAKES`` are ``(name, build, words)``, those of ``HARMLESS`` ``(name, build)``, where
``build()`` gives model, mesh, rules and options. The words of a mistake occur together in one
finding. What the mistake costs was measured without lint, and stands above it.
"""

import collections
import functools

import equinox as eqx
import flax.linen as nn
import jax
import optax
from flax import nnx
from flax.training import train_state
from penzai import pz
from penzai.models import simple_mlp

import penzai_shard as pzs
from tests.layouts.transformers import build_llama
from tests.models import hax

KEY = jax.random.key(0)
MESH = pzs.make_mesh({"data": 4, "model": 2})
EIGHT = pzs.make_mesh({"data": 8})
LLAMA = {"embedding": 4096, "heads": 8, "multiplier": 4, "projection": 128, "neurons": 14336}
FSDP, TP = {"features": "data"}, {"features_out": "model"}
BATCH = {"batch": 4096, "features": 4096}
TABLE, UP = {"vocab": 128256, "embed": 4096}, {"embed": 4096, "mlp": 14336}
RULES = {"embed": "data", "mlp": "model", "vocab": "model"}
COPIES = pzs.AxisRules({"features": None, "features_out": None})
TWO_DIMENSIONAL = pzs.fully_sharded() | pzs.tensor_parallel()
MISTAKES = []


def mistake(*words):
    return lambda build: MISTAKES.append((build.__name__, build, words))


def pod(**sizes):
    return pzs.make_mesh(sizes, abstract=True)


def setup(model, mesh, rules=None, **options):
    return {"model": model, "mesh": mesh, "rules": rules, **options}


# Models and batches of shapes


def flow(dtype="float32", **axes):
    struct = jax.ShapeDtypeStruct(tuple(axes.values()), dtype)
    return pz.nx.NamedArray(collections.OrderedDict(axes), struct)


def split(mesh, over="data", **axes):
    return pzs.shard_batch(flow(**axes or BATCH), mesh, {"batch": over})


def weights(**axes):
    arrays = {path: jax.ShapeDtypeStruct((*own.values(),), "float32") for path, own in axes.items()}
    return pzs.name_axes(arrays, {path: tuple(own) for path, own in axes.items()})


def llama(vocabulary=128256, **options):
    return pzs.abstract_model(build_llama, blocks=2, vocabulary=vocabulary, **LLAMA, **options)


def mlp(*sizes):
    sizes = sizes or (4096, 16384, 16384, 4096)
    return pzs.abstract_model(lambda: simple_mlp.MLP.from_config(KEY, [*sizes]))


class Tower(nn.Module):
    vocabulary: int = 32000
    is_table_named: bool = True

    @nn.compact
    def __call__(self, tokens):
        def init(*names):
            return nn.with_logical_partitioning(nn.initializers.normal(), names)

        table = init("vocab", "embed") if self.is_table_named else nn.initializers.normal()
        x = nn.Embed(self.vocabulary, 1024, embedding_init=table)(tokens)
        x = nn.relu(nn.Dense(8192, kernel_init=init("embed", "mlp"))(x))
        return nn.Dense(1024, kernel_init=init("mlp", "embed"))(nn.LayerNorm()(x))


def linen(*options):
    return jax.eval_shape(Tower(*options).init, KEY, jax.ShapeDtypeStruct((2, 8), "int32"))


def linen_state(*options):
    create = functools.partial(train_state.TrainState.create, apply_fn=None, tx=optax.adam(1e-3))
    return jax.eval_shape(lambda params: create(params=params), linen(*options)["params"])


def nnx_state():
    init = nnx.with_partitioning(nnx.initializers.normal(), ("embed", "mlp"))
    linear = nnx.Linear(4096, 14336, kernel_init=init, rngs=nnx.Rngs(0))
    return nnx.Optimizer(linear, optax.adam(1e-3), wrt=nnx.Param)


def equinox():
    return pzs.abstract_model(eqx.nn.MLP, 4096, 4096, 16384, 2, key=KEY)


def haliax():
    embed, neurons = hax.Axis("embed", 4096), hax.Axis("mlp", 16384)
    return pzs.abstract_model(hax.nn.MLP.init, embed, embed, neurons, 2, key=KEY)


# Edits and layouts


def constrain(mesh, *rules, model=None):
    place, layers = pz.nn.Elementwise, (pzs.ConstrainShardingByName(mesh, own) for own in rules)
    edits = pzs.Recipe(*(pzs.insert_after(place, layer) for layer in layers))
    return edits.apply(model or mlp())


def with_layout(layout, mesh):
    model, tokens = llama(), flow("int32", batch=64, seq=512)
    rules = layout.for_model(model, mesh).parameters
    edited = layout.recipe(model, mesh).apply(model)
    return setup(edited, mesh, rules, batch=layout.shard_batch(tokens, mesh))


# What has no valid layout


# make_plan raises.
@mistake("head_groups", "model")
def grouped_heads_do_not_divide():
    return setup(llama(), pod(data=16, model=16), {"head_groups": "model", "neurons": "model"})


# make_plan raises.
@mistake("vocab", "50257")
def the_vocabulary_of_gpt2_does_not_divide():
    return setup(linen(50257), pod(data=16, model=16), RULES, on_unnamed="replicate")


# make_plan raises.
@mistake("mlp", "data")
def both_dimensions_want_one_mesh_axis():
    return setup(weights(up=UP), EIGHT, {"embed": "data", "mlp": "data"})


# make_plan raises.
@mistake("layers/", "weight")
def a_model_without_names():
    return setup(equinox(), EIGHT, {"embed": "data"})


# make_plan raises.
@mistake("heads", "model")
def six_heads_on_four_devices():
    heads = hax.Axis("heads", 6), hax.Axis("head_size", 64)
    model = pzs.abstract_model(hax.nn.Linear.init, hax.Axis("embed", 384), heads, key=KEY)
    return setup(model, pod(data=2, model=4), {"heads": "model", "embed": "data"})


# make_plan raises.
@mistake("experts", "16")
def fewer_experts_than_devices():
    rules = {"experts": "expert", "embed": "data"}
    return setup(weights(up={"experts": 8} | UP), pod(data=4, expert=16), rules)


# shard_batch raises.
@mistake("batch", "12")
def a_batch_that_does_not_divide():
    return setup(mlp(), EIGHT, FSDP | {"batch": "data"}, batch=flow(batch=12, features=4096))


# make_plan raises.
@mistake("fsdp")
def a_mesh_axis_that_is_not_there():
    return setup(llama(), pod(data=16, model=16), {"embedding": "fsdp"})


# Rules


# 5.5 GiB on every device in place of 0.7.
@mistake("embeding", "embedding")
def a_misspelt_name():
    return setup(llama(), EIGHT, {"embeding": "data"})


# 1152 MiB on every device in place of 608, and the mesh axis is idle.
@mistake("mpl")
def two_letters_that_changed_places():
    return setup(haliax(), MESH, {"embed": "data", "mpl": "model"})


# The query's 64 MiB are on each of 16 devices.
@mistake("q_heads")
def a_name_from_another_code_base():
    query = {"embed": 4096, "heads": 32, "kv": 128}
    return setup(weights(query=query, up=UP), pod(model=16), {"q_heads": "model", "mlp": "model"})


# 1.5 GiB on every device.
@mistake("features")
def no_rules_and_no_axis_called_like_a_mesh_axis():
    return setup(mlp(), EIGHT)


# 56 MiB in place of 28 on every device: the first rule always wins.
@mistake("mlp", "model")
def a_rule_that_never_applies():
    return setup(weights(up=UP), MESH, [("embed", "data"), ("mlp", None), ("mlp", "model")])


# Arrays that are whole


# 2 GiB on each of 256 devices.
@mistake("token_table")
def a_forgotten_table():
    tree = weights(token_table=TABLE, up={"hidden": 4096, "mlp": 14336})
    return setup(tree, pod(data=16, model=16), {"hidden": "data", "mlp": "model"})


# 224 MiB on each of 8 devices.
@mistake("up_projection")
def a_least_size_in_bytes_of_a_gigabyte():
    return setup(weights(up_projection=UP), EIGHT, pzs.fully_sharded(min_size=2**30))


# 307 MiB on each of 8 devices: padded, it would divide.
@mistake("logits_table")
def nothing_divides():
    table = {"vocab": 50257, "embed": 1601}
    return setup(weights(logits_table=table, up=UP), EIGHT, pzs.fully_sharded())


# Two tables of 500 MiB on every device.
@mistake("vocabulary", "32001")
def one_token_too_many_and_no_error():
    rules = {"vocabulary": "model", "neurons": "model", "head_groups": "model"}
    return setup(llama(32001), MESH, rules, on_indivisible="replicate")


# 256 MiB on each of 8 devices: dimensions without names are never split.
@mistake("patch_kernel")
def dimensions_without_names():
    kernel = jax.ShapeDtypeStruct((16384, 4096), "float32")
    named = pzs.name_axes({"patch_kernel": kernel}, {"patch_kernel": (None, None)})
    return setup(named | weights(up=UP), EIGHT, pzs.fully_sharded())


# 125 MiB three times on every device: parameter and two statistics.
@mistake("embedding")
def a_table_without_names_in_a_train_state():
    return setup(linen_state(32000, False), MESH, RULES, on_unnamed="replicate")


# Mesh axes without work


# Eight groups of devices hold the same.
@mistake("fsdp")
def nothing_lies_over_one_mesh_axis():
    return setup(weights(table=TABLE, up=UP), pod(data=4, fsdp=8, model=4), RULES)


# Four groups of devices hold the same.
@mistake("expert")
def a_mesh_for_experts_and_a_dense_model():
    return setup(llama(), pod(data=8, expert=4), {"embedding": "data", "experts": "expert"})


# Flops of each device 15.9e12 in place of 8.0e12.
@mistake("slices")
def the_batch_leaves_out_a_mesh_axis():
    return with_layout(pzs.Layout.fully_sharded(), pod(slices=2, data=4))


# What flows


# Flops of each device 14.4e11 in place of 4.1e11.
@mistake("btach")
def a_misspelt_name_in_a_constraint():
    return setup(constrain(MESH, {"btach": "data"}), MESH, TP, batch=split(MESH))


# Flops of each device 14.4e11 in place of 4.1e11.
@mistake("features_out", "sublayers")
def a_constraint_with_the_name_of_the_weights():
    return setup(constrain(MESH, TP), MESH, TP, batch=split(MESH))


# Flops of each device 6.6e12 in place of 3.3e12.
@mistake("seqlen")
def a_sequence_that_is_called_otherwise():
    outputs = ({"batch": "data", "seqlen": "model"},)
    edit = pzs.wrap(pz.nn.Elementwise, pzs.ConstrainActivations, mesh=MESH, outputs=outputs)
    batch = split(MESH, batch=64, time=512, features=4096)
    return setup(pzs.Recipe(edit).apply(mlp()), MESH, FSDP, batch=batch)


# Flops of each device 3.3e12 in place of 4.1e11.
@mistake("batch", "data")
def every_device_computes_the_whole_batch():
    return setup(mlp(), EIGHT, COPIES, batch=flow(**BATCH))


# Flops of each device 3.3e12 in place of 4.1e11.
@mistake("batch", "data")
def a_batch_that_is_called_otherwise():
    batch = flow(rows=4096, features=4096)
    return setup(mlp(), EIGHT, COPIES | pzs.data_parallel(), batch=batch)


# Each device sends 448 MiB in place of 64.
@mistake("batch", "data", "constrain")
def the_second_constraint_undoes_the_first():
    model = constrain(MESH, {"batch": "data"}, {"features": "model"})
    return setup(model, MESH, TP, batch=split(MESH))


# Each device sends 42.3 GiB in place of 3.2 with constraints.
@mistake("embedding", "data")
def fully_sharded_without_a_constraint():
    tokens = pzs.shard_batch(flow("int32", batch=64, seq=512), EIGHT, {"batch": "data"})
    return setup(llama(), EIGHT, {"embedding": "data"}, batch=tokens)


# Each device sends 432 MiB in place of 64.
@mistake("features", "model")
def the_batch_takes_the_mesh_axis_of_the_weights():
    return setup(mlp(), MESH, TP, batch=split(MESH, "model"))


# Layouts


def harmless_fully_sharded_and_tensor_parallel():
    return with_layout(pzs.Layout.two_dimensional(), MESH)


def harmless_fully_sharded():
    return with_layout(pzs.Layout.fully_sharded(), EIGHT)


def harmless_sequence_parallel():
    return with_layout(pzs.Layout.sequence_parallel(), MESH)


def harmless_copies_across_nodes():
    return with_layout(pzs.Layout.hybrid(), pod(replica=2, data=4))


def harmless_bfloat16_and_less_memory():
    return with_layout(pzs.Layout.two_dimensional(precision="bfloat16", rematerialise="dots"), MESH)


def harmless_a_state_for_256_devices():
    state = pzs.TrainState.initial_state(llama(), optax.adamw(1e-3), KEY)
    return setup(state, pod(data=32, model=8), TWO_DIMENSIONAL)


def harmless_the_vocabulary_is_whole_on_purpose():
    rules = pzs.AxisRules({"vocabulary": None, "embedding": None}) | pzs.tensor_parallel()
    return setup(llama(), MESH, rules | pzs.data_parallel())


def harmless_blocks_in_a_stack():
    return setup(llama(stacked=True), pod(data=32, model=8), TWO_DIMENSIONAL)


# Models that are called


def harmless_the_example_of_the_readme():
    model = constrain(MESH, {"batch": "data"}, model=mlp(8, 32, 32, 8))
    return setup(model, MESH, TP, batch=split(MESH, batch=16, features=8))


def harmless_a_small_model_is_copied():
    batch = split(EIGHT, batch=64, features=64)
    return setup(mlp(64, 128, 64), EIGHT, pzs.data_parallel(), batch=batch)


def harmless_a_large_model_is_copied_on_purpose():
    return setup(mlp(), EIGHT, COPIES | pzs.data_parallel(), batch=split(EIGHT))


def harmless_a_constraint_that_keeps_features_whole():
    model = constrain(EIGHT, {"batch": "data", "features": None})
    return setup(model, EIGHT, FSDP, batch=split(EIGHT))


def harmless_the_same_constraint_twice():
    model = constrain(EIGHT, {"batch": "data"}, {"batch": "data"})
    return setup(model, EIGHT, FSDP, batch=split(EIGHT))


def harmless_a_mesh_axis_of_one_device_for_the_batch():
    return setup(mlp(), pod(data=1, model=8), TP, batch=flow(**BATCH))


# Rules for dictionaries


def harmless_a_mesh_axis_of_one_device():
    return setup(weights(up=UP), pod(data=8, model=1), {"embed": "data"})


def harmless_a_table_is_whole_on_purpose():
    rules = {"vocab": None, "embed": None, "mlp": "data"}
    return setup(weights(table=TABLE, up=UP), EIGHT, rules)


def harmless_a_small_table_without_a_rule():
    return setup(weights(bias={"buckets": 32, "heads": 32}, up=UP), EIGHT, {"mlp": "data"})


def harmless_a_vocabulary_that_may_stay_whole():
    table = TABLE | {"vocab": 50257}
    return setup(weights(table=table, up=UP), MESH, [*RULES.items(), ("vocab", None)])


def harmless_names_that_are_mesh_axes():
    up = {"up": jax.ShapeDtypeStruct((4096, 14336), "float32")}
    return setup(pzs.name_axes(up, {"up": jax.P("data", "model")}), pod(data=16, model=16))


def harmless_neurons_give_way_to_experts():
    rules = pzs.tensor_parallel("expert", ("experts", "mlp"))
    return setup(weights(up={"experts": 8} | UP, shared=UP), pod(expert=8), rules)


def harmless_waste_below_the_threshold():
    table = {"positions": 1024, "embed": 2048}
    return setup(weights(table=table, up=UP), EIGHT, {"mlp": "data"}, min_bytes=2**24)


def harmless_ten_classes_on_eight_devices():
    tree, rules = weights(head={"embed": 4096, "classes": 10}, up=UP), {"classes": "data"}
    return setup(tree, EIGHT, rules | {"mlp": "data"}, on_indivisible="replicate")


def harmless_a_key_and_a_counter():
    others = {"rng": KEY, "step": jax.ShapeDtypeStruct((), "int32")}
    return setup(weights(up=UP) | others, EIGHT, pzs.fully_sharded())


# Other libraries


def harmless_linen_with_logical_axes():
    return setup(linen(), MESH, RULES | {"batch": "data"}, on_unnamed="replicate")


def harmless_a_state_of_linen_with_adam():
    return setup(linen_state(), EIGHT, pzs.fully_sharded(unnamed="largest"))


def harmless_an_optimizer_of_nnx():
    rules = {"embed": "data", "mlp": "model"}
    return setup(pzs.abstract_model(nnx_state), MESH, rules, on_unnamed="replicate")


def harmless_equinox_without_names():
    return setup(equinox(), EIGHT, pzs.fully_sharded(unnamed="largest"))


def harmless_equinox_with_names():
    names = {"layers/*/weight": ("out", "in"), "layers/*/bias": ("out",)}
    return setup(pzs.name_axes(equinox(), names), MESH, {"out": "model", "in": "data"})


def harmless_haliax_with_a_second_choice():
    rules = [("embed", "data"), ("mlp", "model"), ("mlp2", "model"), ("mlp2", "data")]
    return setup(haliax(), MESH, rules)


def harmless_statistics_of_adafactor_on_an_explicit_mesh():
    state = pzs.TrainState.initial_state(mlp(), optax.adafactor(1e-3), KEY)
    return setup(state, pzs.make_mesh({"data": 8}, explicit=True), pzs.fully_sharded())


HARMLESS = [(name, build) for name, build in list(globals().items()) if name.startswith("harmless")]
