"""Checkpoints of the Hugging Face student: what they hold, how they replace one another, which are refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from distill.errors import ConfigError, EnvironmentFault
from distill.objectives.divergence import JSD
from students.hf.backend import HFStudent
from tests.builders_student import make_batch, weights_of, write_student
from tests.builders_student import start_student as start

FULL = JSD().spec


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_student(tmp_path / "model")


def trained(model: Path, steps: int = 2) -> HFStudent:
    student = start(model)
    for step in range(steps):
        student.step(make_batch(FULL, version=step, seed=step), JSD())
    return student


def test_a_checkpoint_is_also_a_hugging_face_folder_without_pickle(model: Path, tmp_path: Path) -> None:
    trained(model).save(tmp_path / "checkpoint")
    AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    suffixes = {path.suffix for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}
    assert [path.name for path in (tmp_path / "checkpoint").glob("*.safetensors")] == ["model.safetensors"]


def test_saving_over_a_checkpoint_replaces_it_and_leaves_nothing_beside_it(model: Path, tmp_path: Path) -> None:
    student = trained(model)
    student.save(tmp_path / "run/checkpoint")
    student.step(make_batch(FULL, version=2), JSD())
    student.save(tmp_path / "run/checkpoint")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint"]
    fresh = start(model)
    fresh.load(tmp_path / "run/checkpoint")
    assert fresh.version == 3


def test_a_failed_save_keeps_the_old_checkpoint(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    student = trained(model)
    student.save(tmp_path / "checkpoint")

    def full_disk(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(EnvironmentFault, match="No space left on device"):
        student.save(tmp_path / "checkpoint")
    monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "checkpoint"}
    start(model).load(tmp_path / "checkpoint")


def test_a_student_saved_before_its_first_step_can_be_loaded(model: Path, tmp_path: Path) -> None:
    start(model).save(tmp_path / "checkpoint")
    student = start(model)
    student.load(tmp_path / "checkpoint")
    assert student.version == 0
    assert student.step(make_batch(FULL), JSD()).loss == start(model).step(make_batch(FULL), JSD()).loss


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


FOREIGN_STATE = b'{"format": "x", "version": 1, "files": {}}'


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: cut_short(folder / "model.safetensors"), "model.safetensors is .* written were"),
        (lambda folder: flip_a_bit(folder / "trainer/rank-00000.safetensors"), "another digest"),
        (lambda folder: (folder / "trainer/rank-00000.safetensors").unlink(), "rank-00000.safetensors is missing"),
        (lambda folder: cut_short(folder / "trainer/state.json"), "state.json is broken"),
        (lambda folder: (folder / "trainer/state.json").unlink(), "is not a checkpoint of a student"),
        (lambda folder: (folder / "trainer/state.json").write_bytes(FOREIGN_STATE), "in format 'x'"),
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_checkpoint_is_refused(
    model: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    student = trained(model)
    student.save(tmp_path / "checkpoint")
    before = weights_of(student)
    damage(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match=message):
        student.load(tmp_path / "checkpoint")
    assert weights_of(student) == before
    assert student.version == 2


def test_a_checkpoint_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    trained(model).save(tmp_path / "checkpoint")
    other = start(write_student(tmp_path / "other", layers=1))
    with pytest.raises(ConfigError, match="is of another model than"):
        other.load(tmp_path / "checkpoint")
