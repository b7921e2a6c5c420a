"""Traces from JSON: what they hold, and what is refused with the place at which it stands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distill.errors import ConfigError
from distill.teacher_manager.timeline.generated import digest
from distill.teacher_manager.timeline.reading import COLUMNS, read_case

DATA = Path(__file__).parents[1] / "golden" / "data" / "scheduling"


def timed() -> dict[str, Any]:
    dense = {"kind": "dense", "base": None, "bytes": 4, "total_params": 1, "active_params": 1, "layers": 4}
    return {
        "format": "tm-sched/1",
        "kind": "timed",
        "name": "one",
        "system": {
            "devices": [{"id": 0, "budget_bytes": 8, "flops_per_s": 2, "link": 0, "tp": 1}],
            "links": [{"id": 0, "bytes_per_s": 2}],
            "host": None,
        },
        "teachers": [{"id": 0, **dense}, {"id": 1, **dense}],
        "jobs_columns": list(COLUMNS),
        "jobs": [[0, 0, 0, 0, 1, 3, 3, 9], [1, 1, 0, 0, 2, 3, 3, 9]],
    }


def write(folder: Path, content: object) -> Path:
    path = folder / "one.json"
    path.write_text(json.dumps(content))
    return path


def set_at(content: Any, place: str, value: object) -> object:
    """`a.0.b` names a key of a list entry."""
    *way, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    inner = content
    for key in way:
        inner = inner[key]
    inner[last] = value
    return content


def test_a_trace_holds_what_its_file_says(tmp_path: Path) -> None:
    case = read_case(write(tmp_path, timed()))
    assert [job.arrival_ns for job in case.jobs] == [1, 2]
    assert case.system.needs == ((0,), (1,))
    assert case.system.service_ns(3, 0, 0) == 3 * 10**9
    assert case.system.copy_ns(0, 0, from_disk=False) == 2 * 10**9


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("format", "tm-sched/2", "Invalid enum value 'tm-sched/2' - at `$.format`"),
        ("kind", "paging_uniform", "at `$.kind`"),
        ("system.devices.0.flops_per_s", 0, "at `$.system.devices[0].flops_per_s`"),
        ("system.devices.0.link", 1, "devices[0].link is 1; there are 1 links"),
        ("system.devices.0.id", 3, "devices[0].id is 3; ids count from 0"),
        ("system.devices", [], "at `$.system.devices`"),
        ("system.host", {"budget_bytes": 8, "disk_bytes_per_s": 1, "initial": [2]}, "host.initial names teacher 2"),
        ("teachers.1.bytes", 1.5, "Expected `int`, got `float` - at `$.teachers[1].bytes`"),
        ("teachers.1.kind", "sparse", "at `$.teachers[1].kind`"),
        ("teachers.1.base", 0, "teachers[1].base is 0, kind is dense"),
        ("teachers.1.kind", "lora", "teachers[1].base is None, kind is lora"),
        ("teachers.1", {**timed()["teachers"][1], "kind": "lora", "base": 0}, "which is no teacher of kind base"),
        ("jobs_columns", ["id"], "jobs_columns are id; expected id, teacher, step"),
        ("jobs", [], "at `$.jobs`"),
        ("jobs.0.6", 0, "at `$.jobs[0][6]`"),
        ("jobs.0.1", 2, "jobs[0].teacher is 2, which is no teacher that has jobs"),
        ("jobs.1.0", 5, "jobs[1].id is 5; ids count from 0"),
        ("jobs.1.4", 0, "jobs[1] arrives at 0 ns, before the job of the id below"),
        ("jobs.1.3", 3, "jobs[1] arrives at 2 ns, before it is announced"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(tmp_path: Path, place: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_case(write(tmp_path, set_at(timed(), place, value)))
    assert said in str(raised.value) and "one.json" in str(raised.value)


def test_a_file_that_is_not_there_and_one_that_is_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        read_case(tmp_path / "nowhere.json")
    (tmp_path / "torn.json").write_text('{"format": "tm-')
    with pytest.raises(ConfigError, match=r"torn\.json"):
        read_case(tmp_path / "torn.json")


def test_a_generated_trace_is_the_same_everywhere() -> None:
    path = DATA / "E" / "E_64x64_dense.json"
    case = read_case(path)
    assert digest(case.jobs) == json.loads(path.read_text())["check"]["sha256_of_rows"]
    assert len(case.system.devices) == 64
    assert [device.link for device in case.system.devices] == [link.id for link in case.system.links]
