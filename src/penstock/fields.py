"""Reading JSON field by field, so that every mistake in a file is one clear line.

`Fields` wraps one JSON object together with the file's name and the path to the object inside it. Each method
returns a checked value or raises `FormatError` naming the file, the field, what was found and what was wanted.
"""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import FormatError, shorten

T = TypeVar("T")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
REQUIRED: Any = object()  # marks a field without a default; None is a legal default


class Fields:
    """One JSON object and where it came from."""

    def __init__(self, values: object, where: str, path: str = "") -> None:
        if not isinstance(values, dict):
            raise FormatError(where, path.rstrip(".") or "top level", values, "a JSON object")
        self._values, self._where, self._path = values, where, path

    def error(self, name: str, wanted: str) -> FormatError:
        """Return the error for field `name`; the caller raises it."""
        found = self._values[name] if name in self._values else _Missing()
        return FormatError(self._where, self._path + name, found, wanted)

    def text(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a non-empty string."""
        return self._checked(name, default, "a non-empty string", lambda v: isinstance(v, str) and v != "")

    def optional_text(self, name: str) -> str | None:
        """Return a non-empty string, or None where the field is null or absent."""
        found = self._checked(
            name, None, "a non-empty string or null", lambda v: v is None or (isinstance(v, str) and v != "")
        )
        return None if found is None else str(found)

    def choice(self, name: str, choices: tuple[str, ...], default: Any = REQUIRED) -> Any:
        """Return one of `choices`."""
        return self._checked(name, default, "one of " + ", ".join(choices), lambda v: v in choices)

    def flag(self, name: str, default: Any = REQUIRED) -> Any:
        """Return true or false."""
        return self._checked(name, default, "true or false", lambda v: isinstance(v, bool))

    def integer(self, name: str, minimum: int, default: Any = REQUIRED) -> Any:
        """Return a whole number of at least `minimum`."""
        return self._checked(name, default, f"a whole number >= {minimum}", lambda v: _is_integer(v) and v >= minimum)

    def amount(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a finite number of at least 0 as a float: seconds, or seconds per byte."""
        value = self._checked(name, default, "a finite number >= 0", _is_amount)
        return float(value) if _is_amount(value) else value

    def optional_amount(self, name: str) -> float | None:
        """Return a finite number of at least 0, or None where the field is null or absent."""
        found = self._checked(name, None, "a finite number >= 0 or null", lambda v: v is None or _is_amount(v))
        return None if found is None else float(found)

    def optional_number(self, name: str) -> float | None:
        """Return a finite number of either sign, or None where the field is null or absent."""
        found = self._checked(name, None, "a finite number or null", lambda v: v is None or _is_finite(v))
        return None if found is None else float(found)

    def text_list(self, name: str) -> tuple[str, ...]:
        """Return a list of strings."""
        ok = self._checked(
            name, REQUIRED, "a list of strings", lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v)
        )
        return tuple(ok)

    def integer_list(self, name: str, minimum: int, default: Any = REQUIRED) -> tuple[int, ...]:
        """Return a list of whole numbers of at least `minimum`."""
        found = self._checked(
            name,
            default,
            f"a list of whole numbers >= {minimum}",
            lambda v: isinstance(v, list) and all(_is_integer(x) and x >= minimum for x in v),
        )
        return tuple(found)

    def member(self, name: str) -> "Fields":
        """Return an object inside this one."""
        found = self._checked(name, REQUIRED, "a JSON object", lambda v: isinstance(v, dict))
        return Fields(found, self._where, f"{self._path}{name}.")

    def optional_member(self, name: str) -> "Fields | None":
        """Return an object inside this one, or None where the field is null or absent."""
        return None if self._values.get(name) is None else self.member(name)

    def objects(self, name: str, default: Any = REQUIRED) -> "Iterator[Fields]":
        """Yield the objects of a list, each as `Fields` that know their index."""
        values = self._checked(name, default, "a list of objects", lambda v: isinstance(v, list))
        for index, value in enumerate(values):
            yield Fields(value, self._where, f"{self._path}{name}[{index}].")

    def mapping(self, name: str, default: Any = REQUIRED) -> "Iterator[tuple[str, Fields]]":
        """Yield the entries of an object of objects."""
        values = self._checked(name, default, "an object", lambda v: isinstance(v, dict))
        for key, value in values.items():
            yield key, Fields(value, self._where, f"{self._path}{name}.{key}.")

    def present(self, name: str) -> bool:
        """Say whether the field is there and not null."""
        return self._values.get(name) is not None

    def scalars(self, name: str) -> dict[str, str | int | float | bool]:
        """Return an object whose values are strings, numbers or truth values; an absent one is empty."""
        found = self._checked(
            name,
            {},
            "an object of strings and numbers",
            lambda v: isinstance(v, dict) and all(isinstance(x, str | bool) or _is_finite(x) for x in v.values()),
        )
        return dict(found)

    def reject_unknown(self, known: tuple[str, ...]) -> None:
        """Refuse fields outside `known`: a misspelt optional field must not be ignored."""
        for name in self._values:
            if name not in known:
                raise FormatError(
                    self._where, self._path + name, self._values[name], "no such field; known: " + ", ".join(known)
                )

    def _checked(self, name: str, default: Any, wanted: str, accept: Callable[[Any], bool]) -> Any:
        if name not in self._values and default is not REQUIRED:
            return default
        if name not in self._values or not accept(self._values[name]):
            raise self.error(name, wanted)
        return self._values[name]


