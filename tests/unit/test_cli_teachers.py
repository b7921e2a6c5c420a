"""`distill-run teachers`: schedules of a trace, as a user asks for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distill.cli.run import main
from distill.teacher_manager.timeline.checker import check
from distill.teacher_manager.timeline.reading import read_case
from distill.teacher_manager.timeline.schedule import read_schedule

TRACES = Path(__file__).parents[1] / "golden" / "data" / "scheduling" / "C"


def test_sim_sets_the_scheduler_beside_the_simple_policies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, log = TRACES / "H_hand01_one_slot.json", tmp_path / "log.json"
    assert main(["teachers", "sim", str(trace), "--log", str(log)]) == 0
    said = capsys.readouterr().out
    case, schedule = read_case(trace), read_schedule(log)
    assert not check(case, schedule)
    assert f"{len(case.jobs)} jobs for {len(case.system.teachers)} teachers on 1 devices" in said
    ends = {name: float(end) for name, end in re.findall(r"^(\w[\w, ]*?) {2,}([\d.]+) s \(", said, re.MULTILINE)}
    assert ends["distill"] == pytest.approx(max(visit.end_ns for visit in schedule.visits) / 1e9, abs=6e-4)
    policies = {"fifo", "oldest_drain", "longest_drain", "barrier"}
    assert ends.keys() == {"distill", "oldest_drain_stream", *policies, *(f"{name}, prefetched" for name in policies)}


def test_sim_alone_leaves_the_simple_policies_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["teachers", "sim", str(TRACES / "H_hand01_one_slot.json"), "--no-simple"]) == 0
    said = capsys.readouterr().out
    assert "\ndistill " in said and "fifo" not in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["teachers"], "the command line: the following arguments are required: COMMAND"),
        (["teachers", "sin"], "invalid choice: 'sin'"),
        (["teachers", "sim", "nowhere.json"], "nowhere.json"),
        (["teachers", "sim", __file__], "tm-sched/1 is expected"),
        (["teachers", "sim", str(TRACES / "H_hand01_one_slot.json"), "--log", "/dev/null/x"], "--log: /dev/null/x"),
        (["teacher"], "did you mean 'teachers'"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    assert says in capsys.readouterr().err
