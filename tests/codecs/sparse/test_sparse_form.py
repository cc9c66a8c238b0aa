"""Sparse blocks that stay on a device, against the codec on the host, bit by bit; interpreted where there is no GPU."""

import os
from itertools import accumulate, pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
pytest.importorskip("triton", reason="install penstock[gpu] to test codecs on a device")

from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from penstock.codecs.sparse.block import INDEX_FORMS, Entries  # noqa: E402
from penstock.codecs.sparse.sparse_codec import SparseCodec  # noqa: E402
from sparse_oracle import dyadic  # noqa: E402

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
EXAMPLES = settings(max_examples=60)
CODECS = st.builds(
    SparseCodec, st.sampled_from([0.004, 0.05, 0.3, 0.6]), st.sampled_from([32, 16]), st.sampled_from(INDEX_FORMS)
)
SIZES = st.lists(st.sampled_from([1, 2, 3, 8, 50, 333, 700]), min_size=1, max_size=4)
HALF_ROUNDS_UP = np.float32(1 + 2**-8 + 2**-20)  # rounded to bfloat16 it is more than it was
KINDS = {
    "few different": lambda rng, n: dyadic(rng, n, bits=3),
    "any": lambda rng, n: rng.standard_normal(n).astype(np.float32),
    "zeros of both signs": lambda rng, n: rng.choice(np.array([0.0, -0.0, 1.0], np.float32), n),
    "sums that overflow": lambda rng, n: rng.choice(np.array([3.4e38, -3.4e38, 1e-45, HALF_ROUNDS_UP], np.float32), n),
    "not finite": lambda rng, n: rng.choice(np.array([np.inf, -np.inf, np.nan, 2.0], np.float32), n),
}


