"""A codec written in Python goes where a name goes; abilities are declared, never guessed."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.codecs.codec import Codec
from penstock.codecs.feedback import DeferredResidual
from penstock.codecs.header import NOT_FINITE, parse_header
from penstock.codecs.registry import codec_digest, codec_name, codec_names, fingerprint, make_codec
from penstock.errors import CodecError, MismatchError, NonFiniteError
from penstock.runtime import Communicator
from penstock.runtime.transport.memory import MemoryTransport
from python_codecs import Int8, Nonzero
from runtime.threads import outcomes, run_ranks

NUMEL, PARTS = 1000, (0, 100, 101, 1000)
PACKAGE = Path(penstock.__file__).parent


def dyadic(rank: int) -> np.ndarray:
    return (np.random.default_rng(rank).integers(-8, 9, NUMEL) / 8).astype(np.float32)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["ring", "all_gather", "parameter_server"])
@pytest.mark.parametrize("kind", [Int8, Nonzero])
def test_nothing_is_lost_between_ranks(kind, strategy: str, world_size: int) -> None:
    def rank(transport: MemoryTransport) -> tuple[np.ndarray, np.ndarray]:
        data, residual = dyadic(transport.rank), DeferredResidual(np.zeros(NUMEL, np.float32))
        Communicator(transport).all_reduce(data, strategy, kind(), residual, PARTS)
        return data, residual.values()

    found = run_ranks(world_size, rank)
    assert len({data.tobytes() for data, _ in found}) == 1
    total = sum(dyadic(rank) for rank in range(world_size))
    np.testing.assert_allclose(found[0][0] + sum(kept for _, kept in found), total, atol=1e-5)
    if kind is Nonzero:
        assert not any(kept.any() for _, kept in found)


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_16_bit_gradients_are_taken_as_they_are(dtype) -> None:
    values, codec = np.ones(64, np.float32), Nonzero()
    data = values.astype(np.float16) if dtype is np.float16 else (values.view(np.uint32) >> 16).astype(np.uint16)
    out, before = np.zeros(codec.max_nbytes(64), np.uint8), data.copy()
    payload = out[: codec.encode(data, None, out)]
    data[:] = 0
    codec.decode(payload, data)
    assert np.array_equal(data, before)


def test_nan_on_one_rank_is_raised_by_all_in_the_same_call_and_the_next_is_fine() -> None:
    def rank(transport: MemoryTransport) -> str:
        communicator, codec = Communicator(transport), Int8()
        data = dyadic(transport.rank)
        data[3] = np.nan if transport.rank == 1 else 0
        with pytest.raises(NonFiniteError) as caught:
            communicator.all_reduce(data, "ring", codec, np.zeros(NUMEL, np.float32), PARTS)
        communicator.all_reduce(dyadic(transport.rank), "ring", codec)
        return str(caught.value)

    mine, other = "the gradient holds NaN or infinity; fix the loss", "a gradient of another rank holds NaN"
    assert [each[: len(mine)] == mine for each in run_ranks(3, rank)] == [False, True, False]
    assert [each[: len(other)] == other for each in run_ranks(3, rank)] == [True, False, True]


def test_what_was_noted_is_asked_for_or_raised_once() -> None:
    noting, raising = make_codec(Int8(), on_nonfinite="note"), make_codec(Int8())
    values, out = np.full(8, np.inf, np.float32), np.zeros(64, np.uint8)
    for codec in (noting, raising):
        codec.bind_encode(values, None, out)()
        assert parse_header(out.data).flags == NOT_FINITE
    noting.check_finite()
    assert [noting.saw_nonfinite(), noting.saw_nonfinite()] == [True, False]
    with pytest.raises(NonFiniteError):
        raising.check_finite()
    raising.check_finite()


def test_a_skipped_step_leaves_the_residual_as_it_was() -> None:
    codec, residual = make_codec(Int8(), on_nonfinite="skip"), np.ones(8, np.float32)
    codec.encode(np.full(8, np.nan, np.float32), residual, np.zeros(64, np.uint8))
    assert residual.tolist() == [1.0] * 8


def test_a_payload_of_another_codec_or_size_is_refused() -> None:
    codec, out = Int8(), np.zeros(64, np.uint8)
    codec.encode(np.ones(8, np.float32), None, out)
    with pytest.raises(CodecError, match="payload of 8 elements by int8; wanted 9 by int8"):
        codec.decode(out, np.zeros(9, np.float32))
    with pytest.raises(CodecError, match="wanted 8 by nonzero"):
        Nonzero().decode(out, np.zeros(8, np.float32))


EXTREME = ["topk(density=1)", "dgc(density=1)", "graddrop(density=1)", "adacomp(bin=1)"]
SPARSE = ["sparse(density=1)", "sparse(density=0.79)", "sparse(density=0.5)", "sparse(density=1, value_bits=16)"]


@pytest.mark.parametrize("name", [*codec_names(), *EXTREME, *SPARSE])
def test_no_codec_sends_more_than_dense(name: str) -> None:
    """Whatever the gradient and its parameters: 16 bytes are for a count, a scale and the one entry of a scalar."""
    codec = make_codec(name)
    for numel in (1, 2, 3, 31, 33, 1000, 1001, 70_001):
        for values in (np.ones(numel), np.linspace(-1, 1, numel), np.random.default_rng(0).standard_normal(numel)):
            payload = np.zeros(codec.max_nbytes(numel), np.uint8)
            codec.encode(values.astype(np.float32), np.zeros(numel, np.float32), payload)
            assert parse_header(payload.data, 1 << 48).body_nbytes <= 4 * numel + 16


def test_an_object_is_found_by_its_name_and_its_copies_note_for_themselves() -> None:
    name = codec_name(Int8())
    first, second = make_codec(name, on_nonfinite="note"), make_codec(name, on_nonfinite="note")
    first.note_nonfinite()
    assert (name, second.saw_nonfinite(), first.saw_nonfinite()) == ("int8", False, True)
    assert fingerprint(name) == Int8().fingerprint != Nonzero().fingerprint
    assert codec_digest(name) == f"int8 {Int8().fingerprint}"


@pytest.mark.parametrize(("name", "message"), [("onebit", "called as one of ours"), ("a+b", "wanted letters")])
def test_names_that_a_plan_could_not_tell_apart_are_refused(name: str, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        codec_name(type("Mine", (Int8,), {"name": name})())


def test_ranks_whose_python_codecs_differ_in_text_or_settings_are_told_before_data_move() -> None:
    def rank(transport: MemoryTransport) -> None:
        codec = Int8()
        codec.bits, codec._seed = transport.rank, transport.rank
        Communicator(transport).all_reduce(np.ones(8, np.float32), codec=codec)

    for error in outcomes(2, rank):
        assert isinstance(error, MismatchError)
        assert "the text of codec int8 (fingerprint)" in str(error)


def test_a_codec_that_cannot_merge_or_says_no_size_says_so() -> None:
    class Plain(Codec):
        name = "plain"
        max_nbytes = encode = decode = decode_add = None

    with pytest.raises(CodecError, match="plain cannot add encoded blocks"):
        Plain().merge(None, None, None)
    with pytest.raises(CodecError, match="payloads of plain do not say"):
        Plain().payload_nbytes(None)


def test_the_interface_imports_without_torch_and_compilers() -> None:
    code = "import sys, penstock.codecs.codec; print(*({'torch', 'numba', 'lark'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


GUESSING = {"hasattr", "getattr"}


def test_no_ability_of_a_codec_is_guessed() -> None:
    found = []
    for path in [*PACKAGE.rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in GUESSING:
                subject = ast.unparse(node.args[0])
                if "codec" in subject.lower() and not subject.startswith("args."):
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert not found
