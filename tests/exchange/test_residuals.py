"""Residuals belong to parameters, whatever bucket they are in."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.codecs.registry import make_codec
from penstock.errors import PlanError
from penstock.exchange.residuals import Layout, Residuals
from penstock.torch.arrays import TorchArrays, layout_of


def filled(**sizes):
    """A store with one bucket per parameter, each with values of its own."""
    residuals = Residuals()
    for number, (name, size) in enumerate(sizes.items()):
        residuals.bucket([name], [size])[:] = 10 * number + np.arange(size)
    return residuals


def same(one, other):
    """The same parameters with the same values."""
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name])


@given(st.lists(st.integers(1, 4), max_size=5), st.randoms())
def test_a_layout_is_the_order_in_which_a_dense_parameter_lies_in_memory(sizes, random):
    order = random.sample(range(len(sizes)), len(sizes))
    parameter = torch.randn([sizes[place] for place in order]).permute(
        [order.index(place) for place in range(len(sizes))]
    )
    flat, layout = parameter.as_strided((parameter.numel(),), (1,)), layout_of(parameter)
    assert layout.in_memory(parameter.numpy()).tolist() == flat.tolist()
    assert torch.equal(torch.from_numpy(layout.logical(flat.numpy())), parameter)
    assert layout.logical(flat.numpy()).flags.c_contiguous


@pytest.mark.parametrize("parameter", [torch.zeros(3, 1).expand(3, 4), torch.zeros(4, 6)[:, :3], torch.zeros(2, 0)])
def test_a_parameter_with_gaps_lies_in_buckets_in_logical_order(parameter):
    assert layout_of(parameter) == Layout.contiguous(tuple(parameter.shape))


def test_complex_numbers_lie_in_buckets_as_pairs():
    parameter = torch.zeros(3, 2, dtype=torch.complex64).t()
    assert layout_of(parameter) == Layout((2, 3, 2), (2, 4, 1))


def test_a_dimension_of_one_element_has_no_order():
    single = torch.zeros(4, 3, 1, 1)
    other = single.to(memory_format=torch.channels_last)
    assert single.as_strided((4, 3, 1, 1), (3, 1, 3, 3)).stride() != single.stride()
    assert layout_of(single.as_strided((4, 3, 1, 1), (3, 1, 3, 3))) == layout_of(single) == layout_of(other)


def test_a_bucket_owes_nothing_at_first_and_keeps_its_memory():
    residuals = Residuals()
    memory = residuals.bucket(["a", "b"], [2, 3])
    assert memory.tolist() == [0.0] * 5
    assert residuals.bucket(["a", "b"], [2, 3]) is memory


@given(st.permutations(["a", "b", "c", "d"]), st.integers(0, 4))
def test_values_move_with_their_parameter_into_other_buckets(order, cut):
    sizes = {"a": 1, "b": 2, "c": 3, "d": 0}
    residuals = filled(**sizes)
    before = residuals.values()
    for names in (order[:cut], order[cut:]):
        memory = residuals.bucket(names, [sizes[name] for name in names])
        assert memory.tolist() == [value for name in names for value in before[name]]
    same(residuals.values(), before)


def test_what_a_new_bucket_writes_is_what_a_checkpoint_holds():
    residuals = filled(a=2, b=2)
    residuals.bucket(["b", "a"], [2, 2])[:] = [1, 2, 3, 4]
    same(residuals.values(), {"a": np.float32([3, 4]), "b": np.float32([1, 2])})


def test_a_parameter_may_stay_behind_when_its_bucket_is_taken_apart():
    residuals = Residuals()
    residuals.bucket(["a", "b"], [1, 1])[:] = [5, 6]
    residuals.bucket(["a"], [1])
    assert residuals.bucket(["b"], [1]).tolist() == [6]


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_has_memory_of_its_own(twin):
    residuals = filled(a=2, b=2)
    other = twin(residuals)
    residuals.bucket(["a", "b"], [2, 2])[:] = -1
    assert other.bucket(["a", "b"], [2, 2]).tolist() == [0, 1, 10, 11]


def test_restoring_undoes_what_was_sent_since_saving():
    residuals = filled(a=2)
    residuals.save()
    residuals.bucket(["a"], [2])[:] = 7
    residuals.bucket(["new"], [1])[:] = 7
    residuals.restore()
    assert {name: kept.tolist() for name, kept in residuals.values().items()} == {"a": [0, 1], "new": [0]}


class ADevice(TorchArrays):
    """Tensors of the CPU that are said to lie on a device, where arrays cannot be assigned."""

    def device(self, values):
        return values.device if isinstance(values, torch.Tensor) else None


def test_what_was_loaded_on_the_host_is_restored_where_its_bucket_lies_now():
    residuals = Residuals(ADevice())
    residuals.load({"a": np.array([1, 2], np.float32)})
    residuals.save()
    residuals.bucket(["a"], [2], torch.device("cpu"))[:] = 7
    residuals.restore()
    assert residuals.bucket(["a"], [2], torch.device("cpu")).tolist() == [1, 2]


def test_a_state_of_another_model_is_refused_by_name():
    residuals = Residuals()
    residuals.load({"a": np.zeros(3, np.float32)})
    with pytest.raises(PlanError, match="residual of 'a' has 3 elements, its parameter 2; load the state of this"):
        residuals.bucket(["a"], [2])


def test_what_a_codec_put_off_is_settled_by_whoever_looks() -> None:
    codec, residuals = make_codec("onebit"), Residuals()
    gradient = np.random.default_rng(0).standard_normal(64, np.float32)
    plain, out = np.zeros(64, np.float32), np.zeros(codec.max_nbytes(64), np.uint8)
    for _ in range(3):
        codec.encode(gradient, plain, out)
        codec.encode(gradient, residuals.deferred(["a", "b"], [40, 24]).piece(0, 64), out)
    assert np.concatenate(list(residuals.values().values())).tobytes() == plain.tobytes()
    codec.encode(gradient, plain, out)
    codec.encode(gradient, residuals.deferred(["a", "b"], [40, 24]).piece(0, 64), out)
    residuals.bucket(["b"], [24])  # moves what it owes to another bucket
    assert residuals.values()["b"].tobytes() == plain[40:].tobytes()


def test_a_restored_residual_owes_nothing_of_what_was_put_off() -> None:
    codec, residuals = make_codec("onebit"), Residuals()
    out = np.zeros(codec.max_nbytes(8), np.uint8)
    residuals.bucket(["a"], [8])[:] = 3
    residuals.save()
    codec.encode(np.ones(8, np.float32), residuals.deferred(["a"], [8]).piece(0, 8), out)
    residuals.restore()
    assert residuals.values()["a"].tolist() == [3.0] * 8


@pytest.mark.parametrize("name", ["onebit", "terngrad", "blocks(bits=4)"])
@pytest.mark.parametrize("pieces", [[(0, 6400)], [(0, 1600), (1600, 4800), (4800, 6400)], [(800, 3200), (4000, 5000)]])
def test_residuals_that_are_copied_are_left_as_they_are(name: str, pieces: list[tuple[int, int]]) -> None:
    codec, sizes = make_codec(name), {"a": 4000, "b": 2400}
    rooms = {name: np.full(size, np.nan, np.float32) for name, size in (sizes | {"c": 3}).items()}
    sent: dict[bool, list[bytes]] = {False: [], True: []}
    for copies in (False, True):
        codec.begin(1)
        residuals, out = Residuals(), np.zeros(codec.max_nbytes(6400), np.uint8)
        for step in range(4):
            gradient = np.random.default_rng(step).standard_normal(6400, np.float32)
            whole = residuals.deferred(list(sizes), list(sizes.values()))
            for start, stop in pieces:
                codec.encode(gradient[start:stop], whole.piece(start, stop), out)
                sent[copies].append(out.tobytes())
            if copies:
                residuals.copy_to(rooms)
    assert sent[True] == sent[False]
    assert {name: rooms[name].tobytes() for name in sizes} == {
        name: each.tobytes() for name, each in residuals.values().items()
    }
    assert rooms["c"].tolist() == [0.0] * 3


def test_a_bucket_that_comes_later_changes_no_bit_of_the_others() -> None:
    """In lanes it depends on timing which bucket is new before which other is encoded again."""
    codec, sent = make_codec("onebit"), []
    for comes_between in (False, True):
        residuals, out, gradient = Residuals(), np.zeros(codec.max_nbytes(701), np.uint8), np.zeros(701, np.float32)
        encode = codec.bind_encode(gradient, residuals.deferred(["a"], [701]).piece(0, 701, 0.5), out)
        for step in range(4):
            gradient[:] = np.random.default_rng(step).standard_normal(701, np.float32)
            encode()
            if comes_between:
                residuals.bucket([f"b{step}"], [3])
                residuals.take(f"b{step}", 3)
        sent.append(out.tobytes())
    assert sent[0] == sent[1]
