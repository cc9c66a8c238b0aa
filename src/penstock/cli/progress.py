"""A progress bar on standard error that says what was just finished."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar for the length of a `with` block; call what it yields once per step, with the step's name."""
    from rich.progress import Progress

    from penstock.cli.output import stderr_console

    with Progress(console=stderr_console(), transient=True) as bar:
        task = bar.add_task(title, total=total)

        def done(name: str) -> None:
            bar.update(task, advance=1, description=f"{title}: {name}")

        yield done
