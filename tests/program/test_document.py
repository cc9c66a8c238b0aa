import json

import pytest

from every_call import dense_calls, sparse_calls
from penstock.errors import FormatError
from penstock.fields import parse_json
from penstock.program import DATA, Collective, Program, Slice
from penstock.program.builder import ProgramBuilder
from penstock.program.document import FORMAT, load_program, program_document, program_from_fields, save_program
from penstock.strategies import Options, build


def read(document: dict[str, object]) -> Program:
    return parse_json(json.dumps(document), "it.json", FORMAT, program_from_fields)


@pytest.mark.parametrize(("operation", "name"), [*dense_calls(), *sparse_calls()])
def test_a_program_comes_back_as_it_was(operation, name):
    program = build(operation, name, 5, 23, Options(block_numel=2, root=0))
    assert read(program_document(program)) == program


def test_encoded_buffers_and_the_root_come_back(tmp_path):
    builder = ProgramBuilder("coded", Collective.REDUCE, 2, 3, root=1)
    builder.scratch("c", 3, encoded=True)
    builder.encode(0, Slice("c", 0, 3), Slice(DATA, 0, 3))
    save_program(builder.build(), tmp_path / "p.json")
    assert load_program(tmp_path / "p.json") == builder.build()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"collective": "gather"}, "collective: found 'gather'; wanted one of all_reduce, reduce"),
        ({"ranks": []}, "ranks: found .*; wanted 2 lists of instructions, one per rank"),
        ({"colour": 1}, "colour: found 1; wanted no such field"),
        ({"ranks": [{"instructions": [{"op": "jump"}]}, {}]}, r"ranks\[0\].instructions\[0\].op: found 'jump'"),
        (
            {"ranks": [{"instructions": [{"op": "send", "read": "data[0]"}]}, {"instructions": []}]},
            r"ranks\[0\].instructions\[0\].read: found 'data\[0\]'; wanted a slice such as data\[0:4\]",
        ),
        (
            {"ranks": [{"instructions": [{"op": "send", "after": [-1]}]}, {"instructions": []}]},
            r"after: found \[-1\]; wanted a list of whole numbers >= 0",
        ),
    ],
)
def test_a_mistake_in_a_file_is_named(change, message):
    document = program_document(build("broadcast", "linear_pipeline", 2, 4)) | change
    with pytest.raises(FormatError, match=message):
        read(document)
