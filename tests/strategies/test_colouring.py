from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.strategies.colouring import turns


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40))
def test_no_rank_sends_or_receives_twice_in_a_turn_and_no_turn_is_wasted(links):
    chosen, count = turns(links)
    sends, receives = Counter(source for source, _ in links), Counter(target for _, target in links)
    assert count == max([0, *sends.values(), *receives.values()])
    assert all(0 <= turn < count for turn in chosen)
    assert len({(source, turn) for (source, _), turn in zip(links, chosen, strict=True)}) == len(links)
    assert len({(target, turn) for (_, target), turn in zip(links, chosen, strict=True)}) == len(links)
