"""Every exception penstock raises on purpose: what was found, what was wanted, what to do.

All derive from `PenstockError`, so a training script can catch one class; the command line prints the message
as one line and exits with code 2.
"""


class PenstockError(Exception):
    """The user's input or surroundings cannot be used as they are; the message says what to change."""


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
        text = source_line.expandtabs(1)
        caret = " " * (column - 1) + "^" * max(1, min(width, len(text) - column + 1))
        super().__init__(f"{path}:{line}:{column}: {problem}; {advice}\n    {text}\n    {caret}")


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
