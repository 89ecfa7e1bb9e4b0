"""What is wrong with the files of weights is found from their headers, all at once and by name."""

import json
import mmap
import os
import re
import shutil

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
from safetensors.numpy import save_file

from penzai_shard import CheckpointDamagedError, CheckpointNotFoundError
from penzai_shard.pretrained.safetensors_header import DTYPES
from penzai_shard.pretrained.tensor_files import open_tensors, read_config

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def written(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + data)
    return path


def entry(dtype="F32", shape=(2,), start=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


TWICE = b'{"w":%s,"w":%s}' % ((json.dumps(entry()).encode(),) * 2)
NOT_WHOLE = {
    "truncated": (({"w": entry()}, bytes(7)), "is truncated: its tensors take 8 bytes, and 7"),
    "longer": (({"w": entry()}, bytes(9)), "has 1 bytes more than its tensors take"),
    "header too long": (({"w": entry()}, bytes(8), 10**6), "its header should have 1,000,000"),
    "header too short": (({"w": entry()}, bytes(8), 5), "has a header that is not JSON"),
    "not JSON": ((b"{not json}",), "has a header that is not JSON"),
    "deep JSON": ((b"[" * 100_000,), "has a header that is not JSON"),
    "not text": ((b"\xff\xfe{}",), "has a header that is not JSON"),
    "not an object": ((b"[1]",), "is damaged: invalid JSON in header"),
    "overlap": (
        ({"w": entry(), "b": entry(start=4, end=12)}, bytes(12)),
        "the bytes of tensor 'b', 4 to 12, overlap those of another",
    ),
    "hole": (
        ({"w": entry(), "b": entry(start=12, end=20)}, bytes(20)),
        "the bytes of tensor 'b', 12 to 20, leave a hole before them",
    ),
    "backwards": (({"w": entry(start=8, end=0)}, bytes(8)), "bytes of tensor 'w', 8 to 0"),
    "past the end": (({"w": entry(shape=(4,), end=16)}, bytes(8)), "take 16 bytes, and 8 are"),
    "length of dtype": (
        ({"w": entry(shape=(3,))}, bytes(8)),
        r"tensor 'w' has 8 bytes, and F32\[3\] takes 12",
    ),
    "unknown dtype": (({"w": entry("F3")}, bytes(8)), "has tensor 'w' of dtype 'F3', which this"),
    "packed dtype": (({"w": entry("F4", (16,))}, bytes(8)), "dtype F4, such as 'w' .1 in all."),
    "negative": (({"w": entry(shape=(-2,))}, bytes(8)), "tensor 'w' has 8 bytes"),
    "huge": (({"w": entry(shape=(2**62, 4))}, bytes(8)), "tensor 'w' has 8 bytes"),
    "no offsets": (({"w": {"dtype": "F32", "shape": [2]}}, bytes(8)), "missing field .data_off"),
    "twice": ((TWICE, bytes(8)), "has 'w' twice in its header"),
}


@pytest.mark.parametrize("fault", NOT_WHOLE)
def test_a_file_that_is_not_whole_is_refused_by_name(fault, tmp_path):
    content, text = NOT_WHOLE[fault]
    written(tmp_path / "model.safetensors", *content)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointDamagedError, match=text) as caught:
            open_tensors(path)
        assert str(caught.value).startswith(f"cannot read the weights at {path}:")
        assert caught.value.problems[0].startswith("model.safetensors: ")


OTHER_CONTENT = {
    b"": "model.safetensors: is empty",
    b"abc": "is truncated, or not of this format",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n": "git lfs pull",
    b"<!DOCTYPE html><html>": "is a web page",
    b"PK\x03\x04" + bytes(90): "is a file of torch.save under another name",
    b"\x80\x02}q\x00." + bytes(90): "is a pickle of Python under another name",
}


@pytest.mark.parametrize("content", OTHER_CONTENT)
def test_what_stands_in_place_of_weights_is_said(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointDamagedError, match=OTHER_CONTENT[content]):
        open_tensors(tmp_path)


def test_headers_whose_length_looks_like_another_file_are_read(tmp_path):
    for length in (ord("<"), 0x0280):
        text = json.dumps({"w": entry()}).encode().ljust(length)
        reader = open_tensors(written(tmp_path / "model.safetensors", text, bytes(8)))
        assert list(reader.tensors) == ["w"]


