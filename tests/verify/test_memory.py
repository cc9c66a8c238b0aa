from hypothesis import given
from hypothesis import strategies as st

from penstock.verify.memory import SegmentMap

NUMEL = 12
edits = st.lists(st.tuples(st.booleans(), st.integers(0, NUMEL), st.integers(0, NUMEL), st.integers(1, 9)), max_size=12)


@given(edits)
def test_it_holds_what_a_plain_list_would(edits):
    held, plain = SegmentMap(NUMEL, 0), [0] * NUMEL
    for replaces, one, other, value in edits:
        start, stop = sorted((one, other))
        if replaces:
            held.set(start, stop, value)
        else:
            held.update(start, stop, lambda old, value=value: old * 10 + value)
        plain[start:stop] = [value if replaces else old * 10 + value for old in plain[start:stop]]
    segments = held.get(0, NUMEL)
    assert [value for start, stop, value in segments for _ in range(start, stop)] == plain


@given(edits, st.integers(0, NUMEL), st.integers(0, NUMEL))
def test_a_part_is_cut_at_its_ends(edits, one, other):
    held = SegmentMap(NUMEL, 0)
    for _, first, second, value in edits:
        held.set(*sorted((first, second)), value)
    start, stop = sorted((one, other))
    part = held.get(start, stop)
    assert [edge for low, high, _ in part for edge in (low, high)] == sorted(
        edge for low, high, _ in part for edge in (low, high)
    )
    assert (not part) == (start == stop)
    if part:
        assert (part[0][0], part[-1][1]) == (start, stop)
