"""Configuration -> running objects. The only file that names implementations; `distill.loop` then does the work."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import secrets
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from distill import loop
from distill.checkpoint import Checkpoint, Checkpoints
from distill.cluster import Cluster
from distill.config import RunConfig
from distill.config.options import resolved
from distill.config.resume import settings_of
from distill.errors import DistillError, EnvironmentFault, RunStopped
from distill.evaluation import Evaluator
from distill.idle_steps import IdleSteps
from distill.observe import Observer
from distill.preflight import Preflight, inspect
from distill.protocols import Objective, SampleStore, ServerAddress
from distill.quarantine import Quarantine, default_limit
from distill.registry import load
from distill.remote import RemoteServer, RemoteStudent, start_student
from distill.rollout.admission import Admission
from distill.rollout.graders import Marker, OutcomeGrader
from distill.rollout.pool import RolloutPool, RolloutServer
from distill.run_folder import RESUME, allowed_changes, choose_folder, find_checkpoint, owned, set_aside
from distill.serving.client import ServerClient
from distill.teaching import Teaching, start_server
from distill.types import Ids

_FOR_EVER_S = 31_536_000.0
"""A year. A run that waits for its teachers has no patience to lose."""


def run(config: RunConfig, *, preflight: Preflight | None = None) -> dict[str, Any]:
    """Run a whole distillation and return what result.json holds.

    Raises DistillError subclasses (see `distill.errors`); the result and the report are written also then. `preflight`
    is made when it is not given.
    """
    checked = preflight or inspect(config)
    folder = choose_folder(config)
    with owned(folder):
        return _run_in(folder, config, checked)


def _run_in(folder: Path, config: RunConfig, checked: Preflight) -> dict[str, Any]:
    checkpoint = find_checkpoint(folder, config)
    aside = set_aside(folder) if checkpoint is None else None
    text = yaml.safe_dump(resolved(config), sort_keys=False)
    (folder / "config.yaml").write_text(text)
    try:
        return asyncio.run(_Run(config, checked, folder, checkpoint, text).execute(aside))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise EnvironmentFault(
            f"no space left for the run in {folder}",
            why="the newest checkpoint is untouched",
            fix=f"make room; {RESUME}",
        ) from error


@dataclass
class _Stop:
    """The user's wish to stop: the first signal asks, the second insists."""

    event: asyncio.Event
    signal: int = 0

    def install(self, tell: Callable[[str, str], None]) -> None:
        """Catch SIGINT, SIGTERM and SIGHUP for the running task. After Ray's start, which sets handlers of its own."""
        main = asyncio.current_task()
        assert main is not None

        def asked(number: int) -> None:
            if self.signal:
                main.cancel()
                return
            self.signal = number
            self.event.set()
            tell("warning", "stopping after this step; once more to stop at once, without a checkpoint")

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, asked, number)

    def explain(self, stopped: RunStopped) -> RunStopped:
        stopped.exit_code = 128 + (self.signal or signal.SIGINT)
        return stopped


