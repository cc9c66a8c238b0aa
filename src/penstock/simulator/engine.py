"""A discrete-event engine: tasks that take time, wait for one another and share resources.

A task starts when everything in `after` is finished and each resource it uses is free. Among tasks that could start at
the same moment the one listed first goes first, so a run is deterministic and the list order is the priority. A task
holds all its resources for its whole duration.

    a: 2 s on the link;  b: 1 s on the link;  c: 1 s on the CPU, after a

    link  |a a|b|
    cpu       |c|      ends at 3: b waits for the link, c for a

A `pool` is a number of cores. Tasks on it are never kept waiting: where there are more of them than cores, all go on at
the same lower speed, as an operating system divides its cores.

    a, b and c on a pool of two cores, each 2 s of a core's time; c starts at 1

    a, b  |1|2 3 3|    from 1 to 2.5 three tasks at 2/3 of a core's speed; a and b end at 2.5
    c       |3 3 |2|   has had 1 s by then, and ends at 3.5
"""

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Resource = Hashable


class Task(NamedTuple):  # a tuple, as an instruction is: an iteration in lanes has a hundred thousand
    """Work of `seconds` that begins once tasks before it are done and all resources that it uses are free."""

    seconds: float  # on a pool: of one core
    uses: tuple[Resource, ...] = ()
    after: tuple[int, ...] = ()  # indices into the task list
    pool: Hashable = None  # the cores that it needs one of; None: none


class Ran(NamedTuple):
    """When a task ran."""

    start_seconds: float
    end_seconds: float


class DeadlockError(AssertionError):
    """Some tasks wait for one another for ever: a cycle in `after`, which callers must not build."""


def run_tasks(tasks: Sequence[Task], pools: Mapping[Hashable, float] | None = None) -> list[Ran]:
    """Run all tasks and return when each ran; a resource serves one task at a time, a pool has so many cores."""
    return _Run(tasks, pools or {}).finish()


_READY, _FINISHED, _POOL = range(3)  # kinds of events


@dataclass(slots=True)
class _Pool:
    """Cores, and the tasks on them: all have the same speed, so what one gets in a time, each gets."""

    cores: float
    given: float = 0.0  # seconds of a core that each task which was there all the time has had
    at: float = 0.0  # until this moment
    ends: list[tuple[float, int]] = field(default_factory=list)  # what is `given` when a task ends, and which; a heap
    version: int = 0  # of `ends`: what was predicted before it changed does not hold

    @property
    def speed(self) -> float:
        return min(1.0, self.cores / max(len(self.ends), 1))

    def go_on(self, now: float) -> None:
        self.given += (now - self.at) * self.speed
        self.at = now

    def next_end(self) -> float:
        return self.at + max(0.0, self.ends[0][0] - self.given) / self.speed


class _Run:
    """The state of one simulation."""

    def __init__(self, tasks: Sequence[Task], pools: Mapping[Hashable, float]) -> None:
        self.tasks = tasks
        self.busy: set[Resource] = set()
        earlier = [set(task.after) for task in tasks]
        self.blocking = [len(each) for each in earlier]  # dependencies not yet finished
        self.followers: list[list[int]] = [[] for _ in tasks]
        for index, each in enumerate(earlier):
            for before in each:
                self.followers[before].append(index)
        self.waiting: defaultdict[Resource, set[int]] = defaultdict(set)  # tasks that are ready but lack room
        self.pools = {name: _Pool(cores) for name, cores in pools.items()}
        self.events: list[tuple[float, int, int, Hashable, int]] = []  # (time, task, kind, pool, its version)
        self.started: list[float | None] = [None] * len(tasks)
        self.ran: list[Ran | None] = [None] * len(tasks)

    def finish(self) -> list[Ran]:
        for index, blocking in enumerate(self.blocking):
            if not blocking:
                heapq.heappush(self.events, (0.0, index, _READY, None, 0))
        while self.events:
            now = self.events[0][0]
            self._start(now, self._settle(now))
        stuck = [index for index, ran in enumerate(self.ran) if ran is None]
        if stuck:
            raise DeadlockError(f"tasks {stuck[:5]} never become ready; `after` has a cycle")
        return [ran for ran in self.ran if ran is not None]

    def _settle(self, now: float) -> set[int]:
        """Take every event of this moment and return the tasks that may now be able to start."""
        candidates: set[int] = set()
        while self.events and self.events[0][0] <= now:
            _, index, kind, pool, version = heapq.heappop(self.events)
            if kind == _READY:
                candidates.add(index)
                for resource in self.tasks[index].uses:
                    self.waiting[resource].add(index)
            elif kind == _FINISHED:
                candidates |= self._release(now, index)
            elif version == self.pools[pool].version:
                candidates |= self._leave(now, pool)
        return candidates

    def _release(self, now: float, index: int) -> set[int]:
        started = self.started[index]
        assert started is not None
        self.ran[index] = Ran(started, now)
        for follower in self.followers[index]:
            self.blocking[follower] -= 1
            if not self.blocking[follower]:
                heapq.heappush(self.events, (now, follower, _READY, None, 0))
        woken: set[int] = set()
        for resource in self.tasks[index].uses:
            self.busy.discard(resource)
            woken.update(self.waiting[resource])
        return woken

    def _leave(self, now: float, name: Hashable) -> set[int]:
        """End the tasks of a pool that have had their time."""
        pool, woken = self.pools[name], set[int]()
        pool.at, pool.given = now, pool.ends[0][0]
        while pool.ends and pool.ends[0][0] <= pool.given:
            woken |= self._release(now, heapq.heappop(pool.ends)[1])
        self._predict(name)
        return woken

    def _predict(self, name: Hashable) -> None:
        """Note when the next task of a pool ends, if no other joins or leaves it before."""
        pool = self.pools[name]
        pool.version += 1
        if pool.ends:
            heapq.heappush(self.events, (pool.next_end(), -1, _POOL, name, pool.version))

    def _start(self, now: float, candidates: Iterable[int]) -> None:
        joined: dict[Hashable, None] = {}
        for index in sorted(candidates):
            task = self.tasks[index]
            if self.started[index] is None and self.busy.isdisjoint(task.uses):
                for resource in task.uses:
                    self.busy.add(resource)
                    self.waiting[resource].discard(index)
                self.started[index] = now
                if task.pool in self.pools:
                    pool = self.pools[task.pool]
                    pool.go_on(now)
                    heapq.heappush(pool.ends, (pool.given + task.seconds, index))
                    joined[task.pool] = None
                else:
                    heapq.heappush(self.events, (now + task.seconds, index, _FINISHED, None, 0))
        for name in joined:
            self._predict(name)
