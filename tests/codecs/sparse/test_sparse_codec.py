"""Sparse blocks: selection, merging and keeping, against naive arithmetic; bytes that nobody wrote are refused."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.codecs.header import NOT_FINITE, PADDED, Header, pack_header, parse_header
from penstock.codecs.registry import make_codec
from penstock.codecs.sparse.block import INDEX_FORMS, VALUE_BITS, BlockForm, Entries, entry_count, largest_gaps_nbytes
from penstock.codecs.sparse.entry_kernels import read_gaps, write_gaps
from penstock.codecs.sparse.published import PublishedCodec
from penstock.codecs.sparse.sparse_codec import NAME, SparseCodec
from penstock.errors import CodecError, NonFiniteError
from sparse_oracle import dyadic, keep_largest

FORMS = st.builds(
    SparseCodec,
    st.sampled_from([0.004, 0.05, 0.3, 1.0]),
    st.sampled_from([32, 16]),
    st.sampled_from(INDEX_FORMS),
)


def encode(codec, gradient, residual=None):
    out = np.full(codec.max_nbytes(gradient.size) + 8, 0xAB, np.uint8)
    nbytes = codec.encode(gradient, residual, out[:-8])
    assert nbytes <= out.size - 8
    assert (out[-8:] == 0xAB).all(), "encode wrote past the end of its buffer"
    return out[:-8]


def decode(codec, block, numel):
    out = np.full(numel + 16, 7.0, np.float32)
    codec.decode(block, out[8:-8])
    assert (out[:8] == 7).all(), "decode wrote before its output"
    assert (out[-8:] == 7).all(), "decode wrote behind its output"
    return out[8:-8]


@given(FORMS, st.integers(1, 600), st.integers(0, 99))
def test_exactly_the_largest_of_gradient_and_residual_are_sent_and_the_rest_is_kept(codec, numel, seed):
    rng = np.random.default_rng(seed)
    gradient, residual = dyadic(rng, numel), dyadic(rng, numel)
    total = gradient + residual
    sent = decode(codec, encode(codec, gradient, residual), numel)
    assert np.array_equal(sent, keep_largest(total, codec.entries(numel)))
    assert np.array_equal(residual, total - sent)


@given(FORMS, st.integers(1, 600), st.integers(0, 99))
def test_a_merge_keeps_the_largest_of_the_sum_and_hands_the_rest_to_the_residual(codec, numel, seed):
    rng = np.random.default_rng(seed)
    blocks = [encode(codec, dyadic(rng, numel)) for _ in range(2)]
    total = sum(decode(codec, block, numel) for block in blocks)
    residual, other = dyadic(rng, numel), blocks[0].copy()
    before = residual.copy()
    codec.merge(blocks[0], blocks[1], residual)
    merged = decode(codec, blocks[1], numel)
    assert np.array_equal(merged, keep_largest(total, codec.entries(numel)))
    assert np.array_equal(merged + residual, total + before)
    assert np.array_equal(blocks[0], other), "a merge changes only one of its blocks"


LARGE = {
    "gaussian": lambda rng, numel: rng.standard_normal(numel),
    "few different values": lambda rng, numel: rng.integers(-2, 3, numel),
    "sorted": lambda rng, numel: np.sort(rng.standard_normal(numel)),
    "all in one place": lambda rng, numel: np.where(np.arange(numel) < numel // 9, 1e6 * rng.standard_normal(numel), 0),
    "zeros": lambda rng, numel: np.zeros(numel),
}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("density", [0.001, 0.06])
def test_large_tensors_whose_threshold_is_guessed_from_a_sample_are_exact_too(kind, density):
    rng, numel, codec = np.random.default_rng(7), 300_000, SparseCodec(density)
    gradients = [LARGE[kind](rng, numel).astype(np.float32) for _ in range(2)]
    residual = np.zeros(numel, np.float32)
    blocks = [encode(codec, gradient, np.zeros(numel, np.float32)) for gradient in gradients]
    sent = [decode(codec, block, numel).copy() for block in blocks]
    for gradient, one in zip(gradients, sent, strict=True):
        assert np.array_equal(one, keep_largest(gradient, codec.entries(numel)))
    codec.merge(blocks[0], blocks[1], residual)
    merged = decode(codec, blocks[1], numel)
    assert np.array_equal(np.abs(merged).sum(), np.abs(keep_largest(sent[0] + sent[1], codec.entries(numel))).sum())
    assert np.array_equal(merged + residual, sent[0] + sent[1])


@given(FORMS, st.integers(1, 300), st.integers(0, 99))
def test_two_ranks_that_merge_the_same_blocks_get_the_same_bytes(codec, numel, seed):
    rng = np.random.default_rng(seed)
    one, other = (encode(codec, rng.standard_normal(numel).astype(np.float32)) for _ in range(2))
    here, there = one.copy(), other.copy()
    codec.merge(other, here, np.zeros(numel, np.float32))
    codec.merge(one, there, None)
    used = codec.entries(numel) and parse_header(here.data).nbytes + parse_header(here.data).body_nbytes
    assert np.array_equal(here[:used], there[:used])


@given(st.integers(1, 300), st.integers(0, 99))
def test_rounding_to_16_bits_is_kept_too(numel, seed):
    codec = SparseCodec(0.2, value_bits=16)
    rng = np.random.default_rng(seed)
    gradients = rng.standard_normal((2, numel)).astype(np.float32)
    residuals = np.zeros((2, numel), np.float32)
    blocks = [encode(codec, *pair) for pair in zip(gradients, residuals, strict=True)]
    sent = [decode(codec, block, numel) for block in blocks]
    assert np.array_equal(gradients, np.stack(sent) + residuals), "what bfloat16 cut off is exact in float32"
    before = residuals[1].copy()
    codec.merge(blocks[0], blocks[1], residuals[1])
    left = decode(codec, blocks[1], numel).astype(np.float64) + residuals[1] - before
    np.testing.assert_allclose(left, sent[0].astype(np.float64) + sent[1], rtol=0, atol=1e-6)


def test_equal_magnitudes_are_settled_by_the_lowest_index():
    codec = SparseCodec(0.5)
    block = encode(codec, np.array([1, -1, 1, -1], np.float32))
    assert decode(codec, block, 4).tolist() == [1, -1, 0, 0]
    other = encode(codec, np.array([0, 0, -1, 1], np.float32))
    residual = np.zeros(4, np.float32)
    codec.merge(other, block, residual)
    assert decode(codec, block, 4).tolist() == [1, -1, 0, 0]
    assert residual.tolist() == [0, 0, -1, 1]


def test_values_that_cancel_stay_entries():
    codec = SparseCodec(0.5)
    block = encode(codec, np.array([3, 2, 0, 0], np.float32))
    codec.merge(encode(codec, np.array([-3, -2, 0, 0], np.float32)), block, None)
    assert codec.read(block, 4).indices.tolist() == [0, 1]
    assert decode(codec, block, 4).tolist() == [0, 0, 0, 0]


def test_a_value_without_another_adds_zero_wherever_it_stands():
    """So -0 becomes 0 among the other block's entries as behind them: what a kernel on a GPU does with each entry."""
    codec, blocks = SparseCodec(0.5), []
    for indices, values in (([0, 2, 6, 7], [-0.0, 1, -0.0, 2]), ([1, 2, 3, 4], [3, 1, 1, 1])):
        blocks.append(np.zeros(codec.max_nbytes(9), np.uint8))
        codec.write(Entries(np.array(indices, np.int32), np.array(values, np.float32)), blocks[-1], 9)
    dropped = []
    codec.merge(blocks[1], blocks[0], lambda indices, values: dropped.extend(zip(indices, values, strict=True)))
    assert [index for index, _ in dropped] == [0, 4, 6]
    assert not np.signbit([value for _, value in dropped]).any()