class Device:
    """Blocks of some pieces in memory on the device: what the form makes of them, and the same on the host."""

    def __init__(self, codec, sizes):
        self.codec, self.noted = codec, []
        self.form = codec.on_device(DEVICE, lambda: self.noted.append(True))
        self.edges = [0, *accumulate(sizes)]
        self.pieces = list(pairwise(self.edges))
        nbytes = [-(-self.form.max_nbytes(size) // 16) * 16 for size in sizes]
        self.places = [[end - own + which * sum(nbytes) for own, end in zip(nbytes, accumulate(nbytes), strict=True)]
                       for which in range(2)]  # fmt: skip
        self.memory = torch.zeros(2 * sum(nbytes), dtype=torch.uint8, device=DEVICE)

    def write(self, which, piece, entries, refused):
        """Write a block as the page of the format says."""
        numel = self.pieces[piece][1] - self.pieces[piece][0]
        values, whole = self.bits(entries.values), entries.indices.size == numel
        parts = [np.array([refused, 0, 0, 0], np.int32), values, np.zeros(values.nbytes % 4 // 2, np.uint16)]
        data = b"".join(part.tobytes() for part in (*parts, *([] if whole else [entries.indices.astype(np.int32)])))
        assert len(data) == self.form.max_nbytes(numel)
        start = self.places[which][piece]
        self.memory[start : start + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(DEVICE)

    def read(self, which, piece):
        """Return whether a block is refused, its entries, and nothing else."""
        numel = self.pieces[piece][1] - self.pieces[piece][0]
        start, count = self.places[which][piece], self.codec.entries(numel)
        data = self.memory[start : start + self.form.max_nbytes(numel)].cpu().numpy()
        width = self.codec.value_bits // 8
        halves = data[16 : 16 + count * width]
        values = halves.view(np.float32) if width == 4 else _wide(halves.view(np.uint16))
        indices = np.arange(count) if count == numel else data[-4 * count :].view(np.int32)
        return bool(data[:4].view(np.int32)[0]), Entries(indices, values)

    def bits(self, values):
        if self.codec.value_bits == 32:
            return values.astype(np.float32)
        return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()


def _wide(halves):
    return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)


def same(found, wanted):
    """Compare to the bit; a sum of infinities has another NaN on a GPU than on a CPU."""
    found, wanted = (np.where(np.isnan(each), np.float32(np.nan), each) for each in (found, wanted))
    return found.tobytes() == wanted.tobytes()


def random_entries(codec, numel, kind, rng):
    count = codec.entries(numel)
    return Entries(np.sort(rng.choice(numel, count, replace=False)).astype(np.int32), KINDS[kind](rng, count))


@EXAMPLES
@given(CODECS, SIZES, st.sampled_from([*KINDS]), st.booleans(), st.integers(0, 999))
@example(SparseCodec(0.05), [700], "any", True, 0)
@example(SparseCodec(0.3, value_bits=16), [333, 1, 50], "few different", True, 1)
@example(SparseCodec(0.3), [333, 50], "zeros of both signs", True, 2)
def test_a_merge_on_the_device_has_the_bits_of_unite_and_cut(codec, sizes, kind, keeps, seed):
    rng, device = np.random.default_rng(seed), Device(codec, sizes)
    owed = rng.standard_normal(device.edges[-1]).astype(np.float32)
    wanted_owed, wanted = owed.copy(), []
    for piece, numel in enumerate(sizes):
        refused, blocks = rng.random(2) < 0.2, []
        for which in range(2):
            block = np.zeros(codec.max_nbytes(numel), np.uint8)
            entries = random_entries(codec, numel, kind, rng)
            codec.write(entries, block, numel)
            device.write(which, piece, entries, refused[which])
            if refused[which]:
                codec.refuse(numel, block)
            blocks.append(block)
        part = wanted_owed[slice(*device.pieces[piece])]
        with np.errstate(all="ignore"):
            codec.merge(blocks[1], blocks[0], part if keeps else None)
        wanted.append(codec.read(blocks[0], numel))
        if wanted[-1] is not None:
            wanted[-1] = Entries(wanted[-1].indices.copy(), wanted[-1].values.copy())
    before = device.memory.clone()
    residual = torch.from_numpy(owed).to(DEVICE)
    merge = device.form.queued_merger(residual if keeps else None, device.memory, device.pieces, *device.places)
    with np.errstate(all="ignore"):
        merge()
    for piece, entries in enumerate(wanted):
        refused, found = device.read(0, piece)
        assert refused == (entries is None)
        if entries is not None:
            assert np.array_equal(found.indices, entries.indices)
            assert same(found.values, entries.values)
    assert same(residual.cpu().numpy(), wanted_owed)
    other = slice(device.places[1][0], None)
    assert torch.equal(device.memory[other], before[other]), "a merge changes only one of its blocks"


@pytest.mark.parametrize("density", [0.3, 0.7])
def test_a_merge_of_pieces_that_several_programs_share_is_exact_too(density):
    """Places and ties are counted from one program of a piece to the next."""
    sizes, codec, rng = [700, 9000, 5000], SparseCodec(density, index_form="gaps"), np.random.default_rng(3)
    device, owed, wanted = Device(codec, sizes), np.zeros(sum(sizes), np.float32), []
    for piece, numel in enumerate(sizes):
        blocks = []
        for which in range(2):
            entries = random_entries(codec, numel, "few different", rng)
            device.write(which, piece, entries, False)
            blocks.append(np.zeros(codec.max_nbytes(numel), np.uint8))
            codec.write(entries, blocks[-1], numel)
        codec.merge(blocks[1], blocks[0], owed[slice(*device.pieces[piece])])
        wanted.append(blocks[0])
    residual = torch.zeros(sum(sizes), device=DEVICE)
    device.form.queued_merger(residual, device.memory, device.pieces, *device.places)()
    for piece, numel in enumerate(sizes):
        entries, (_, found) = codec.read(wanted[piece], numel), device.read(0, piece)
        assert np.array_equal(found.indices, entries.indices)
        assert same(found.values, entries.values)
    assert same(residual.cpu().numpy(), owed)


@EXAMPLES
@given(CODECS, SIZES, st.sampled_from([*KINDS]), st.booleans(), st.booleans(), st.integers(0, 999))
def test_what_is_encoded_and_decoded_on_the_device_has_the_bits_of_the_host(codec, sizes, kind, feeds, adds, seed):
    rng, device = np.random.default_rng(seed), Device(codec, sizes)
    numel = device.edges[-1]
    gradient, owed, finite = KINDS[kind](rng, numel), rng.standard_normal((2, numel)).astype(np.float32), []
    given = gradient + owed[0] if feeds else gradient
    bucket, residual = (torch.from_numpy(each.copy()).to(DEVICE) for each in (gradient, owed[0]))
    places = [device.places[0]] * 2 if adds else [device.places[0]]
    encode = device.form.queued_encoder(
        bucket, residual if feeds else None, device.memory, device.pieces, places[0], range(len(sizes))
    )
    with np.errstate(all="ignore"):
        encode(0)
        bucket.copy_(torch.from_numpy(owed[1]))
        device.form.queued_decoder(bucket, device.memory, device.pieces, places, adds)()
    for start, stop in device.pieces:
        block, values = np.zeros(codec.max_nbytes(stop - start), np.uint8), owed[1][start:stop].copy()
        finite.append(np.isfinite(given[start:stop]).all())
        kept = owed[0][start:stop]
        if finite[-1]:
            codec.encode(gradient[start:stop], kept if feeds else None, block)
        else:
            codec.refuse(stop - start, block)
        for _ in places:
            (codec.decode_add if adds else codec.decode)(block, values)
        assert same(bucket[start:stop].cpu().numpy(), values)
        if finite[-1] or not feeds:
            assert same(residual[start:stop].cpu().numpy(), kept)
    look = device.form.queued_look(bucket, device.pieces)
    look.start()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    look.finish()
    assert device.noted == ([] if all(finite) else [True])
