"""What the teachers are asked about answers of a file, and what those read that do not read the student's ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from distill.config import RunConfig
from distill.errors import ConfigError
from distill.preflight import Preflight
from distill.preflight.context import with_context
from distill.preflight.full_rows import choose_full_rows
from distill.preflight.vocabulary import load_vocabulary
from distill.protocols import Contract, Objective
from distill.rollout.prompts import encode
from distill.score_files.rows import Answer
from distill.teacher_manager import Context, Reader, Translation
from distill.teacher_manager.own_prompts import OwnPrompts
from distill.types import Ids, Sample, Signal, SignalSpec


def choose_spec(signal: Signal | None, k: int | None, checked: Preflight) -> SignalSpec:
    """Raises ConfigError for a `k` that nothing needs, or that is missing or too large, and for what a teacher with
    another tokenizer cannot say. In a file nobody says what the student found probable: the teacher's tokens are asked
    about instead."""
    own = checked.objective.spec
    signal = signal or own.signal
    foreign = [name for name, reader in checked.translations.items() if isinstance(reader, Translation)]
    if foreign and signal is not Signal.SAMPLED:
        raise ConfigError(
            f"--signal {signal}: teachers.{foreign[0]} has another tokenizer, whose ids are not the student's",
            fix="use --signal sampled",
        )
    if signal is not Signal.TOPK:
        if k is not None:
            raise ConfigError(f"--k: {k} is ignored, as the signal is {signal}", fix="leave it out, or --signal topk")
        return SignalSpec(signal)
    k = own.k if k is None else k
    if not 0 < k <= checked.vocab_size:
        raise ConfigError(
            f"--k is {k}, and the vocabulary has {checked.vocab_size} ids",
            fix=f"give --k from 1 to {checked.vocab_size}",
        )
    return SignalSpec(Signal.TOPK, k)


@dataclass(frozen=True)
class _Asking:
    """The run's objective, but for what it asks of teachers."""

    objective: Objective
    spec: SignalSpec

    @property
    def contract(self) -> Contract:
        return self.objective.contract

    def __call__(self, rows: Any) -> tuple[Any, dict[str, Any]]:
        return self.objective(rows)


def asking(checked: Preflight, spec: SignalSpec, config: RunConfig, prompts: FilePrompts) -> Preflight:
    """`checked` for teachers that are asked for `spec` about `prompts`."""
    return replace(
        checked,
        objective=_Asking(checked.objective, spec),
        full_rows=choose_full_rows(config, spec, checked.vocab_size)
        if spec.signal is Signal.FULL
        else replace(checked.full_rows, heads={}, why=""),
        translations=prompts.readers(checked.translations),
    )


@dataclass(frozen=True)
class _ByRow(OwnPrompts):
    """Prompts by the id of the sample."""

    def of_sample(self, sample: Sample) -> Ids:
        return self.by_ids[sample.id.encode()]


class FilePrompts:
    """The prompts of rows under way as teachers read them that do not read the student's ids."""

    def __init__(self, config: RunConfig, checked: Preflight) -> None:
        self._config = config
        self._ids: dict[str, dict[bytes, Ids]] = {name: {} for name in checked.translations}
        self._tokenizers: dict[str, Any] = {
            name: _tokenizer(name, reader, checked) for name, reader in checked.translations.items()
        }

    def readers(self, of_run: Mapping[str, Reader]) -> dict[str, Reader]:
        return {name: self._reader(name, reader) for name, reader in of_run.items()}

    def add(self, answers: Iterable[Answer]) -> None:
        """Spell them. Raises ConfigError, with the row's place, for one that a teacher cannot read."""
        for name, answer in self._asked(answers):
            role = f"teachers.{name}"
            read = with_context(answer.row, self._config.teachers[name].context, role)
            ids = encode(read, self._tokenizers[name], f"{role}'s")
            self._ids[name][answer.sample.id.encode()] = ids

    def forget(self, answers: Iterable[Answer]) -> None:
        for name, answer in self._asked(answers):
            self._ids[name].pop(answer.sample.id.encode(), None)

    def _asked(self, answers: Iterable[Answer]) -> Iterable[tuple[str, Answer]]:
        return ((name, answer) for answer in answers for name in answer.row.teachers if name in self._ids)

    def _reader(self, name: str, reader: Reader) -> Reader:
        prompts = _ByRow(name, self._ids[name])
        if isinstance(reader, Translation | Context):
            return replace(reader, prompts=prompts)
        raise AssertionError(f"teachers.{name}: {type(reader).__name__} reads prompts in a way of its own")


def _tokenizer(name: str, reader: Reader, checked: Preflight) -> Any:
    if not isinstance(reader, Translation):
        return checked.vocabulary.tokenizer
    models = checked.models
    folder = (models.teachers.get(name) or models.elsewhere[name]).tokenizer
    return load_vocabulary(folder, f"teachers.{name}").tokenizer


Report = Callable[[str, str], None]
"""(level, line) for the person who waits."""
