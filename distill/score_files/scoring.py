"""Slots and their manager over the rows of a file, a window of rows at a time."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from distill.cluster import Cluster
from distill.config import RunConfig
from distill.errors import ConfigError, RunStopped, ServiceError, TeacherDropped
from distill.loop import first_cause
from distill.preflight import Preflight, inspect
from distill.remote import RemoteServer
from distill.run_folder import owned, without_folder
from distill.score_files.asking import FilePrompts, Report, asking, choose_spec
from distill.score_files.columns import RESERVED, Columns, Scored
from distill.score_files.job import ScoreJob
from distill.score_files.parts import Parts
from distill.score_files.rows import Answer, AnswerFile, Overview
from distill.teacher_manager import TeacherManager, Translation
from distill.teaching import Teaching
from distill.types import Signal, SignalSpec

_BLOCK_BYTES = 200_000_000
"""Of scores: a block of rows ends where it would have more, but holds one row."""
_REPORT_S = 5.0
_Block = tuple[Sequence[Answer], asyncio.Task[list[Scored]]]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a job is. Counts and seconds are of this process, but `rows` and `total`."""

    rows: int
    total: int
    seconds: float
    scored_rows: int
    tokens: int
    """That teachers scored, prompts included."""
    swaps: int
    stall_share: float
    """Of the time in which slots had something to do: they stood still."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A job that is done."""

    progress: Progress
    dropped: int
    """Scores that are missing, of teachers that could not be served."""


@dataclass(frozen=True)
class Sinks:
    """Who hears of a job."""

    event: Report
    progress: Callable[[Progress], None]


def score_file(config: RunConfig, job: ScoreJob, sinks: Sinks) -> Summary:
    """Score the rows of `job.source` by the run's teachers, and write `job.output` when all are.

    Raises DistillError subclasses: ConfigError with the file and the line for a row that cannot be scored, RunStopped
    when the user stops it. What is scored until then is kept for a job that resumes.
    """
    # a finished run of this configuration is no obstacle: nothing goes into its folder
    config = without_folder(config)
    job.check(config, RESERVED)
    checked = inspect(config)
    spec = choose_spec(job.signal, job.k, checked)
    rows = AnswerFile(job, config, checked)
    overview = rows.check()
    if job.signal is None and checked.objective.spec.student_k:
        sinks.event("note", f"the file does not say what the student found probable: each teacher's own {spec.k} are")
    parts = Parts(job.output)
    parts.make()
    with owned(parts.folder):
        parts.open(job.settings(config, spec), resume=job.resume)
        prompts = FilePrompts(config, checked)
        asked = asking(checked, spec, config, prompts)
        sent = asked.full_rows.asked(spec)
        spans = any(isinstance(reader, Translation) for reader in checked.translations.values())
        columns = Columns(job, overview, sent, spans=spans)
        scoring = _Scoring(config, job, asked, sent, rows, overview, prompts, parts, columns, sinks)
        summary = asyncio.run(scoring.execute())
        parts.finish(columns.schema)
    return summary


