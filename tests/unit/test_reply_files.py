"""Large replies through shared memory: what is checked, when HTTP takes over, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distill.errors import ServerError
from distill.serving import reply_files
from distill.serving.client import ServerClient
from distill.serving.embedded import generate
from distill.serving.reply_files import LEAST_BYTES, LostReplyError, ReplyFile, ReplyFolder, write_reply
from distill.types import ScoreRequest, Signal, SignalSpec, TeacherScores
from tests.builders_embedded import VOCAB, Server, prompt, running_server, save_model
from tests.builders_run import start_server

ROWS, REQUESTS = 100, 30
BODY = np.random.default_rng(0).bytes(LEAST_BYTES + 3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(save_model(tmp_path_factory.mktemp("teacher"))) as running:
        yield running


@pytest.fixture
def folder() -> Iterator[ReplyFolder]:
    with contextlib.closing(ReplyFolder()) as made:
        yield made


def a_file(folder: ReplyFolder) -> ReplyFile:
    file = folder.file()
    assert file is not None
    return file


class Posts:
    """Which calls a client made, and how their bodies came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offered: list[bool] = []
        self.in_file: list[bool] = []
        exchange = ServerClient.exchange

        async def watched(client: ServerClient, *args: Any, **more: Any) -> Any:
            reply = await exchange(client, *args, **more)
            if args[1] == "/generate":
                self.offered.append(reply_files.HEADER in (args[5] if len(args) > 5 else {}))
                self.in_file.append(reply_files.HEADER in reply.headers)
            return reply

        monkeypatch.setattr(ServerClient, "exchange", watched)


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> Posts:
    return Posts(monkeypatch)


async def full(client: ServerClient, requests: int = REQUESTS) -> list[TeacherScores]:
    asked = [ScoreRequest(f"s{i}", np.array(prompt(ROWS + 5, i), np.int32), ROWS) for i in range(requests)]
    return await client.score(asked, SignalSpec(Signal.FULL), "t", "v0")


def same(left: list[TeacherScores], right: list[TeacherScores]) -> bool:
    return all(np.array_equal(a.full_logprobs, b.full_logprobs) for a, b in zip(left, right, strict=True))  # type: ignore[arg-type]


def ours() -> set[Path]:
    """Folders that this process holds, whatever others on the machine have."""
    held = {link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and link.exists()}
    return {path for path in held if path.parent == reply_files.SHM_DIR and path.name.startswith("distill-replies-")}


def spoiling(how: Any) -> Any:
    """A server that writes the reply into the client's file, after which `how` befalls the file."""

    def write(header: str, body: bytes) -> str | None:
        told = write_reply(header, body)
        if told is not None:
            how(Path(header.split(" ")[0]))
        return told

    return write


