"""A compressed bucket passes few calls in few files on its way from torch's hook to its average."""

import pytest

pytest.importorskip("torch", reason="the hook needs torch")

from spawn import spawn
from torch_path import trace_a_bucket

MOST_CALLS, MOST_FILES = 25, 10  # from hook to average
MOST_CALLS_BEFORE, MOST_FILES_BEFORE = 10, 4  # from the hook to the communicator
COMMUNICATOR = "runtime/"


@pytest.fixture(scope="module")
def path() -> list[tuple[str, str]]:
    """Return the functions that a bucket passes, each once, as (file, name), in the order of their first calls."""
    traced = spawn(2, trace_a_bucket, "onebit")[0]
    found = list(dict.fromkeys(call for entry in ("BucketSender.hook", "Exchange._run") for call in traced[entry]))
    print("\n".join(f"{number:3} {file}: {name}" for number, (file, name) in enumerate(found, 1)))
    return found


def files(path: list[tuple[str, str]]) -> set[str]:
    return {file for file, _ in path}


def test_a_bucket_reaches_the_communicator_in_ten_calls_and_four_files(path) -> None:
    before = path[: next(index for index, (file, _) in enumerate(path) if file.startswith(COMMUNICATOR))]
    assert len(before) <= MOST_CALLS_BEFORE
    assert len(files(before)) <= MOST_FILES_BEFORE


def test_a_bucket_is_averaged_in_25_calls_and_ten_files(path) -> None:
    assert len(path) <= MOST_CALLS
    assert len(files(path)) <= MOST_FILES
