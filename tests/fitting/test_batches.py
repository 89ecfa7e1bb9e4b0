"""Batches made ahead: their order, their number, their errors, and the end of their thread."""

import itertools
import threading
import traceback

import grain
import jax
import numpy as np
import pytest
from penzai import pz

from penzai_shard import ShardingWarning, fit
from penzai_shard.errors import RuleTypeError, TrainingStoppedError
from penzai_shard.fitting import background_feed
from penzai_shard.fitting.background_feed import BackgroundFeed
from penzai_shard.fitting.batch_sources import BatchSource, Position, placed_batches, token_count
from penzai_shard.fitting.iterator_states import state_of_text, state_text
from tests.fitting.conftest import numbers


def feed_threads():
    return [t for t in threading.enumerate() if t.name.startswith("penzai-shard")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert feed_threads() == []


@pytest.fixture
def train(setting):
    def call(batches, steps=4, **options):
        losses = []
        state = fit(
            setting.make_state(),
            setting.step,
            batches,
            steps=steps,
            **{
                "shard_batch": setting.place,
                "progress": False,
                "log_every": 1,
                "on_log": lambda record: losses.append(record.loss),
            }
            | options,
        )
        return state, losses

    return call


def test_items_come_in_order_and_no_more_of_them_are_made_ahead_than_asked_for():
    made = []

    def items():
        for i in range(20):
            made.append(i)
            yield i

    with BackgroundFeed(items(), ahead=3) as feed:
        used = []
        while (item := feed.next()) is not None:
            used.append(item)
            assert len(made) <= len(used) + 3
    assert used == list(range(20))


def test_an_item_is_made_while_another_one_is_used():
    """Without timing: making item 1 ends only once item 0 is in use, and the other way round."""
    is_made, is_used = threading.Event(), threading.Event()

    def items():
        yield 0
        assert is_used.wait(120)
        is_made.set()
        yield 1

    with BackgroundFeed(items(), ahead=1) as feed:
        assert feed.next() == 0
        is_used.set()
        assert is_made.wait(120)
        assert feed.next() == 1


def test_without_a_thread_items_are_made_when_they_are_asked_for():
    made = []
    with BackgroundFeed((made.append(i) or i for i in range(3)), ahead=0) as feed:
        assert feed_threads() == []
        assert feed.next() == 0
        assert made == [0]


def test_a_feed_that_is_left_early_closes_its_generator():
    closed = []

    def items():
        try:
            yield from itertools.count(1)
        finally:
            closed.append(True)

    def left_early():
        with BackgroundFeed(items(), ahead=2) as feed:
            raise KeyError(feed.next())

    with pytest.raises(KeyError, match="1"):
        left_early()
    assert closed == [True]


def test_an_item_that_takes_for_ever_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(background_feed, "SECONDS_TO_END", 0.1)
    never = threading.Event()

    def items():
        never.wait(120)
        yield 1

    feed = BackgroundFeed(items(), 1)
    feed.__enter__()
    assert feed.next(lambda: True) is None
    (thread,) = feed_threads()
    with pytest.warns(ShardingWarning, match="has been making one item for over"):
        feed.__exit__(None, None, None)
    never.set()
    thread.join()


def test_settings_of_jax_that_hold_for_one_thread_hold_for_the_batches():
    def kinds():
        yield str(jax.numpy.asarray(np.ones(2)).dtype)

    with jax.enable_x64(True), BackgroundFeed(kinds(), 1) as feed:
        assert feed.next() == "float64"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_the_iterator_reaches_the_caller_with_its_own_traceback(
    train, tmp_path, prefetch
):
    def batches():
        yield from numbers(3)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone") as caught:
        train(batches, steps=9, checkpoint=tmp_path, prefetch=prefetch)
    assert [frame.name for frame in traceback.extract_tb(caught.tb)][-1] == "batches"
    assert caught.value.__notes__ == [
        f"fit was asking for the batch of step 4. The last checkpoint is {tmp_path}/step_00000003."
    ]


def test_an_error_of_placing_reaches_the_caller(train):
    def place(batch):
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError, match="no room"):
        train(numbers, shard_batch=place)
    with pytest.raises(RuleTypeError, match="shard_batch must return the batch, and returned None"):
        train(numbers, shard_batch=lambda batch: None)


