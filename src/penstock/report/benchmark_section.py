"""One benchmark on the page of benchmarks, and how to say which of its rows compete."""

from dataclasses import dataclass

from penstock.report.benchmark_tables import Choice, Rivalry


@dataclass(frozen=True, slots=True)
class Section:
    """One benchmark on the page."""

    title: str
    text: str
    rivalry: Rivalry | None = None
    hidden: tuple[str, ...] = ()  # fields that stay in the JSON
    shares: tuple[str, ...] = ()  # fields that are shown in percent


def begins(*words: str) -> Choice:
    """Return what picks the names that begin with one of the words."""
    return lambda name: name.startswith(words)


def equals(*words: str) -> Choice:
    """Return what picks these names."""
    return lambda name: name in words


def other(choice: Choice) -> Choice:
    """Return what picks all other names."""
    return lambda name: not choice(name)


def replayed(ours: Choice, peer: Choice, *further: str) -> Rivalry:
    """Return the rivalry of replayed iterations, told apart by `how`; `further` fields must agree too."""
    return Rivalry(("hosts", "rate", "what", *further), "how", ours, peer, "measured_seconds")
