"""Host memory that the model servers of a machine share: stored once, evicted in order, nothing lost by a kill."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from distill.errors import TeacherError
from distill.weights import host as host_module
from distill.weights.files import Checkpoint, tensor_checksums
from distill.weights.host import HeldObject, HostStore
from distill.weights.host_files import bin_file, locked

ELEMENTS = 1000
NBYTES = 2 * ELEMENTS * 4


def save(folder: Path, seed: int, *, near: int | None = None) -> Checkpoint:
    """Two float32 tensors; with `near` those of that seed, a few of their low bits changed."""
    random = np.random.default_rng(seed if near is None else near)
    values = {name: random.standard_normal(ELEMENTS).astype(np.float32) for name in ("a", "b")}
    if near is not None:
        values["a"].view(np.uint32)[::10] ^= seed % 7 + 1
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.from_numpy(value) for name, value in values.items()}, folder / "model.safetensors")
    return Checkpoint.open(folder)


def held(store: HostStore, checkpoint: Checkpoint) -> HeldObject:
    found = store.hold(checkpoint)
    assert found is not None, store.report().from_disk
    return found


def check(found: HeldObject, checkpoint: Checkpoint) -> None:
    """Bytes and digests are those of the files."""
    wanted = tensor_checksums(checkpoint.folder)
    for name, tensor in checkpoint.tensors.items():
        octets, digest = found.read(name)
        np.testing.assert_array_equal(octets, tensor.bytes())
        assert digest == wanted[name]


def take(store: HostStore, checkpoint: Checkpoint) -> bool:
    """Whether it came from host memory; checked and closed."""
    found = held(store, checkpoint)
    check(found, checkpoint)
    found.close()
    return not found.from_disk


def test_a_checkpoint_is_read_from_disk_once(tmp_path: Path) -> None:
    store, checkpoint = HostStore(tmp_path / "host", 10 * NBYTES), save(tmp_path / "t", 1)
    assert [take(store, checkpoint) for _ in range(3)] == [False, True, True]
    assert take(HostStore(tmp_path / "host", 10 * NBYTES), checkpoint), "another process finds it"
    assert store.report().stored_bytes == NBYTES


def test_equal_checkpoints_are_stored_once(tmp_path: Path) -> None:
    store = HostStore(tmp_path / "host", 10 * NBYTES)
    for name in ("one", "two"):
        take(store, save(tmp_path / name, 1))
    report = store.report()
    assert (report.objects, report.stored_bytes, report.from_disk) == (1, NBYTES, ())


def test_a_file_that_was_replaced_is_another_object(tmp_path: Path) -> None:
    store = HostStore(tmp_path / "host", 10 * NBYTES)
    take(store, save(tmp_path / "t", 1))
    assert not take(store, save(tmp_path / "t", 2))
    assert store.report().objects == 2


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    store = HostStore(tmp_path / "host", 2 * NBYTES)
    one, two, three = (save(tmp_path / str(seed), seed) for seed in (1, 2, 3))
    assert [take(store, item) for item in (one, two, one, three, one, two)] == [False, False, True, False, True, False]
    assert store.report().stored_bytes == 2 * NBYTES


def test_what_is_being_copied_is_not_evicted(tmp_path: Path) -> None:
    store, other = (HostStore(tmp_path / "host", NBYTES) for _ in range(2))
    one, two = save(tmp_path / "one", 1), save(tmp_path / "two", 2)
    copying = held(store, one)
    assert other.hold(two) is None
    (reason,) = other.report().from_disk
    assert f"{NBYTES} bytes do not fit" in reason
    check(copying, one)
    copying.close()
    assert not take(other, two)


def test_an_object_larger_than_the_budget_evicts_nothing(tmp_path: Path) -> None:
    store = HostStore(tmp_path / "host", NBYTES)
    take(store, save(tmp_path / "small", 1))
    large = tmp_path / "large"
    large.mkdir()
    save_file({"x": torch.zeros(3 * ELEMENTS)}, large / "model.safetensors")
    assert store.hold(Checkpoint.open(large)) is None
    assert take(store, Checkpoint.open(tmp_path / "small"))


def test_a_full_file_system_is_a_reason_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HostStore(tmp_path / "host", 10 * NBYTES)
    one, two = save(tmp_path / "one", 1), save(tmp_path / "two", 2)
    take(store, one)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(host_module.os, "posix_fallocate", full)
        assert store.hold(two) is None
        assert "No space left" in store.report().from_disk[0]
        assert take(store, one)
    assert store.report().stored_bytes == NBYTES
    assert not take(store, two)


def test_bytes_that_changed_in_memory_are_found_and_dropped(tmp_path: Path) -> None:
    store, checkpoint = HostStore(tmp_path / "host", 10 * NBYTES), save(tmp_path / "t", 1)
    found = held(store, checkpoint)
    found.close()
    with bin_file(tmp_path / "host", found.digest).open("r+b") as file:
        file.seek(5000)
        file.write(b"!")
    broken = held(store, checkpoint)
    broken.read("a")
    with pytest.raises(TeacherError, match=r"'b'.*damaged"):
        broken.read("b")
    broken.close()
    assert not take(store, checkpoint)


def test_a_difference_takes_less_memory_and_is_lossless(tmp_path: Path) -> None:
    store = HostStore(tmp_path / "host", 10 * NBYTES, differences=True)
    base, near, far = save(tmp_path / "b", 1), save(tmp_path / "n", 2, near=1), save(tmp_path / "f", 3)
    for checkpoint in (base, near, far, near, base, far):
        take(store, checkpoint)
    report = store.report()
    assert (report.objects, report.differences, report.weight_bytes) == (3, 1, 3 * NBYTES)
    assert 2 * NBYTES < report.stored_bytes < 2.3 * NBYTES


def test_a_base_stays_as_long_as_something_differs_from_it(tmp_path: Path) -> None:
    store = HostStore(tmp_path / "host", 5 * NBYTES // 2, differences=True)
    base, near, far = save(tmp_path / "b", 1), save(tmp_path / "n", 2, near=1), save(tmp_path / "f", 3)
    take(store, base)
    take(store, near)
    take(store, far)
    assert store.report().objects == 3, "all three fit"
    take(store, far)
    other = save(tmp_path / "o", 4)
    take(store, other)  # has to evict the difference before its base, which is older
    assert store.report().stored_bytes <= 5 * NBYTES // 2
    for checkpoint in (other, near, base, far):
        take(store, checkpoint)


def test_the_last_to_leave_frees_the_memory(tmp_path: Path) -> None:
    one, other = (HostStore(tmp_path / "host", 10 * NBYTES) for _ in range(2))
    checkpoint = save(tmp_path / "t", 1)
    take(one, checkpoint)
    one.close()
    assert take(other, checkpoint), "somebody still uses it"
    other.close()
    assert {file.name for file in (tmp_path / "host").iterdir()} == {"lock", "users"}
    last = HostStore(tmp_path / "host", 10 * NBYTES)
    assert not take(last, checkpoint)
    last.close()
    last.close()


def _stop_while_filling(folder: Path, checkpoint: Path, ready: str) -> None:
    def tell(*arguments: object, **_: object) -> None:
        Path(ready).touch()
        time.sleep(60)

    host_module.read_into = tell  # type: ignore[assignment]
    HostStore(folder, 10 * NBYTES).hold(Checkpoint.open(checkpoint))


def _stop_while_holding(folder: Path, checkpoint: Path, ready: str) -> None:
    HostStore(folder, 10 * NBYTES).hold(Checkpoint.open(checkpoint))
    Path(ready).touch()
    time.sleep(60)


def _stop_with_the_lock(folder: Path, checkpoint: Path, ready: str) -> None:
    with locked(folder):
        (folder / "x.json.tmp").touch()
        (folder / ("0" * 32 + ".bin")).write_bytes(b"no index")
        Path(ready).touch()
        time.sleep(60)


@pytest.mark.faults
@pytest.mark.parametrize("work", [_stop_while_filling, _stop_while_holding, _stop_with_the_lock])
def test_a_process_that_is_killed_leaves_nothing_behind(
    tmp_path: Path, work: Callable[[Path, Path, str], None]
) -> None:
    store, checkpoint = HostStore(tmp_path / "host", NBYTES), save(tmp_path / "t", 1)
    process = multiprocessing.get_context("spawn").Process(
        target=work, args=(tmp_path / "host", tmp_path / "t", str(tmp_path / "ready"))
    )
    process.start()
    end = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    take(store, checkpoint)
    other = save(tmp_path / "o", 2)
    take(store, other)  # fits only when what the killed process had is gone
    assert store.report().stored_bytes == NBYTES
    names = {file.suffix for file in (tmp_path / "host").iterdir()} - {""}
    assert names == {".bin", ".json", ".known"}


def test_many_threads_and_stores_agree(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    checkpoints = [save(tmp_path / str(seed), seed) for seed in range(4)]
    stores = [HostStore(tmp_path / "host", 2 * NBYTES) for _ in range(3)]

    def work(index: int) -> None:
        checkpoint = checkpoints[index % 4]
        found = stores[index % 3].hold(checkpoint)
        if found is not None:
            check(found, checkpoint)
            found.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(40)))
    assert stores[0].report().stored_bytes <= 2 * NBYTES
