"""Files and texts that the campaign of damage (`benchmarks/soak/damage.py`) found a way through with: one line each."""

import hashlib
import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import penstock.compll
from penstock.bench.record import load_record
from penstock.cli.options import parse_counts
from penstock.cluster.slots import _holder_lives
from penstock.cluster.topology import parse_delay, parse_rate
from penstock.codecs.registry import make_codec
from penstock.compll.cache import load_program as load_compiled
from penstock.compll.cache import write_whole
from penstock.compll.frontend.source import compile_file, compile_source
from penstock.compll.lower.passes import dump
from penstock.errors import CodecError, CompileError, FormatError, PenstockError
from penstock.plan import parse_route
from penstock.program.document import load_program
from penstock.strategies import parse_strategy
from penstock.torch.checkpoint_folder import check_model
from penstock.torch.fsdp.sharded_state import ShardedState
from penstock.torch.saved_folder import MODEL, SUMS
from penstock.train.job import HEAD, Job, Saved, find_checkpoint, write_saved

BF16 = Path(penstock.compll.__file__).parent / "algorithms" / "bf16.cll"
DIGITS = "9" * 5000


@pytest.mark.parametrize("read", [compile_file, lambda path: make_codec(str(path))])
def test_a_compressor_that_is_no_text_is_refused(read, tmp_path):
    path = tmp_path / "mine.cll"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CodecError, match=r"mine\.cll: found bytes that are no text"):
        read(path)


@pytest.mark.parametrize(
    "text", ["float \x1b[2J = 1;", f"float {'x' * 10_000} = y;", "(" * 3000, "float y = " + DIGITS]
)
def test_an_error_in_a_source_shows_little_of_it_and_no_control_characters(text):
    with pytest.raises(CompileError) as raised:
        compile_source(text, "mine.cll")
    said = str(raised.value)
    assert len(said) < 1500
    assert said.count("\n") == 2
    assert said.replace("\n", "").isprintable()
    if len(text) > 2000 and raised.value.column < 100:
        assert said.split("\n")[2].index("^") == raised.value.column - 1 + 4


def test_the_caret_stands_under_a_mistake_far_behind_in_a_line():
    with pytest.raises(CompileError) as raised:
        compile_source(f"/*{'x' * 3000}*/ float $;", "mine.cll")
    _, line, caret = str(raised.value).split("\n")
    assert line[caret.index("^")] == "$"


@pytest.mark.parametrize("digits", ["9" * 19, DIGITS])
def test_a_slice_of_many_digits_is_refused(digits, tmp_path):
    path = tmp_path / "program.json"
    instruction = {"op": "send", "read": f"data[0:{digits}]", "peer": 0}
    document = {"format": "penstock-program/1", "strategy": "ring", "collective": "all_reduce", "world_size": 1}
    path.write_text(json.dumps({**document, "numel": 4, "ranks": [{"instructions": [instruction]}]}))
    with pytest.raises(FormatError, match=r"wanted a slice such as data\[0:4\]") as raised:
        load_program(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parse_route, f"ring/{DIGITS}"),
        (parse_strategy, f"parameter_server(servers={DIGITS})"),
        (parse_rate, f"{DIGITS}gbit"),
        (parse_delay, f"{DIGITS}ms"),
        (lambda text: parse_counts(text, "--workers"), DIGITS),
    ],
)
def test_numbers_of_thousands_of_digits_in_options_are_refused(read, text):
    with pytest.raises(PenstockError, match="wanted"):
        read(text)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"9" * 5000, b"[]"])
def test_what_is_no_record_of_a_benchmark_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(FormatError) as raised:
        load_record(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("note", ["[1]", "3", "null", "[" * 100_000])
def test_the_note_of_an_emulated_cluster_that_no_cluster_wrote_counts_as_alive(note, tmp_path):
    (tmp_path / "note").write_text(note)
    assert _holder_lives(tmp_path / "note")


def test_a_checkpoint_that_claims_more_ranks_than_it_has_files_is_refused_at_once(tmp_path):
    digests = dict.fromkeys((MODEL, "rank-0.state"), "0" * 64)
    write_saved(Saved(tmp_path, 5, 1.0, 2**62, Job(), None), digests)
    with pytest.raises(
        FormatError, match=f"{SUMS}: names: found .* wanted {HEAD.file}, {MODEL} and files of {2**62} ranks"
    ):
        find_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    "document",
    [
        [],
        {"nodes": {}, "program": 3},
        {"nodes": [], "program": {"is": "Length"}},
        {"nodes": [{"x": 1}], "program": {}},
        {"nodes": [], "program": {"is": "os"}},
        {"nodes": [], "program": {"node": 5}},
        {"nodes": 5},
    ],
)
def test_a_compiled_program_with_a_digest_of_its_own_is_compiled_again(document, tmp_path):
    wanted = dump(load_compiled(BF16, {}, tmp_path))
    (kept,) = tmp_path.iterdir()
    text = json.dumps(document).encode()
    kept.write_bytes(b"penstock-program/1 %s\n%s" % (hashlib.sha256(text).hexdigest().encode(), text))
    assert dump(load_compiled(BF16, {}, tmp_path)) == wanted


FULL = """
import resource, sys
from pathlib import Path
import numpy as np
from penstock.compll.backends.numba.backend import NumbaKernels
from penstock.compll.cache import load_program
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
program = load_program(Path(sys.argv[1]), {}, Path(sys.argv[2]))
print(NumbaKernels(program, cache_dir=Path(sys.argv[2])).encode(np.ones(2, np.float32), {}).tobytes().hex())
"""


def test_kernels_work_where_the_cache_has_no_room_for_machine_code(tmp_path):
    command = [sys.executable, "-c", FULL, str(BF16), str(tmp_path), "3000"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ran.stdout.strip() == "803f803f", ran.stderr[-2000:]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_file_that_cannot_be_written_whole_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.compll.cache.os.replace", full)
    with suppress(OSError):
        write_whole(tmp_path / "kept", b"half")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", ["inf", "-inf", "nan", "0", "1.5", "9" * 400])
def test_a_rank_that_no_matrix_has_is_refused(rank):
    with pytest.raises(CodecError, match="wanted a whole number, 1 or more"):
        make_codec(f"lowrank(rank={rank})")


DEEP = []
for _ in range(5000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    "changed", [{"residual": "x"}, {"residual": [1]}, {"iterations": DEEP}, {"scale": {}}, {"iterations": None}]
)
def test_a_sharded_state_of_other_types_is_one_line(changed):
    state = {"format": "penstock-sharded-exchange/1", "iterations": 3, "scale": 1.0, "residual": {}} | changed
    with pytest.raises(FormatError, match=f"sharded exchange state: {next(iter(changed))}: found ") as raised:
        ShardedState(None, (), None, None)._mine(state)
    assert "\n" not in str(raised.value)


def test_a_models_state_with_names_that_are_no_text_is_one_line(tmp_path):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(FormatError, match=r"model\.state: model: found .* \(2 differ\)"):
        check_model(tmp_path / "model.state", model, model.state_dict() | {True: 1, "x": 2})
