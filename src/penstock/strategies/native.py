"""Native: one call of the engine's own collective, to be compared with and to fall back on.

    all-reduce on 2 ranks

    rank 0   0 native data[0:n]
    rank 1   0 native data[0:n]

What travels is the engine's business: no step and no byte of it shows in the program.
"""

from penstock.program import DATA, Collective, Part, Slice
from penstock.program.builder import PartBuilder
from penstock.strategies.strategy import Builder, Options, Strategy

NAME = "native"


def _calls(collective: Collective) -> Builder:
    """Return what builds one call of the engine's own collective."""
    rooted = collective in (Collective.BROADCAST, Collective.REDUCE)

    def build(rank: int, world_size: int, numel: int, options: Options) -> Part:
        builder = PartBuilder(NAME, collective, rank, world_size, numel, options.root if rooted else 0)
        builder.native(Slice(DATA, 0, numel))
        return builder.build()

    return build


NATIVE = Strategy(NAME, {collective: _calls(collective) for collective in Collective})
