"""What becomes of the works of a teacher that cannot be served: the run's `on_teacher_failure` decides.

stop: they fail, and the run ends with the reason. drop_teacher: their samples are trained without that teacher, and
counted. wait: they are kept, and the teacher is tried again after a pause that grows.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distill.config import TeacherManagerConfig
from distill.errors import ServerError, TeacherDropped, TeacherError
from distill.teacher_manager.spans import EventSink
from distill.teacher_manager.work import Work

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


class Failures:
    """Of works and of whole items."""

    def __init__(self, config: TeacherManagerConfig, on_event: EventSink) -> None:
        self._rule = config.on_teacher_failure
        self._max_tries = config.max_tries
        self._event = on_event
        self._out: dict[int, TeacherError] = {}
        """Items that are served no more."""
        self._parked: defaultdict[int, list[Work]] = defaultdict(list)
        self._pauses: dict[int, float] = {}
        self._waits: dict[int, asyncio.TimerHandle] = {}
        self._dropped = Counter[str]()

    @property
    def stops(self) -> bool:
        """A teacher that cannot be served ends the run."""
        return self._rule == "stop"

    @property
    def waits(self) -> bool:
        return self._rule == "wait"

    def is_out(self, item: int) -> bool:
        return item in self._out

    def take(self, work: Work) -> bool:
        """Whether the new work's item is out: then it fails at once, or is kept until the item is tried again."""
        error = self._out.get(work.item)
        if error is None:
            return False
        if self.waits:
            self._parked[work.item].append(work)
        else:
            self.fail(work, error)
        return True

    def out(self, item: int, error: TeacherError, works: Sequence[Work], *, again: Callable[[Work], None]) -> None:
        """The item cannot be served. `works` wait for it; with `wait` they go to `again` after the pause."""
        self._out[item] = error
        if not self.waits:
            for work in works:
                self.fail(work, error)
            return
        self._parked[item] += works
        pause_s = self._pauses[item] = min(max(2 * self._pauses.get(item, 0.0), _FIRST_WAIT_S), _LONGEST_WAIT_S)
        self._event("warning", f"{error.what}; tried again in {pause_s:.0f} s (on_teacher_failure=wait)")
        self._waits[item] = asyncio.get_running_loop().call_later(pause_s, self._try_again, item, again)

    def blame(self, works: Sequence[Work], error: ServerError | TeacherError) -> None:
        """Count a try against each; one that failed too often fails for good, unless the run waits."""
        if isinstance(error, TeacherError):
            for work in works:
                work.alone = True  # the next error tells whose fault it is
        for work in works:
            work.tries += 1
            if work.tries < self._max_tries or self.waits:
                continue
            what = f"teacher {work.teacher}: {work.name} failed {work.tries} times, last: {error.what}"
            why, fix = error.why or "its server keeps failing", error.fix or "look at logs/ in the run's folder"
            self.fail(work, TeacherError(what, why=why, fix=fix))

    def fail(self, work: Work, error: TeacherError) -> None:
        """Each waiter gets an error of its own: a raised exception carries the traceback of the one who got it."""
        if work.future.done():
            return
        kind = TeacherDropped if self._rule == "drop_teacher" else TeacherError
        work.future.set_exception(kind(error.what, why=error.why, fix=error.fix))

    async def result(self, work: Work) -> Any:
        """What the work came to; a teacher that is done without has its TeacherDropped as the result."""
        try:
            return await work.future
        except TeacherDropped as dropped:
            self._dropped[work.teacher] += 1
            if self._dropped[work.teacher] == 1:
                self._event("warning", f"samples go on without teacher {work.teacher}: {dropped.what}")
            return dropped

    def dropped(self) -> Mapping[str, int]:
        """Teacher -> samples, and calls to write, that went on without it."""
        return dict(self._dropped)

    def forget(self, work: Work) -> None:
        if work in self._parked[work.item]:
            self._parked[work.item].remove(work)

    def close(self) -> None:
        for wait in self._waits.values():
            wait.cancel()

    def _try_again(self, item: int, again: Callable[[Work], None]) -> None:
        del self._out[item], self._waits[item]
        for work in self._parked.pop(item, []):
            if not work.future.done():
                again(work)
