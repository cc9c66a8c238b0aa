"""What a schedule takes, and the best of all schedules, by definition: no queues, no dynamic programme."""

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
    """Try every partition and, for every message, every way: 2^(L-1) partitions, by their definition."""
    ready, sizes, count = trace.ready_seconds, trace.nbytes, len(trace.tensors)

    def best_from(start, free):
        if start == count:
            return max(free[-1], ready[-1])
        best, nbytes = INFINITY, 0
        for end in range(start, count):
            nbytes += sizes[end]
            for way in ways:
                now, freed, codec = ready[end], [], way.seconds_per_tensor * (end + 1 - start)
                for stage, busy in zip(way.stages, free, strict=True):
                    now = max(now, busy) + stage.a_seconds + stage.b_seconds_per_byte * nbytes + codec
                    freed.append(now)
                    codec = 0.0
                best = min(best, best_from(end + 1, freed))
        return best

    return best_from(0, [0.0] * len(ways[0].stages))
