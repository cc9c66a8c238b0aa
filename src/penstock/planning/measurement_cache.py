"""Measured networks that are kept between jobs: one file per cluster, in the platform's cache folder unless told where.

A measurement holds for the hosts, their links, the engine, the number of workers, the versions and the codecs it was
made with; that is what its file is called by. Where the speed of a link cannot be read (an emulated host's, a switch's)
the kept one is compared with a few messages before it is used (`runtime.measure.link_holds`). Only rank 0 reads and
writes. Nothing about a file ends training: what cannot be read is measured again, with a warning.
"""

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from platformdirs import user_cache_path

from penstock.codecs.registry import codec_digest
from penstock.errors import PenstockError, PlanError
from penstock.machine import versions
from penstock.network import Network, load_network, save_network
from penstock.planning.agree import Ranks, nodes_of
from penstock.private_folder import make_private
from penstock.runtime.hosts import Nodes

OFF = (False, "off")  # what a user says to keep nothing
_INTERFACES = Path("/sys/class/net")
Links = tuple[tuple[str, int], ...]  # names of interfaces, and Mb/s


@dataclass(frozen=True, slots=True)
class Cluster:
    """The ranks, engine, hosts and codecs that a measurement is of: it is used again where all of them are the same."""

    hosts: tuple[str, ...]  # names of the ranks' hosts, in order
    engine: str  # gloo, nccl, ...
    device: str  # cpu or cuda
    workers: int
    nodes: Nodes = ()  # the ranks of each host: emulated hosts and containers may have the same name
    links: tuple[Links, ...] = ()  # of each rank's host, as far as it knows them
    versions: tuple[tuple[str, str], ...] = ()  # of what computes and sends
    codecs: tuple[str, ...] = ()  # that were measured, by their text

    @property
    def digest(self) -> str:
        """A short name for files."""
        return hashlib.sha256(json.dumps(astuple(self)).encode()).hexdigest()[:16]


def cluster_of(ranks: Ranks, device: str, engine: str, codecs: Sequence[str] = ()) -> Cluster:
    """Return the cluster that ranks are on; every rank must call this at the same time. `device`: cpu or cuda."""
    found: list[tuple[str, Links]] = ranks.gather((platform.node(), read_links()), "gathering the names of hosts")
    return Cluster(
        hosts=tuple(host for host, _ in found),
        engine=engine,
        device=device,
        workers=len(found),
        nodes=nodes_of(ranks),
        links=tuple(links for _, links in found),
        versions=(("python", platform.python_version()), *versions(("penstock", "torch")).items()),
        codecs=tuple(codec_digest(codec) for codec in codecs),
    )


def read_links(interfaces: Path = _INTERFACES) -> Links:
    """Return the network cards of this host that are up, with their speeds; virtual interfaces have none to tell."""
    found = []
    for one in sorted(interfaces.iterdir()) if interfaces.is_dir() else ():
        try:
            if (one / "device").exists() and (one / "operstate").read_text().strip() == "up":
                found.append((one.name, int((one / "speed").read_text())))
        except (OSError, ValueError):  # a card that does not say
            continue
    return tuple(found)


def measurement_folder(asked: str | os.PathLike[str] | bool | None) -> Path | None:
    """Return the folder that a user's `measurements` means; None: keep nothing."""
    if asked is None:
        return _default_folder()
    if asked in OFF:
        return None
    if not isinstance(asked, str | os.PathLike):
        raise PlanError(
            f"measurements is {asked!r}; wanted a folder, None for the cache folder, or False to keep nothing"
        )
    return Path(asked)


def _default_folder() -> Path:
    return user_cache_path("penstock") / "measurements"


def _check_folder(folder: Path) -> None:
    """Make the folder that the user did not name the user's alone, or raise; a named one may be a team's."""
    if folder == _default_folder():
        make_private(folder)


def measurement_path(folder: str | Path, cluster: Cluster) -> Path:
    """Return where the measurement of a cluster is kept."""
    return Path(folder) / f"network-{cluster.engine}-{cluster.workers}-{cluster.digest}.json"


def load_kept(path: Path, workers: int) -> Network | None:
    """Return what a file has, None where there is none; one that cannot be used is named in a warning."""
    try:
        if not path.exists():
            return None
        _check_folder(path.parent)
        network = load_network(path)
        if network.workers == workers:
            return network
        found = f"it is of {network.workers} workers, wanted {workers}"
    except (PenstockError, OSError, UnicodeError) as error:
        found = str(error)
    warnings.warn(f"the kept measurement {path} cannot be used ({found}): measuring again", stacklevel=2)
    return None


def keep(network: Network, path: Path) -> bool:
    """Write a measurement down, whole or not at all; say whether that went well. Where it did not, warn."""
    try:
        _check_folder(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_network(network, path)
    except (PenstockError, OSError) as error:
        warnings.warn(
            f"what was measured could not be kept in {path.parent} ({error}): the next job measures again; name a "
            "folder with measurements=..., or say measurements=False",
            stacklevel=2,
        )
        return False
    return True
