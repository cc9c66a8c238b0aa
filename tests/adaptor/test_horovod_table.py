"""Every row of the table names a check that there is, and every check that does what Horovod does is in it."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parents[1] / "docs" / "horovod-tests.md"
ROW = re.compile(r"^\| (test_\w+) \| (.+) \|$", re.MULTILINE)


def rows() -> list[tuple[str, str]]:
    return ROW.findall(PAGE.read_text())


def test_every_row_names_what_covers_it_or_says_why_nothing_does():
    source = ast.parse((TESTS / "worker_tensorflow.py").read_text())
    checks = {node.name for node in source.body if isinstance(node, ast.FunctionDef)}
    assert len(rows()) > 80
    for test, ours in rows():
        named = re.findall(r"^`(\w+)`", ours)
        assert set(named) <= checks, test
        assert named or ours.startswith("none: "), test


def test_every_check_of_horovods_behaviour_is_in_the_table():
    listed = (TESTS / "test_tensorflow.py").read_text().split("CHECKS = {")[1].split("}")[0]
    checks = set(re.findall(r'^    "(\w+)":', listed, re.MULTILINE))
    ours = {"tape_gradients", "half_gradients", "states_of_optimizers", "metrics_of_all"}  # Horovod's tests lack them
    assert checks - ours <= {name for _, text in rows() for name in re.findall(r"`(\w+)`", text)}
