"""What a visit asks of a slot: requests that many samples share, the doubt of single ones, and what all of it took."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from distill.config import TeacherManagerConfig
from distill.errors import ServerError, TeacherError
from distill.teacher_manager.catalogue import Catalogue
from distill.teacher_manager.gate import Gate
from distill.teacher_manager.slot import Slot
from distill.teacher_manager.spans import EventSink, SpanSink
from distill.teacher_manager.work import Work, batches, cost_of_prompt, settle
from distill.types import Generation, SignalSpec


@dataclass(slots=True)
class Outcome:
    """Of one visit. Its works have their results, but for those that an error kept from it."""

    tokens: int = 0
    """That were scored."""
    distrust: str = ""
    """Why weights that were loaded and verified since are to be asked once more; empty: no need."""
    error: ServerError | TeacherError | None = None
    """Ended the visit."""
    blamed: Sequence[Work] = ()
    """Those of the call that it came from."""


class Calls:
    """Asks slots for works, and counts."""

    def __init__(
        self,
        catalogue: Catalogue,
        gate: Gate,
        spec: SignalSpec,
        config: TeacherManagerConfig,
        on_span: SpanSink,
        on_event: EventSink,
    ) -> None:
        self._catalogue = catalogue
        self._gate = gate
        self._spec = spec
        self._config = config
        self._span = on_span
        self._event = on_event
        self.tokens = Counter[str]()
        """Teacher -> tokens that it scored, prompts included."""
        self.streams = 0
        self.bad_streams = Counter[int]()
        """Item -> streams in a row whose weights were refused."""

    async def visit(self, slot: Slot, item: int, works: Sequence[Work], *, stream: bool) -> Outcome:
        """Do the works, in their order, until one call fails. Those of a resident `item` may be for others of its base,
        too: each request names the object that is to answer it."""
        found, call = Outcome(), works
        try:
            for call in self._calls(works):
                found.tokens += sum(work.tokens for work in call if work.score is not None)
                found.distrust = await self._run_or_doubt(slot, item, call, stream=stream) or found.distrust
        except (ServerError, TeacherError) as error:
            names = ", ".join(sorted({work.teacher for work in call}))
            self._event("warning", f"{slot.name}: {len(call)} requests for {names} failed: {error.what}")
            found.distrust, found.error, found.blamed = error.what, error, call
            self.bad_streams[item] += stream and isinstance(error, TeacherError)
        return found

    async def _run_or_doubt(self, slot: Slot, item: int, call: Sequence[Work], *, stream: bool) -> str:
        """`_run`. Scores that are refused because of one sample end this call and nothing else: all of it is asked for
        again, each by itself, and the sample fails if it is refused once more. Not empty: a second opinion is wanted,
        of weights that were loaded and verified since, and why."""
        try:
            await self._run(slot, item, call, stream=stream)
        except TeacherError as error:
            asked = {work.score.id: work for work in call if work.score is not None}
            at_fault = asked.get(error.sample_id)
            if at_fault is None:
                raise
            error.sample_id, error.teacher = at_fault.sample, at_fault.teacher
            for work in call:
                work.alone = True
            if at_fault.doubted:
                settle(at_fault, error)
                return ""
            at_fault.doubted = True
            self._event("warning", f"{slot.name}: scores are refused, and asked for once more: {error.what}")
            return error.what
        return ""

    async def _run(self, slot: Slot, item: int, call: Sequence[Work], *, stream: bool) -> None:
        """One request to the server: samples to score together, or one work that writes."""
        start = time.monotonic()
        requests = [work.score for work in call if work.score is not None]
        if requests:
            if stream:
                files = self._catalogue.items[item].files
                replies = await slot.stream(files, self._gate, requests, self._spec, self._config.timeout_s)
                self.streams += 1
                self.bad_streams[item] = 0
            else:
                replies = await slot.score(requests, self._spec, self._config.timeout_s)
            self._account(call, start)
            for work, scores in zip(call, replies, strict=True):
                settle(work, scores)
            return
        (work,) = call
        written: list[Generation] = []
        for prompts in batches(work.prompts, cost_of_prompt, self._config.call_tokens):
            written += await slot.generate(self._catalogue.items[work.item].files, prompts, self._config.timeout_s)
        self._span("eval", start, time.monotonic(), work.teacher, sum(len(each.output_ids) for each in written))
        settle(work, written)

    def _account(self, call: Sequence[Work], start: float) -> None:
        """The tokens of each teacher; the time of a call that several share is split by tokens."""
        tokens = Counter[str]()
        for work in call:
            tokens[work.teacher] += work.tokens
        share_s = (time.monotonic() - start) / max(1, tokens.total())
        for teacher, count in tokens.items():
            self.tokens[teacher] += count
            self._span("score", start, start + share_s * count, teacher, count)
            start += share_s * count

    def _calls(self, works: Sequence[Work]) -> list[list[Work]]:
        """The visit's requests, in the order of its works: a function of the works alone."""
        single = [[work] for work in works if work.prompts or work.alone]
        scoring = [work for work in works if not work.prompts and not work.alone]
        return single + batches(scoring, lambda work: work.tokens, self._config.call_tokens)
