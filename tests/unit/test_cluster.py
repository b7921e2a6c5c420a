"""Objects in real Ray actors."""

from __future__ import annotations

import ipaddress
import os
import signal
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from distill.cluster import Cluster, Remote, Shared, _death  # pyright: ignore[reportPrivateUsage]
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

    def total(self, numbers: np.ndarray) -> float:
        return float(numbers.sum())

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


async def test_a_value_in_shared_memory_reaches_every_actor_and_functions_run_there_too(
    cluster: Cluster, counter: Remote
) -> None:
    numbers = Shared.put(np.arange(100_000.0))
    other = cluster.actor("other", failure=ServerError)
    await other.make(COUNTER, (1,), {}, 60)
    for remote in (counter, other):
        assert await remote.call("total", numbers, deadline_s=60) == np.arange(100_000.0).sum()
    assert await other.run("os:getpid", deadline_s=60) == await other.pid()
    ipaddress.ip_address(await other.host())
    other.kill()


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


RAYLET_DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: _Actor
\tpid: 15229
The actor is dead because its owner has died. Owner worker exit type: SYSTEM_ERROR Worker exit detail: \
Owner's node has crashed."""
WORKER_DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: _Actor
The actor is dead because its worker process has died. Worker exit detail: Worker unexpectedly exits with a connection \
error code 2. End of file. Some common causes include: (1) the process was killed by the OOM killer"""


def test_a_death_is_told_as_ray_tells_it() -> None:
    """Recorded from Ray 2.5x, once with the raylet killed and once with the actor's own process."""
    what, why = _death("student", RAYLET_DIED)
    assert what == "student: Ray's process on its machine (raylet) died, and student with it,"
    assert why.endswith("Owner's node has crashed.")
    what, why = _death("student", WORKER_DIED)
    assert what == "student: its process died"
    assert why.startswith("The actor is dead because its worker process has died") and why.endswith("End of file.")
    assert _death("student", "") == ("student: its process died", "")


def test_ray_leaves_nothing_behind(cluster: Cluster) -> None:
    """The cluster of this module is at work: its folder is there, and not in /tmp/ray."""
    folder = cluster._folder  # pyright: ignore[reportPrivateUsage]
    assert folder is not None and (folder.path / "session_latest" / "sockets").is_dir()
