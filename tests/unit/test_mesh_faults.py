"""Real processes that die or stall at each step of an update."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from distill.errors import MeshError
from distill.transfermesh import Endpoint, Manifest, MemoryLoader, TensorSpec
from distill.transfermesh.auth import dial, run_id
from distill.transfermesh.endpoint import SHM_DIR
from distill.transfermesh.serve import Child
from distill.transfermesh.transports.shm import PREFIX, leaked
from distill.transfermesh.wire import Ack, Offer, Ready
from tests.builders_mesh import KEY, Pause, ScriptedLoader, endpoints, model, publisher, receivers, same

pytestmark = pytest.mark.faults
ROOT = Path(__file__).parents[2]
STALL_S = 4.0


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def faulty(at: str, strike: str) -> Child:
    """A receiver process that sends itself the signal `strike` when its loader comes to step `at`."""
    return Child(KEY, "faulty", module="tests.builders_mesh", at=at, signal=strike)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("step", ["begin", "load", "digest", "commit"])
def test_a_receiver_that_is_killed_is_named_and_the_others_commit(step, transport):
    good = MemoryLoader()
    with receivers({"good": good}) as started, faulty(step, "SIGKILL") as child, publisher(transport) as made:
        report = made.publish(model(), 1, [child.endpoint, *endpoints(started)])
        assert (report.committed, list(report.failed)) == (("good",), ["faulty"])
        assert report.seconds < 20.0, "a death is seen at once, not at the end of the timeout"
        assert made.publish(model(2), 2, endpoints(started)).committed == ("good",)
    assert same(good, model(2))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("step", ["load", "digest", "commit"])
def test_a_receiver_that_stalls_is_named_within_the_timeout_and_patient_ones_hear_from_the_publisher(step, transport):
    good = MemoryLoader()
    # The healthy receiver bears less silence than the stalled one causes.
    with receivers({"good": good}, timeout_s=0.6 * STALL_S) as started, faulty(step, "SIGSTOP") as child:
        with publisher(transport, timeout_s=STALL_S) as made:
            report = made.publish(model(), 1, [child.endpoint, *endpoints(started)])
        child.process.kill()
    assert report.committed == ("good",)
    assert f"within {STALL_S:g} s" in report.failed["faulty"] and "faulty at 127.0.0.1" in report.failed["faulty"]
    assert same(good, model())


def test_a_process_that_stopped_before_the_handshake_is_named_too():
    with faulty("begin", "SIGSTOP") as child, publisher(timeout_s=STALL_S) as made:
        child.process.send_signal(signal.SIGSTOP)
        report = made.publish(model(), 1, [child.endpoint])
        child.process.kill()
    assert "did not answer the handshake" in report.failed["faulty"]


def publisher_process(endpoint: Endpoint, transport: str, version: int, key: bytes = KEY) -> subprocess.Popen[bytes]:
    order = {"key": key.hex(), "endpoint": endpoint.to_dict(), "transport": transport, "version": version, "seed": 9}
    process = subprocess.Popen([sys.executable, "-m", "tests.builders_mesh"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.close()
    return process


@pytest.fixture
def killed_publisher(request: pytest.FixtureRequest) -> Iterator[tuple[str, ScriptedLoader, list, bytes, int]]:
    """A receiver with version 1, and a publisher of version 2 that was killed while its weights were loaded."""
    transport, key = request.param, f"killed publisher {request.param}".encode()
    loader = ScriptedLoader()
    with receivers({"a": loader}, key=key) as started:
        with publisher(transport, key=key) as made:
            made.publish(model(1), 1, endpoints(started))
        loader.hooks["load"] = pause = Pause()
        process = publisher_process(started[0].endpoint, transport, 2, key)
        try:
            assert pause.reached.wait(60)
            segments = list(SHM_DIR.glob(f"{PREFIX}{run_id(key)}-{process.pid}-*"))
            assert len(segments) == (transport == "shm")
            assert not set(segments) & set(leaked()), "its owner lives"
        finally:
            process.kill()
            process.wait(10)
        loader.hooks.clear()
        pause.release.set()
        yield transport, loader, started, key, process.pid


@pytest.mark.parametrize("killed_publisher", ["shm", "tcp"], indirect=True)
def test_a_publisher_killed_in_the_middle_leaves_the_old_version_and_the_next_publish_works(killed_publisher):
    transport, loader, started, key, _ = killed_publisher
    with publisher(transport, key=key) as made:
        # Waits for the receiver to notice: it takes one update at a time.
        report = made.publish(model(3), 3, endpoints(started))
        assert loader.aborts == 1 and report.committed == ("a",)
    assert same(loader, model(3))


@pytest.mark.parametrize("killed_publisher", ["shm"], indirect=True)
def test_the_segment_of_a_killed_publisher_is_removed_at_the_next_start(killed_publisher):
    transport, _, started, key, dead = killed_publisher
    with publisher(transport, key=key) as made:
        assert made.publish(model(3), 3, endpoints(started)).committed == ("a",)
        assert list(SHM_DIR.glob(f"{PREFIX}*-{dead}-*")) == []
        assert len(list(SHM_DIR.glob(f"{PREFIX}{run_id(key)}-{os.getpid()}-*"))) == 1, "living segments stay"


def test_a_publisher_that_falls_silent_is_given_up_on_and_the_next_one_is_served():
    loader = MemoryLoader()
    with receivers({"a": loader}, timeout_s=1.0) as started, publisher() as made:
        link = dial(started[0].endpoint, KEY, 20.0)
        link.send(Offer("tcp", 1024, Manifest(1, (TensorSpec("w", "int8", (4,), 4),))))
        link.receive(Ready)
        with pytest.raises(MeshError, match="the publisher did not send a frame within 1 s"):
            link.receive(Ack)
        link.close()
        assert made.publish(model(2), 2, endpoints(started)).committed == ("a",)
    assert same(loader, model(2))


def test_closing_a_receiver_in_the_middle_fails_the_update_and_aborts():
    pause = Pause()
    loader = ScriptedLoader(load=pause)
    with receivers({"a": loader}) as started, publisher() as made:
        reports = []
        thread = threading.Thread(target=lambda: reports.append(made.publish(model(), 1, endpoints(started))))
        thread.start()
        assert pause.reached.wait(20)
        threading.Timer(0.2, pause.release.set).start()
        started[0].close()
        thread.join(20)
    assert list(reports[0].failed) == ["a"] and loader.aborts == 1 and loader.tensors == {}


def test_the_child_program_tells_why_it_did_not_start():
    with pytest.raises(MeshError, match="receiver process"):
        Child(KEY, "a", host="192.0.2.1")
