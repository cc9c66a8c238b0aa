"""Every row of the table names a check that there is, and every check that does what Horovod does is in it."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parents[1] / "docs" / "horovod-tests.md"
ROW = re.compile(r"^\| (test_\w+) \| (.+) \|$", re.MULTILINE)
MXNET = "base_test_mxnet.py"


def rows(mxnet: bool) -> list[tuple[str, str]]:
    sections = PAGE.read_text().split("\n## ")
    return [row for each in sections if each.startswith(MXNET) is mxnet for row in ROW.findall(each)]


def functions_of(script: str) -> set[str]:
    return {node.name for node in ast.parse((TESTS / script).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_row_names_what_covers_it_or_says_why_nothing_does():
    for mxnet, script, least in ((False, "worker_tensorflow.py", 115), (True, "worker_mxnet.py", 40)):
        assert len(rows(mxnet)) >= least
        known = functions_of(script)
        for test, ours in rows(mxnet):
            named = re.findall(r"^`(\w+)`", ours)
            assert set(named) <= known, test
            assert named or ours.startswith("none: "), test


def checks_of(path: Path) -> set[str]:
    listed = path.read_text().split("CHECKS = {")[1].split("}")[0]
    return set(re.findall(r'^    "(\w+)":', listed, re.MULTILINE))


def test_every_check_of_horovods_behaviour_is_in_the_table():
    ours = {
        "tape_gradients",
        "half_gradients",
        "states_of_optimizers",
        "metrics_of_all",
        "learning_rates",
    }  # not Horovod's
    for mxnet, path in ((False, TESTS / "test_tensorflow.py"), (True, TESTS.parent / "mxnet" / "test_trainer.py")):
        named = {name for _, text in rows(mxnet) for name in re.findall(r"`(\w+)`", text)}
        assert checks_of(path) - ours <= named