@dataclass
class _Scoring:
    config: RunConfig
    job: ScoreJob
    checked: Preflight
    sent: SignalSpec
    rows: AnswerFile
    overview: Overview
    prompts: FilePrompts
    parts: Parts
    columns: Columns
    sinks: Sinks
    began: float = field(default_factory=time.monotonic)
    first: int = 0
    """Rows that an earlier job scored."""
    done: int = 0
    missing: int = 0
    signal: int = 0
    manager: TeacherManager | None = None

    async def execute(self) -> Summary:
        self.first = self.done = self.parts.done
        if self.first:
            self.sinks.event("note", f"goes on behind {self.first} rows that are scored")
        try:
            if self.done < self.overview.rows:
                await self._serve()
        except asyncio.CancelledError:
            stopped = RunStopped(
                f"stopped; {self.done} of {self.overview.rows} rows are scored", fix="--resume goes on behind them"
            )
            stopped.exit_code = 128 + (self.signal or signal.SIGINT)
            raise stopped from None
        return Summary(self._progress(), self.missing)

    async def _serve(self) -> None:
        """Start the slots, score everything, end what was started."""
        teaching = Teaching(self.config, self.checked, self.parts.folder, _no_span, self.sinks.event)
        with Cluster(self.config.ray_address) as cluster:
            self._catch_signals()  # after Ray's start, which sets handlers of its own
            async with contextlib.AsyncExitStack() as stack:
                servers = await _start(teaching, cluster, stack)
                manager = self.manager = teaching.manager(servers, barrier=False)
                stack.push_async_callback(manager.close)
                await manager.start()
                self.began = time.monotonic()
                reporting = asyncio.create_task(self._report())
                try:
                    await self._score_blocks(manager)
                finally:
                    reporting.cancel()

    async def _score_blocks(self, manager: TeacherManager) -> None:
        """Two blocks are under way, so that teachers of the next have work while the last rows of one are waited for;
        a third is announced, so that the scheduler knows what comes."""
        under_way: deque[_Block] = deque()
        blocks = self._blocks()
        try:
            while block := await self._next(blocks, under_way):
                for answer in block:
                    manager.announce(answer.sample.id, list(answer.row.teachers), answer.tokens)
                if len(under_way) == 2:
                    await self._keep(*under_way.popleft())
                under_way.append((block, asyncio.create_task(self._score(manager, block))))
            while under_way:
                await self._keep(*under_way.popleft())
        finally:
            for _, task in under_way:
                task.cancel()
            await asyncio.gather(*(task for _, task in under_way), return_exceptions=True)

    async def _next(self, blocks: Iterator[list[Answer]], under_way: deque[_Block]) -> list[Answer] | None:
        """None at the end. A row that cannot be read ends the job once those before are scored and written."""
        try:
            block = await asyncio.to_thread(next, blocks, None)
            self.prompts.add(block or [])
        except ConfigError:
            while under_way:
                await self._keep(*under_way.popleft())
            raise
        return block

    async def _score(self, manager: TeacherManager, block: Sequence[Answer]) -> list[Scored]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask(manager, answer)) for answer in block]
        except BaseExceptionGroup as failed:
            raise first_cause(failed) from failed
        return [scored for task in tasks if (scored := task.result()) is not None]

    async def _ask(self, manager: TeacherManager, answer: Answer) -> Scored | None:
        """None where no teacher could be served, and the run is to go on without."""
        try:
            return answer, await manager.score(answer.sample)
        except TeacherDropped:
            return None
        except ServiceError as error:
            if error.sample_id != answer.sample.id:
                raise
            raise type(error)(
                f"{answer.row.place}: {error.what.removeprefix(f'{answer.sample.id}: ')}",
                why=error.why,
                fix=error.fix,
                sample_id=error.sample_id,
                teacher=error.teacher,
            ) from error

    async def _keep(self, block: Sequence[Answer], task: asyncio.Task[list[Scored]]) -> None:
        """Wait for the block, and write it."""
        try:
            scored = await task
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        wanted = sum(len(answer.row.teachers) for answer in block)
        self.missing += wanted - sum(len(sample.scores) for _, sample in scored)
        table = await asyncio.to_thread(self.columns.table, scored)
        await asyncio.to_thread(self.parts.write, block[0].index, len(block), table)
        self.prompts.forget(block)
        self.done += len(block)
        assert self.manager is not None
        self.manager.advance(self.done // self.config.trainer.batch_size)

    def _blocks(self) -> Iterator[list[Answer]]:
        """Half a window each, or less where the scores are large."""
        block: list[Answer] = []
        size, most = 0, max(1, self.job.window // 2)
        try:
            for answer in self.rows.answers(self.first):
                more = len(answer.sample.response_ids) * len(answer.row.teachers) * self._token_bytes
                if block and (len(block) == most or size + more > _BLOCK_BYTES):
                    yield block
                    block, size = [], 0
                block.append(answer)
                size += more
        except ConfigError:
            if block:
                yield block  # what stands before the broken row
            raise
        if block:
            yield block

    @functools.cached_property
    def _token_bytes(self) -> int:
        """Of one token's scores, at most."""
        widest = {Signal.FULL: 4 * self.checked.vocab_size, Signal.HIDDEN: 4 * self.checked.vocab_size}
        return 8 + widest.get(self.sent.signal, 8 * self.sent.k)

    def _catch_signals(self) -> None:
        main = asyncio.current_task()
        assert main is not None

        def asked(number: int) -> None:
            self.signal = self.signal or number
            main.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, asked, number)

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            self.sinks.progress(self._progress())

    def _progress(self) -> Progress:
        manager = self.manager
        return Progress(
            rows=self.done,
            total=self.overview.rows,
            seconds=time.monotonic() - self.began,
            scored_rows=self.done - self.first,
            tokens=sum(manager.token_counts().values()) if manager else 0,
            swaps=sum(manager.swap_counts().values()) if manager else 0,
            stall_share=manager.figures().stall_share if manager else 0.0,
        )


async def _start(teaching: Teaching, cluster: Cluster, stack: contextlib.AsyncExitStack) -> list[RemoteServer]:
    try:
        async with asyncio.TaskGroup() as starting:
            tasks = [
                starting.create_task(teaching.start_slot(cluster, stack, index)) for index in range(teaching.slots)
            ]
    except BaseExceptionGroup as group:
        raise first_cause(group) from group
    return [task.result() for task in tasks]


def _no_span(kind: str, start: float, end: float, label: str, amount: int) -> None:
    """There is no timeline of a job."""
