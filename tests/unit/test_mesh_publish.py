"""One version for all: who commits, who is given up on, and what each of them holds afterwards."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time

import numpy as np
import pytest

from distill.errors import ConfigError, EnvironmentFault, MeshError
from distill.transfermesh import Endpoint, MemoryLoader, Publisher, PublishReport, Receiver, host_id
from distill.transfermesh.auth import run_id
from distill.transfermesh.endpoint import SHM_DIR
from distill.transfermesh.transports.shm import PREFIX, Segment
from tests.builders_mesh import (
    KEY,
    FlippingLoader,
    Pause,
    ScriptedLoader,
    endpoints,
    model,
    publisher,
    receivers,
    same,
    tensor,
)


def fail_with(error: BaseException):
    def hook() -> None:
        raise error

    return hook


def test_nobody_commits_before_everybody_has_staged():
    seen: list[int] = []
    quick = MemoryLoader()

    def look() -> None:
        time.sleep(0.3)
        seen.append(quick.version)

    with receivers({"quick": quick, "slow": ScriptedLoader(digest=look)}) as started, publisher() as made:
        assert made.publish(model(), 1, endpoints(started)).committed == ("quick", "slow")
    assert seen == [-1] and quick.version == 1


def test_a_receiver_whose_digest_is_wrong_fails_alone_and_keeps_its_old_weights():
    good, bad = MemoryLoader(), FlippingLoader()
    with receivers({"good": good, "bad": bad}) as started, publisher() as made:
        report = made.publish(model(), 1, endpoints(started))
        assert report.committed == ("good",) and list(report.failed) == ["bad"]
        assert "digest" in report.failed["bad"]
        assert started[1].version == -1
    assert same(good, model()) and bad.tensors == {}


@pytest.mark.parametrize("step", ["begin", "load", "digest", "commit"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_loader_that_fails_is_named_with_its_reason_and_the_others_commit(step, transport):
    good = MemoryLoader()
    bad = ScriptedLoader(**{step: fail_with(ValueError("no such layer"))})
    with receivers({"bad": bad, "good": good}) as started, publisher(transport) as made:
        report = made.publish(model(), 1, endpoints(started))
        assert report.committed == ("good",)
        assert "ValueError: no such layer" in report.failed["bad"] and step in report.failed["bad"]
        assert (started[0].version, bad.tensors, bad.aborts > 0) == (-1, {}, True)
        bad.hooks.clear()
        assert made.publish(model(2), 2, endpoints(started)).committed == ("bad", "good")
    assert same(bad, model(2)) and same(good, model(2))


def test_the_reason_survives_although_the_publisher_is_still_sending():
    bad = ScriptedLoader(load=fail_with(RuntimeError("out of memory")))
    weights = [tensor(f"t{index}", "uint8", (4 << 20,), index) for index in range(4)]
    with receivers({"bad": bad}) as started, publisher("tcp", bucket_bytes=4 << 20) as made:
        assert "out of memory" in made.publish(weights, 1, endpoints(started)).failed["bad"]


def test_a_receiver_given_up_on_cannot_commit_what_was_written_over_under_its_hands():
    pause = Pause()
    slow, quick = ScriptedLoader(load=pause), MemoryLoader()
    weights = [tensor(f"t{index}", "uint8", (900,), index) for index in range(12)]
    with receivers({"slow": slow, "quick": quick}) as started, publisher("shm", timeout_s=1.0) as made:
        report = made.publish(weights, 1, endpoints(started))
        assert report.committed == ("quick",) and "within 1 s" in report.failed["slow"]
        assert made.publish(model(2), 2, endpoints(started)[1:]).committed == ("quick",)
        pause.release.set()
    assert (started[0].version, slow.tensors, slow.aborts) == (-1, {}, 1)
    assert same(quick, model(2))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_publisher_that_is_interrupted_commits_nothing_and_can_publish_again(error, monkeypatch):
    loader = MemoryLoader()
    with receivers({"a": loader}) as started, publisher() as made:
        made.publish(model(1), 1, endpoints(started))
        with monkeypatch.context() as patch:
            patch.setattr("distill.transfermesh.publisher.tensor_digest", lambda data: fail_with(error())())
            with pytest.raises(error):
                made.publish(model(2), 2, endpoints(started))
        assert same(loader, model(1)) and started[0].version == 1
        assert made.publish(model(3), 3, endpoints(started)).committed == ("a",)


def test_a_second_publisher_is_told_that_an_update_is_under_way(monkeypatch):
    monkeypatch.setattr("distill.transfermesh.session._BUSY_S", 0.1)
    pause = Pause()
    with receivers({"a": ScriptedLoader(load=pause)}) as started, publisher() as first, publisher() as second:
        reports: list[PublishReport] = []
        thread = threading.Thread(target=lambda: reports.append(first.publish(model(1), 1, endpoints(started))))
        thread.start()
        assert pause.reached.wait(20)
        assert "another update is under way" in second.publish(model(2), 2, endpoints(started)).failed["a"]
        pause.release.set()
        thread.join(20)
        assert reports[0].committed == ("a",)


def test_an_older_version_is_refused_and_the_same_one_is_taken_again():
    loader = MemoryLoader()
    with receivers({"a": loader}) as started, publisher() as made:
        made.publish(model(5), 5, endpoints(started))
        report = made.publish(model(4), 4, endpoints(started))
        assert "version 4 is older than version 5" in report.failed["a"]
        assert same(loader, model(5))
        assert made.publish(model(5), 5, endpoints(started)).committed == ("a",)


def test_a_receiver_that_joins_later_gets_the_version_that_the_others_have():
    with receivers({"old": MemoryLoader()}) as first, publisher() as made:
        made.publish(model(7), 7, endpoints(first))
        late = MemoryLoader()
        with receivers({"late": late}) as second:
            assert made.publish(model(7), 7, endpoints(second)).committed == ("late",)
        assert same(late, model(7)) and first[0].version == 7


def test_a_receiver_that_is_gone_is_named_and_the_others_commit():
    gone = Receiver(KEY, MemoryLoader(), name="gone").start()
    gone.close()
    with receivers({"a": MemoryLoader()}) as started, publisher() as made:
        report = made.publish(model(), 1, [gone.endpoint, *endpoints(started)])
    assert report.committed == ("a",) and "cannot reach gone at 127.0.0.1" in report.failed["gone"]


def test_shared_memory_and_tcp_are_mixed_in_one_publish():
    loaders = {"here": MemoryLoader(), "too": MemoryLoader(), "far": MemoryLoader()}
    with receivers(loaders) as started, publisher() as made:
        targets = endpoints(started)
        targets[2] = dataclasses.replace(targets[2], host_id="another machine")
        report = made.publish(model(), 1, targets)
        assert report.transports == {"here": "shm", "too": "shm", "far": "tcp"}
        assert report.committed == ("here", "too", "far")
        shm = made.stats["shm"]
        assert shm.bytes_carried == 2 * shm.bytes_written > 0, "written once for both receivers of the host"
    assert all(same(loader, model()) for loader in loaders.values())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost"])
def test_receivers_listen_on_ipv4_ipv6_and_names(host):
    try:
        receiver = Receiver(KEY, MemoryLoader(), host=host, name="a").start()
    except EnvironmentFault:
        pytest.skip(f"this machine has no {host}")
    with publisher("tcp") as made:
        assert made.publish(model(), 1, [receiver.endpoint]).failed == {}
    receiver.close()


def test_an_address_of_another_machine_cannot_be_listened_on():
    with pytest.raises(EnvironmentFault, match=r"cannot listen for weights on '192\.0\.2\.1'"):
        Receiver(KEY, MemoryLoader(), host="192.0.2.1").start()


def test_an_endpoint_survives_a_dictionary_and_wrong_ones_are_told():
    endpoint = Endpoint("a", "::1", 4321, host_id())
    assert Endpoint.from_dict(endpoint.to_dict()) == endpoint and str(endpoint) == "a at [::1]:4321"
    for wrong in (
        {},
        endpoint.to_dict() | {"port": "4321"},
        endpoint.to_dict() | {"port": 0},
        endpoint.to_dict() | {"x": 1},
    ):
        with pytest.raises(MeshError):
            Endpoint.from_dict(wrong)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([("w", "float32", (3,), np.zeros(3, np.float32)), ("w", "int8", (1,), np.zeros(1, np.int8))], "there twice"),
        ([("w", "float32", (3,), np.zeros(11, np.uint8))], "11 bytes are not float32"),
        ([("w", "float33", (3,), np.zeros(12, np.uint8))], "unknown dtype"),
        ([("w", "int8", (2,), np.zeros((4, 4), np.int8)[:2, 0])], "not contiguous"),
        ([("", "int8", (1,), np.zeros(1, np.int8))], "a tensor's name has 0"),
    ],
)
def test_weights_that_are_not_a_model_are_refused_before_anything_is_sent(weights, reason):
    loader = MemoryLoader()
    with receivers({"a": loader}) as started, publisher() as made:
        with pytest.raises(MeshError, match=reason):
            made.publish(weights, 1, endpoints(started))
        assert made.publish(model(), 1, endpoints(started)).committed == ("a",)


def test_two_receivers_of_one_name_cannot_be_told_apart():
    with receivers({"a": MemoryLoader()}) as started, publisher() as made:
        with pytest.raises(MeshError, match="different names: a, a"):
            made.publish(model(), 1, endpoints(started) * 2)


def test_a_publish_to_nobody_is_a_report_with_a_digest():
    with publisher() as made:
        report = made.publish(model(), 1, [])
    assert (report.committed, report.failed, len(report.digest)) == ((), {}, 32)


def test_wrong_settings_are_told_when_the_publisher_is_made():
    with pytest.raises(ConfigError, match="no 'smh'"):
        Publisher(KEY, transport="smh")
    with pytest.raises(ConfigError, match="buckets of 1 bytes"):
        Publisher(KEY, bucket_bytes=1)
    with pytest.raises(ConfigError, match="key has 3 bytes"):
        Publisher(b"abc")
    with pytest.raises(ConfigError, match="key has 0 bytes"):
        Receiver(b"", MemoryLoader())


def test_a_full_shared_memory_is_told_with_its_sizes_and_leaves_nothing_behind():
    total = shutil.disk_usage(SHM_DIR).total
    run = run_id(b"full" * 8)
    with pytest.raises(EnvironmentFault, match=rf"is full: {total + 4096} bytes are needed .* of {total} are free"):
        Segment(run, total + 4096)
    assert list(SHM_DIR.glob(f"{PREFIX}{run}-*")) == []


def test_a_closed_publisher_leaves_no_segment():
    key = b"closed publisher key"
    with receivers({"a": MemoryLoader()}, key=key) as started, publisher("shm", key=key) as made:
        made.publish(model(), 1, endpoints(started))
        assert len(list(SHM_DIR.glob(f"{PREFIX}{run_id(key)}-*"))) == 1
    assert list(SHM_DIR.glob(f"{PREFIX}{run_id(key)}-*")) == []
