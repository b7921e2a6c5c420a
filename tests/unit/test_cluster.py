"""Objects in real Ray actors."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from distill.cluster import Cluster, Remote
from distill.errors import ConfigError, EnvironmentFault, ServerError, StudentError, TeacherError

pytestmark = pytest.mark.timeout(180)
COUNTER = "tests.unit.test_cluster:Counter"


class Counter:
    """What the actors of these tests host."""

    def __init__(self, start: int) -> None:
        if start < 0:
            raise ConfigError(f"cannot start at {start}")
        self.value = start

    def add(self, amount: int, *, times: int = 1) -> int:
        self.value += amount * times
        return self.value

    def fail_like_a_teacher(self) -> None:
        raise TeacherError("teachers.math: wrong", why="because", fix="do that")

    def fail_like_a_stranger(self) -> None:
        raise ZeroDivisionError("a fault of ours")

    def sleep(self, seconds: float) -> None:
        import time

        time.sleep(seconds)

    def setting(self) -> str:
        return os.environ["OMP_NUM_THREADS"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(None) as running:
        yield running


@pytest.fixture
async def counter(cluster: Cluster) -> AsyncIterator[Remote]:
    remote = await cluster.spawn(
        "counter",
        COUNTER,
        (5,),
        failure=StudentError,
        fix="again",
        deadline_s=60,
        env={"OMP_NUM_THREADS": "3"},
    )
    yield remote
    remote.kill()


async def test_calls_run_in_another_process_with_its_own_environment(counter: Remote) -> None:
    assert await counter.call("add", 2, times=3, deadline_s=60) == 11
    assert await counter.call("setting", deadline_s=60) == "3"
    assert await counter.pid() != os.getpid()


async def test_our_errors_cross_whole_and_strange_ones_stay_strange(counter: Remote) -> None:
    with pytest.raises(TeacherError) as caught:
        await counter.call("fail_like_a_teacher", deadline_s=60)
    assert (caught.value.what, caught.value.why, caught.value.fix) == ("teachers.math: wrong", "because", "do that")
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        await counter.call("fail_like_a_stranger", deadline_s=60)


async def test_an_error_of_the_constructor_keeps_its_class(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="cannot start at -1"):
        await cluster.spawn("counter", COUNTER, (-1,), failure=ServerError, deadline_s=60)


async def test_a_killed_process_is_named_with_what_was_awaited(counter: Remote) -> None:
    os.kill(await counter.pid(), signal.SIGKILL)
    with pytest.raises(StudentError, match=r"counter: its process died during 'add'") as caught:
        await counter.call("add", 1, deadline_s=60)
    assert caught.value.fix == "again"


async def test_a_call_past_its_deadline_is_named(cluster: Cluster) -> None:
    remote = await cluster.spawn("slow", COUNTER, (0,), failure=ServerError, deadline_s=60)
    with pytest.raises(ServerError, match=r"slow: no answer to 'sleep' in 0 s"):
        await remote.call("sleep", 30.0, deadline_s=0.2)
    remote.kill()


def test_a_cluster_that_is_not_there_is_an_environment_fault() -> None:
    with pytest.raises(EnvironmentFault, match="Ray did not start"), Cluster("127.0.0.1:1"):
        pass
