import numpy as np
import pytest

from penstock.codecs.codec import Capabilities, Codec
from penstock.codecs.registry import make_codec
from penstock.codecs.sparse.published import PublishedCodec
from penstock.codecs.sparse.sparse_codec import SparseCodec
from penstock.errors import CodecError
from penstock.runtime import measure_codecs as module
from penstock.runtime.measure_codecs import measure_codecs
from penstock.runtime.measure_network import measure_network
from runtime.threads import run_ranks


class Paced(Codec):
    """A codec whose operations take as long as a line says; it packs sixteen bytes into one, behind 40 of header."""

    name = "paced"

    def __init__(self):
        self.now = 0.0  # of a clock that only these operations move

    def max_nbytes(self, numel):
        return 40 + numel // 4

    def encode(self, gradient, residual, out):
        self.now += 2e-3 + 4e-9 * gradient.nbytes
        return out.size

    def decode(self, payload, out):
        self.now += 1e-3 + 2e-9 * out.nbytes

    def decode_add(self, payload, out):
        self.now += 1e-3 + 3e-9 * out.nbytes


def test_a_codec_of_known_lines_is_measured_as_it_is(monkeypatch):
    codec = Paced()
    monkeypatch.setattr(module, "perf_counter", lambda: codec.now)
    curves = module._measure(codec, None, 0.5)
    assert (curves.ratio, curves.fixed_nbytes) == (1 / 16, 40)
    for curve, startup, slope in ((curves.encode, 2e-3, 4e-9), (curves.decode, 1e-3, 2e-9), (curves.merge, 1e-3, 3e-9)):
        assert curve.least_seconds == pytest.approx(startup, rel=0.02)
        assert curve.seconds_per_byte == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize(("seconds", "sizes"), [(0.3, 3), (1.0, 7)])
def test_a_short_budget_has_few_sizes(monkeypatch, seconds, sizes):
    codec, seen = Paced(), set()
    monkeypatch.setattr(module, "perf_counter", lambda: codec.now)
    encode = codec.encode
    monkeypatch.setattr(codec, "encode", lambda gradient, *rest: seen.add(gradient.size) or encode(gradient, *rest))
    module._measure(codec, None, seconds)
    assert len(seen) == sizes


def test_curves_say_what_the_codec_does_to_sizes_and_grow_with_bytes():
    curves = measure_codecs(["onebit"], seconds=0.2)["onebit"]
    assert curves.ratio == pytest.approx(1 / 32)
    assert 0 < curves.fixed_nbytes < 128
    for curve in (curves.encode, curves.decode, curves.merge):
        assert 0 < curve.seconds(4096) < curve.seconds(1 << 24) < 1.0


def test_all_ranks_return_the_same_curves_with_the_network():
    first, second = run_ranks(2, lambda one: measure_network(one, seconds=1.0, codecs=["fp16"]).network)
    assert first == second
    assert first.codecs["fp16"].ratio == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["graddrop(density=0.05)", "adacomp", "3lc"])
def test_payloads_that_differ_in_size_from_encode_to_encode_are_decoded_as_they_were_made(name):
    codec, decoded = make_codec(name), []

    class Watching:
        capabilities = Capabilities()
        max_nbytes, encode, decode_add = codec.max_nbytes, codec.encode, codec.decode_add

        def decode(self, read, out):
            codec.decode(read, out)
            decoded.append(out.copy())

    operations = dict(module._operations(Watching(), 4096))
    for operation in ("encode", "decode", "encode", "decode_add", "decode"):
        for _ in range(3):
            operations[operation]()
    assert len(decoded) == 6
    assert all((each == decoded[0]).all() for each in decoded)


def test_two_different_blocks_are_merged_each_time():
    codec, merged = SparseCodec(0.1), []

    class Watching:
        capabilities = Capabilities(merging=True)
        max_nbytes, encode, decode, decode_add = codec.max_nbytes, codec.encode, codec.decode, codec.decode_add

        def merge(self, read, write, residual):
            other = codec.read(read, 4096).indices.copy()
            merged.append(np.intersect1d(other, codec.read(write, 4096).indices).size)
            codec.merge(read, write, residual)

    operations = dict(module._operations(Watching(), 4096))
    for _ in range(3):
        operations["encode"]()
        operations["block_merge"]()
    assert merged[0] < 100  # of 410 entries: those of independent gradients seldom meet
    assert len(set(merged)) == 1


def test_unknown_codecs_are_named():
    with pytest.raises(CodecError, match="codec 'onebyte'; wanted one of"):
        measure_codecs(["onebyte"])


def test_compressed_all_reduces_have_lines_too():
    routes = ["native", "ring+onebit", "parameter_server+onebit/4", "gtopk+sparse(density=0.01)"]
    first, second = run_ranks(2, lambda one: measure_network(one, seconds=1.0, strategies=routes).network)
    assert first == second
    assert list(first.all_reduce) == routes
    assert all(line.b_seconds_per_byte > 0 for line in first.all_reduce.values())
    with_tensors = [name for name, line in first.all_reduce.items() if line.c_seconds_per_tensor is not None]
    assert with_tensors == routes[1:]  # what each tensor of a bucket adds counts where a codec takes them one by one


def test_a_sparse_codec_also_has_a_curve_of_merging_blocks():
    curves = measure_codecs(["sparse(density=0.01)"], seconds=0.2)["sparse(density=0.01)"]
    assert curves.block_merge is not None
    assert curves.block_merge.seconds(1 << 20) > 0
    assert curves.ratio < 0.02
    assert measure_codecs(["onebit"], seconds=0.05)["onebit"].block_merge is None


def test_a_codec_that_remembers_what_it_sent_can_be_timed_too():
    curves = module._measure(PublishedCodec(SparseCodec(0.1)), None, 0.05)
    assert curves.block_merge is not None
    assert all(curve.seconds(1 << 20) > 0 for curve in (curves.encode, curves.decode, curves.merge))
