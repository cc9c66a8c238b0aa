"""How a bucket is cut into waves: the pieces of one program, in the fewest even groups that a limit allows."""

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.strategies.batches import consecutive_waves, make_batches, make_waves

SIZES = st.lists(st.integers(0, 9000), min_size=1, max_size=7)


def bounds_of(sizes: list[int]) -> list[int]:
    return [sum(sizes[:count]) for count in range(len(sizes) + 1)]


def best_largest(sizes: list[int], most: int) -> tuple[int, int]:
    """Return how few groups of consecutive sizes there can be, and their smallest largest sum, by trying all cuts."""
    for count in range(1, len(sizes) + 1):
        sums = [
            max(sum(sizes[start:stop]) for start, stop in pairwise([0, *cuts, len(sizes)]))
            for cuts in combinations(range(1, len(sizes)), count - 1)
        ]
        if min(sums) <= max(most, *sizes):
            return count, min(sums)
    raise AssertionError("each by itself fits")


@given(SIZES, st.integers(1, 5), st.sampled_from([None, 3, 12]), st.integers(1, 30_000))
@settings(max_examples=150, deadline=None)
def test_waves_have_the_pieces_of_one_program_each_in_its_chunk(
    sizes: list[int], chunks: int, partitions: int | None, most: int
) -> None:
    bounds = bounds_of(sizes)
    whole = make_batches(bounds, chunks, partitions, max(bounds[-1], 1))
    waves = make_waves(bounds, chunks, partitions, most)
    assert all(len(wave.pieces) == chunks for wave in waves)
    for chunk, pieces in enumerate(whole.pieces):
        assert tuple(piece for wave in waves for piece in wave.pieces[chunk]) == pieces
    largest = max((stop - start for pieces in whole.pieces for start, stop in pieces), default=0)
    assert all(sum(wave.sizes) <= max(most, chunks * largest) for wave in waves)


@given(SIZES, st.integers(1, 30_000))
@settings(max_examples=150, deadline=None)
def test_there_are_the_fewest_waves_that_a_limit_allows_and_they_are_even(sizes: list[int], most: int) -> None:
    waves = consecutive_waves(bounds_of(sizes), most)
    assert [wave[-1] for wave in waves][-1] == sum(sizes)
    assert all(before[-1] == after[0] for before, after in pairwise(waves))
    assert (len(waves), max(wave[-1] - wave[0] for wave in waves)) == best_largest(sizes, most)


def test_a_tensor_is_cut_into_waves_between_its_pieces_and_uneven_chunks_cost_no_wave() -> None:
    """By hand: 40 pieces of a table of 38.6M elements for four chunks come in ten turns of 3.86M."""
    table = 50257 * 768
    assert [len(make_waves([0, table], 4, None, most * 10**6)) for most in (39, 20, 10, 1)] == [1, 2, 5, 10]
    assert len(make_waves([0, table, table + 100], 4, None, table + 100)) == 1
