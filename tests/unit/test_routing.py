"""Who teaches a row: rules by domain, tag, expression and function, a default only where one is named, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from distill.config import DataConfig, RoutingConfig, RunConfig, TeacherConfig
from distill.config.compose import load_config
from distill.errors import ConfigError
from distill.preflight import inspect, inspect_early
from distill.preflight.parts import check_parts
from distill.rollout.prompts import read_rows
from distill.rollout.routing import Router
from tests.builders_config import settings, write_jsonl, write_run

HERE = "tests.unit.test_routing"
TEACHERS = {name: TeacherConfig(model=Path(name)) for name in ("math", "code", "style")}
PROOF = {"match": {"tag": "proof"}, "teachers": ["math"]}
PYTHON = {"match": {"column": "prompt", "regex": "(?i)python"}, "teachers": {"code": 0.8, "style": 0.2}}
CALL = {"call": f"{HERE}:choose"}


def choose(row: Mapping[str, Any]) -> Any:
    """By a column; the next rule decides about rows without it."""
    match row.get("level"):
        case "hard":
            return {"math": 0.7, "code": 0.3}
        case "both":
            return ["math", "style"]
        case "domain":
            return row["domain"]
        case "nonsense":
            return 3
        case "misspelt":
            return "mth"
        case "fails":
            return row["no such column"]
        case "none":
            return []
        case "changes":
            row["level"] = "easy"  # pyright: ignore[reportIndexIssue]
            return "math"
        case _:
            return None


def takes_two(row: Any, other: Any) -> str:
    return "math"


NUMBER = 5


def router(*rules: dict[str, Any], default: str | None = None) -> Router:
    return Router(RoutingConfig.model_validate({"rules": list(rules), "default": default}), TEACHERS)


def routed(folder: Path, row: dict[str, Any], *rules: dict[str, Any], default: str | None = None) -> dict[str, float]:
    path = write_jsonl(folder / "rows.jsonl", [{"prompt": "abc", "domain": "other"} | row])
    (found,) = read_rows(DataConfig(path=path), TEACHERS, router=router(*rules, default=default))
    return dict(found.teachers)


def test_a_rule_by_tag_by_expression_by_domain_and_by_function(tmp_path: Path) -> None:
    assert routed(tmp_path, {"tags": ["hard", "proof"]}, PROOF) == {"math": 1.0}
    assert routed(tmp_path, {"prompt": "Write PYTHON code"}, PYTHON) == {"code": 0.8, "style": 0.2}
    geometry = {"match": {"domain": "geometry"}, "teachers": {"math": 2.0}}
    assert routed(tmp_path, {"domain": "geometry"}, geometry) == {"math": 2.0}
    assert routed(tmp_path, {"level": "hard"}, CALL) == {"math": 0.7, "code": 0.3}
    assert routed(tmp_path, {"level": "both"}, CALL) == {"math": 1.0, "style": 1.0}
    assert routed(tmp_path, {"level": "domain", "domain": "code"}, CALL) == {"code": 1.0}, "it sees the row's domain"


def test_all_of_a_match_must_hold_and_the_first_rule_that_fits_decides(tmp_path: Path) -> None:
    both = {"match": {"tag": "proof", "regex": "^abc"}, "teachers": ["style"]}
    assert routed(tmp_path, {"tags": ["proof"]}, both, PROOF) == {"style": 1.0}
    assert routed(tmp_path, {"tags": ["proof"], "prompt": "xabc"}, both, PROOF) == {"math": 1.0}
    assert routed(tmp_path, {"tags": ["proof"]}, PROOF, both) == {"math": 1.0}
    assert routed(tmp_path, {"tags": ["proof"], "level": "easy"}, CALL, PROOF) == {"math": 1.0}, "None passes it on"


def test_expressions_read_what_chat_messages_say_and_any_column(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "python, please"}]
    assert routed(tmp_path, {"prompt": chat}, PYTHON) == {"code": 0.8, "style": 0.2}
    anywhere = {"match": {"regex": "(?m)^python"}, "teachers": ["code"]}
    assert routed(tmp_path, {"prompt": chat}, anywhere) == {"code": 1.0}
    source = {"match": {"column": "source", "regex": r"^gsm\d"}, "teachers": ["math"]}
    assert routed(tmp_path, {"source": "gsm8k"}, source) == {"math": 1.0}
    assert routed(tmp_path, {"source": ["web", "gsm8k"]}, source, default="code") == {"code": 1.0}, (
        "lines, from the first"
    )
    number = {"match": {"column": "year", "regex": "^2024$"}, "teachers": ["math"]}
    assert routed(tmp_path, {"year": 2024}, number) == {"math": 1.0}


def test_what_a_row_says_itself_comes_first_then_rules_then_its_domain_then_the_default(tmp_path: Path) -> None:
    row = {"tags": ["proof"], "domain": "code"}
    assert routed(tmp_path, row | {"teacher": "style"}, PROOF, default="math") == {"style": 1.0}
    assert routed(tmp_path, row | {"teachers": {"style": 0.5}}, PROOF) == {"style": 0.5}, "either name of the column"
    assert routed(tmp_path, row, PROOF, default="style") == {"math": 1.0}
    assert routed(tmp_path, {"domain": "code"}, PROOF, default="style") == {"code": 1.0}
    assert routed(tmp_path, {}, PROOF, default="style") == {"style": 1.0}


def test_a_row_without_a_teacher_shows_itself_the_rules_and_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        routed(tmp_path, {"tags": ["easy"], "prompt": "how " * 40}, PROOF, PYTHON, CALL)
    assert f"{tmp_path}/rows.jsonl:1: nothing says who teaches this row" in caught.value.what
    assert (
        "(0: tag 'proof'; 1: column 'prompt', regex '(?i)python'; "
        "2: call tests.unit.test_routing:choose): prompt 'how how" in caught.value.what
    )
    assert caught.value.what.endswith("..., tags ['easy']")
    assert "routing.default" in caught.value.fix and "known: code, math, style" in caught.value.fix


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"level": "nonsense"}, f"routing.rules.0.call: {HERE}:choose is neither a name, nor names, .*, but 3"),
        ({"level": "none"}, "is neither a name, nor names, .* but \\[\\]"),
        ({"level": "misspelt"}, "'mth' is not one of the teachers \\(routing.rules.0.call"),
        ({"level": "fails"}, "choose fails for this row: KeyError: 'no such column'"),
        ({"level": "changes"}, "choose fails for this row: TypeError: 'mappingproxy' object"),
        ({"tags": "proof"}, "`tags` is not a list of texts, but 'proof'"),
        ({"teacher": "math", "teachers": ["code"]}, "the row has both `teacher` and `teachers`"),
    ],
)
def test_a_row_that_no_rule_can_use_is_named_with_its_line(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"rows.jsonl:1: .*{says}"):
        routed(tmp_path, row, CALL, PROOF)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (f"{HERE}:NUMBER", "is no function, but int"),
        (f"{HERE}:takes_two", r"cannot be called with \(row\)"),
        (f"{HERE}:chose", "has no 'chose'"),
        ("no_such_module:choose", "no module 'no_such_module'"),
    ],
)
def test_a_function_that_cannot_route_is_refused_before_anything_is_read(target: str, says: str) -> None:
    config = RunConfig.model_validate(settings() | {"routing": {"rules": [{"call": target}]}})
    with pytest.raises(ConfigError, match=rf"routing\.rules\.0\.call: .*{says}"):
        check_parts(config)
    check_parts(RunConfig.model_validate(settings() | {"routing": {"rules": [CALL]}}))


def test_preflight_refuses_a_column_that_no_row_has_and_notes_a_rule_that_decides_nothing(tmp_path: Path) -> None:
    rule = {"match": {"column": "sorce", "regex": "x"}, "teachers": ["math"]}
    path = write_run(tmp_path, routing={"rules": [rule]}, student={"model": "./base", "warmup_steps": 1})
    write_jsonl(tmp_path / "math.jsonl", [{"prompt": "ab=", "source": "y"}])
    with pytest.raises(ConfigError, match=r"routing\.rules\.0\.match\.column: no row has a column 'sorce'") as caught:
        inspect(load_config(path).config)
    assert "did you mean 'source'?" in caught.value.fix
    found = inspect(load_config(path, ["routing.rules.0.match.column=source"]).config)
    assert found.notes == ("routing.rules.0: decides about none of the rows of data",)


def test_rules_route_trained_and_held_out_rows_of_a_run(tmp_path: Path) -> None:
    rules = [{"match": {"tag": "b"}, "teachers": {"math": 0.5, "code": 0.5}}, {"call": f"{HERE}:choose"}]
    write_jsonl(tmp_path / "held.jsonl", [{"prompt": "ab", "answer": "c", "domain": "new", "tags": ["b"]}])
    path = write_run(
        tmp_path, routing={"rules": rules, "default": "code"}, evaluation={"data": [{"path": "held.jsonl"}]}
    )
    write_jsonl(tmp_path / "math.jsonl", [{"prompt": "ab=", "tags": ["b"]}, {"prompt": "a="}])
    inspect_early(load_config(path).config)
    prompts = inspect(load_config(path).config).prompts
    assert [dict(row.teachers) for row, _ in prompts.rows] == [{"math": 0.5, "code": 0.5}, {"math": 1.0}, {"code": 1.0}]
    assert prompts.held_out["new"][0].teachers == {"math": 0.5, "code": 0.5}


def test_a_mix_names_every_group_of_prompts_and_no_other(tmp_path: Path) -> None:
    path = write_run(tmp_path, routing={"mix": {"math": 1, "code": 3}})
    prompts = inspect(load_config(path).config).prompts
    found = [next(iter(prompts.stream.at(ordinal).teachers)) for ordinal in range(400)]
    assert found.count("math") == 100 and found[:4].count("math") == 1
    with pytest.raises(ConfigError, match=r"routing\.mix: there is no share for the 1 prompts of code"):
        inspect(load_config(path, ["~routing.mix.code"]).config)
    write_jsonl(tmp_path / "math.jsonl", [{"prompt": "ab=", "teacher": ["math", "code"]}])
    with pytest.raises(ConfigError, match=r"routing\.mix\.math: no prompt is taught by math alone") as caught:
        inspect(load_config(path).config)
    assert caught.value.why == "teachers of the 2 prompts: code+math (1), code (1)"
