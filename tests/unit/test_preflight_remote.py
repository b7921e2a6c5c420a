"""A run with a teacher that is served elsewhere: what its configuration may be, and what is asked before it starts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distill.config.checks import check
from distill.config.compose import load_config
from distill.config.models import RunConfig
from distill.config.resume import changes, settings_of
from distill.errors import ConfigError, ServerError
from distill.preflight import Preflight, inspect
from tests.builders_config import settings, write_run, write_tokenizer
from tests.builders_embedded import save_model
from tests.builders_openai import NAME, OpenAIServer, openai_server

ROWS = 14
"""Ids of the tokenizer in `write_run`."""
CONTEXT = 20
AWAY = {"url": "https://models.example:8000/v1", "tokenizer": "t"}
LOCAL = {"model": "./experts/code"}


def checked(math: dict[str, Any], code: dict[str, Any] | None = None, **more: Any) -> RunConfig:
    config = RunConfig.model_validate(settings() | {"teachers": {"math": math, "code": code or LOCAL}} | more)
    check(config)
    return config


@pytest.mark.parametrize(
    ("math", "says"),
    [
        ({}, "teachers.math has neither a model nor a url"),
        ({"model": "m", **AWAY}, "teachers.math has a model and a url: the folder would not be looked at"),
        ({"base": "m", **AWAY}, "teachers.math has a base and a url"),
        ({"url": AWAY["url"]}, "teachers.math has a url and no tokenizer"),
        ({**AWAY, "url": "models.example:8000"}, "teachers.math.url is not the address of a server"),
        ({**AWAY, "url": "https://me:secret@models.example"}, "teachers.math.url is not the address of a server"),
        ({**AWAY, "url": "https://models.example?key=secret"}, "teachers.math.url is not the address of a server"),
        ({"model": "m", "api": "openai"}, "teachers.math.api has no effect without url"),
        ({"model": "m", "api_key_env": "KEY"}, "teachers.math.api_key_env has no effect without url"),
        ({"model": "m", "concurrency": 2}, "teachers.math.concurrency has no effect without url"),
        ({**AWAY, "remote_model": "x"}, "teachers.math.remote_model has no effect without api=openai"),
    ],
)
def test_a_teacher_is_a_folder_or_a_server(math: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(math)
    assert says in str(caught.value) and "secret" not in str(caught.value)


def test_a_key_is_not_taken_for_the_name_of_its_variable(tmp_path: Path) -> None:
    path = run(tmp_path, "http://127.0.0.1:9", math={"api_key_env": "hf_abcdef"})
    with pytest.raises(ConfigError, match=r"api_key_env must be the name of an environment variable, in capitals"):
        look(path)


def test_a_teacher_elsewhere_takes_no_slot() -> None:
    assert checked(AWAY, teacher_manager={"slots": 1}).teachers["math"].concurrency == 8
    with pytest.raises(ConfigError, match="slots is 2, and the number of teachers only 1"):
        checked(AWAY, teacher_manager={"slots": 2}, server={"program": "sglang"})
    assert checked(AWAY, AWAY).teacher_manager.slots == 1


def test_a_run_may_go_on_with_its_teacher_at_another_address_but_not_with_another_model() -> None:
    openai = {**AWAY, "api": "openai", "remote_model": "math-32b"}
    then = settings_of(checked(openai))
    moved = settings_of(checked({**openai, "url": "http://10.0.0.9", "concurrency": 2, "api_key_env": "KEY"}))
    assert all(change.allowed for change in changes(moved, then))
    other = settings_of(checked({**openai, "remote_model": "math-72b"}))
    assert [change.allowed for change in changes(other, then)] == [False]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    folder = save_model(tmp_path_factory.mktemp("model"), rows=ROWS, max_position_embeddings=CONTEXT)
    with openai_server(folder) as running:
        yield running


def run(folder: Path, url: str, *, letters: str | None = None, **more: Any) -> Path:
    write_tokenizer(folder / "tokenizer", **({} if letters is None else {"letters": letters}))
    math = {"url": url, "api": "openai", "tokenizer": "./tokenizer"} | more.pop("math", {})
    objective = {"name": "reverse_kl", "support": "teacher_topk", "k": 4}
    changes = {"teachers": {"math": math, "code": {"model": "./experts/code"}}, "objective": objective}
    return write_run(folder, **(changes | more))


def look(path: Path) -> Preflight:
    return inspect(load_config(path).config)


def test_a_server_is_asked_before_the_run_for_what_the_run_will_ask(tmp_path: Path, server: OpenAIServer) -> None:
    server.bodies.clear()
    found = look(run(tmp_path, server.url))
    assert {body["prompt_logprobs"] for body in server.bodies} == {4}
    assert {body["model"] for body in server.bodies} == {NAME}
    assert found.teacher_vocab_sizes == {"math": ROWS, "code": ROWS}
    assert list(found.models.teachers) == ["code"] and list(found.models.elsewhere) == ["math"]
    assert found.models.elsewhere["math"].context_length == CONTEXT
    assert (found.models.context_length, found.models.tightest) == (CONTEXT - 1, "teachers.math.url")
    assert found.plan.swaps_per_step == 0  # the only folder stays in the only slot
    assert f"teachers.math: served at {server.url} (openai), takes no slot; {CONTEXT} tokens" in found.notes


async def test_it_can_be_looked_at_from_within_an_event_loop(tmp_path: Path, server: OpenAIServer) -> None:
    found = look(run(tmp_path, server.url))
    assert found.models.elsewhere["math"].url == server.url
    assert asyncio.get_running_loop().is_running()


def test_all_teachers_may_be_elsewhere(tmp_path: Path, server: OpenAIServer) -> None:
    away = {"url": server.url, "api": "openai", "tokenizer": "./tokenizer"}
    found = look(run(tmp_path, server.url, teachers={"math": away, "code": away}))
    assert found.models.slot_bytes == 0 and not found.models.teachers and len(found.models.elsewhere) == 2


def test_the_tokenizer_is_compared_as_strictly_as_a_folders(tmp_path: Path, server: OpenAIServer) -> None:
    with pytest.raises(ConfigError, match=r"teachers.math: its tokenizer in .*tokenizer is not the student's"):
        look(run(tmp_path, server.url, letters="jihgfedcba="))
    with pytest.raises(ConfigError, match=r"teachers.math: there is no model folder .*nowhere"):
        look(run(tmp_path, server.url, math={"tokenizer": "./nowhere"}))


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        ({"name": "reverse_kl"}, r"teachers.math: the objective asks for the whole vocabulary"),
        ({"name": "reverse_kl", "support": "student_topk", "k": 4}, r"objective.support=student_topk"),
    ],
)
def test_an_objective_that_the_server_cannot_serve_is_refused(
    tmp_path: Path, server: OpenAIServer, objective: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        look(run(tmp_path, server.url, objective=objective))


def test_a_server_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    path = run(tmp_path, "http://127.0.0.1:9", teacher_manager={"timeout_s": 0.3})
    with pytest.raises(ServerError, match=r"teacher math \(http://127.0.0.1:9\) gave no answer within 0.3 s"):
        look(path)


def test_a_limit_of_the_server_is_named_with_the_setting(tmp_path: Path, server: OpenAIServer) -> None:
    server.be.max_logprobs = 3
    try:
        with pytest.raises(ConfigError, match="gives at most 3 ids a row, and 4 are asked for") as caught:
            look(run(tmp_path, server.url))
        assert "set objective.k=3 or less" in caught.value.fix
    finally:
        server.be.max_logprobs = 20