def test_decode_add_adds():
    codec = SparseCodec(0.1)
    rng = np.random.default_rng(1)
    gradient, total = rng.standard_normal((2, 500)).astype(np.float32)
    block, wanted = encode(codec, gradient), total + keep_largest(gradient, 50)
    codec.decode_add(block, total)
    assert np.array_equal(total, wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gradients_are_taken_as_they_are(dtype):
    torch = pytest.importorskip("torch")
    codec = SparseCodec(0.1)
    gradient = torch.randn(500, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    out = torch.empty(codec.max_nbytes(500), dtype=torch.uint8)
    codec.encode(gradient, None, out)
    wanted = torch.from_numpy(keep_largest(gradient.float().numpy(), 50)).to(gradient.dtype)
    back = torch.ones_like(gradient)
    codec.decode(out, back)
    assert torch.equal(back, wanted)
    codec.decode_add(out, back)
    assert torch.equal(back, wanted + wanted)


@pytest.mark.parametrize("numel", [0, 1, 2])
def test_empty_and_tiny_tensors(numel):
    codec = SparseCodec(0.001)
    gradient, residual = np.ones(numel, np.float32), np.zeros(numel, np.float32)
    block = encode(codec, gradient, residual)
    assert decode(codec, block, numel).sum() == min(numel, 1)
    assert residual.sum() == max(0, numel - 1)


def test_the_wire_takes_eight_bytes_per_entry_and_less_with_gaps_and_16_bits():
    numel, count = 25_000_000, 25_000
    nbytes = {
        (bits, form): BlockForm.of(numel, count, bits, form).max_nbytes for bits in (32, 16) for form in INDEX_FORMS
    }
    assert nbytes[32, "int32"] == 8 * count
    assert nbytes[16, "int32"] == 6 * count
    assert nbytes[32, "smaller"] == nbytes[32, "gaps"] < 6.1 * count
    assert nbytes[16, "gaps"] < 4.1 * count
    assert not BlockForm.of(1 << 30, 1, 32, "smaller").gaps, "one far index is shorter as it is"


@given(st.floats(0.01, 1.0), st.integers(1, 500), st.sampled_from(VALUE_BITS), st.sampled_from(INDEX_FORMS))
def test_a_block_is_never_longer_than_all_values(density, numel, bits, index_form):
    """And where it would be, all values are sent: nothing is left, and two such blocks add up as dense ones do."""
    codec = SparseCodec(density, bits, index_form)
    form = BlockForm.of(numel, entry_count(density, numel), bits, index_form)
    assert form.max_nbytes <= (4 * numel if bits == 32 else 4 * -(-numel // 2))
    gradients = np.random.default_rng(0).integers(-8, 9, (2, numel)).astype(np.float32)  # exact in bfloat16, sums too
    residual = np.zeros(numel, np.float32)
    one, other = (encode(codec, each, residual) for each in gradients)
    if form.count == numel:
        assert not residual.any()
        codec.merge(other, one, residual)
        assert np.array_equal(decode(codec, one, numel), gradients.sum(axis=0))
        assert not residual.any()
    else:
        assert codec.entries(numel) == entry_count(density, numel)


@given(st.data())
def test_gaps_never_take_more_than_their_bound(data):
    numel = data.draw(st.one_of(st.integers(1, 1000), st.integers(1, 1 << 40)))
    indices = np.array(sorted(data.draw(st.sets(st.integers(0, numel - 1), min_size=1, max_size=40))), np.int64)
    out = np.zeros(10 * indices.size, np.uint8)
    nbytes = write_gaps(indices, out)
    assert nbytes <= largest_gaps_nbytes(indices.size, numel)
    back = np.zeros_like(indices)
    assert read_gaps(out[:nbytes], numel, back)
    assert np.array_equal(back, indices)


def test_blocks_of_tensors_beyond_32_bit_indices():
    codec, numel = SparseCodec(1e-9, index_form="int32"), 5_000_000_000
    form = BlockForm.of(numel, 5, 32, "int32")
    assert form.gaps, "whatever was asked for"
    indices = np.array([0, 3, 2**31, 2**32 + 1, numel - 1], np.int64)
    blocks = [np.zeros(codec.max_nbytes(numel), np.uint8) for _ in range(2)]
    for block, shift in zip(blocks, (0, -1), strict=True):
        nbytes = form.write(
            Entries(indices + shift + (indices == 0), np.arange(1, 6, dtype=np.float32)), block[64 + 16 :]
        )
        codec.write_header(block, numel, nbytes)
    codec.merge(blocks[0], blocks[1], None)
    merged = codec.read(blocks[1], numel)
    assert merged.indices.tolist() == [2**31 - 1, 2**32, 2**32 + 1, numel - 2, numel - 1]
    assert merged.values.tolist() == [3, 4, 4, 5, 5]


@pytest.mark.slow
def test_a_tensor_of_more_than_2_to_31_elements_is_encoded():
    numel = (1 << 31) + 100
    gradient = np.zeros(numel, np.float32)  # pages that nobody writes take no memory
    places = [5, 1 << 20, (1 << 31) - 1, (1 << 31) + 99]
    gradient[places] = [1, -2, 3, -4]
    codec = SparseCodec(3 / numel)
    block = np.zeros(codec.max_nbytes(numel), np.uint8)
    codec.encode(gradient, None, block)
    assert codec.read(block, numel).indices.tolist() == places[1:]
    codec.decode_add(block, gradient)
    assert gradient[places].tolist() == [1, -4, 6, -8]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_is_named(bad):
    gradient = np.ones(300, np.float32)
    gradient[217] = bad
    with pytest.raises(NonFiniteError, match=r"conv1\.weight holds NaN or infinity; fix the loss, or pass on_nonfi"):
        SparseCodec(0.01).encode(gradient, None, np.zeros(5000, np.uint8), tensor="conv1.weight")


def test_a_skipped_step_is_nan_for_all_and_what_others_sent_is_kept():
    codec = SparseCodec(0.1, on_nonfinite="skip")
    gradient, residual = np.arange(20, dtype=np.float32), np.ones(20, np.float32)
    gradient[3] = np.nan
    bad = encode(codec, gradient, residual)
    assert parse_header(bad.data).flags == NOT_FINITE
    assert (residual == 1).all(), "a step that is skipped leaves the residual alone"
    good = encode(codec, np.arange(20, dtype=np.float32))
    for read, write in ((bad, good.copy()), (good, bad.copy())):
        kept = np.zeros(20, np.float32)
        codec.merge(read, write, kept)
        assert np.array_equal(kept, keep_largest(np.arange(20, dtype=np.float32), 2))
        assert np.isnan(decode(codec, write, 20)).all()
    total = np.zeros(20, np.float32)
    codec.decode_add(bad, total)
    assert np.isnan(total).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"density": 0}, "density 0; wanted more than 0 and at most 1"),
        ({"density": 1.5}, r"density 1\.5; wanted"),
        ({"density": 0.1, "value_bits": 8}, "value_bits is 8; wanted one of 32, 16"),
        ({"density": 0.1, "index_form": "huffman"}, "index_form is 'huffman'; wanted one of int32, gaps, smaller"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(CodecError, match=message):
        SparseCodec(**arguments)


@pytest.mark.parametrize("residual", [np.zeros(3, np.float32), np.zeros(300)])
def test_a_residual_of_another_size_or_type_is_refused(residual):
    codec = SparseCodec(0.1)
    with pytest.raises(CodecError, match=r"the residual of w has .*; wanted 300 of float32"):
        codec.encode(np.ones(300, np.float32), residual, np.zeros(codec.max_nbytes(300), np.uint8), tensor="w")


# Hostile bytes

NUMEL = 257
CODECS = [SparseCodec(0.05, bits, form) for bits in (32, 16) for form in ("int32", "gaps")]
BLOCKS = [encode(codec, np.random.default_rng(3).standard_normal(NUMEL).astype(np.float32)) for codec in CODECS]
CASES = st.sampled_from(range(len(CODECS)))


def try_decode(case, data):
    """Decode and merge; True if the codec took the bytes, False if it refused them cleanly."""
    room = np.full(NUMEL + 64, 5.0, np.float32)
    block = np.frombuffer(bytearray(data), np.uint8)  # writable, as buffers are: no kernels for other arrays
    try:
        CODECS[case].decode(block, room[32:-32])
        taken = True
    except CodecError:
        taken = False
    kept = np.full(NUMEL + 64, 5.0, np.float32)
    try:
        CODECS[case].merge(block, BLOCKS[case].copy(), kept[32:-32])
        assert taken, "merge took what decode refused"
    except CodecError:
        assert not taken, "merge refused what decode took"
    for guard in (room[:32], room[-32:], kept[:32], kept[-32:]):
        assert (guard == 5).all()
    return taken


@settings(max_examples=200)
@given(CASES, st.data())
def test_flipped_bits_never_reach_beyond_the_output(case, data):
    damaged = bytearray(BLOCKS[case].tobytes())
    for bit in data.draw(st.lists(st.integers(0, 8 * len(damaged) - 1), min_size=1, max_size=8)):
        damaged[bit // 8] ^= 1 << bit % 8
    taken = try_decode(case, bytes(damaged))
    if damaged[:80] != BLOCKS[case].tobytes()[:80]:
        assert not taken, "a changed header was believed"


@settings(max_examples=200)
@given(CASES, st.data())
def test_arbitrary_bodies_under_an_honest_header_never_reach_beyond_the_output(case, data):
    codec = CODECS[case]
    body = data.draw(st.binary(max_size=codec.max_nbytes(NUMEL) - 80 + 8))
    flags = data.draw(st.integers(0, 3))
    header = Header(NAME, codec._parameters, NUMEL, len(body), flags)
    assert not try_decode(case, pack_header(header) + body) or body or flags == NOT_FINITE


@given(CASES, st.data())
def test_truncated_blocks_are_refused(case, data):
    header = parse_header(BLOCKS[case].data)
    whole = BLOCKS[case].tobytes()[: header.nbytes + header.body_nbytes]
    assert not try_decode(case, whole[: data.draw(st.integers(0, len(whole) - 1))])


@pytest.mark.parametrize("index", [-1, NUMEL, 2**31 - 1, -(2**31), 0])
def test_an_index_outside_the_tensor_or_out_of_order_is_refused(index):
    codec, damaged = CODECS[0], bytearray(BLOCKS[0].tobytes())
    last = 80 + 8 * codec.entries(NUMEL) - 4
    damaged[last : last + 4] = struct.pack("<i", index)
    with pytest.raises(CodecError, match="sparse indices are not ascending from 0 to below 257: the block is damaged"):
        codec.decode(np.frombuffer(damaged, np.uint8), np.zeros(NUMEL, np.float32))


def test_blocks_of_another_codec_or_tensor_say_so():
    wide = encode(SparseCodec(0.1), np.ones(NUMEL, np.float32))
    with pytest.raises(CodecError, match=r"block of sparse\(0\.1, 32, 2\); wanted sparse\(density=0\.05.*same codec"):
        CODECS[0].decode(wide, np.zeros(NUMEL, np.float32))
    with pytest.raises(CodecError, match="block of 257 elements; wanted 256: it belongs to another tensor"):
        CODECS[0].decode(BLOCKS[0], np.zeros(NUMEL - 1, np.float32))
    padded = pack_header(Header(NAME, CODECS[0]._parameters, NUMEL, 0, PADDED))
    with pytest.raises(CodecError, match="flags 0x1 and 0 bytes: it is damaged"):
        CODECS[0].decode(np.frombuffer(padded, np.uint8), np.zeros(NUMEL, np.float32))


def test_k_is_the_rounded_share_and_at_least_one():
    assert [entry_count(0.001, numel) for numel in (0, 1, 1499, 1501, 10**6)] == [0, 1, 1, 2, 1000]
    assert entry_count(1.0, 7) == 7


def test_a_plan_names_sparse_codecs_like_all_others():
    assert make_codec("sparse(density=0.01, value_bits=16)") == SparseCodec(0.01, 16)
    assert make_codec("sparse") == SparseCodec(0.001)
    assert make_codec("published(density=0.01)") == PublishedCodec(SparseCodec(0.01))
    assert make_codec("onebit").name == "onebit()"
    with pytest.raises(CodecError, match="no parameter 'bitwidth'; wanted density and value_bits"):
        make_codec("sparse(bitwidth=2)")
