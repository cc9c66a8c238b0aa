"""A coverage-guided fuzzer for decoding: `python tests/codecs/fuzz_decode.py -runs=1000000`.

Needs atheris; `coverage_fuzz.py` does without. Coverage is that of the Python code that checks; the kernels behind it
are machine code, which the guards of every case watch (`codecs_fuzz_cases.py`).
"""

import sys

import atheris

with atheris.instrument_imports(include=["penstock.codecs", "penstock.compll.lower.payload_layout"]):
    from codecs_fuzz_cases import one_input

if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
