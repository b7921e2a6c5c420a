"""`distill-run teachers score` before anything starts: what is wrong with the command, the rows and an earlier job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distill.cli.run import main
from distill.cli.teachers_score import as_json, line
from distill.config.compose import load_config
from distill.errors import ConfigError
from distill.preflight import inspect
from distill.score_files import Progress, ScoreJob, choose_spec
from distill.score_files.columns import Columns
from distill.score_files.parts import Parts, nested
from distill.score_files.rows import AnswerFile
from distill.types import ScoredSample, Signal, SignalSpec, TeacherScores
from tests.builders_config import write_run

GOOD = {"prompt": "ab", "domain": "math", "response": "ba"}


def write_answers(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def opened(folder: Path, source: Path, **changes: Any) -> tuple[ScoreJob, AnswerFile, Any]:
    config = load_config(write_run(folder)).config
    checked = inspect(config)
    job = ScoreJob(source, folder / "scores.parquet", **changes)
    return job, AnswerFile(job, config, checked), checked


@pytest.mark.parametrize(
    ("rows", "words", "says"),
    [
        ([GOOD, {**GOOD, "response": None}], (), "answers.jsonl:2: the row has no answer to score"),
        ([{**GOOD, "response": ""}], (), "answers.jsonl:1: 'response' is not a text"),
        ([{**GOOD, "response_ids": [3, "x"]}], (), "answers.jsonl:1: 'response_ids' is no list of token ids"),
        ([GOOD, {**GOOD, "domain": "history"}], (), "answers.jsonl:2: nothing says who teaches this row"),
        ([{**GOOD, "domain": None}], (), "answers.jsonl:1: the row has no domain"),
        ([{"domain": "math", "response": "a"}], (), "answers.jsonl:1: the row has no column 'prompt'"),
        ([{**GOOD, "id": [1]}], (), "answers.jsonl:1: 'id' is neither"),
        ([], (), "holds no row"),
        ([GOOD], ("--teacher", "maths"), "--teacher: the run has no teacher 'maths'"),
        ([GOOD], ("--teacher", "math", "--teacher", "math"), "--teacher: 'math' is given twice"),
        ([GOOD], ("--keep", "sourse"), "--keep: no row has a column 'sourse'"),
        ([GOOD], ("--keep", "logprobs"), "--keep: the output has a column 'logprobs' of its own"),
        ([GOOD], ("--k", "4", "--signal", "sampled"), "--k: 4 is ignored"),
        ([GOOD], ("--k", "4000", "--signal", "topk"), "--k is 4000, and the vocabulary has"),
        ([GOOD], ("--limit", "0"), "'0' is no whole number above 0"),
        ([GOOD], ("--output", "scores.csv"), "scores.csv does not end in .parquet"),
        ([GOOD], ("--output", "nowhere/scores.parquet"), "--output: there is no folder nowhere"),
        ([GOOD], ("--input", "nowhere.jsonl"), "there is no data file nowhere.jsonl"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    rows: list[Any],
    words: tuple[str, ...],
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run, source = write_run(tmp_path), write_answers(tmp_path / "answers.jsonl", *rows)
    given = ("--input", str(source), "--output", "scores.parquet", *words)
    assert main(["teachers", "score", str(run), *given]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("*.partial"))


def test_an_error_as_json_has_everything_of_it() -> None:
    said = json.loads(as_json(ConfigError("a:1: wrong", why="because", fix="mend")))
    assert said == {"error": "ConfigError", "what": "a:1: wrong", "why": "because", "fix": "mend", "exit_code": 2}


def test_a_line_of_progress_has_the_rates() -> None:
    said = line(Progress(rows=30, total=40, seconds=10.0, scored_rows=20, tokens=500, swaps=3, stall_share=0.125))
    assert said == "30 of 40 rows, 2.0 rows/s, 50 tokens/s, 3 swaps, stall 12.5 %"


def test_rows_are_numbered_routed_and_spelled(tmp_path: Path) -> None:
    rows = [GOOD, {**GOOD, "id": 7, "response_ids": [4, 5]}, {**GOOD, "teacher": "code"}, GOOD]
    source = write_answers(tmp_path / "answers.jsonl", *rows)
    _, file, checked = opened(tmp_path, source, limit=3, append_end=True)
    overview = file.check()
    assert (overview.rows, dict(overview.teachers)) == (3, {"math": 2, "code": 1})
    found = list(file.answers(0))
    assert [answer.id for answer in found] == ["row-1", "7", "row-3"]
    end = checked.vocabulary.tokenizer.eos_token_id
    assert found[0].sample.response_ids[-1] == end
    assert found[1].sample.response_ids.tolist() == [4, 5]
    assert [answer.index for answer in file.answers(2)] == [2]
    source.write_text(json.dumps({**GOOD, "response_ids": [3, 9999]}) + "\n")
    with pytest.raises(ConfigError, match=r"answers\.jsonl:1: the response has the id 9999"):
        list(file.answers(0))


@pytest.mark.parametrize(
    ("values", "kind", "kept"),
    [
        ([1, None, 2], pa.int64(), [1, None, 2]),
        ([1, 2.5, None], pa.float64(), [1.0, 2.5, None]),
        (["a", "b", "c"], pa.string(), ["a", "b", "c"]),
        ([True, None, False], pa.bool_(), [True, None, False]),
        (["a", 1, {"b": [2]}], pa.string(), ['"a"', "1", '{"b": [2]}']),
        ([1, 2**70, 3], pa.string(), ["1", str(2**70), "3"]),
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_kept_columns_have_one_type_in_all_parts(
    values: list[Any], kind: Any, kept: list[Any], suffix: str, tmp_path: Path
) -> None:
    rows = [{**GOOD, "mark": value} for value in values]
    if suffix == "parquet":
        if kept != values:
            pytest.skip("no such column can be written")
        source = parquet(tmp_path / "answers.parquet", rows)
    else:
        source = write_answers(tmp_path / "answers.jsonl", *rows)
    job, file, _ = opened(tmp_path, source, keep=("mark",))
    columns = Columns(job, file.check(), SignalSpec(Signal.SAMPLED), spans=False)
    assert columns.schema.field("mark").type == kind
    scored = [
        (answer, ScoredSample(answer.sample, (TeacherScores("math", np.asarray([-1.0, -2.0], np.float32)),)))
        for answer in file.answers(0)
    ]
    table = columns.table(scored)
    assert table.column("mark").to_pylist() == kept
    assert table.column("mean_logprob").to_pylist() == [-1.5] * 3
    assert columns.table([]).schema == table.schema


def test_hidden_states_are_written_exactly_whatever_held_them(tmp_path: Path) -> None:
    job, file, _ = opened(tmp_path, write_answers(tmp_path / "answers.jsonl", GOOD))
    columns = Columns(job, file.check(), SignalSpec(Signal.HIDDEN), spans=False)
    (answer,) = file.answers(0)
    wanted = np.asarray([[1.5, -2.0], [0.25, 3.0]], np.float32)
    for hidden in (wanted, wanted.astype(np.float16), (wanted.view(np.uint32) >> 16).astype(np.uint16).view(np.int16)):
        scores = TeacherScores("math", np.zeros(2, np.float32), hidden=hidden)
        table = columns.table([(answer, ScoredSample(answer.sample, (scores,)))])
        assert table.column("hidden").to_pylist() == [wanted.tolist()]


def test_lists_keep_their_lengths() -> None:
    assert nested([np.asarray([1, 2]), np.asarray([3])], pa.int32()).to_pylist() == [[1, 2], [3]]
    twice = [np.asarray([[1, 2], [3, 4]]), np.asarray([[5, 6, 7]])]
    assert nested(twice, pa.int32()).to_pylist() == [[[1, 2], [3, 4]], [[5, 6, 7]]]
    assert nested([], pa.int32()).to_pylist() == []


def test_the_objective_says_what_is_asked_unless_the_user_does(tmp_path: Path) -> None:
    *_, checked = opened(tmp_path, write_answers(tmp_path / "answers.jsonl", GOOD))
    assert choose_spec(None, None, checked).signal is checked.objective.spec.signal
    assert choose_spec(Signal.SAMPLED, None, checked) == SignalSpec(Signal.SAMPLED)
    assert choose_spec(Signal.TOPK, 5, checked) == SignalSpec(Signal.TOPK, 5)


def test_parts_become_one_file_and_a_gap_is_noticed(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "out.parquet")
    parts.make()
    parts.open({"a": 1}, resume=False)
    tables = [pa.table({"x": [1, 2]}), pa.table({"x": pa.array([], pa.int64())}), pa.table({"x": [3]})]
    for first, table in zip((0, 2, 4), tables, strict=True):
        parts.write(first, 2, table)
    assert parts.done == 6
    with pytest.raises(ConfigError, match="holds what a broken job scored"):
        parts.open({"a": 1}, resume=False)
    with pytest.raises(ConfigError, match=r"--resume: a is not as it was .*: 1 then, 2 now"):
        parts.open({"a": 2}, resume=True)
    parts.open({"a": 1}, resume=True)
    moved = parts.folder / "part-000000000002-000000002.parquet"
    kept = moved.read_bytes()
    moved.unlink()
    with pytest.raises(ConfigError, match="does not follow row 2"):
        parts.finish(tables[0].schema)
    moved.write_bytes(kept)
    parts.finish(tables[0].schema)
    assert pq.read_table(tmp_path / "out.parquet").column("x").to_pylist() == [1, 2, 3]
    assert not parts.folder.exists()
