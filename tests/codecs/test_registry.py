"""Codecs by name, by text and by path."""

import doctest

import pytest

from penstock.codecs import elements, registry, spec
from penstock.codecs.registry import codec_names, make_codec
from penstock.codecs.spec import parse_spec
from penstock.errors import CodecError


def test_the_algorithms_of_the_papers_are_there():
    assert {"onebit", "tbq", "terngrad", "dgc", "graddrop", "adacomp", "3lc", "qsgd", "signsgd", "topk"} <= set(
        codec_names()
    )


def test_parameters_come_from_the_text_or_from_keywords():
    assert make_codec("topk(density=0.25)").name == make_codec("topk", density=0.25).name == "topk(density=0.25)"
    assert make_codec(" terngrad( bitwidth = 4 ) ").parameters == {"bitwidth": 4.0, "block": 0.0}


def test_a_path_to_a_compressor_is_compiled(tmp_path):
    path = tmp_path / "mine.cll"
    path.write_text(
        "void encode(float* gradient, uint8* compressed) { compressed = concat(gradient); }\n"
        "void decode(uint8* compressed, float* gradient) { float* g = extract(compressed); gradient = map(g, abs); }\n"
    )
    assert make_codec(str(path)).name == "mine()"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("zip", "codec 'zip'; wanted one of 3lc, adacomp"),
        ("nowhere/zip.cll", "no compressor at nowhere/zip.cll"),
        ("topk(density)", "'density' is not a parameter; write name=number"),
        ("topk(0.1", r"codec 'topk\(0.1'; wanted a name such as onebit, or topk\(density=0.01\)"),
        ("topk(density=7)", "parameter density is 7; wanted a number from 0"),
        ("terngrad(bitwidth=3)", "parameter bitwidth is 3; wanted one of 1, 2, 4, 8"),
        ("onebit(bits=3)", "codec 'onebit': no parameter 'bits'; wanted block"),
    ],
)
def test_messages_say_what_is_wanted(spec, message):
    with pytest.raises(CodecError, match=message):
        make_codec(spec)


def test_settings_are_checked():
    with pytest.raises(CodecError, match="on_nonfinite is 'ignore'; wanted one of raise, skip"):
        make_codec("onebit", on_nonfinite="ignore")
    with pytest.raises(CodecError, match="seed -1; wanted 0 to 4294967295"):
        make_codec("onebit", seed=-1)


def test_examples_in_the_docstrings_hold():
    assert doctest.testmod(registry).failed == 0
    assert doctest.testmod(elements).failed == 0
    assert doctest.testmod(spec).failed == 0
    assert parse_spec("onebit") == ("onebit", {})
