"""Rollout servers as one engine: routing, retries, fencing, and coming back after a restart.

A server is ACTIVE (routable), JOINING (up, but without current weights) or DOWN (being waited for). A request goes to
the ACTIVE server with the fewest samples in flight. When a server fails, its requests are sent again elsewhere, and it
is routed to only after a publish to it has committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from enum import Enum

import numpy as np

from distill.config import RolloutConfig
from distill.errors import ServerError
from distill.protocols import ModelServer, PublishResult, ServerAddress
from distill.rollout.prompts import PromptStream
from distill.types import GenerateRequest, Generation, Prompt, Sample, sample_id

SpanSink = Callable[[str, float, float, str, int], None]
"""(kind, start, end, label, amount): times from time.monotonic, the amount in tokens."""
EventSink = Callable[[str, str], None]
"""(level, message)"""
_MIX = 0x9E3779B97F4A7C15
_RECONNECT_PAUSE_S = 0.2


class State(Enum):
    ACTIVE = "active"
    JOINING = "joining"
    DOWN = "down"


class RolloutServer:
    """One server of the pool and what the pool knows of it."""

    def __init__(
        self,
        name: str,
        locate: Callable[[float], Awaitable[ServerAddress]],
        connect: Callable[[ServerAddress], ModelServer],
    ) -> None:
        self.name = name
        self.state = State.DOWN
        self.in_flight = 0
        self.failures = 0
        """In a row, since it last answered or took weights."""
        self._locate = locate
        self._connect = connect
        self._address: ServerAddress | None = None
        self._client: ModelServer | None = None

    @property
    def address(self) -> ServerAddress:
        assert self._address is not None, f"{self.name} was never located"
        return self._address

    @property
    def client(self) -> ModelServer:
        assert self._client is not None, f"{self.name} was never located"
        return self._client

    async def connect(self, deadline_s: float) -> None:
        """Find the server, waiting for a restart under way; it is JOINING afterwards.

        Its host may name the address of a program that has just died, so a refused connection is tried again.
        """
        end = time.monotonic() + deadline_s
        while True:
            await self.close()
            self._address = await self._locate(max(end - time.monotonic(), 0.0))
            self._client = self._connect(self._address)
            try:
                await self._client.info()
            except ServerError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(_RECONNECT_PAUSE_S)
            else:
                self.state = State.JOINING
                return

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


class RolloutPool:
    """Implements `RolloutEngine`. A sample is seeded by (run seed, ordinal), whichever server writes it.

    `report_k` most probable tokens of the student are put down with each token that it writes; 0 asks for none.
    """

    def __init__(
        self,
        servers: Sequence[RolloutServer],
        prompts: PromptStream,
        config: RolloutConfig,
        *,
        seed: int,
        stop_token_ids: Sequence[int],
        report_k: int,
        start_timeout_s: float,
        on_span: SpanSink,
        on_event: EventSink,
    ) -> None:
        self._servers = list(servers)
        self._prompts = prompts
        self._config = config
        self._seed = seed
        self._stop = tuple(stop_token_ids)
        self._report_k = report_k
        self._start_timeout_s = start_timeout_s
        self._span = on_span
        self._event = on_event
        self._changed = asyncio.Condition()
        self._repairs: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Reach every server. They are JOINING until the first publish."""
        await asyncio.gather(*(server.connect(self._start_timeout_s) for server in self._servers))

    def prompt(self, ordinal: int) -> Prompt:
        return self._prompts.at(ordinal // self._config.samples_per_prompt)

    async def generate(self, ordinals: Sequence[int]) -> AsyncIterator[Sample]:
        requests = [self._request(ordinal) for ordinal in ordinals]
        for ordinal, generation in zip(ordinals, await self._written(requests, "rollout"), strict=True):
            yield self._sample(ordinal, generation)

    async def answer(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        return await self._written(requests, "eval")

    async def _written(self, requests: Sequence[GenerateRequest], kind: str) -> list[Generation]:
        """Send the requests as one call, and again elsewhere when a server fails."""
        for attempt in range(1, self._config.max_tries + 1):
            server = await self._pick(len(requests))
            start = time.monotonic()
            try:
                async with asyncio.timeout(self._config.timeout_s):
                    generations = await server.client.generate(requests)
                aborted = [item.id for item in generations if item.finish_reason == "abort"]
                if aborted:
                    raise ServerError(f"{server.name} aborted {len(aborted)} requests, the first is {aborted[0]}")
            except (ServerError, TimeoutError) as error:
                if attempt == self._config.max_tries:
                    raise self._gave_up(server, requests, error) from error
                self._fail(server, error)
                continue
            finally:
                await self._release(server, len(requests))
            tokens = sum(len(item.output_ids) for item in generations)
            self._span(kind, start, time.monotonic(), server.name, tokens)
            return generations
        raise AssertionError("unreachable: the last try returns or raises")

    def _gave_up(self, server: RolloutServer, requests: Sequence[GenerateRequest], error: Exception) -> ServerError:
        return ServerError(
            f"{requests[0].id} and {len(requests) - 1} more requests failed {self._config.max_tries} times, "
            f"last on {server.name}: {str(error) or type(error).__name__}",
            why="the rollout servers keep failing, or need longer than rollout.timeout_s",
            fix="look at logs/ in the run's folder; raise rollout.timeout_s if the server is only slow",
        )

    async def _pick(self, size: int) -> RolloutServer:
        async with self._changed:
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    await self._changed.wait_for(lambda: self._in(State.ACTIVE) or self._repair_error())
            except TimeoutError as error:
                raise ServerError(
                    f"no rollout server became usable in {self._start_timeout_s:.0f} s: "
                    + ", ".join(f"{server.name} is {server.state.value}" for server in self._servers),
                    fix="look at logs/ in the run's folder",
                ) from error
            active = self._in(State.ACTIVE)
            if not active:
                error = self._repair_error()
                assert error is not None
                raise error
            server = min(active, key=lambda server: server.in_flight)
            server.in_flight += size
            return server

    async def _release(self, server: RolloutServer, size: int) -> None:
        async with self._changed:
            server.in_flight -= size
            self._changed.notify_all()

    def _in(self, state: State) -> list[RolloutServer]:
        return [server for server in self._servers if server.state is state]

    def _repair_error(self) -> BaseException | None:
        """Why a server cannot come back, once every server is down for good."""
        failed = [task for task in self._repairs.values() if task.done() and not task.cancelled() and task.exception()]
        return failed[0].exception() if len(failed) == len(self._servers) else None

    def _fail(self, server: RolloutServer, error: Exception) -> None:
        """Fence a server and wait for it to come back, a bounded number of times."""
        if server.state is State.DOWN:
            return
        server.state = State.DOWN
        server.failures += 1
        reason = str(error) or type(error).__name__
        if server.failures >= self._config.max_tries:
            raise ServerError(
                f"{server.name} failed {server.failures} times in a row, last: {reason}",
                fix="look at its log in logs/ of the run's folder",
            )
        self._event("warning", f"{server.name} failed and is fenced: {reason}")
        self._repairs[server.name] = asyncio.create_task(self._repair(server))

    async def _repair(self, server: RolloutServer) -> None:
        try:
            await server.connect(self._start_timeout_s)
            self._event("info", f"{server.name} is up again (start {server.address.incarnation}) and waits for weights")
        finally:
            async with self._changed:
                self._changed.notify_all()

    def receivers(self) -> list[ServerAddress]:
        return [server.address for server in self._servers if server.state is not State.DOWN]

    def committed(self, result: PublishResult) -> None:
        for server in self._servers:
            if server.name in result.committed and server.state is State.JOINING:
                server.state = State.ACTIVE
                server.failures = 0
            elif server.name in result.failed:
                self._fail(server, ServerError(f"weights {result.version}: {result.failed[server.name]}"))
        asyncio.get_running_loop().create_task(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def joining(self) -> list[ServerAddress]:
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._in(State.JOINING)))
            return [server.address for server in self._in(State.JOINING)]

    async def close(self) -> None:
        for task in self._repairs.values():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ServerError):
                await task
        await asyncio.gather(*(server.close() for server in self._servers))

    def _request(self, ordinal: int) -> GenerateRequest:
        config = self._config
        return GenerateRequest(
            id=sample_id(ordinal),
            input_ids=self.prompt(ordinal).input_ids,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            stop_token_ids=self._stop,
            seed=sampling_seed(self._seed, ordinal),
            report_k=self._report_k,
        )

    def _sample(self, ordinal: int, written: Generation) -> Sample:
        prompt = self.prompt(ordinal)
        return Sample(
            id=written.id,
            ordinal=ordinal,
            domain=prompt.domain,
            teachers=prompt.teachers,
            prompt_ids=prompt.input_ids,
            response_ids=written.output_ids,
            logprobs=written.logprobs,
            versions=version_numbers(written.versions),
            finish_reason=written.finish_reason,
            topk_ids=written.topk_ids,
        )


def sampling_seed(seed: int, ordinal: int) -> int:
    """31 well-mixed bits of (run seed, ordinal), after splitmix64 (Steele et al., OOPSLA 2014)."""
    z = (seed * _MIX + (ordinal + 1) * 0xD1B54A32D192ED03) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & 0x7FFFFFFF


def version_numbers(labels: Sequence[str]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Weight version labels as the numbers that we gave them. Raises ServerError for a label that is not ours."""
    seen: Mapping[str, int] = {}
    try:
        seen = {label: int(label) for label in set(labels)}
    except ValueError as error:
        raise ServerError(
            f"a rollout server answered with weight versions {sorted(set(labels))}",
            why="every rollout server must hold weights that this run published",
        ) from error
    return np.fromiter((seen[label] for label in labels), np.int32, len(labels))
