"""What the processes of a job run: each function is one job of many checks."""

import contextlib
import errno
import functools
import io
import os
import pathlib
import runpy
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import treescope
from jax.sharding import NamedSharding, PartitionSpec
from penzai import pz
from treescope.external.jax_support import JAXArrayAdapter

import penzai_shard as pzs
from penzai_shard.cli import demo
from penzai_shard.cli import processes as cli_processes
from penzai_shard.cli.main import main
from penzai_shard.errors import ShardingError
from penzai_shard.library_apis import orbax_api
from penzai_shard.library_apis.treescope_api import shown_parts
from penzai_shard.processes import any_process, failing_together, on_first_process


def refused(act):
    """The message of the error that something raises, and the kind."""
    try:
        act()
    except ShardingError as error:
        return f"{type(error).__name__}: {error}"
    return "went through"


def own_parts(array):
    """Every part of an array that this process has: where it is, and its numbers."""
    return [
        [[[s.start or 0, s.stop] for s in shard.index], np.asarray(shard.data).tolist()]
        for shard in array.addressable_shards
    ]


def rows(start, count, length=3):
    """Rows of a batch, each of which holds its number."""
    numbers = np.repeat(np.arange(start, start + count), length).reshape(count, length)
    return pz.nx.NamedArray.wrap(numbers).tag("batch", "seq")


