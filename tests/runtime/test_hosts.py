"""Hosts as values: which ranks share one, in a program's words and in a person's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime import hosts
from penstock.runtime.handshake import Claim
from penstock.runtime.hosts import describe_nodes, group_by_host, share_hosts, this_host


def test_this_process_and_its_threads_are_on_one_host() -> None:
    assert this_host() == Claim().host != ""


def test_where_there_is_no_linux_a_host_is_what_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_path: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(hosts.Path, "read_text", absent)
    monkeypatch.setattr(hosts.platform, "node", lambda: "somewhere")
    assert this_host() == "somewhere"


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_two_ranks_are_in_one_node_where_their_hosts_are_the_same(names: list[str]) -> None:
    nodes = group_by_host(names)
    home = {rank: number for number, node in enumerate(nodes) for rank in node}
    assert sorted(home) == list(range(len(names)))
    assert all((home[i] == home[j]) == (a == b) for i, a in enumerate(names) for j, b in enumerate(names))
    assert [node[0] for node in nodes] == sorted(node[0] for node in nodes)
    assert all(list(node) == sorted(node) for node in nodes)


@pytest.mark.parametrize(
    ("names", "can_pay"), [("a", False), ("aaa", False), ("abc", False), ("aab", True), ("abab", True)]
)
def test_aggregating_inside_can_pay_where_some_ranks_share_one_of_several_hosts(names: str, can_pay: bool) -> None:
    assert share_hosts(group_by_host(names)) == can_pay


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("a", "1 rank on 1 host (0)"),
        ("aabb", "4 ranks on 2 hosts (0-1; 2-3)"),
        ("abab", "4 ranks on 2 hosts (0, 2; 1, 3)"),
        ("abcdefghij", "10 ranks on 10 hosts (0; 1; 2; 3; 4; 5; 6; 7; ...)"),
        ("ab" * 9 + "a", "19 ranks on 2 hosts (0, 2, 4, 6, 8, 10, 12, 14, ...; 1, 3, 5, 7, 9, 11, 13, 15, ...)"),
    ],
)
def test_nodes_are_said_in_few_words(names: str, words: str) -> None:
    assert describe_nodes(group_by_host(names)) == words
