"""Prompts: reading, routing and the order of a run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.config import DataConfig, TeacherConfig
from distill.errors import ConfigError
from distill.rollout.prompts import PromptRow, PromptStream, encode, read_rows
from tests.builders_config import write_jsonl

TEACHERS = {"math": TeacherConfig(model=Path("m"), weight=2.0), "code": TeacherConfig(model=Path("c"))}


def rows_of(path: Path, rows: list[Any], routes: Any = None, **source: Any) -> list[PromptRow]:
    return read_rows(DataConfig(path=write_jsonl(path / "rows.jsonl", rows), **source), TEACHERS, routes)


def test_rows_keep_their_line_domain_and_answer(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "domain": "math", "answer": 7}\n\n{"prompt": "b", "domain": "code"}\n')
    first, second = read_rows(DataConfig(path=path), TEACHERS)
    assert (first.line, first.domain, first.answer, first.place) == (1, "math", "7", f"{path}:1")
    assert (second.line, second.domain, second.answer) == (3, "code", None)


def test_who_teaches_a_row(tmp_path: Path) -> None:
    row = {"prompt": "a", "domain": "math"}
    assert rows_of(tmp_path, [row])[0].teachers == {"math": 2.0}, "the teacher named like the domain, with its weight"
    assert rows_of(tmp_path, [row | {"teacher": "code"}])[0].teachers == {"code": 1.0}, "the row's own teacher"
    assert rows_of(tmp_path, [row | {"teacher": ["code", "math"]}])[0].teachers == {"code": 1.0, "math": 2.0}
    assert rows_of(tmp_path, [row | {"teacher": {"code": 0.5}}])[0].teachers == {"code": 0.5}
    assert rows_of(tmp_path, [row | {"teacher": None}])[0].teachers == {"math": 2.0}
    assert rows_of(tmp_path, [row | {"teacher": "code"}], teachers=["math"])[0].teachers == {"math": 2.0}, (
        "the entry wins"
    )
    assert rows_of(tmp_path, [row], teachers={"code": 0.2, "math": 0.8})[0].teachers == {"code": 0.2, "math": 0.8}
    assert rows_of(tmp_path, [row], domain="mix", routes={"mix": {"code": 0.3}})[0].teachers == {"code": 0.3}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "", "domain": "math"}, "neither a text nor a list of chat messages"),
        ({"prompt": 3, "domain": "math"}, "neither a text"),
        ({"prompt": [{"content": "a"}], "domain": "math"}, "neither a text"),
        ({"prompt": "a"}, "the row has no domain"),
        ({"prompt": "a", "domain": "math", "teacher": 3}, "neither a name, nor names"),
        ({"prompt": "a", "domain": "math", "teacher": "cod"}, "did you mean 'code'"),
        ({"prompt": "a", "domain": "math", "teacher": ["math", "code", "math"]}, "'math' is named twice"),
        (
            {"prompt": "a", "domain": "math", "teacher": {"code": -1}},
            "the weight of 'code' must be a number between 1e-06 and 1e+06, and is -1",
        ),
        ({"prompt": "a", "domain": "math", "teacher": {"code": 1e-300}}, "and is 1e-300"),
        ({"prompt": "a", "domain": "math", "teacher": {"code": 1e300}}, "and is 1e+300"),
        ({"prompt": "a", "domain": "math", "answer": ["x"]}, "'answer' is not a text"),
        ({"promptt": "a", "domain": "math"}, "did you mean 'promptt'"),
        (["a"], "not a JSON object, but list"),
    ],
)
def test_a_wrong_row_is_named_by_file_and_line(tmp_path: Path, row: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rows_of(tmp_path, [{"prompt": "fine", "domain": "math"}, row])
    assert f"{tmp_path}/rows.jsonl:2: " in str(caught.value) and says in str(caught.value)


def test_parquet_rows_are_the_same_as_jsonl_rows(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "domain": "math", "answer": "1", "teacher": {"math": 0.5, "code": None}},
        {"prompt": "b", "domain": "code", "answer": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = read_rows(DataConfig(path=tmp_path / "rows.parquet"), TEACHERS)
    assert [(row.prompt, row.domain, row.answer, dict(row.teachers)) for row in found] == [
        ("a", "math", "1", {"math": 0.5}),
        ("b", "code", None, {"code": 1.0}),
    ]


def test_a_cut_parquet_file_and_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}]), tmp_path / "rows.parquet")
    (tmp_path / "rows.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:50])
    with pytest.raises(ConfigError, match="not a whole Parquet file"):
        read_rows(DataConfig(path=tmp_path / "rows.parquet"), TEACHERS)
    (tmp_path / "rows.csv").write_text("prompt\na\n")
    with pytest.raises(ConfigError, match="kind of this file is not known"):
        read_rows(DataConfig(path=tmp_path / "rows.csv"), TEACHERS)


class Letters:
    """A tokenizer whose ids are code points; its template writes the roles and a mark for the answer."""

    chat_template: str | None = "yes"

    def __call__(self, text: str, add_special_tokens: bool = True) -> Any:
        return SimpleNamespace(input_ids=[1] * add_special_tokens + [ord(letter) for letter in text])

    def apply_chat_template(self, conversation: Any, **options: Any) -> str:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        return "".join(f"{turn['role'][0]}{turn['content']}" for turn in conversation) + ">"


def test_a_text_gets_its_special_tokens_and_chat_those_of_the_template() -> None:
    text = PromptRow(Path("f"), 1, "d", "ab", None, {})
    assert encode(text, Letters()).tolist() == [1, 97, 98]
    assert encode(text, Letters()).dtype == np.int32
    chat = PromptRow(Path("f"), 1, "d", [{"role": "user", "content": "x"}], None, {})
    assert encode(chat, Letters()).tolist() == [ord(letter) for letter in "ux>"]


def stream(count: int, seed: int = 0, epochs: int | None = None) -> PromptStream:
    rows = [PromptRow(Path("f"), line, "d", "p", str(line), {"t": 1.0}) for line in range(count)]
    return PromptStream(rows, [np.array([line], np.int32) for line in range(count)], seed, epochs)


@given(count=st.integers(1, 20), seed=st.integers(0, 2**31), epoch=st.integers(0, 50))
def test_every_epoch_takes_each_prompt_once_in_an_order_of_the_seed(count: int, seed: int, epoch: int) -> None:
    one, other = stream(count, seed), stream(count, seed)
    ordinals = range(epoch * count, (epoch + 1) * count)
    taken = [one.at(ordinal) for ordinal in ordinals]
    assert Counter(prompt.answer for prompt in taken) == Counter(str(line) for line in range(count))
    assert [prompt.ordinal for prompt in taken] == list(ordinals)
    backwards = [other.at(ordinal).answer for ordinal in reversed(ordinals)]
    assert backwards[::-1] == [prompt.answer for prompt in taken], "the order does not depend on what was asked before"


def test_orders_differ_between_epochs_and_seeds() -> None:
    def answers(seed: int, epoch: int) -> list[str | None]:
        return [stream(50, seed).at(epoch * 50 + index).answer for index in range(50)]

    assert answers(0, 0) != answers(0, 1) and answers(0, 0) != answers(1, 0)


@given(
    sizes=st.lists(st.integers(20, 200), min_size=1, max_size=5),
    shared=st.integers(20, 200),
    seed=st.integers(0, 2**31),
    step=st.integers(0, 40),
)
def test_every_step_meets_each_teacher_in_its_share_of_a_file_that_is_sorted_by_domain(
    sizes: list[int], shared: int, seed: int, step: int
) -> None:
    """Also where some prompts have several teachers."""
    routes = [(f"d{index}", {f"t{index}": 1.0}) for index, size in enumerate(sizes) for _ in range(size)]
    routes += [("both", {"t0": 1.0, "all": 0.5})] * shared
    rows = [PromptRow(Path("f"), line, domain, "p", None, to) for line, (domain, to) in enumerate(routes)]
    found = PromptStream(rows, [np.array([1], np.int32)] * len(rows), seed)
    batch = 40 * (len(sizes) + 1)
    met = Counter(name for n in range(batch) for name in found.at(step * batch + n).teachers)
    for name in met:
        target = batch * sum(name in to for _, to in routes) / len(routes)
        groups = len({tuple(to) for _, to in routes if name in to})
        assert abs(met[name] - target) < 2 * groups
        if target >= 20 * groups:
            assert abs(met[name] - target) <= 0.1 * target


def test_a_stream_of_two_epochs_ends_after_them() -> None:
    two = stream(3, epochs=2)
    assert two.total == 6 and len(list(two)) == 6
    with pytest.raises(IndexError):
        two.at(6)
    assert stream(3).total is None
