"""Whether full rows travel as rows or as hidden states, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill.config.compose import load_config
from distill.errors import ConfigError
from distill.preflight.full_rows import FullRows, choose_full_rows
from distill.protocols import HeadFolder
from distill.types import Signal, SignalSpec
from tests.builders_config import write_run

FULL, LARGE = SignalSpec(Signal.FULL), 150_000


def choose(
    folder: Path,
    *,
    spec: SignalSpec = FULL,
    vocab_size: int = LARGE,
    hidden: int | None = 4096,
    adapter: dict[str, Any] | None = None,
    **changes: Any,
) -> FullRows:
    """The choice for teachers whose hidden states have `hidden` numbers."""
    config = load_config(write_run(folder, **changes)).config
    for teacher in config.teachers.values():
        settings = json.loads((teacher.model / "config.json").read_text())
        settings.pop("hidden_size", None)
        (teacher.model / "config.json").write_text(json.dumps(settings | ({"hidden_size": hidden} if hidden else {})))
        if adapter is not None:
            base = {"base_model_name_or_path": str(config.student.model)}
            (teacher.model / "adapter_config.json").write_text(json.dumps(base | adapter))
    if adapter is not None:
        (config.student.model / "config.json").write_text(json.dumps({"hidden_size": hidden}))
    return choose_full_rows(config, spec, vocab_size)


@pytest.mark.parametrize(
    ("vocab_size", "hidden", "dtype", "expected"),
    [
        (150_000, 4096, "float32", True),
        (150_000, 150_000, "float32", False),
        (150_000, 150_000, "bfloat16", True),
        (150_000, 300_000, "bfloat16", False),
        (16_384, 64, "float32", True),
        (16_383, 64, "float32", False),
    ],
)
def test_hidden_states_are_sent_where_they_are_fewer_bytes_than_a_long_row(
    tmp_path: Path, vocab_size: int, hidden: int, dtype: str, expected: bool
) -> None:
    found = choose(tmp_path, vocab_size=vocab_size, hidden=hidden, server={"dtype": dtype})
    assert bool(found.heads) is expected
    size = 4 if dtype == "float32" else 2
    assert f"{hidden * size} bytes a token as hidden states, {4 * vocab_size} as rows" in found.why
    assert found.asked(FULL).signal is (Signal.HIDDEN if expected else Signal.FULL)


def test_each_teachers_head_is_in_its_folder_in_the_servers_dtype(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path)).config
    found = choose(tmp_path, server={"dtype": "bfloat16"})
    assert found.heads == {name: HeadFolder(each.model, "bfloat16") for name, each in config.teachers.items()}


def test_what_the_user_says_is_done(tmp_path: Path) -> None:
    assert choose(tmp_path, vocab_size=14, teacher_manager={"full_rows": "hidden"}).heads
    rows = choose(tmp_path, teacher_manager={"full_rows": "rows"})
    assert not rows.heads and "600000 bytes a token" in rows.why


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"server": {"program": "sglang"}}, "server.program is sglang"),
        ({"hidden": None}, "does not say how many numbers a hidden state has"),
        ({"adapter": {"target_modules": ["q_proj", "lm_head"]}}, "changes lm_head"),
        ({"adapter": {"target_modules": "all", "modules_to_save": ["embed_tokens"]}}, "changes embed_tokens"),
    ],
    ids=["sglang", "no size", "adapted head", "saved embedding"],
)
def test_where_hidden_states_cannot_be_had_auto_sends_rows_and_hidden_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    found = choose(tmp_path, **changes)
    assert not found.heads and reason in found.why
    with pytest.raises(ConfigError, match=f"full_rows is hidden, and .*{reason}"):
        choose(tmp_path, teacher_manager={"full_rows": "hidden"}, **changes)


def test_an_adapter_that_leaves_the_head_alone_has_its_bases(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path)).config
    found = choose(tmp_path, adapter={"target_modules": ["q_proj", "v_proj"]})
    assert {head.folder for head in found.heads.values()} == {config.student.model}


@pytest.mark.parametrize("spec", [SignalSpec(Signal.TOPK, 4), SignalSpec(Signal.SAMPLED)])
def test_nothing_is_chosen_where_no_full_rows_are_wanted(tmp_path: Path, spec: SignalSpec) -> None:
    found = choose(tmp_path, spec=spec)
    assert found == FullRows({}) and found.asked(spec) is spec
    with pytest.raises(ConfigError, match="asks for no full rows"):
        choose(tmp_path, spec=spec, teacher_manager={"full_rows": "hidden"})


def test_attached_servers_give_hidden_states_only_to_those_who_say_so(tmp_path: Path) -> None:
    server = {"program": "attach", "rollout_urls": ["http://a:1"], "teacher_urls": ["http://a:2"]}
    assert "which gives no hidden states" in choose(tmp_path, server=server).why
    assert choose(tmp_path, server=server, teacher_manager={"full_rows": "hidden"}).heads
