"""NaN or infinity on one rank: whatever the strategy and the codec, all ranks raise in the same call, or all skip."""

from dataclasses import replace
from functools import cache
from itertools import count

import numpy as np
import pytest
import torch

from every_call import sparse_calls
from exchange.parcels import average
from penstock.codecs.codec import Codec
from penstock.codecs.dense.dense_codec import DenseCodec
from penstock.codecs.registry import SPARSE_CODECS, codec_names, make_codec
from penstock.errors import NonFiniteError
from penstock.exchange.averaging import Averaging
from penstock.exchange.compression import Scheme
from penstock.plan import Route
from penstock.runtime import Communicator
from penstock.strategies import coded_names
from penstock.torch.checkpoint import TorchMemory
from runtime.threads import run_ranks

TIMEOUT_SECONDS = 120.0  # nothing takes so long, however busy the machine
RANKS, SIZES = 4, (37, 4100, 400)  # the second tensor is cut into pieces
NUMEL = sum(SIZES)
SPARSE_SPECS = tuple(f"{name}(density=0.05)" for name in SPARSE_CODECS)
SPARSE_NAMES = tuple(name for _, name in sparse_calls())
ONE_LEVEL = (*(name for name in coded_names() if name != "hierarchical"), *SPARSE_NAMES)
FEW = ("onebit", "graddrop", *SPARSE_SPECS)  # of one size, of varying size, merged


def carries(strategy: str, codec: str) -> bool:
    """Say whether a strategy carries a codec's payloads: sparse ones want blocks that merge, and `published` them."""
    return codec in SPARSE_SPECS if strategy in SPARSE_NAMES else not codec.startswith("published")


PAIRS = [
    *((strategy, codec) for strategy in ONE_LEVEL for codec in (*codec_names(), *SPARSE_SPECS)),
    *((f"hierarchical(ranks_per_node=3, outer={outer})", codec) for outer in ONE_LEVEL for codec in FEW),
    *(("hierarchical(ranks_per_node=2, outer=ring)", codec) for codec in codec_names()),
]
PAIRS = [(strategy, codec) for strategy, codec in PAIRS if carries(strategy.rpartition("=")[2].strip(")"), codec)]


@cache
def compiled(name: str) -> Codec:
    """Return a codec whose kernels are loaded, which takes longer than using them here."""
    codec = make_codec(name)
    values, payload = np.ones(8, np.float32), np.zeros(codec.max_nbytes(8), np.uint8)
    codec.encode(values, np.zeros(8, np.float32), payload)
    codec.decode(payload, values)
    codec.decode_add(payload, values)
    return codec


def of_one_rank(name: str, rank: int) -> Codec:
    codec = compiled(name)
    return replace(codec, seed=rank, _calls=count()) if isinstance(codec, DenseCodec) else make_codec(name)


@pytest.mark.parametrize(("strategy", "name"), PAIRS)
def test_a_communicator_raises_on_every_rank_and_is_of_use_again(strategy: str, name: str) -> None:
    compiled(name)

    def rank(transport):
        communicator, codec = Communicator(transport, TIMEOUT_SECONDS), of_one_rank(name, transport.rank)
        residual, parts = np.zeros(NUMEL, np.float32), (0, *np.cumsum(SIZES).tolist())
        told = []
        for step in range(3):
            data = np.ones(NUMEL, np.float32)
            data[3000] = np.nan if (step, transport.rank) == (1, 1) else 1.0
            try:
                communicator.all_reduce(data, strategy, codec, residual, parts)
                told.append((type(None), data.tobytes()))
            except NonFiniteError as error:
                told.append((type(error), data.tobytes()))
                residual[:] = 0.0  # what a rank still owes is no longer known
        return told

    ranks = run_ranks(RANKS, rank)
    assert [kind for kind, _ in ranks[0]] == [type(None), NonFiniteError, type(None)]
    assert all(other == ranks[0] for other in ranks[1:])


EXCHANGED = [
    (strategy, name, on_nonfinite)
    for strategy, name in PAIRS
    for on_nonfinite in ("raise", "skip")
    if name in FEW and (on_nonfinite == "raise" or strategy in ("ring", "gtopk") or "outer" in strategy)
]


@pytest.mark.parametrize(("strategy", "name", "on_nonfinite"), EXCHANGED)
def test_an_exchange_raises_the_same_on_every_rank_or_spoils_the_step_on_every_rank(
    strategy: str, name: str, on_nonfinite: str
) -> None:
    compiled(name)

    def rank(transport):
        memory = TorchMemory(Scheme(name), on_nonfinite)
        exchange = Averaging(Communicator(transport, TIMEOUT_SECONDS), memory, leaves_out=False)
        for step in range(2):
            values = torch.ones(NUMEL)
            values[3000] = torch.inf if (step, transport.rank) == (1, 3) else 1.0
            try:
                average(exchange, values, Route(strategy, name), ("a", "b", "c"), SIZES)
            except NonFiniteError as error:
                return str(error)
        return memory.has_nonfinite, values.numpy().tobytes()

    ranks = run_ranks(RANKS, rank)
    assert all(other == ranks[0] for other in ranks[1:])
    if on_nonfinite == "raise":
        assert ranks[0].startswith("the gradient of 'b' holds NaN or infinity on some rank")
    else:
        spoilt, values = ranks[0]
        assert spoilt
        assert np.isnan(np.frombuffer(values, np.float32)[3000])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ranks_that_follow_hear_of_16_bit_gradients_too(dtype: torch.dtype) -> None:
    def rank(transport):
        data = torch.ones(64, dtype=dtype)
        data[7] = torch.nan if transport.rank == 3 else 1.0
        with pytest.raises(NonFiniteError):
            Communicator(transport, TIMEOUT_SECONDS).all_reduce(
                data, "hierarchical(ranks_per_node=2)", make_codec("onebit")
            )

    run_ranks(RANKS, rank)
