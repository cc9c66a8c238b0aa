"""What ranks of NCCL do without a device: compare programs through the store in which they met."""

import pytest

pytest.importorskip("torch")
from runtime.workers import compare_through_the_store
from spawn import spawn


def test_claims_are_compared_through_the_store_again_and_again() -> None:
    for message in spawn(3, compare_through_the_store, [5, 6, 7]):
        assert message == "numel is 8 on rank 1 and 7 on rank 0; all ranks must make the same call"
