"""What every server of teachers does: a slot of the embedded server, and servers that hold one model at a time.

SGLang lives in an environment of its own: set DISTILL_SGLANG_PYTHON to an interpreter that has it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from distill.errors import ConfigError, EnvironmentFault, ServerError, TeacherError
from distill.protocols import TeacherServer, WeightSource
from distill.serving.client import ServerClient
from distill.serving.single import SingleTeacherServer
from distill.serving.teacher_client import TeacherClient
from distill.types import GenerateRequest, ScoreRequest, Signal, SignalSpec
from distill.weights.files import tensor_checksums
from tests.builders_serving import (
    VOCAB,
    launcher,
    reference_greedy,
    reference_logprobs,
    save_adapter,
    save_merged,
    save_tiny_llama,
)

SGLANG_PYTHON = os.environ.get("DISTILL_SGLANG_PYTHON")
PROGRAMS = [
    "slot",
    "single",
    pytest.param(
        "sglang",
        marks=[
            pytest.mark.sglang,
            pytest.mark.skipif(
                SGLANG_PYTHON is None, reason="DISTILL_SGLANG_PYTHON names no interpreter that has SGLang"
            ),
        ],
    ),
]
RESTART_S = 120.0
SAMPLED = SignalSpec(Signal.SAMPLED)
ROOM = 2.5
"""Teachers that a slot has room for."""


@dataclass(frozen=True)
class Served:
    """A running server and the checkpoints that it may be given."""

    program: str
    host: Any
    folders: dict[str, Path]
    slot_bytes: int

    def connect(self) -> TeacherServer:
        address = self.host.address(RESTART_S)
        if self.program == "slot":
            return TeacherClient(address.url, name=address.name, timeout_s=60)
        client = ServerClient(address.url, name=address.name, timeout_s=60)
        return SingleTeacherServer(client, dtype="float32", budget_bytes=self.slot_bytes)

    def source(self, name: str, **changes: Any) -> WeightSource:
        base = "math" if name == "poet" else None
        return WeightSource(name, changes.pop("folder", self.folders[name]), f"{name}@1", VOCAB, base, **changes)


@pytest.fixture(scope="module", params=PROGRAMS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(f"slot-{request.param}")
    folders = {name: save_tiny_llama(folder / name, seed) for seed, name in enumerate(("math", "code", "chat"))}
    folders["poet"] = save_adapter(folder / "poet", folders["math"], 7)
    save_merged(folder / "poet-merged", folders["math"], folders["poet"])
    size = sum(file.stat().st_size for file in folders["math"].glob("*.safetensors"))
    slot = {"slot_gb": ROOM * size / 1e9, "host_gb": 0.01, "host_folder": folder / "host"}
    program = "embedded" if request.param in ("slot", "single") else request.param
    python = Path(SGLANG_PYTHON) if request.param == "sglang" and SGLANG_PYTHON else None
    host = launcher(
        program, folders["math"], folder / "logs", python=python, slot=slot if request.param == "slot" else None
    )
    try:
        host.start()
        yield Served(request.param, host, folders, round(ROOM * size))
    finally:
        host.stop()


@pytest.fixture
async def server(served: Served) -> AsyncIterator[TeacherServer]:
    """A client of the server, on which nothing is resident."""
    client = served.connect()
    for name in ("math", "code", "chat"):
        await client.register(served.source(name))
    if not client.holds_one:
        await client.register(served.source("poet"))
        for name in ("poet", "math", "code", "chat"):
            await client.release(name)
    yield client
    await client.close()


@pytest.fixture
async def slot(server: TeacherServer) -> TeacherServer:
    if server.holds_one:
        pytest.skip("holds one model at a time")
    return server


def request_to(teacher: str, seed: int = 5, length: int = 20) -> ScoreRequest:
    ids = np.random.default_rng(seed).integers(3, VOCAB, length).astype(np.int32)
    return ScoreRequest(f"{teacher}-{seed}", ids, length // 2, teacher=teacher)


def expected(folder: Path, request: ScoreRequest) -> np.ndarray:
    start = len(request.input_ids) - request.response_len
    rows = reference_logprobs(folder, request.input_ids)[start - 1 : -1]
    return rows[np.arange(request.response_len), request.input_ids[start:]]


async def check_scores(served: Served, server: TeacherServer, name: str, **how: Any) -> np.ndarray:
    """Its scores are those of transformers."""
    request = request_to(name)
    (found,) = await server.score([request], SAMPLED, **how)
    folder = served.folders[name].parent / "poet-merged" if name == "poet" else served.folders[name]
    assert found.teacher == name
    np.testing.assert_allclose(found.logprobs, expected(folder, request), atol=2e-5)
    return found.logprobs


async def test_costs_are_known_before_anything_is_loaded(served: Served, server: TeacherServer) -> None:
    costs = await server.register(served.source("math"))
    size = sum(file.stat().st_size for file in served.folders["math"].glob("*.safetensors"))
    assert 0.9 * size < costs.bytes < 1.1 * size
    assert costs.total_params == costs.active_params == pytest.approx(costs.bytes / 4, rel=0.01)
    assert costs.layers == 2
    assert (costs.stream_bytes is None) == server.holds_one
    assert (await server.ledger()).used_bytes == 0


async def test_a_loaded_teacher_scores_and_writes_as_transformers_does(served: Served, server: TeacherServer) -> None:
    for name in ("math", "code"):
        await server.load(name)
        await check_scores(served, server, name)
        prompt = np.array([5, 9, 11], np.int32)
        (answer,) = await server.generate([GenerateRequest("g", prompt, 4, temperature=0.0)], name)
        written = reference_greedy(served.folders[name], prompt, 4)[: len(answer.output_ids)]
        assert answer.output_ids.tolist() == written.tolist()
        assert set(answer.versions) == {f"{name}@1"}


async def test_what_a_server_holds_is_what_lies_in_the_files(served: Served, server: TeacherServer) -> None:
    if served.program == "sglang":
        pytest.skip("SGLang digests tensors of its own")
    loaded = await server.load("math")
    files = tensor_checksums(served.folders["math"])
    assert await server.checksums("math") == files
    if not server.holds_one:
        assert loaded.checksums == files


async def test_the_ledger_names_residents_with_their_bytes(served: Served, server: TeacherServer) -> None:
    costs = await server.register(served.source("math"))
    await server.load("math")
    ledger = await server.ledger()
    assert ledger.residents == {"math": costs.bytes}
    assert ledger.used_bytes == costs.bytes <= ledger.peak_bytes
    assert ledger.budget_bytes == served.slot_bytes
    await server.release("math")
    assert (await server.ledger()).used_bytes == 0
    with pytest.raises(ServerError, match="math"):
        await server.score([request_to("math")], SAMPLED)


async def test_an_unknown_name_is_an_error(server: TeacherServer) -> None:
    for call in (server.load("nobody"), server.release("nobody"), server.score([request_to("nobody")], SAMPLED)):
        with pytest.raises(ServerError, match="nobody"):
            await call


async def test_a_larger_teacher_than_the_slot_is_refused_with_the_numbers(served: Served) -> None:
    """By the program that has a budget of its own, or by its client."""
    if served.program == "slot":
        pytest.skip("a slot refuses by what is free")
    client = served.connect()
    client._budget = 1000  # type: ignore[attr-defined]
    costs = await client.register(served.source("math"))
    with pytest.raises(EnvironmentFault, match=rf"{costs.bytes} bytes .* holds 1000"):
        await client.load("math")
    await client.close()


async def test_two_teachers_score_while_a_third_is_copied_where_there_is_room(
    served: Served, slot: TeacherServer
) -> None:
    await slot.load("math")
    copying = asyncio.create_task(slot.load("code"))
    while not copying.done():
        await check_scores(served, slot, "math")
    await copying
    both = await slot.score([request_to("math"), request_to("code"), request_to("math", 6)], SAMPLED)
    assert [one.teacher for one in both] == ["math", "code", "math"]
    for name in ("math", "code"):
        await check_scores(served, slot, name)


async def test_what_does_not_fit_is_refused_with_the_numbers_and_changes_nothing(
    served: Served, slot: TeacherServer
) -> None:
    await slot.load("math")
    await slot.load("code")
    before = await slot.ledger()
    costs = await slot.register(served.source("chat"))
    with pytest.raises(EnvironmentFault, match=rf"chat needs {costs.bytes} bytes .* of {before.budget_bytes} are free"):
        await slot.load("chat")
    assert await slot.ledger() == before
    await slot.release("code")
    await slot.load("chat")
    await check_scores(served, slot, "chat")
    await check_scores(served, slot, "math")


async def test_a_streamed_teacher_scores_as_if_it_were_resident(served: Served, slot: TeacherServer) -> None:
    costs = await slot.register(served.source("chat"))
    assert costs.stream_bytes is not None and costs.stream_bytes < costs.bytes
    await slot.load("math")
    await slot.load("code")
    before = (await slot.ledger()).used_bytes
    free = served.slot_bytes - before
    if costs.stream_bytes > free:
        with pytest.raises(EnvironmentFault, match="stream of chat needs"):
            await slot.score([request_to("chat")], SAMPLED, stream=True)
        await slot.release("code")
        before = (await slot.ledger()).used_bytes
    streamed = await check_scores(served, slot, "chat", stream=True)
    assert (await slot.ledger()).used_bytes == before
    read, files = await slot.checksums("chat"), tensor_checksums(served.folders["chat"])
    assert read.items() <= files.items() and len(read) >= len(files) - 1, "an embedding may be read by rows"
    await slot.load("chat")
    np.testing.assert_array_equal(await check_scores(served, slot, "chat"), streamed)


async def test_a_server_of_one_model_streams_nothing_and_takes_no_adapter(
    served: Served, server: TeacherServer
) -> None:
    if not server.holds_one:
        pytest.skip("a slot does both")
    with pytest.raises(ServerError, match="cannot stream"):
        await server.score([request_to("math")], SAMPLED, stream=True)
    with pytest.raises(ConfigError, match=r"poet.*adapter"):
        await server.register(served.source("poet"))


async def test_an_adapter_scores_and_writes_beside_its_base(served: Served, slot: TeacherServer) -> None:
    with pytest.raises(ServerError, match="math is not resident"):
        await slot.load("poet")
    await slot.load("math")
    loaded = await slot.load("poet")
    assert dict(loaded.checksums) == tensor_checksums(served.folders["poet"]) == await slot.checksums("poet")
    await check_scores(served, slot, "poet")
    mixed = [request_to("poet"), request_to("math"), request_to("poet", 8)]
    found = await slot.score(mixed, SAMPLED)
    merged = served.folders["poet"].parent / "poet-merged"
    for request, scores in zip(mixed, found, strict=True):
        folder = merged if request.teacher == "poet" else served.folders["math"]
        np.testing.assert_allclose(scores.logprobs, expected(folder, request), atol=2e-5)
    prompt = np.array([5, 9, 11], np.int32)
    for name, folder in (("poet", merged), ("math", served.folders["math"])):
        (answer,) = await slot.generate([GenerateRequest("g", prompt, 6, temperature=0.0)], name)
        assert answer.output_ids.tolist() == reference_greedy(folder, prompt, 6)[: len(answer.output_ids)].tolist()
        assert set(answer.versions) == {f"{name}@1"}
    with pytest.raises(ServerError, match="base of poet"):
        await slot.release("math")
    await slot.release("poet")
    await slot.release("math")
    assert (await slot.ledger()).used_bytes == 0


async def test_a_teacher_in_use_is_not_released(served: Served, slot: TeacherServer) -> None:
    await slot.load("math")
    long = [GenerateRequest(f"long{i}", np.array([5], np.int32), 120, temperature=1.0, seed=i) for i in range(16)]
    writing = asyncio.create_task(slot.generate(long, "math"))
    refused = 0
    while not writing.done() and not refused:
        await asyncio.sleep(0.01)
        try:
            await slot.release("math")
        except ServerError as error:
            refused += "in use" in str(error)
        else:
            await slot.load("math")
    await writing
    assert refused
    await slot.release("math")


@pytest.mark.parametrize("damage", ["cut", "swapped", "gone"])
async def test_files_that_changed_are_named_and_the_slot_is_as_before(
    served: Served, slot: TeacherServer, tmp_path: Path, damage: str
) -> None:
    folder = shutil.copytree(served.folders["chat"], tmp_path / "fragile")
    await slot.load("math")
    await slot.register(WeightSource(f"fragile-{damage}", folder, "fragile@1"))
    before = await slot.ledger()
    file = folder / "model.safetensors"
    if damage == "cut":
        os.truncate(file, file.stat().st_size - 100)
    elif damage == "swapped":
        shutil.copy(served.folders["code"] / file.name, file)
    else:
        file.unlink()
    with pytest.raises((TeacherError, ConfigError), match="fragile"):
        await slot.load(f"fragile-{damage}")
    after = await slot.ledger()
    assert (after.used_bytes, after.residents) == (before.used_bytes, before.residents)
    await check_scores(served, slot, "math")
    shutil.copy(served.folders["chat"] / file.name, file)
    await slot.register(WeightSource(f"fragile-{damage}", folder, "fragile@1"))
    await slot.load(f"fragile-{damage}")
    await slot.release(f"fragile-{damage}")


async def test_other_weights_under_a_known_version_are_refused(
    served: Served, slot: TeacherServer, tmp_path: Path
) -> None:
    folder = shutil.copytree(served.folders["chat"], tmp_path / "sly")
    source = WeightSource("sly", folder, "sly@1")
    await slot.register(source)
    await slot.load("sly")
    await slot.release("sly")
    shutil.copy(served.folders["code"] / "model.safetensors", folder / "model.safetensors")
    await slot.register(source)
    with pytest.raises(TeacherError, match=r"sly/model.safetensors: tensor .* has digest .* before"):
        await slot.load("sly")
    assert (await slot.ledger()).used_bytes == 0
    await slot.register(WeightSource("sly", folder, "sly@2"))
    await slot.load("sly")
    await slot.release("sly")


async def test_every_signal_is_that_of_the_teacher_asked(served: Served, server: TeacherServer) -> None:
    await server.load("code")
    request = request_to("code")
    (full,) = await server.score([request], SignalSpec(Signal.FULL))
    (top,) = await server.score([request], SignalSpec(Signal.TOPK, 5))
    rows = reference_logprobs(served.folders["code"], request.input_ids)[request.response_len - 1 : -1]
    assert full.full_logprobs is not None and top.topk_ids is not None
    np.testing.assert_allclose(full.full_logprobs, rows, atol=2e-5)
    np.testing.assert_array_equal(top.topk_ids, np.argsort(-rows, axis=1, kind="stable")[:, :5])


@pytest.mark.faults
async def test_a_server_killed_in_a_load_comes_back_empty_and_works(served: Served) -> None:
    before = served.host.address(RESTART_S)
    client = served.connect()
    await client.register(served.source("math"))
    await client.info()
    loading = asyncio.create_task(client.load("math"))
    await asyncio.sleep(0.005)
    _listener(before.url).send_signal(signal.SIGKILL)
    try:
        await loading
    except (ServerError, TeacherError):
        pass
    with pytest.raises(ServerError):
        for _ in range(200):
            await client.info()
    await client.close()
    after = await asyncio.to_thread(served.host.address, RESTART_S)
    assert after.incarnation == before.incarnation + 1
    client = served.connect()
    await client.register(served.source("math"))
    assert (await client.ledger()).residents == {}
    await client.load("math")
    await check_scores(served, client, "math")
    await client.close()


def _listener(url: str) -> psutil.Process:
    """Our child that listens on the port of `url`."""
    port = int(url.rpartition(":")[2])
    (found,) = [
        child
        for child in psutil.Process().children()
        if any(socket.status == psutil.CONN_LISTEN and socket.laddr.port == port for socket in child.net_connections())
    ]
    return found