class _Missing:
    """Prints as `nothing`: what an error says was found where a field is absent."""

    def __repr__(self) -> str:
        return "nothing"


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_amount(value: Any) -> bool:
    return _is_finite(value) and value >= 0


def with_an_end(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file; raise `OSError` for a pipe or a device, which would be read for ever."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of folders, reading says so itself
        raise OSError(errno.EINVAL, "a pipe or a device", str(path))
    return Path(path)


def read_json(path: str | os.PathLike[str], expected_format: str, build: Callable[[Fields], T]) -> T:
    """Read the JSON file at `path`, check its `format` field and hand its fields to `build`."""
    where = str(path)
    try:
        text = with_an_end(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(where, "file", _reason(error), f"a readable {expected_format} file") from error
    return parse_json(text, where, expected_format, build)


def parse_json(text: str, where: str, expected_format: str, build: Callable[[Fields], T]) -> T:
    """Parse `text`, check its `format` field and hand its fields to `build`."""
    try:
        values = load_json(text)
    except UnexpectedValueError as error:
        raise FormatError(where, "JSON", error.found, f"{error.wanted} in a {expected_format} document") from error
    except json.JSONDecodeError as error:
        found = f"{error.msg} at line {error.lineno} column {error.colno} of {text.count(chr(10)) + 1} lines"
        raise FormatError(where, "JSON", found, f"a whole {expected_format} document") from error
    except RecursionError as error:
        raise FormatError(where, "JSON", "nesting too deep", f"a {expected_format} document") from error
    fields = Fields(values, where)
    fields.choice("format", (expected_format,))
    return build(fields)


class UnexpectedValueError(ValueError):
    """A value that is JSON, and that no writer of ours puts into a document."""

    def __init__(self, found: str, wanted: str) -> None:
        super().__init__(f"{found}; wanted {wanted}")
        self.found, self.wanted = found, wanted


def load_json(text: str, bits: int = 64) -> Any:
    """Return what JSON holds: whole numbers of `bits` with their sign, floats of 64 bits, strings that are text.

    Raise `UnexpectedValueError` for other values, `json.JSONDecodeError` for what is no JSON, and `RecursionError`
    where it is nested too deep.
    """

    def whole(digits: str) -> int:
        if len(digits) > bits // 3 or abs(int(digits)) >= 1 << bits - 1:  # int() takes long for many digits
            found = f"a whole number of {len(digits.lstrip('-'))} digits"
            raise UnexpectedValueError(found, f"whole numbers below 2^{bits - 1}")
        return int(digits)

    values = json.loads(text, parse_int=whole, parse_float=_finite)
    if _ESCAPED_SURROGATE.search(text):
        try:
            json.dumps(values, ensure_ascii=False).encode()  # a pair of them is a letter; one alone is none
        except UnicodeEncodeError as error:
            raise UnexpectedValueError("half of a surrogate pair", "text") from error
    return values


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise UnexpectedValueError(f"{shorten(digits, 20)}, beyond float64", "finite numbers")
    return value


def json_text(document: Any, where: str, **layout: Any) -> str:
    """Return `document` as JSON for `where`, laid out as `json.dumps` takes it; its numbers must be finite."""
    try:
        return json.dumps(document, allow_nan=False, **layout)
    except ValueError as error:
        wanted = "finite numbers: those it was made from are too large, or too small to divide by"
        raise FormatError(where, "JSON", str(error), wanted) from error


def write_json(path: str | os.PathLike[str], document: dict[str, Any]) -> None:
    """Write `document` to `path`, as `write_text` does."""
    write_text(path, json_text(document, str(path), indent=1) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` to `path`, in a folder made for it, whole or not at all: a reader never sees half a file.

    A link is replaced, not followed: in a folder of another's making it may lead anywhere. A device or a pipe is
    refused: root would put a file in its place.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        _refuse_devices(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)  # a dead process's of the same number
        with open(partial, "x", encoding="utf-8") as file:  # follows no link
            file.write(text)
        partial.replace(target)
    except OSError as error:
        raise FormatError(str(path), "file", _reason(error), "a path that can be written") from error
    finally:
        with suppress(OSError):  # where it could not be made, it need not go
            partial.unlink()


def _refuse_devices(target: Path) -> None:
    with suppress(FileNotFoundError):
        with_an_end(target)
    if target.parent.resolve() == Path("/dev"):  # /dev/stdout is a link, which may lead to a file
        raise OSError(errno.EINVAL, "a name among devices", str(target))


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