@pytest.fixture
def two_files(tmp_path):
    weights = {"a": np.arange(4.0), "b": np.ones((2, 3), np.int8)}
    save_file({"a": weights["a"]}, tmp_path / FIRST)
    save_file({"b": weights["b"]}, tmp_path / SECOND)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST, "b": SECOND}}))
    return tmp_path


def changed_index(directory, **weight_map):
    content = {"a": FIRST, "b": SECOND} | weight_map
    content = {name: file for name, file in content.items() if file}
    (directory / INDEX).write_text(json.dumps({"weight_map": content}))


def index_text(text):
    return lambda directory: (directory / INDEX).write_text(text)


MISINDEXED = {
    "missing file": (
        lambda d: (d / SECOND).unlink(),
        f"{SECOND}: is not there, and the index says that it has 1 tensors, such as 'b'",
    ),
    "dangling link": (
        lambda d: ((d / SECOND).unlink(), (d / SECOND).symlink_to("gone")),
        f"{SECOND}: is a link to gone, which cannot be read",
    ),
    "directory": (
        lambda d: ((d / SECOND).unlink(), (d / SECOND).mkdir()),
        f"{SECOND}: is not a file, but a directory",
    ),
    "tensor elsewhere": (
        lambda d: changed_index(d, b=FIRST, a=SECOND),
        f"b: the index says that it is in {FIRST}, which does not have it. It is in {SECOND}",
    ),
    "tensor nowhere": (lambda d: changed_index(d, c=FIRST), f"c: .*{FIRST}, which does not have"),
    "tensor unknown": (
        lambda d: (changed_index(d, b=None), save_file({"b": np.ones(1)}, d / FIRST)),
        f"b: is in {FIRST}, and the index does not know it",
    ),
    "in two files": (
        lambda d: save_file({"a": np.ones(1), "b": np.ones(1)}, d / SECOND),
        f"a: is in {FIRST} and in {SECOND}. Remove",
    ),
    "path outside": (lambda d: changed_index(d, b=f"../{SECOND}"), "may name files beside it"),
    "not JSON": (index_text("{"), f"{INDEX}: is not JSON"),
    "list": (index_text("[]"), f"{INDEX}: does not say which tensor is in which file"),
    "no map": (index_text('{"metadata": {}}'), "does not say which tensor"),
    "map of numbers": (index_text('{"weight_map": {"a": 1}}'), "does not say which tensor"),
    "empty map": (index_text('{"weight_map": {}}'), "does not say which tensor"),
}


@pytest.mark.parametrize("fault", MISINDEXED)
def test_an_index_and_files_that_disagree_are_refused_by_name(fault, two_files):
    change, text = MISINDEXED[fault]
    change(two_files)
    with pytest.raises(CheckpointDamagedError, match=text):
        open_tensors(two_files)


def test_all_files_that_are_not_whole_are_named_at_once(two_files):
    for name in (FIRST, SECOND):
        (two_files / name).write_bytes((two_files / name).read_bytes()[:-1])
    with pytest.raises(CheckpointDamagedError) as caught:
        open_tensors(two_files)
    assert [p.partition(":")[0] for p in caught.value.problems] == [FIRST, SECOND]


def test_files_beside_those_of_the_index_are_left_alone(two_files):
    save_file({"a": np.zeros(1)}, two_files / "consolidated.safetensors")
    for path in (two_files, two_files / INDEX):
        reader = open_tensors(path)
        assert {name: tensor.shape for name, tensor in reader.tensors.items()} == {
            "a": (4,),
            "b": (2, 3),
        }
    assert reader.read("b", (slice(1, 2), slice(0, 2))).tolist() == [[1, 1]]