def batches():
    """Batches of which each process gives its part, and what is wrong with them."""
    me, count = jax.process_index(), jax.process_count()
    mesh = pzs.make_mesh({"data": 4, "model": 2})
    rules = {"batch": "data"}
    share = 8 // count
    own = {"tokens": rows(me * share, share), "rate": 0.5}

    def give(batch, **options):
        return pzs.shard_batch(batch, mesh, rules, local=True, **options)

    placed = give(own)
    tokens = placed["tokens"]
    assert dict(tokens.named_axes) == {"batch": 8, "seq": 3}
    assert tokens.data_array.sharding.spec == PartitionSpec("data")
    whole = pzs.shard_batch({"tokens": rows(0, 8), "rate": 0.5}, mesh, rules)
    assert tokens.data_array.sharding == whole["tokens"].data_array.sharding
    assert own_parts(tokens.data_array) == own_parts(whole["tokens"].data_array)
    assert float(placed["rate"]) == 0.5
    assert placed["rate"].weak_type == whole["rate"].weak_type
    # A view, whose rows are not the first dimension in memory.
    view = pz.nx.NamedArrayView(
        data_shape=(3, share),
        data_axis_for_logical_axis=(),
        data_axis_for_name={"batch": 1, "seq": 0},
        data_array=np.asarray(own["tokens"].data_array).T,
    )
    turned = give(view)
    assert dict(turned.named_shape) == {"batch": 8, "seq": 3}
    assert turned.data_array.sharding.spec == PartitionSpec(None, "data")
    # Without communication in the second layout: every process has the whole of this dimension.
    over_model = pzs.make_mesh({"model": count, "data": 8 // count})
    same = pzs.shard_batch(rows(0, 8), over_model, rules, local=True)
    assert dict(same.named_axes) == {"batch": 8, "seq": 3}
    plan = pzs.make_plan(whole, mesh, rules)
    by_plan = pzs.shard_batch(own, plan=plan, local=True)
    assert own_parts(by_plan["tokens"].data_array) == own_parts(tokens.data_array)
    return {
        "lengths": refused(lambda: give({"x": rows(0, 2 + 2 * me), "y": rows(0, 4)})),
        "names": refused(lambda: give({"x" if me else "y": rows(0, 4)})),
        "dtypes": refused(lambda: give(rows(0, 4) if me else rows(0, 4).astype(float))),
        "indivisible": refused(lambda: give({"x": rows(0, 3)})),
        "same part": refused(
            lambda: pzs.shard_batch({"x": rows(me, 8)}, over_model, rules, local=True)
        ),
        "numbers": refused(lambda: give({"x": rows(0, 4), "rate": 0.5 * me})),
        "placed": refused(lambda: give(placed)),
        "text": refused(lambda: give({"x": rows(0, 4), "name": "text"})),
        "whole": refused(lambda: pzs.shard_batch({"x": {"y": rows(me, 8)}}, mesh, rules)),
        "other calls": refused(
            lambda: give(own) if me else any_process(False, asked="shall we stop")
        ),
        "any": [any_process(False), any_process(me == count - 1)],
        "failed": refused(lambda: _fail_in_the_last()),
        "first": refused(lambda: on_first_process("saving", lambda: _fail_in(0))),
        "failed before": [
            refused(functools.partial(_failed_before, who, lambda: give(own)))
            for who in (0, count - 1)
        ],
        "failed inside": [refused(functools.partial(_fail_inside, who)) for who in (0, count - 1)],
        "failed twice": refused(_fail_at_two_depths),
        "kept": refused(lambda: _failure_is_kept(give, own)),
        "other calls inside": refused(lambda: _other_calls_inside(lambda: give(own))),
        "afterwards": any_process(me == 0),
    }


def _failed_before(who, act):
    """One process fails, and the others have come to a call that all make."""
    with failing_together("reading"), failing_together("drawing"):
        _fail_in(who)
        act()


def _fail_inside(who):
    """One process fails in the outer of two blocks, which may have the same name."""
    with failing_together("reading"):
        _fail_in(who)
        with failing_together("reading"):
            pass


def _fail_at_two_depths():
    with failing_together("reading"):
        _fail_in(0)
        with failing_together("drawing"):
            raise ValueError("inside")


def _failure_is_kept(give, own):
    """What says that another process has failed is caught, and the block ends with it anyway."""
    with failing_together("reading"):
        _fail_in(0)
        for _ in range(2):
            with contextlib.suppress(ShardingError):
                give(own)


def _other_calls_inside(act):
    with failing_together("reading"):
        act() if jax.process_index() else any_process(False, asked="shall we stop")


def _fail_in_the_last():
    with failing_together("reading"):
        _fail_in(jax.process_count() - 1)


def _fail_in(process):
    if jax.process_index() == process:
        raise pzs.CheckpointNotFoundError("there is nothing at /x.")


def training_loop(folder):
    """A run of ``fit`` that one process is told to stop, its sequel, and one whose batches fail."""
    me, count = jax.process_index(), jax.process_count()
    mesh = pzs.make_mesh({"data": 8})
    share = 8 // count

    def loss_fn(model, rng, state, x):
        weights = model["w"].unwrap("features")
        values = x.unwrap("batch", "features") @ weights
        loss = jnp.mean((values - 1.0) ** 2) + 0.1 * jnp.mean(
            jax.random.normal(rng, weights.shape) * weights
        )
        return loss, state, {"loss": loss}

    def own_rows(fails_at=None):
        for number in range(100):
            if number == fails_at and me == count - 1:
                raise OSError("the disk is gone")
            whole = np.random.default_rng(number).normal(size=(8, 4)).astype("float32")
            rows = whole[me * share : (me + 1) * share]
            yield {"x": pz.nx.wrap(rows, "batch", "features")}

    step = pzs.build_train_step_fn(loss_fn, donate_params_and_state=True)

    def train(batches=own_rows, act=lambda record: None, **options):
        model = pzs.place({"w": pz.nx.wrap(np.zeros(4, "float32"), "features")}, mesh, {})
        state = pzs.TrainState.initial_state(model, optax.adam(0.1), jax.random.key(0))
        losses = []

        def on_log(record):
            losses.append(record.loss)
            act(record)

        printed, failed = io.StringIO(), None
        with contextlib.redirect_stdout(printed):
            try:
                state = pzs.fit(
                    state,
                    step,
                    batches,
                    steps=9,
                    log_every=1,
                    on_log=on_log,
                    shard_batch=functools.partial(
                        pzs.shard_batch, mesh=mesh, rules={"batch": "data"}, local=True
                    ),
                    **options,
                )
            except (Exception, KeyboardInterrupt) as error:
                failed, state = f"{type(error).__name__}: {error}", getattr(error, "state", None)
        done = None if state is None else int(state.step)
        return {"losses": losses, "step": done, "failed": failed, "printed": printed.getvalue()}

    def interrupt_the_last_process(record):
        if record.step == 3 and me == count - 1:
            signal.raise_signal(signal.SIGINT)

    # A shell has programs in the background ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    runs = {
        "whole": train(),
        "stopped": train(checkpoint=folder, act=interrupt_the_last_process),
        "resumed": train(checkpoint=folder),
        "failing": train(lambda: own_rows(fails_at=4), checkpoint=f"{folder}/other"),
        "full": with_a_full_disk(lambda: train(checkpoint=f"{folder}/full", save_every=2)),
        "emptied": train(checkpoint=f"{folder}/full", save_every=2),
    }
    signal.signal(signal.SIGINT, before)
    return runs


def with_a_full_disk(act):
    """Acts while the last process cannot write what it has of the second checkpoint."""
    begin = orbax_api.begin_save
    directories = []

    def begin_save(directory, *arguments):
        written = begin(directory, *arguments)
        directories.append(directory)
        fails = len(directories) == 2 and jax.process_index() == jax.process_count() - 1

        def wait():
            written()
            if fails:
                raise OSError(errno.ENOSPC, "full")

        return wait

    orbax_api.begin_save = begin_save
    try:
        return act()
    finally:
        orbax_api.begin_save = begin


def surface(folder):
    """What else a job does: initialisers, placing, trainers, steps, checkpoints, and views."""
    me, count = jax.process_index(), jax.process_count()
    mesh = pzs.make_mesh({"data": 4, "model": 2})
    numbers = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
    key = jax.random.key(0)

    def named(array):
        return pz.nx.wrap(array, "a", "b")

    def initial(key, numbers):
        return {
            "random": named(jax.random.normal(key, (8, 8))),
            "scaled": named(numbers * jnp.sum(numbers)),
            "orthogonal": named(jax.nn.initializers.orthogonal()(key, (8, 8))),
            "key": key,
        }

    made = pzs.sharded_init(initial, key, numbers, mesh=mesh, rules={"a": "data"})
    assert made["orthogonal"].data_array.sharding.spec == PartitionSpec("data")
    for name, value in jax.jit(initial)(key, numbers).items():
        whole = getattr(value, "data_array", value)
        mine = getattr(made[name], "data_array", made[name])
        assert mine.sharding.device_set == set(jax.devices())
        if name == "key":
            assert mine.dtype == whole.dtype
            continue
        for shard in mine.addressable_shards:
            np.testing.assert_allclose(shard.data, np.asarray(whole)[shard.index], rtol=1e-5)
    weights = {"w": named(jnp.asarray(numbers))}
    placed = pzs.place(weights, mesh, {"a": "data"})
    other = pzs.place(placed, pzs.make_mesh({"model": 4, "data": 2}), {"a": "data"})
    assert other["w"].data_array.sharding.shard_shape((8, 8)) == (4, 8)
    keys = pzs.place({"keys": jax.random.split(key, 3)}, mesh, {}, on_unnamed="replicate")
    assert keys["keys"].is_fully_replicated

    def loss_fn(model, rng, state, x):
        loss = jnp.mean((x.data_array @ model["w"].unwrap("a", "b")) ** 2)
        return loss, state, {"loss": loss}

    # A state of a model that every process has on a device of its own, and a batch in host memory.
    state = pzs.TrainState.initial_state(weights, optax.adam(1e-2), key)
    batch = {"x": pz.nx.NamedArray.wrap(numbers).tag("batch", "a")}
    trainer = pzs.StatefulTrainer(state, loss_fn, mesh=mesh, rules={"a": "data"})
    own = float(trainer.step(**batch)["loss"])
    state = pzs.TrainState.initial_state(placed, optax.adam(1e-2), key)
    declared = {"x": NamedSharding(mesh, PartitionSpec("data"))}
    step = pzs.build_train_step_fn(loss_fn, input_kwarg_shardings=declared)
    _, aux = step(state, **batch)
    views = [repr(placed), repr(state), state._repr_html_(), trainer._repr_html_()]
    with treescope.active_autovisualizer.set_scoped(treescope.ArrayAutovisualizer()):
        views.append(treescope.render_to_html(state))
    assert all(view.strip() for view in views)
    if me == count - 1:
        # In one process alone: no other has to take part.
        views += _views_of_one_process(placed["w"])
    edited = pzs.Recipe(pzs.wrap(Doubling, pzs.Checkpointed)).apply(Doubling())
    same = pzs.check_equivalent(Doubling(), edited, placed["w"], gradients=False)
    other_function = pzs.check_equivalent(Doubling(), Halving(), placed["w"], gradients=False)

    path = f"{folder}/own"
    pzs.save_params(path, weights)
    local = pzs.make_mesh({"data": jax.local_device_count()}, jax.local_devices())
    again = pzs.restore_params(path, weights, local, {"a": "data"})
    np.testing.assert_array_equal(again["w"].data_array, numbers)
    doubled = pzs.Jitted(Doubling())(placed["w"]).data_array
    assert doubled.sharding.spec == PartitionSpec("data")
    found = {
        "losses": [own, float(aux["loss"])],
        "view": treescope.render_to_text(state),
        "equivalent": [bool(same), bool(other_function)],
        "other seeds": refused(
            lambda: pzs.sharded_init(
                lambda k: named(jax.random.normal(k, (8, 8))),
                jax.random.key(me),
                mesh=mesh,
                rules={},
            )
        ),
        "other meshes": refused(lambda: pzs.place(placed, local, {"a": "data"})),
        "other names": refused(
            lambda: pzs.save_params(f"{folder}/new", {"v" if me else "w": placed["w"]})
        ),
        "other values": refused(
            lambda: pzs.save_params(f"{folder}/new", {"w": named(jnp.asarray(numbers + me))})
        ),
        "exists": refused(lambda: pzs.save_params(path, weights)),
        "nothing there": refused(
            lambda: pzs.restore_params(path if me else f"{path}_not", weights, local, {})
        ),
        "other input": refused(
            lambda: step(state, x=pz.nx.wrap(jax.device_put(numbers, jax.local_devices()[0])))
        ),
    }
    # The job is ended here, and one of its programs goes on until the other is gone.
    first = pathlib.Path(folder, "first")
    if me == 0:
        first.write_text(str(os.getpid()))
    jax.distributed.shutdown()
    if me:
        with contextlib.suppress(ProcessLookupError):
            while not os.kill(int(first.read_text()), 0):
                time.sleep(0.05)
        time.sleep(0.3)
    return found


def _views_of_one_process(array):
    """A plan and views of arrays, small and large, of which this process has one half."""
    whole = pz.nx.NamedArray.wrap(np.arange(64.0).reshape(8, 8)).tag("a", "b")
    shown, is_here = shown_parts(array.data_array, None, (None, 2))
    # The third column stands for those in the middle.
    assert is_here.tolist() == [[False] * 5] * 4 + [[True, True, False, True, True]] * 4
    numbers = np.concatenate([s.data for s in array.data_array.addressable_shards[::2]])
    np.testing.assert_array_equal(shown[4:], np.insert(numbers[:, [0, 1, 6, 7]], 2, 0, axis=1))
    large = jax.ShapeDtypeStruct((800, 800), "float32", sharding=array.data_array.sharding)
    large = jax.make_array_from_callback(
        large.shape, large.sharding, lambda index: np.ones((200, 800), "float32")
    )
    model = {"small": array, "large": pz.nx.wrap(large, "a", "b"), "own": whole}
    views = [
        str(pzs.make_plan(model, array.data_array.sharding.mesh, {"a": "data"})),
        treescope.render_to_html(treescope.render_array(array)),
        treescope.render_to_html(treescope.render_array(large)),
        treescope.render_to_text(model),
    ]
    with treescope.active_autovisualizer.set_scoped(treescope.ArrayAutovisualizer()):
        views.append(treescope.render_to_html(model))
    # Treescope's own function needs the parts of the other process; a drawing needs none.
    of_treescope = JAXArrayAdapter.get_array_data_with_truncation.__wrapped__
    with contextlib.suppress(RuntimeError):
        of_treescope(JAXArrayAdapter(), array.data_array, None, (None, None))
        raise AssertionError("treescope shows such arrays by itself: shown_parts is not needed")
    drawing = pzs.show_sharding(array)
    held = {
        device.id: (part.indices(8)[:2], (0, 8))
        for device, (part, _) in array.data_array.sharding.devices_indices_map((8, 8)).items()
    }
    assert held == {
        device: part.intervals for part in drawing.parts.parts for device in part.devices
    }
    assert [part.processes for part in drawing.parts.parts] == [(0,), (0,), (1,), (1,)]
    views += [str(drawing), drawing._repr_html_()]
    assert "(process 0)" in views[-2]
    assert "(process 1) *" in views[-2]
    assert all(views)
    return views


@pz.pytree_dataclass
class Halving(pz.nn.Layer):
    def __call__(self, x, **side_inputs):
        return x * 0.5


@pz.pytree_dataclass
class Doubling(pz.nn.Layer):
    def __call__(self, x, **side_inputs):
        return x * 2.0


def script(path_or_text, arguments, folder):
    """A program as Python runs it, with its output in files of its own."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with open(pathlib.Path(folder) / name, "wb") as file:
            os.dup2(file.fileno(), descriptor)
    sys.argv = [path_or_text, *arguments]
    if "\n" in path_or_text:
        exec(compile(path_or_text, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(path_or_text, run_name="__main__")


def demonstration(folder):
    """The demo with a small model, as its own command runs it in every process of a job."""
    demo.DECODER_BLOCKS, demo.SAMPLE_LENGTH, demo.CONTEXT = 1, 4, 16
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        # Not what several processes do to their own standard output.
        cli_processes._keep_output_for_python = lambda: None
        status = main(["demo", "--steps", "2", "--out", folder])
    return {"status": status, "printed": printed.getvalue()}
