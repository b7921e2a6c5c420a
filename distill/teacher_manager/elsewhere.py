"""Works of teachers that somebody else serves: each is asked at once, for they take no slot and have no turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from distill.errors import DistillError, ServerError, TeacherError
from distill.teacher_manager.failures import Failures
from distill.teacher_manager.remote import RemoteTeacher, State
from distill.teacher_manager.spans import SpanSink
from distill.teacher_manager.work import Work, settle
from distill.types import SignalSpec

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


class Elsewhere:
    """Remote teachers by name. A work's future gets the scores, or the reason why there are none."""

    def __init__(
        self, teachers: Mapping[str, RemoteTeacher], spec: SignalSpec, failures: Failures, on_span: SpanSink
    ) -> None:
        self.teachers = teachers
        self._spec = spec
        self._failures = failures
        self._span = on_span
        self._asking: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Look at every server. One that is not there ends a run that could not go on without it."""
        if self._failures.stops:
            await asyncio.gather(*(teacher.start() for teacher in self.teachers.values()))

    def ask(self, work: Work) -> None:
        task = asyncio.create_task(self._answer(self.teachers[work.teacher], work))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        work.future.add_done_callback(lambda _: task.cancel())  # whoever asked went away

    async def close(self) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        for teacher in self.teachers.values():
            await teacher.close()

    async def _answer(self, teacher: RemoteTeacher, work: Work) -> None:
        pause_s = _FIRST_WAIT_S
        while True:
            try:
                found = await self._once(teacher, work)
            except (ServerError, TeacherError) as error:
                if error.sample_id:
                    settle(work, error)
                elif not self._failures.waits or teacher.state is State.REFUSED:
                    self._failures.fail(work, TeacherError(error.what, why=error.why, fix=error.fix))
                else:
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_WAIT_S)
                    continue
            except DistillError as error:  # the server cannot give what the objective needs
                settle(work, error)
            else:
                settle(work, found)
            return

    async def _once(self, teacher: RemoteTeacher, work: Work) -> Any:
        start = time.monotonic()
        if work.score is None:
            written = await teacher.generate(work.prompts)
            self._span("eval", start, time.monotonic(), work.teacher, sum(len(each.output_ids) for each in written))
            return written
        (scores,) = await teacher.score([work.score], self._spec)
        self._span("score", start, time.monotonic(), work.teacher, work.tokens)
        return scores