def test_no_more_batches_are_drawn_than_there_are_steps(train):
    batches = numbers()
    train(batches, steps=4, prefetch=3)
    rest = next(batches)["x"].data_array
    assert (rest == next(numbers(1, 4))["x"].data_array).all()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (np.ones(3), r"batch 0 of batches is a ndarray\. Write for instance \(\{'tokens': batch\}"),
        ((1, 2), r"is a tuple\. Write for instance \(\{'x': x, 'y': y\} for x, y in batches\)"),
        ({1: 2}, r"is a dict\. Its keys are of type int; use the names of the inputs"),
        (None, "batch 0 of batches is None"),
    ],
)
def test_a_batch_that_is_not_a_dictionary_is_refused_with_what_to_write(train, batch, message):
    with pytest.raises(RuleTypeError, match=message):
        train([batch])


def test_a_generator_from_an_unknown_place_is_refused(train, tmp_path):
    used = numbers(2)
    list(used)
    with pytest.raises(TrainingStoppedError, match="is a generator that is used up"):
        train(used)
    train(numbers, steps=2, checkpoint=tmp_path)
    used = numbers()
    next(used)
    with pytest.raises(TrainingStoppedError, match=r"nobody knows which .* batches=numbers"):
        train(used, checkpoint=tmp_path)
    with pytest.raises(
        TrainingStoppedError, match=r"has used 2 batches, and batches ended after 1"
    ):
        train(list(numbers(1)), checkpoint=tmp_path)
    train(numbers(), steps=4, checkpoint=tmp_path)


def test_tokens_are_those_of_the_array_that_has_most():
    batch = {
        "a": pz.nx.ones({"batch": 4, "seq": 8}),
        "b": pz.nx.ones({"batch": 4, "seq": 2, "f": 9}),
    }
    assert token_count(("batch", "seq"), batch) == 32
    assert token_count(("batch",), batch) == 4
    assert token_count((), batch) is None


@pytest.mark.parametrize(
    "state",
    [
        {"next_index": 3, "inner": {"list": [1, 2.5, None, True], "text": "ü"}},
        b'{"version": 2}\x00\xff',
        {"tuple": (1, (2,)), 7: "a key", "__bytes__": "not a mark"},
        {"random": np.arange(6, dtype=np.uint64).reshape(2, 3), "one": np.float32(0.1)},
    ],
)
def test_the_state_of_an_iterator_is_read_back_as_it_was(state):
    class Standing:
        def get_state(self):
            return state

    found = state_of_text(state_text(Standing()))
    np.testing.assert_equal(found, state)
    if isinstance(state, dict):
        assert [type(value) for value in found.values()] == [type(v) for v in state.values()]


def test_a_state_that_is_not_data_is_refused_at_the_first_batch(train):
    class Odd:
        number = 0

        def __iter__(self):
            return self

        def __next__(self):
            return next(numbers(1))

        def get_state(self):
            return {"lock": threading.Lock()}

        def set_state(self, state):
            raise AssertionError

    with pytest.raises(RuleTypeError, match="the state of Odd cannot be saved: it holds a lock"):
        train(Odd())


class Named(grain.transforms.Map):
    def map(self, values):
        return {"x": pz.nx.wrap(values, "batch", "seq", "features")}


def grain_batches():
    """Endless shuffled batches of 40 examples, of a dataset or a loader."""

    source = np.random.default_rng(0).normal(size=(40, 3, 4)).astype(np.float32)
    # By default 16 threads read 500 elements ahead.
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return {
        "dataset": grain.MapDataset.source(source)
        .seed(1)
        .shuffle()
        .repeat()
        .batch(8)
        .map(Named())
        .to_iter_dataset(reading),
        "loader": grain.DataLoader(
            data_source=source,
            sampler=grain.samplers.IndexSampler(40, shuffle=True, seed=1),
            operations=[grain.transforms.Batch(8), Named()],
            read_options=reading,
        ),
    }


@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_a_grain_pipeline_is_put_where_it_was(train, kind, tmp_path):
    _, whole = train(grain_batches()[kind], steps=9)
    _, first = train(grain_batches()[kind], steps=4, checkpoint=tmp_path, prefetch=3)
    drawn = []

    class Watched:
        def __init__(self):
            self.iterator = iter(grain_batches()[kind])
            self.get_state, self.set_state = self.iterator.get_state, self.iterator.set_state

        def __iter__(self):
            return self

        def __next__(self):
            drawn.append(None)
            return next(self.iterator)

    _, rest = train(Watched(), steps=9, checkpoint=tmp_path)
    assert first + rest == whole
    # The four batches before were not drawn again.
    assert len(drawn) == 5


def test_the_position_after_a_batch_is_that_of_the_iterator_then():
    source = BatchSource(grain_batches()["dataset"])
    placed = placed_batches(
        source.iterator(Position()), lambda batch: batch, Position(), 3, lambda batch: None
    )
    found = [state_of_text(batch.position.iterator_state) for batch in placed]
    assert [state["next_index"] for state in found] == [1, 2, 3]
