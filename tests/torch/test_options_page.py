"""The page about the wrapper has every option of the wrapper and of the hook, with its default."""

import inspect
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

pytest.importorskip("torch", reason="the wrapper needs torch")

from torch.nn.parallel import DistributedDataParallel as StockDDP

from penstock.exchange.compression import CompressionOptions
from penstock.exchange.warmup import _NAMED
from penstock.planners import PLANNERS
from penstock.planning.planning import PlannerName, PlanningOptions
from penstock.torch import BulkSynchronous, Compression, DistributedDataParallel, Planning, comm_hook
from penstock.torch.ddp import WrapperOptions
from penstock.torch.overlap import ALGORITHMS

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
DOCUMENTED = dict(re.findall(r"^\| `(\w+)=([^`]*)` \| [^|]+ \| [^|]+ \|$", PAGE, flags=re.MULTILINE))


def options_of(function):
    skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    known = [one for one in parameters if one.kind not in skipped and one.default is not one.empty]
    return {one.name: repr(one.default).replace("'", '"') for one in known}


def test_the_page_has_every_option_with_its_default_and_no_other():
    taken = (DistributedDataParallel.__init__, comm_hook, Compression, Planning)
    assert {name: default for each in taken for name, default in options_of(each).items()} == DOCUMENTED


def test_the_hook_has_the_wrappers_defaults():
    wrapper = options_of(DistributedDataParallel.__init__) | options_of(Planning)
    assert all(wrapper.get(name, default) == default for name, default in options_of(comm_hook).items())


def test_no_option_is_in_two_groups():
    groups = [options_of(each).keys() for each in (Compression, Planning)]
    own = options_of(DistributedDataParallel.__init__).keys()
    assert not groups[0] & groups[1]
    assert own & (groups[0] | groups[1]) == {"codec"}  # the short form


def hints(kind, but=()):
    return {name: hint for name, hint in get_type_hints(kind).items() if name not in but}


def test_keywords_that_type_checkers_know_are_the_fields_of_both_groups_and_torchs_arguments():
    compression, planning = hints(Compression, ("codec",)), hints(Planning, ("strategy",))
    assert hints(CompressionOptions) == compression
    assert hints(PlanningOptions) == planning
    torchs = set(inspect.signature(StockDDP.__init__).parameters) - {"self", "module"}
    assert set(hints(WrapperOptions)) == {*compression, *planning, "strategy", *torchs}


def test_names_that_type_checkers_know_are_those_that_exist():
    assert set(get_args(PlannerName)) == set(PLANNERS)
    assert set(get_args(inspect.signature(BulkSynchronous.__init__).parameters["algorithm"].annotation)) == set(
        ALGORITHMS
    )
    assert set(get_args(get_args(get_type_hints(Compression)["warmup"])[0])) == set(_NAMED)


def test_every_field_of_a_group_says_what_it_is():
    for group in (Compression, Planning):
        source = inspect.getsource(group)
        assert all(re.search(rf"^    {name}: .*  # .", source, re.MULTILINE) for name in options_of(group))


@pytest.mark.parametrize("documented", [DistributedDataParallel, comm_hook])
def test_docstrings_name_every_option_that_is_new_in_them(documented):
    text = inspect.getdoc(documented)
    new = options_of(documented if documented is comm_hook else documented.__init__)
    shared = options_of(DistributedDataParallel.__init__) if documented is comm_hook else {}
    missing = [name for name in new if name not in shared and not re.search(rf"\b{name}\b", text)]
    assert missing == []
