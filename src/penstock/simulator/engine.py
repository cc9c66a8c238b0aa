"""A discrete-event engine: tasks that take time, wait for one another and share resources.

A task starts when everything in `after` is finished and each resource it uses is free. Among tasks that could start at
the same moment the one listed first goes first, so a run is deterministic and the list order is the priority. A task
holds all its resources for its whole duration.

    a: 2 s on the link;  b: 1 s on the link;  c: 1 s on the CPU, after a

    link  |a a|b|
    cpu       |c|      ends at 3: b waits for the link, c for a
"""

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

Resource = Hashable


@dataclass(frozen=True, slots=True)
class Task:
    """Something that takes time."""

    seconds: float
    uses: tuple[Resource, ...] = ()
    after: tuple[int, ...] = ()  # indices into the task list


@dataclass(frozen=True, slots=True)
class Ran:
    """When a task ran."""

    start_seconds: float
    end_seconds: float


class DeadlockError(AssertionError):
    """Some tasks wait for one another for ever: a cycle in `after`, which callers must not build."""


def run_tasks(tasks: Sequence[Task]) -> list[Ran]:
    """Run all tasks and return when each ran; a resource serves one task at a time."""
    return _Run(tasks).finish()


class _Run:
    """The state of one simulation."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.busy: set[Resource] = set()
        self.blocking = [len(set(task.after)) for task in tasks]  # dependencies not yet finished
        self.followers: list[list[int]] = [[] for _ in tasks]
        for index, task in enumerate(tasks):
            for earlier in set(task.after):
                self.followers[earlier].append(index)
        self.waiting: defaultdict[Resource, set[int]] = defaultdict(set)  # tasks that are ready but lack room
        self.events: list[tuple[float, int, bool]] = []  # (time, task, finished?)
        self.ran: list[Ran | None] = [None] * len(tasks)

    def finish(self) -> list[Ran]:
        for index, blocking in enumerate(self.blocking):
            if not blocking:
                heapq.heappush(self.events, (0.0, index, False))
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
            _, index, finished = heapq.heappop(self.events)
            if finished:
                candidates |= self._release(now, index)
            else:
                candidates.add(index)
                for resource in self.tasks[index].uses:
                    self.waiting[resource].add(index)
        return candidates

    def _release(self, now: float, index: int) -> set[int]:
        for follower in self.followers[index]:
            self.blocking[follower] -= 1
            if not self.blocking[follower]:
                heapq.heappush(self.events, (now, follower, False))
        woken: set[int] = set()
        for resource in self.tasks[index].uses:
            self.busy.discard(resource)
            woken.update(self.waiting[resource])
        return woken

    def _start(self, now: float, candidates: Iterable[int]) -> None:
        for index in sorted(candidates):
            task = self.tasks[index]
            if self.ran[index] is None and self.busy.isdisjoint(task.uses):
                for resource in task.uses:
                    self.busy.add(resource)
                    self.waiting[resource].discard(index)
                self.ran[index] = Ran(now, now + task.seconds)
                heapq.heappush(self.events, (now + task.seconds, index, True))
