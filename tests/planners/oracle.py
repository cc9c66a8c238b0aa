"""What a schedule takes, and the best of all schedules, by definition: no queues, no dynamic programme."""

from itertools import product

INFINITY = float("inf")


def schedule_seconds(trace, ends, chosen_stages):
    """Add up one schedule by the definition of MG-WFBP Eq. 7, stage by stage."""
    ready, sizes = trace.ready_seconds, trace.nbytes
    free = [0.0] * len(chosen_stages[0])
    start = 0
    for end, stages in zip(ends, chosen_stages, strict=True):
        now = ready[end]
        for index, stage in enumerate(stages):
            now = max(now, free[index]) + stage.a_seconds + stage.b_seconds_per_byte * sum(sizes[start : end + 1])
            free[index] = now
        start = end + 1
    return max(free[-1], ready[-1])


def brute_force_seconds(trace, ways):
    """Try all 2^(L-1) partitions, and for each message every way.

    With one stage the ways of a partition can be settled message by message, since an earlier end is never worse.
    """
    count = len(trace.tensors)
    best = INFINITY
    for marks in product((False, True), repeat=count - 1):
        ends = [i for i, mark in enumerate(marks) if mark] + [count - 1]
        if len(ways) == 1 or len(ways[0].stages) == 1:
            best = min(best, _greedy_ways(trace, ends, ways))
        else:
            for chosen in product(ways, repeat=len(ends)):
                best = min(best, schedule_seconds(trace, ends, [way.stages for way in chosen]))
    return best


def _greedy_ways(trace, ends, ways):
    if len(ways) == 1:
        return schedule_seconds(trace, ends, [ways[0].stages] * len(ends))
    now, start = 0.0, 0
    for end in ends:
        size = sum(trace.nbytes[start : end + 1])
        now = max(now, trace.ready_seconds[end]) + min(way.stages[0].seconds(size) for way in ways)
        start = end + 1
    return max(now, trace.ready_seconds[-1])
