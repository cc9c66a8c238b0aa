"""Values with tensors in a file: they come back as they were, and nothing else does."""

import hashlib
import json
import math
import pickle
from collections import OrderedDict

import pytest
import torch

from penstock.errors import FormatError, TrainError
from penstock.torch.state_file import read_state, write_state

CPU = torch.device("cpu")


def again(values, path):
    """Return values written and read."""
    return read_state(path, CPU, write_state(path, values))


def test_values_come_back_as_they_were(tmp_path):
    values = {
        "plain": [None, True, 3, -(10**30), 2**128 - 1, 0.1, "text \u00e9", b"\x00\xff", (1, (2, [3])), {}],
        "keys": {0: "zero", "0": "text", (1, 2): "tuple", None: 1},
        "torch": [torch.float16, torch.device("cpu")],
    }
    found = again(values, tmp_path / "a")
    assert found == values
    assert isinstance(found["plain"][8], tuple)
    odd = again({"odd": [math.inf, -math.inf, math.nan]}, tmp_path / "b")["odd"]
    assert odd[:2] == [math.inf, -math.inf]
    assert math.isnan(odd[2])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0, 3)])
def test_tensors_come_back_to_the_bit(dtype, shape, tmp_path):
    tensor = torch.randn(shape).to(dtype)
    found = again({"tensor": tensor, "other": torch.ones(3)}, tmp_path / "a")["tensor"]
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert bytes(found.reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8))


def test_tensors_keep_their_memory_format_and_views_are_written_alone(tmp_path):
    last = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    view = torch.arange(10_000.0)[::1000]
    found = again({"last": last, "view": view, "wide": torch.ones(1).expand(4)}, tmp_path / "a")
    assert found["last"].stride() == last.stride()
    assert torch.equal(found["last"], last)
    assert torch.equal(found["view"], view)
    assert torch.equal(found["wide"], torch.ones(4))
    assert (tmp_path / "a").stat().st_size < 2000
    assert all(tensor._base is None or tensor._base.numel() == tensor.numel() for tensor in found.values())


def test_a_modules_state_keeps_the_versions_of_its_modules(tmp_path):
    state = torch.nn.BatchNorm1d(3).state_dict()
    found = again({"model": state}, tmp_path / "a")["model"]
    assert isinstance(found, OrderedDict)
    assert found._metadata == dict(state._metadata)


def test_what_cannot_be_kept_is_refused_before_it_is_written(tmp_path):
    for value in (object(), {1, 2}, torch.ones(3).to_sparse(), 2**128, "\ud800", {"\udc00": 1}):
        with pytest.raises(TrainError, match="a checkpoint cannot hold a"):
            write_state(tmp_path / "a", {"value": value})
    assert not (tmp_path / "a").exists()


class Planted:
    """Unpickling it fails the test."""

    def __reduce__(self):
        return pytest.fail, ("unpickled",)


def document(tree, rest=b""):
    """Return a file with that description."""
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    return b"penstock-state/1 %d\n%s%s" % (len(text), text, rest)


HOSTILE = {
    "nothing": b"",
    "text": b"hello\n" * 100,
    "a pickle": pickle.dumps(Planted()),
    "another format": b"penstock-state/9 2\n{}",
    "no length": b"penstock-state/1 x\n{}",
    "a length behind the end": b"penstock-state/1 99\n{}",
    "a negative length": b"penstock-state/1 -5\n{}",
    "a list": document([1]),
    "an unknown kind": document({"object": "os.system"}),
    "two kinds": document({"tuple": [], "dict": []}),
    "a key that cannot be one": document({"dict": [[[1], 2]]}),
    "an unknown type": document({"dict": [["t", {"tensor": ["os", [1], [0], 0]}]]}),
    "a tensor behind the end": document({"dict": [["t", {"tensor": ["float32", [9], [0], 0]}]]}, bytes(32)),
    "a tensor before the start": document({"dict": [["t", {"tensor": ["float32", [1], [0], -4]}]]}, bytes(32)),
    "a huge tensor": document({"dict": [["t", {"tensor": ["float32", [2**40, 2**40], [0, 1], 0]}]]}, bytes(32)),
    "a huge empty tensor": document({"dict": [["t", {"tensor": ["float32", [0, 2**70], [0, 1], 0]}]]}),
    "a shape of less than nothing": document(
        {"dict": [["t", {"tensor": ["float32", [-1, -8], [0, 1], 0]}]]}, bytes(32)
    ),
    "an order that is none": document({"dict": [["t", {"tensor": ["float32", [2, 4], [0, 0], 0]}]]}, bytes(32)),
    "a shape of text": document({"dict": [["t", {"tensor": ["float32", ["a"], [0], 0]}]]}, bytes(32)),
    "deep nesting": document(b"[" * 100_000 + b"]" * 100_000),
    "a number of 5000 digits": document(b"1" * 5000),
    "a number of 400 digits": document(b'{"dict": [["lr", -%s]]}' % (b"9" * 400)),
    "a number of 129 bits": document({"dict": [["lr", 2**128]]}),
    "a float beyond float64": document(b'{"dict": [["lr", 1e400]]}'),
    "half of a surrogate pair": document(b'{"dict": [["lr", "\\ud800"]]}'),
    "text in UTF-16": document('{"dict": []}'.encode("utf-16")),
    "a million dimensions": document({"dict": [["t", {"tensor": ["float32", [2**62] * 10**6, [0], 0]}]]}),
    "tensors over one another": document(
        {"dict": [[place, {"tensor": ["float32", [8], [0], place]}] for place in (0, 0, 4)]}, bytes(1024)
    ),
    "a hole between tensors": document(
        {"dict": [[place, {"tensor": ["float32", [1], [0], place]}] for place in (0, 128)]}, bytes(1024)
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_clear_line_even_with_the_right_digest(case, tmp_path):
    path = tmp_path / "model.state"
    path.write_bytes(HOSTILE[case])
    with pytest.raises(FormatError) as raised:
        read_state(path, CPU, hashlib.sha256(HOSTILE[case]).hexdigest())
    assert str(raised.value).startswith(f"{path}: file: found ")
    assert "\n" not in str(raised.value)


def test_a_small_file_cannot_claim_to_be_a_large_one(tmp_path):
    shares = [[name, {"tensor": ["uint8", [1 << 20], [0], 0]}] for name in range(4096)]  # 4 GiB of 1 MiB
    path, data = tmp_path / "model.state", document({"dict": shares}, bytes(1 << 20))
    path.write_bytes(data)
    with pytest.raises(FormatError, match="its place is 1048576"):
        read_state(path, CPU, hashlib.sha256(data).hexdigest())
