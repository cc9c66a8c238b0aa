"""Every exception penstock raises on purpose: what was found, what was wanted, what to do.

All derive from `PenstockError`, so a training script can catch one class; the command line prints the message
as one line and exits with code 2.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

LONGEST = 2_000  # characters of a message
SHOWN = 200  # characters of a line of source around a mistake in it
EXTRAS = {  # packages that only some parts need: the extra that installs them
    "torch": "torch",
    "numba": "codecs",
    "llvmlite": "codecs",
    "matplotlib": "plot",
    "mpi4py": "mpi",
    "sklearn": "digits",
    "triton": "gpu",
    "tensorboard": "tensorboard",
    "accelerate": "accelerate",
    "transformers": "transformers",
    "lightning": "lightning",
    "tensorflow": "tensorflow",
    "keras": "tensorflow",
    "jax": "jax",
    "optax": "jax",
    "mxnet": "mxnet",
}


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the known name that is nearest to a misspelt one, as the end of a message; "" where none is near.

    >>> did_you_mean("exct", ["exact", "greedy"])
    " (did you mean 'exact'?)"
    """
    near = get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def what_to_install(error: ModuleNotFoundError) -> str:
    """Return what brings a missing package, in one line; "" for a package that no extra has.

    >>> what_to_install(ModuleNotFoundError("No module named 'numba'", name="numba"))
    "numba is not installed, and this needs it: pip install 'penstock[codecs]'"
    """
    package = (error.name or "").split(".")[0]
    extra = EXTRAS.get(package)
    return f"{package} is not installed, and this needs it: pip install 'penstock[{extra}]'" if extra else ""


@contextmanager
def naming_extra() -> Iterator[None]:
    """Around imports: say of a missing package which extra installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not (complaint := what_to_install(error)):
            raise
        raise ModuleNotFoundError(complaint, name=error.name) from None


class PenstockError(Exception):
    """The user's input or surroundings cannot be used as they are; the message says what to change."""

    def __str__(self) -> str:
        """Return the message; names in it may be of any length, and hold what a terminal obeys."""
        return printable(_without_middle(super().__str__(), LONGEST))


class FormatError(PenstockError):
    """A file does not hold what its format promises."""

    def __init__(self, where: str, field: str, found: object, wanted: str) -> None:
        self.where, self.field, self.found, self.wanted = where, field, found, wanted
        named = field if field.isprintable() and len(field) <= 200 else shorten(field, 200)  # a key may be anything
        super().__init__(f"{where}: {named}: found {shorten(found)}; wanted {wanted}")


class TraceError(PenstockError):
    """A trace contradicts itself."""


class NetworkError(PenstockError):
    """A network lacks the numbers that a question about it needs."""


class PlanError(PenstockError):
    """A plan does not fit the trace or the planner cannot answer."""


class FitError(PenstockError):
    """Measured points do not determine a cost line."""


class ProfileError(PenstockError):
    """A model cannot be profiled as it was given."""


class StrategyError(PenstockError):
    """A strategy is unknown or cannot be built with these options."""


class ClusterError(PenstockError):
    """Emulated hosts were asked for in a way that makes no sense, or this machine cannot provide them."""


class TaskError(PenstockError):
    """No task has that name, or what a user's function returned is none."""


class TrainError(PenstockError):
    """A training job was asked for in a way that makes no sense, or its checkpoint cannot be used."""


class WorkerError(PenstockError):
    """A worker of a training job failed; names its rank."""


class TransportError(PenstockError):
    """A message did not arrive: a peer died, hangs, or never called."""

    def __init__(self, strategy: str, rank: int, step: str, peer: int | None, cause: str) -> None:
        self.strategy, self.rank, self.step, self.peer, self.cause = strategy, rank, step, peer, cause
        who = "the other ranks" if peer is None else f"rank {peer}"
        super().__init__(f"{strategy}: rank {rank}, step {step}: no message exchanged with {who}: {cause}")


class MismatchError(PenstockError):
    """Ranks were about to run different programs; no data moved."""


class CodecError(PenstockError):
    """Bytes are not what a codec wrote, or a codec cannot be used with these parameters."""


class NonFiniteError(CodecError):
    """A gradient holds NaN or infinity, which no codec can send."""


class CompileError(PenstockError):
    """A compressor program is wrong; shows the file, the line and a caret under what is meant."""

    def __init__(
        self, path: str, line: int, column: int, source_line: str, width: int, problem: str, advice: str
    ) -> None:
        self.path, self.line, self.column = path, line, column
        self.problem, self.advice = problem, advice
        text = printable(source_line.expandtabs(1))
        start = max(0, column - 1 - SHOWN // 2) if len(text) > SHOWN else 0
        text, place = text[start : start + SHOWN], column - 1 - start
        caret = " " * place + "^" * max(1, min(width, len(text) - place))
        said = f"{_without_middle(problem)}; {_without_middle(advice)}"  # names in a source may be of any length
        super().__init__(f"{path}:{line}:{column}: {said}\n    {text}\n    {caret}")


def printable(text: str) -> str:
    """Return text that may come from a file as a terminal can show it, without characters that it would obey.

    >>> printable("red: \x1b[31m")
    'red: ?[31m'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)


def one_line(error: BaseException) -> str:
    """Return what an error of another library says, in one line; its class where it says nothing.

    >>> one_line(ValueError("size mismatch:\\n\\tfound 3"))
    'size mismatch: found 3'
    """
    return " ".join(str(error).split()) or type(error).__name__


def shorten(value: object, limit: int = 60) -> str:
    """Return `repr(value)`, cut so that an error stays one line.

    >>> shorten("x" * 100, 10)
    "'xxxxxx..."
    """
    try:
        text = repr(value).replace("\n", " ")
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deep to show"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _without_middle(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