class _Run:
    """One run, from its configuration to its result."""

    def __init__(
        self, config: RunConfig, checked: Preflight, folder: Path, checkpoint: Checkpoint | None, config_text: str
    ) -> None:
        self._config = config
        self._checked = checked
        self._folder = folder
        self._checkpoint = checkpoint
        self._synchronous = config.trainer.max_staleness == 0
        self._key = secrets.token_hex(32)
        self._stop = _Stop(asyncio.Event())
        self._observer = Observer(
            folder,
            config.observe,
            run_name=config.run.name,
            total_steps=config.trainer.steps,
            teachers=list(config.teachers),
            domain_teachers=domain_teachers(checked),
            resumed_from=checkpoint.step if checkpoint else 0,
            config_text=config_text,
        )
        self._teaching = Teaching(config, checked, folder, self._observer.add_span, self._observer.event)
        if checkpoint is not None:
            self._observer.restore(checkpoint.state["observer"])

    async def execute(self, aside: Path | None = None) -> dict[str, Any]:
        """Do the run; whatever its end, write result.json and the report. `aside`: where an earlier try was put."""
        observer, export = self._observer, self._folder / "student"
        status, failure = "failed", ""
        try:
            if self._checkpoint:
                observer.event("info", f"going on at step {self._checkpoint.step} from {self._checkpoint.folder}")
                for change in allowed_changes(self._checkpoint, self._config):
                    observer.event("info", f"other than before: {change}")
            if aside:
                observer.event("warning", f"no checkpoint to go on from: begins anew; what was there is now in {aside}")
            observer.event(
                "info", f"starting the student, rollout servers and teacher servers; all goes to {self._folder}"
            )
            async with self._parts() as parts:
                observer.event("info", "all processes are up")
                if self._checked.full_rows.why:
                    observer.event("info", self._checked.full_rows.why)
                await loop.run(parts, self._plan(), self._stop.event)
                await parts.student.export(export)
                if self._config.student.ema_decay is not None:
                    observer.event(
                        "info",
                        "the export holds averaged weights (student.ema_decay); no figure of the run is of those",
                    )
            status = "done"
        except RunStopped as stopped:
            status, failure = "stopped", str(stopped)
            raise self._stop.explain(stopped) from None
        except asyncio.CancelledError:
            stopped = RunStopped("stopped at once; what the newest checkpoint lacks is lost", fix=RESUME)
            status, failure = "stopped", str(stopped)
            raise self._stop.explain(stopped) from None
        except DistillError as error:
            failure = str(error)
            raise
        finally:
            result = observer.finish(status, export_dir=export if status == "done" else None, error=failure or None)
        return result

    @contextlib.asynccontextmanager
    async def _parts(self) -> AsyncGenerator[loop.Parts]:
        """Start every process and wire the rooms; end what was started, whatever happens."""
        config = self._config
        began = self._observer.clock()
        with Cluster(config.ray_address) as cluster:
            self._observer.event("info", f"Ray ready after {self._observer.clock() - began:.0f} s")
            self._stop.install(self._observer.event)
            async with contextlib.AsyncExitStack() as stack:
                student, rollout, slots = await self._start(cluster, stack)
                pool = self._pool(rollout)
                stack.push_async_callback(pool.close)
                teachers = self._teaching.manager(slots, barrier=self._synchronous)
                stack.push_async_callback(teachers.close)
                await pool.start()
                await teachers.start()
                version = self._checkpoint.step if self._checkpoint else 0
                capacity = config.store.capacity or (config.trainer.max_staleness + 2) * config.trainer.batch_size
                store = load("store", config.store.name)(
                    capacity=capacity, first_ordinal=version * config.trainer.batch_size
                )
                if self._checkpoint:
                    if not self._synchronous:
                        # What is written together must be the same in every run: a synchronous one writes all anew.
                        store.restore(self._checkpoint.samples)
                    await student.load(self._checkpoint.student)
                yield loop.Parts(
                    rollout=pool,
                    teachers=teachers,
                    student=student,
                    store=store,
                    admission=Admission(
                        batch_size=config.trainer.batch_size,
                        max_staleness=config.trainer.max_staleness,
                        total=config.trainer.steps * config.trainer.batch_size,
                        version=version,
                    ),
                    evaluator=self._evaluator(),
                    checkpoints=Checkpoints(self._folder / "checkpoints", keep=config.trainer.keep_checkpoints),
                    quarantine=self._quarantine(version, store),
                    idle_steps=self._idle_steps(),
                    observer=self._observer,
                    grade=self._outcome_grader(pool),
                )

    async def _start(
        self, cluster: Cluster, stack: contextlib.AsyncExitStack
    ) -> tuple[RemoteStudent, list[RemoteServer], list[RemoteServer]]:
        """Every process at once: a model takes seconds to load, and none waits for another."""
        try:
            async with asyncio.TaskGroup() as starting:
                student = starting.create_task(self._start_student(cluster, stack))
                rollout = [
                    starting.create_task(self._start_rollout_server(cluster, stack, index))
                    for index in range(self._config.rollout.servers)
                ]
                slots = [
                    starting.create_task(self._teaching.start_slot(cluster, stack, index))
                    for index in range(self._teaching.slots)
                ]
                for what, tasks in (("student", [student]), ("rollout servers", rollout), ("teacher servers", slots)):
                    starting.create_task(self._tell_ready(what, tasks))
        except BaseExceptionGroup as group:
            raise loop.first_cause(group) from group
        return student.result(), [task.result() for task in rollout], [task.result() for task in slots]

    async def _tell_ready(self, what: str, starting: Sequence[asyncio.Task[Any]]) -> None:
        """A line when all of these are up. One that fails ends the start with its own error."""
        if not starting:  # every teacher is served elsewhere
            return
        began = self._observer.clock()
        await asyncio.wait(starting)
        if all(not task.cancelled() and task.exception() is None for task in starting):
            self._observer.event("info", f"{what} ready after {self._observer.clock() - began:.0f} s")

    async def _start_student(self, cluster: Cluster, stack: contextlib.AsyncExitStack) -> RemoteStudent:
        config = self._config
        ranks = await start_student(
            cluster,
            (config.student, config.objective, config.mesh),
            {
                "seed": config.run.seed,
                "total_steps": config.trainer.steps,
                "vocab_size": self._checked.vocab_size,
                "run_key": self._key,
                "threads": config.student.threads,
                "teacher_heads": self._checked.full_rows.heads or None,
            },
            ranks=config.student.ranks,
            fix=RESUME,
            env={"OMP_NUM_THREADS": str(config.student.threads)},
            deadline_s=config.server.start_timeout_s,
        )
        student = RemoteStudent(ranks, spool=self._folder / "weights", connect=self._connect)
        stack.push_async_callback(student.close)
        for remote, pid in zip(ranks, await student.pids(), strict=True):
            self._observer.event("debug", f"the {remote.name} runs as process {pid}")
        return student

    async def _start_rollout_server(
        self, cluster: Cluster, stack: contextlib.AsyncExitStack, index: int
    ) -> RemoteServer:
        """It starts with the student, and takes weights."""
        config, name = self._config, f"rollout-{index}"
        return await start_server(
            cluster,
            stack,
            config,
            name,
            {
                "name": name,
                "model": config.student.model,
                "vocab_size": self._checked.vocab_size,
                "folder": self._folder / "logs",
                "index": index,
                "weight_version": "0",
                "run_key": self._key,
                "attach_url": config.server.rollout_urls[index] if config.server.program == "attach" else None,
            },
            self._observer.event,
        )

    def _pool(self, servers: Sequence[RemoteServer]) -> RolloutPool:
        return RolloutPool(
            [RolloutServer(server.name, server.locate, self._connect) for server in servers],
            self._checked.prompts.stream,
            self._config.rollout,
            seed=self._config.run.seed,
            stop_token_ids=self._checked.end_ids,
            report_k=self._checked.objective.spec.student_k,
            start_timeout_s=self._config.server.start_timeout_s,
            on_span=self._observer.add_span,
            on_event=self._observer.event,
        )

    def _connect(self, address: ServerAddress) -> ServerClient:
        longest = max(self._config.rollout.timeout_s, self._config.teacher_manager.timeout_s)
        half = self._config.teacher_manager.topk_dtype == "float16"
        return ServerClient(address.url, name=address.name, timeout_s=longest, half=half)

    def _evaluator(self) -> Evaluator:
        config = self._config
        return Evaluator(
            self._checked.prompts.held_out,
            config.evaluation,
            marker=_marker(config.evaluation.grader),
            decode=self._decode,
            max_new_tokens=config.evaluation.max_new_tokens or config.rollout.max_new_tokens,
            stop_token_ids=self._checked.end_ids,
            report_k=self._checked.objective.spec.student_k,
        )

    def _quarantine(self, version: int, store: SampleStore) -> Quarantine:
        trainer = self._config.trainer
        limit = trainer.max_quarantined
        quarantine = Quarantine(
            self._folder,
            limit=default_limit(trainer.steps * trainer.batch_size) if limit is None else limit,
            on_event=self._observer.event,
            on_count=self._observer.quarantined,
        )
        saved = self._checkpoint.state.get("quarantine", ()) if self._checkpoint else ()
        quarantine.restore(saved, first_ordinal=version * trainer.batch_size, held=store.ordinals)
        return quarantine

    def _idle_steps(self) -> IdleSteps:
        counted = IdleSteps(
            objective_label(self._config.objective.name, self._checked.objective),
            total_steps=self._config.trainer.steps,
            on_event=self._observer.event,
        )
        if self._checkpoint and "idle_steps" in self._checkpoint.state:
            counted.restore(self._checkpoint.state["idle_steps"])
        return counted

    def _outcome_grader(self, pool: RolloutPool) -> OutcomeGrader | None:
        outcome = self._config.objective.outcome
        if outcome is None:
            return None
        return OutcomeGrader(
            _marker(outcome.grader), answer=lambda ordinal: pool.prompt(ordinal).answer, decode=self._decode
        )

    def _decode(self, ids: Ids) -> str:
        return self._checked.vocabulary.tokenizer.decode(ids, skip_special_tokens=True)

    def _plan(self) -> loop.Plan:
        config = self._config
        batch = config.trainer.batch_size
        # In a synchronous run each server gets its share as one call: what is decoded together is always the same.
        share = math.ceil(batch / config.rollout.servers)
        return loop.Plan(
            steps=config.trainer.steps,
            batch_size=batch,
            group_size=share if self._synchronous else min(config.rollout.requests_per_call, share),
            expected_tokens=config.rollout.max_new_tokens,
            synchronous=self._synchronous,
            evaluated_teachers=list(config.teachers) if config.evaluation.teachers else [],
            evaluate_every=config.evaluation.every,
            checkpoint_every=config.trainer.checkpoint_every,
            patience_s=_FOR_EVER_S
            if config.teacher_manager.on_teacher_failure == "wait"
            else 2 * (config.rollout.timeout_s + config.teacher_manager.timeout_s),
            settings=settings_of(config),
        )


def _marker(grader: str) -> Marker:
    return Marker(grader, load("grader", grader))


def objective_label(name: str, objective: Objective) -> str:
    """The objective with its off-policy correction, where it has one: for messages."""
    taught: Any = getattr(objective, "objective", objective)  # below the outcomes that are mixed in
    importance = getattr(taught, "importance", None)
    return name if importance is None else f"{name} with importance={getattr(importance, 'name', importance)}"


def domain_teachers(checked: Preflight) -> dict[str, list[str]]:
    """Held-out domain -> the teachers of its prompts, for the final table."""
    return {
        domain: list(dict.fromkeys(name for prompt in prompts for name in prompt.teachers))
        for domain, prompts in checked.prompts.held_out.items()
    }
