"""Routing, retries and fencing of the rollout pool, over servers that fail when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from distill.config import RolloutConfig
from distill.errors import ServerError
from distill.protocols import PublishResult, ServerAddress
from distill.rollout.pool import RolloutPool, RolloutServer, sampling_seed
from distill.types import GenerateRequest, Generation, Prompt


class Prompts:
    def at(self, ordinal: int) -> Prompt:
        return Prompt(ordinal, "math", np.array([1, ordinal], np.int32), {"t": 1.0}, None)


class Program:
    """A model server whose program can be killed and comes back, as its host would bring it back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.incarnation = 1
        self.broken = False
        self.stale_answers = 0
        """Times that the host names the dead program's address before it notices."""
        self.finish_reason = "stop"
        self.calls: list[list[str]] = []

    async def locate(self, _deadline_s: float) -> ServerAddress:
        if self.broken and self.stale_answers:
            self.stale_answers -= 1
        elif self.broken:
            self.broken = False
            self.incarnation += 1
        return ServerAddress(self.name, f"http://{self.name}", self.incarnation, {"name": self.name})

    def connect(self, _address: ServerAddress) -> Any:
        return self

    async def info(self) -> None:
        if self.broken:
            raise ServerError(f"{self.name}: connection refused")

    async def close(self) -> None: ...

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.calls.append([request.id for request in requests])
        await asyncio.sleep(0)
        if self.broken:
            raise ServerError(f"{self.name}: connection refused")
        return [
            Generation(
                request.id,
                request.input_ids[-1:] + 7,
                np.zeros(1, np.float32),
                (str(self.incarnation),),
                self.finish_reason,
            )
            for request in requests
        ]


def make_pool(programs: Sequence[Program], events: list[str] | None = None, **options: Any) -> RolloutPool:
    log = events if events is not None else []
    return RolloutPool(
        [RolloutServer(program.name, program.locate, program.connect) for program in programs],
        Prompts(),  # pyright: ignore[reportArgumentType]
        RolloutConfig(max_new_tokens=4, **options),
        seed=3,
        stop_token_ids=(2,),
        report_k=2,
        start_timeout_s=2.0,
        on_span=lambda *_: None,
        on_event=lambda _level, message: log.append(message),
    )


def committed(*names: str, failed: dict[str, str] | None = None) -> PublishResult:
    return PublishResult(1, "d", 10, 0.1, names, failed or {})


async def samples(pool: RolloutPool, ordinals: Sequence[int]) -> dict[int, Any]:
    return {sample.ordinal: sample async for sample in pool.generate(ordinals)}


async def test_nothing_is_sent_to_a_server_before_it_holds_published_weights() -> None:
    program = Program("a")
    pool = make_pool([program])
    await pool.start()
    asking = asyncio.create_task(samples(pool, [0]))
    await asyncio.sleep(0.01)
    assert program.calls == []
    pool.committed(committed("a"))
    assert (await asking)[0].response_ids.tolist() == [7]


async def test_requests_go_to_the_server_with_the_fewest_in_flight() -> None:
    left, right = Program("a"), Program("b")
    pool = make_pool([left, right])
    await pool.start()
    pool.committed(committed("a", "b"))
    await asyncio.gather(*(samples(pool, [2 * i, 2 * i + 1]) for i in range(4)))
    assert len(left.calls) == len(right.calls) == 2


async def test_a_dead_servers_requests_are_written_elsewhere_and_it_is_fenced_until_it_has_weights() -> None:
    events: list[str] = []
    left, right = Program("a"), Program("b")
    pool = make_pool([left, right], events)
    await pool.start()
    pool.committed(committed("a", "b"))
    left.broken, left.stale_answers = True, 2
    got = await samples(pool, [0, 1, 2])
    assert sorted(got) == [0, 1, 2]
    joining = await asyncio.wait_for(pool.joining(), 2)
    assert [(server.name, server.incarnation) for server in joining] == [("a", 2)]
    before = len(left.calls)
    await samples(pool, [3])
    assert len(left.calls) == before, "joining servers are not routable"
    pool.committed(committed("a"))
    await asyncio.gather(samples(pool, [4]), samples(pool, [5]))
    assert len(left.calls) == before + 1
    assert "a failed and is fenced" in events[0]


async def test_a_receiver_that_missed_a_version_is_fenced() -> None:
    left, right = Program("a"), Program("b")
    pool = make_pool([left, right])
    await pool.start()
    pool.committed(committed("a", "b"))
    pool.committed(committed("b", failed={"a": "digest differs"}))
    await samples(pool, [0])
    assert left.calls == []


async def test_a_receiver_that_never_takes_weights_ends_the_run() -> None:
    program = Program("a")
    pool = make_pool([program], max_tries=3)
    await pool.start()
    with pytest.raises(ServerError, match=r"a failed 3 times in a row.*digest differs"):
        for _ in range(4):
            pool.committed(committed(failed={"a": "digest differs"}))
            await pool.joining()


async def test_an_abort_is_written_again_and_never_becomes_a_sample() -> None:
    program = Program("a")
    program.finish_reason = "abort"
    pool = make_pool([program], max_tries=2)
    await pool.start()
    pool.committed(committed("a"))
    asking = asyncio.create_task(samples(pool, [0]))
    await pool.joining()
    program.finish_reason = "length"
    pool.committed(committed("a"))
    assert (await asking)[0].finish_reason == "length"
    assert len(program.calls) == 2


async def test_a_request_that_always_fails_is_given_up_with_the_reason() -> None:
    program = Program("a")
    program.finish_reason = "abort"
    pool = make_pool([program], max_tries=1)
    await pool.start()
    pool.committed(committed("a"))
    with pytest.raises(ServerError, match="sample-00000000 and 0 more requests failed 1 times"):
        await samples(pool, [0])


async def test_a_pool_whose_servers_stay_away_says_in_which_state_each_is() -> None:
    program = Program("a")
    pool = make_pool([program])
    pool._start_timeout_s = 0.05
    await pool.start()
    with pytest.raises(ServerError, match="no rollout server became usable in 0 s: a is joining"):
        await samples(pool, [0])


def test_seeds_differ_by_sample_and_by_run() -> None:
    seeds = {sampling_seed(run, ordinal) for run in range(4) for ordinal in range(1000)}
    assert len(seeds) == 4000
    assert sampling_seed(0, 0) == sampling_seed(0, 0)
