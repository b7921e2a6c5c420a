"""The student's choice of tokens on its way: from the rollout, with the sample, to the teachers' scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.errors import ConfigError, TeacherError
from distill.objectives.divergence import ReverseKL
from distill.protocols import TeacherCaps
from distill.teaching import check_signal
from distill.types import Generation, ScoreRequest, Signal, SignalSpec, Support, TeacherScores
from tests.builders import sample
from tests.builders_teachers import FakeClient, FakeServer, Rig, open_teachers
from tests.unit.test_rollout_pool import Program, committed, make_pool, samples

STUDENT = SignalSpec(Signal.TOPK, 2, Support.STUDENT)


class Reporting(Program):
    """A rollout server that reports the tokens that it was asked for; the first it was ever asked for fails."""

    async def generate(self, requests: Sequence[Any]) -> list[Generation]:
        answers = await super().generate(requests)
        reported = [np.arange(request.report_k, dtype=np.int32)[None] + request.input_ids[-1] for request in requests]
        return [
            Generation(one.id, one.output_ids, one.logprobs, one.versions, one.finish_reason, ids)
            for one, ids in zip(answers, reported, strict=True)
        ]


async def test_a_sample_keeps_the_ids_that_its_writer_reported_also_after_a_retry() -> None:
    left, right = Reporting("a"), Reporting("b")
    pool = make_pool([left, right])
    await pool.start()
    pool.committed(committed("a", "b"))
    left.broken = True
    written = await samples(pool, [0, 1, 2])
    for ordinal, one in written.items():
        assert one.topk_ids.tolist() == [[ordinal, ordinal + 1]]
        assert len(one.topk_ids) == len(one.response_ids)
    await pool.close()


class Remembering(FakeServer):
    """A teacher's server that keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[ScoreRequest, SignalSpec]] = []

    def connect(self, address: Any) -> FakeClient:
        server = self

        class Client(FakeClient):
            async def score(
                self, requests: Sequence[ScoreRequest], spec: SignalSpec, *, stream: bool = False
            ) -> list[TeacherScores]:
                server.asked += [(request, spec) for request in requests]
                return await super().score(requests, spec, stream=stream)

        return Client(self, address.incarnation)


async def test_teachers_are_asked_about_the_samples_ids_and_canaries_are_not(tmp_path: Path) -> None:
    server = Remembering()
    rig = Rig(tmp_path, open_teachers(tmp_path, "a", "b"), [server], spec=STUDENT)
    await rig.manager.start()
    one = replace(sample(0, length=5, teachers=("a", "b")), topk_ids=np.arange(10, dtype=np.int32).reshape(5, 2))
    await rig.manager.score(one)
    await rig.manager.close()
    asked = {request.id: (request.student_ids, spec) for request, spec in server.asked}
    assert asked[one.id] == (one.topk_ids, STUDENT)
    assert {name for name, (ids, _) in asked.items() if ids is None} == {"canary-a", "canary-b"}
    assert all(spec.signal is Signal.SAMPLED for name, (_, spec) in asked.items() if name.startswith("canary"))


@pytest.mark.parametrize("topk_ids", [None, np.zeros((5, 3), np.int32), np.zeros((4, 2), np.int32)])
async def test_a_sample_without_the_ids_is_refused_by_name_before_a_teacher_is_asked(
    tmp_path: Path, topk_ids: np.ndarray | None
) -> None:
    server = Remembering()
    rig = Rig(tmp_path, open_teachers(tmp_path, "a"), [server], spec=STUDENT)
    await rig.manager.start()
    one = replace(sample(3, length=5, teachers=("a",)), topk_ids=topk_ids)
    with pytest.raises(
        TeacherError, match=rf"{one.id}: needs the student's most probable tokens, of shape \(5, 2\)"
    ) as e:
        await rig.manager.score(one)
    assert e.value.sample_id == one.id
    assert server.asked == []
    await rig.manager.close()


def test_an_objective_about_tokens_that_the_teachers_cannot_be_asked_about_is_refused() -> None:
    caps = TeacherCaps(frozenset(Signal), 50, 50, frozenset({Support.TEACHER}))
    check_signal(ReverseKL(support="teacher_topk", k=4), caps)
    check_signal(ReverseKL(), caps)
    for support in ("student_topk", "union"):
        objective = ReverseKL(support=support, k=4)
        check_signal(objective, TeacherCaps(frozenset(Signal), 50, 50))
        with pytest.raises(ConfigError, match=f"objective.support: .* about {support}, only about teacher_topk"):
            check_signal(objective, caps)
    with pytest.raises(ConfigError, match="k = 51"):
        check_signal(ReverseKL(support="union", k=51), TeacherCaps(frozenset(Signal), 50, 50))
