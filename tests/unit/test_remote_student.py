"""One call to several ranks: whose error is told, and what becomes of the others. Settings that do not fit ranks."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from distill import remote
from distill.cluster import Remote
from distill.config.checks import check
from distill.config.models import RunConfig
from distill.errors import ConfigError, EnvironmentFault, PeerFault, StudentError, TeacherError
from distill.preflight import programs
from tests.builders_config import settings

DEATH = StudentError("student rank 1: its process died during 'step'")
ECHO = PeerFault("student rank 0 lost contact")


class FakeRank:
    def __init__(self) -> None:
        self.killed = False

    def kill(self) -> None:
        self.killed = True


async def says(answer: Any, after_s: float = 0.0) -> Any:
    await asyncio.sleep(after_s)
    if isinstance(answer, BaseException):
        raise answer
    return answer


async def call(*answers: Any, after_s: tuple[float, ...] = (0.0, 0.0)) -> tuple[Any, list[bool]]:
    """What came of a call that the ranks answer so, and which of them were killed."""
    ranks = [FakeRank() for _ in answers]
    calls = [asyncio.ensure_future(says(answer, delay)) for answer, delay in zip(answers, after_s, strict=True)]
    try:
        result = await remote.together(calls, cast(list[Remote], ranks))
    except Exception as error:  # noqa: BLE001 (the test looks at it)
        result = error
    return result, [rank.killed for rank in ranks]


async def test_results_come_in_the_order_of_the_ranks() -> None:
    assert await call("a", "b", after_s=(0.05, 0.0)) == (["a", "b"], [False, False])


@pytest.mark.parametrize(
    ("answers", "cause"),
    [
        ((ECHO, DEATH), 1),
        ((DEATH, ECHO), 0),
        ((RuntimeError("connection closed"), DEATH), 1),
        ((RuntimeError("a fault of ours"), ECHO), 0),
        ((PeerFault("because rank 1 did"), TeacherError("sample x", sample_id="x")), 1),
    ],
    ids=["echo first", "death first", "foreign echo", "a fault of ours", "a sample's fault"],
)
async def test_the_error_is_that_of_the_rank_with_the_reason(answers: Any, cause: int) -> None:
    for delays in ((0.0, 0.05), (0.05, 0.0)):
        error, _ = await call(*answers, after_s=delays)
        assert error is answers[cause]


async def test_ranks_that_agree_on_a_samples_fault_live_on() -> None:
    _, killed = await call(PeerFault("because rank 1 did"), TeacherError("sample x", sample_id="x"))
    assert killed == [False, False]


async def test_a_rank_that_hangs_behind_anothers_death_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PEERS_DEADLINE_S", 0.05)
    error, killed = await call("never", DEATH, after_s=(60.0, 0.0))
    assert error is DEATH
    assert killed == [True, True]


async def test_ranks_that_lost_one_another_without_a_death_are_ended() -> None:
    other = PeerFault("student rank 1 lost contact")
    error, killed = await call(ECHO, other)
    assert error in (ECHO, other)
    assert killed == [True, True]


# --- settings


def config(**student: Any) -> RunConfig:
    return RunConfig.model_validate(settings() | {"student": {"model": "./base", **student}})


@pytest.mark.parametrize(
    ("student", "message"),
    [
        ({"parallel": "ddp"}, "student.parallel is ddp, but student.ranks is 1"),
        ({"ranks": 5}, "student.ranks is 5, and a batch has only 4 samples"),
        ({"ranks": 2, "device": "cuda:1"}, "student.device names one device, cuda:1, for 2 ranks"),
        ({"ranks": 2, "optimizer": "adamw_8bit"}, "cannot keep its moments in pieces"),
    ],
    ids=["parallel alone", "more ranks than samples", "one device for two", "8-bit moments in pieces"],
)
def test_settings_of_ranks_that_do_not_fit_are_refused(student: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config(**student))


def test_settings_of_ranks_that_fit_pass() -> None:
    check(config(ranks=4))
    check(config(ranks=2, parallel="ddp", optimizer="adamw_8bit", device="cuda"))


@pytest.mark.parametrize(("device", "there", "fits"), [("auto", 0, True), ("auto", 1, False), ("cuda", 2, True)])
def test_on_gpus_every_rank_needs_one(device: str, there: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_ask", lambda *_args: str(there))
    if fits:
        programs.check_programs(config(ranks=2, device=device))
        return
    with pytest.raises(EnvironmentFault, match="ranks is 2, and torch sees 1 CUDA device here"):
        programs.check_programs(config(ranks=2, device=device))