async def test_a_large_reply_comes_through_shared_memory_and_a_small_one_through_http(
    server: Server, posts: Posts
) -> None:
    before = ours()
    client = ServerClient(f"http://127.0.0.1:{server.port}")
    try:
        large = await full(client)
        small = await full(client, 1)
        (made,) = ours() - before
        assert list(made.iterdir()) == [], "names are gone as soon as a reply was mapped"
    finally:
        await client.close()
    assert posts.in_file == [True, False] and posts.offered == [True, True]
    assert same(large[:1], small), "the arrays outlive the client"
    assert ours() == before and not made.exists()
    assert sum(scores.full_logprobs.nbytes for scores in large) == REQUESTS * ROWS * VOCAB * 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "how",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
    ],
    ids=["missing", "empty", "short", "changed"],
)
async def test_a_file_that_is_not_what_the_server_wrote_costs_one_call_through_http(
    server: Server, posts: Posts, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    monkeypatch.setattr(generate.reply_files, "write_reply", spoiling(how))
    client = ServerClient(f"http://127.0.0.1:{server.port}")
    try:
        found = await full(client)
        assert posts.in_file == [True, False] and posts.offered == [True, False]
        monkeypatch.undo()
        assert same(found, await full(client))
    finally:
        await client.close()


async def test_a_server_that_does_not_see_the_file_is_offered_none_again(
    server: Server, posts: Posts, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = "/dev/shm/elsewhere 00"
    monkeypatch.setattr(generate.reply_files, "write_reply", lambda header, body: write_reply(elsewhere, body))
    client = ServerClient(f"http://127.0.0.1:{server.port}")
    try:
        for requests in (1, REQUESTS, REQUESTS):
            await full(client, requests)
    finally:
        await client.close()
    assert posts.in_file == [False] * 3
    assert posts.offered == [True, True, False], "a small reply says nothing of what the server sees"


def test_a_body_is_mapped_once_and_its_name_is_gone(folder: ReplyFolder) -> None:
    file = a_file(folder)
    told = write_reply(file.header, BODY)
    assert told is not None
    view = file.take(told)
    assert not file.path.exists()
    assert bytes(view) == BODY
    with pytest.raises(LostReplyError):
        file.take(told)


@pytest.mark.parametrize("told", ["", "12", "x y", "0 00", f"{len(BODY)} {'0' * 16}", "12 " + "0" * 16])
def test_what_the_server_says_of_the_file_is_held_against_it(folder: ReplyFolder, told: str) -> None:
    file = a_file(folder)
    assert write_reply(file.header, BODY) is not None
    with pytest.raises(LostReplyError):
        file.take(told)


def test_a_server_writes_into_nothing_but_a_clients_file_of_this_call(folder: ReplyFolder, tmp_path: Path) -> None:
    file = a_file(folder)
    token = file.header.split(" ")[1]
    mine = tmp_path / "mine"
    mine.write_bytes(bytes.fromhex(token))
    linked = file.path.with_name("link")
    linked.symlink_to(mine)
    for header in ("", str(file.path), f"{file.path} {'0' * 32}", f"{mine} {token}", f"{linked} {token}"):
        assert write_reply(header, BODY) is None
    assert mine.read_bytes() == bytes.fromhex(token) == file.path.read_bytes()
    assert write_reply(file.header, BODY[: LEAST_BYTES - 1]) is None, "too small to pay"
    assert write_reply(file.header, BODY) is not None
    assert write_reply(file.header, BODY) is None, "a file is written once"


def test_a_call_that_was_given_up_leaves_no_file_for_a_late_server(folder: ReplyFolder) -> None:
    file = a_file(folder)
    file.close()
    assert write_reply(file.header, BODY) is None
    assert not file.path.exists()


_CLIENT = """
import sys, time
from distill.serving.reply_files import ReplyFolder
file = ReplyFolder().file()
print(file.header, flush=True)
time.sleep(600)
"""


def test_a_killed_clients_folder_is_removed_by_the_next_one_and_a_living_clients_is_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", _CLIENT], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        header = process.stdout.readline().strip()
        path = Path(header.split(" ")[0])
        assert write_reply(header, BODY) is not None
        assert path.parent not in reply_files.reclaim() and path.exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert path.stat().st_size == len(BODY)
    with contextlib.closing(ReplyFolder()) as fresh:
        assert fresh.file() is not None
        assert not path.parent.exists()


async def test_a_server_that_is_killed_in_the_middle_of_a_call_leaves_nothing(tmp_path: Path) -> None:
    process, url = start_server(save_model(tmp_path / "model"), tmp_path, "killed", VOCAB)
    client = ServerClient(url, timeout_s=60)
    try:
        before = ours()
        await client.info()
        process.send_signal(signal.SIGSTOP)
        call = asyncio.create_task(full(client, 1))
        async with asyncio.timeout(30):
            while not [file for folder in ours() - before for file in folder.iterdir()]:
                await asyncio.sleep(0.01)
        process.kill()
        with pytest.raises(ServerError):
            await call
        (made,) = ours() - before
        assert list(made.iterdir()) == []
    finally:
        process.kill()
        process.wait(30)
        await client.close()
    assert ours() == before and not made.exists()


def test_the_memory_of_a_body_is_held_as_long_as_its_arrays_and_no_longer(folder: ReplyFolder) -> None:
    file = a_file(folder)
    told = write_reply(file.header, BODY)
    assert told is not None
    array = np.frombuffer(file.take(told), np.uint8)[5:]
    folder.close()
    assert array.tobytes() == BODY[5:]
    maps = Path("/proc/self/maps")
    assert str(file.path) in maps.read_text()
    del array
    gc.collect()
    assert str(file.path) not in maps.read_text()
