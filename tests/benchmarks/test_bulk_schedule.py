from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulk_schedule import (
    Batch,
    Bulk,
    Message,
    choose_round,
    plan_rounds,
)
from penstock.errors import StrategyError
from penstock.network import LinearCost

COST = LinearCost(1.0, 0.25)


@st.composite
def exchanges(draw, most=30, ranks=5):
    found, links = [], st.sampled_from([*permutations(range(ranks), 2)])
    for index in range(draw(st.integers(1, most))):
        source, target = draw(links)
        found.append(Message(f"g{index}", draw(st.integers(0, 40)), source, target, float(draw(st.integers(0, 20)))))
    return found


bulks = st.builds(Bulk, st.integers(1, 60), st.integers(0, 10).map(float))


@given(exchanges(), bulks)
def test_a_nic_sends_to_one_and_receives_from_one_at_a_time(messages, bulk):
    sent = plan_rounds(messages, COST, bulk)
    for one, other in combinations(sent, 2):
        if one.start_seconds < other.end_seconds and other.start_seconds < one.end_seconds:
            assert one.batch.link[0] != other.batch.link[0]
            assert one.batch.link[1] != other.batch.link[1]


@given(exchanges(), bulks)
def test_every_message_is_sent_once_after_it_is_ready_and_in_order(messages, bulk):
    sent = plan_rounds(messages, COST, bulk)
    names = [message.name for sending in sent for message in sending.batch.messages]
    assert sorted(names) == sorted(message.name for message in messages)
    for sending in sent:
        assert all(message.ready_seconds <= sending.start_seconds for message in sending.batch.messages)
    for link in {message.link for message in messages}:
        queue = sorted((m for m in messages if m.link == link), key=lambda m: m.ready_seconds)
        order = [m for sending in sent if sending.batch.link == link for m in sending.batch.messages]
        assert order == queue


@given(exchanges(), bulks)
def test_no_message_starves(messages, bulk):
    """Once due, a message waits at most for what is before it: all that was ready earlier, and what is under way."""
    sent = plan_rounds(messages, COST, bulk)
    for sending in sent:
        for message in sending.batch.messages:
            due = message.ready_seconds + bulk.timeout_seconds
            older = [m for m in messages if m.ready_seconds <= message.ready_seconds]
            under_way = max(COST.seconds(max(m.nbytes for m in messages)), COST.seconds(bulk.threshold_nbytes))
            assert sending.start_seconds <= due + under_way * (len(older) + 1)


@given(exchanges(), bulks)
def test_batches_are_alike_in_size(messages, bulk):
    for sending in plan_rounds(messages, COST, bulk):
        batch = sending.batch
        assert len(batch.messages) == 1 or batch.nbytes <= bulk.threshold_nbytes


@given(exchanges(most=10, ranks=4))
@settings(max_examples=100)
def test_a_round_uses_as_many_links_as_can_be_beside_the_oldest(messages):
    messages.sort(key=lambda message: message.ready_seconds)
    batches = choose_round(messages, 100.0, Bulk(1, 0.0))
    chosen, oldest = [batch.link for batch in batches], messages[0].link
    assert all(len({link[side] for link in chosen}) == len(chosen) for side in (0, 1))
    assert chosen[0] == oldest
    links = {message.link for message in messages if message.source != oldest[0] and message.target != oldest[1]}
    most = max(
        len(some)
        for count in range(len(links) + 1)
        for some in combinations(links, count)
        if len({source for source, _ in some}) == len(some) == len({target for _, target in some})
    )
    assert len(chosen) == 1 + most


def test_the_example_of_the_docstring():
    a, b, c = Message("a", 1, 0, 1), Message("b", 1, 0, 1), Message("c", 1, 0, 2)
    d, e = Message("d", 1, 2, 1), Message("e", 1, 1, 2)
    first = choose_round([a, b, c, d, e], 0.0, Bulk(10, 0.0))
    assert first == (Batch((a, b)), Batch((e,)))
    assert choose_round([c, d], 0.0, Bulk(10, 0.0)) == (Batch((c,)), Batch((d,)))


def test_a_link_is_due_by_size_or_by_timeout_whichever_is_first():
    bulk = Bulk(threshold_nbytes=10, timeout_seconds=5.0)
    small, more = Message("small", 4, 0, 1, ready_seconds=1.0), Message("more", 6, 0, 1, ready_seconds=2.0)
    assert choose_round([small], 3.0, bulk) == ()
    assert choose_round([small, more], 3.0, bulk) == (Batch((small, more)),)
    assert choose_round([small], 6.0, bulk) == (Batch((small,)),)


def test_busy_nics_are_left_alone():
    messages = [Message("a", 1, 0, 1), Message("b", 1, 2, 3)]
    assert choose_round(messages, 0.0, Bulk(1), busy_senders={0}) == (Batch((messages[1],)),)
    assert choose_round(messages, 0.0, Bulk(1), busy_receivers={3}) == (Batch((messages[0],)),)


def test_the_oldest_link_finds_its_nics_free():
    """Kept busy by others in turn, 0 -> 1 would starve: rank 0 is free while 1 is not, and the other way round."""
    messages = [Message("old", 1, 0, 1), Message("a", 1, 0, 2, 1.0), Message("b", 1, 3, 1, 1.0)]
    assert choose_round(messages, 5.0, Bulk(1), busy_receivers={1}) == ()
    assert choose_round(messages, 5.0, Bulk(1), busy_senders={0}) == ()
    assert choose_round(messages, 5.0, Bulk(1)) == (Batch((messages[0],)),)


def test_batching_saves_startups():
    messages = [Message(f"g{i}", 4, 0, 1) for i in range(10)]
    one_by_one, together = (plan_rounds(messages, COST, Bulk(size, 0.0)) for size in (4, 40))
    assert one_by_one[-1].end_seconds == 10 * (1 + 1)
    assert together[-1].end_seconds == 1 + 10


def test_mistakes_are_named():
    with pytest.raises(
        StrategyError, match=r"threshold of 0 bytes, timeout of 0\.001 s; wanted at least 1 byte and 0 s"
    ):
        Bulk(0)
    with pytest.raises(StrategyError, match="message 'a' is from rank 1 to itself"):
        choose_round([Message("a", 1, 1, 1)], 0.0, Bulk())