def test_a_path_without_weights_says_what_it_is_and_what_is_near(tmp_path, two_files, monkeypatch):
    monkeypatch.chdir(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()

    def refused(path, text):
        with pytest.raises(CheckpointNotFoundError, match=text):
            open_tensors(path)

    refused(empty, "the directory has no file whose name ends in .safetensors")
    refused(tmp_path / "modle", f"the path does not exist. Did you mean {re.escape(str(tmp_path))}")
    refused("gs://bucket/model", "weights are read from a file system")
    (empty / "pytorch_model.bin").touch()
    refused(empty, "it has pytorch_model.bin, which torch wrote. .*save_pretrained")
    (empty / "pytorch_model.bin").rename(empty / "model.gguf")
    refused(empty, "it has model.gguf, a format that is not read")
    refused(two_files / INDEX.replace("index", "indices"), "the path does not exist")
    refused(two_files / FIRST, "is one of 2 files of a model, which belong together. Give their")
    (two_files / INDEX).unlink()
    refused(two_files, f"cannot tell which weights in .* are meant: it has {FIRST}, {SECOND}")
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0f"
    snapshot.mkdir(parents=True)
    shutil.move(two_files / FIRST, snapshot / "model.safetensors")
    refused(tmp_path / "models--org--name", "Did you mean .*snapshots/0f?")


def test_a_name_of_the_hub_is_known_as_such(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"snapshot_download\('org/llama-7b'\)"):
        open_tensors("org/llama-7b")


def test_a_configuration_that_is_not_there_or_not_an_object_is_refused(tmp_path):
    for content, error, text in (
        (None, CheckpointNotFoundError, "there is no configuration .*config.json"),
        ("{", CheckpointDamagedError, "is not JSON"),
        ("[]", CheckpointDamagedError, "is not a JSON object"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(error, match=text):
            read_config(None, str(tmp_path))
    (tmp_path / "config.json").write_text('{"a": 1}')
    for given in (None, tmp_path, tmp_path / "config.json", {"a": 1}):
        assert read_config(given, str(tmp_path / "model.safetensors"))[0] == {"a": 1}
    with pytest.raises(TypeError, match="config is a int"):
        read_config(1, str(tmp_path))


def bits_of(dtype):
    """Numbers of a dtype with all bits in use, of bool both."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.arange(24).reshape(4, 6) % 2 == 0
    rng = np.random.default_rng(dtype.itemsize)
    return rng.integers(0, 256, (4, 6 * dtype.itemsize), np.uint8).view(dtype)


def test_every_dtype_is_read_to_the_bit_at_every_index(tmp_path):
    weights = {str(np.dtype(name)): bits_of(name) for name in DTYPES.values()}
    weights |= {"scalar": np.array(1.5, np.float32), "none": np.ones((0, 3), np.float16)}
    path = tmp_path / "model.safetensors"
    save_file(weights, path)
    reader = open_tensors(path)
    assert {name: tensor.dtype for name, tensor in reader.tensors.items()} == {
        name: str(array.dtype) for name, array in weights.items()
    }
    for name, array in weights.items():
        index = tuple(slice(min(1, n), max(n - 1, min(1, n))) for n in array.shape)
        for part in (index, tuple(slice(0, n) for n in array.shape)):
            read = reader.read(name, part)
            assert read.tobytes() == array[part].tobytes()
            assert read.dtype == array.dtype
            assert read.flags.owndata
            assert read.flags.writeable
            reader.forget([name])


def test_tensors_that_do_not_begin_at_multiples_of_their_size_are_read(tmp_path):
    header = json.dumps({"a": entry("I8", (1,), 0, 1), "b": entry("F64", (1,), 1, 9)}).encode()
    data = b"\x07" + np.float64(2.5).tobytes()
    reader = open_tensors(written(tmp_path / "x.safetensors", header + b" ", data))
    assert reader.read("b", (slice(0, 1),)).tolist() == [2.5]


def test_what_is_read_is_of_the_files_that_were_checked(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": np.arange(3)}, path)
    reader = open_tensors(path)
    save_file({"v": np.zeros(9)}, tmp_path / "other")
    os.replace(tmp_path / "other", path)
    assert reader.read("w", (slice(0, 3),)).tolist() == [0, 1, 2]


def test_files_that_are_replaced_while_they_are_opened_are_opened_anew(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(3)}, path)
    save_file({"w": np.ones(4)}, tmp_path / "newer")
    real = mmap.mmap

    def replaced_before(*arguments, **options):
        if (tmp_path / "newer").exists():
            os.replace(tmp_path / "newer", path)
        return real(*arguments, **options)

    monkeypatch.setattr(mmap, "mmap", replaced_before)
    assert open_tensors(path).read("w", (slice(0, 4),)).tolist() == [1.0] * 4
    monkeypatch.setattr(mmap, "mmap", lambda *a, **b: (path.touch(), real(*a, **b))[1])
    with pytest.raises(CheckpointDamagedError, match="were replaced 5 times while"):
        open_tensors(path)
