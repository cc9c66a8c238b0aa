"""Where a run's record is kept."""

from pathlib import Path

from penstock.run_record import FILE_NAME


def folder_name(name: str) -> str:
    """Return a run's name as a folder's.

    >>> folder_name("onebit, exact plan")
    'onebit-exact-plan'
    """
    return "-".join("".join(letter if letter.isalnum() or letter in ".=" else " " for letter in name).split())


def run_file(out: str, name: str) -> Path:
    """Return where a run's record belongs."""
    return Path(out) / folder_name(name) / FILE_NAME
