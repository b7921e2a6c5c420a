"""Teachers that are served elsewhere: each is asked, before anything starts, for what the run will ask it for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from distill.config import RunConfig, TeacherConfig
from distill.preflight.vocabulary import Vocabularies
from distill.serving.openai import is_loopback
from distill.teacher_manager.remote_apis import open_remote
from distill.types import SignalSpec

LOOK_S = 60.0
"""Longest wait for a server to be there and to answer three short requests."""


@dataclass(frozen=True)
class TeacherElsewhere:
    """A teacher behind a URL."""

    name: str
    url: str
    tokenizer: Path
    foreign: bool
    """Its tokenizer is said to be another than the student's."""
    context_length: int | None = None
    """Tokens that it can score; None: not known."""


def teacher_elsewhere(name: str, teacher: TeacherConfig) -> TeacherElsewhere:
    """As the configuration says, which was checked; nobody is asked."""
    assert teacher.url is not None and teacher.tokenizer is not None, f"teachers.{name} is not elsewhere"
    return TeacherElsewhere(name, teacher.url, teacher.tokenizer, teacher.alignment is not None)


def look_at_servers(
    config: RunConfig, places: Mapping[str, TeacherElsewhere], vocabularies: Vocabularies, spec: SignalSpec
) -> dict[str, int | None]:
    """Teacher -> tokens that its server can score, None where it does not tell. All are asked at the same time.

    Raises ConfigError where a server cannot give what the objective needs, ServerError where one is not there,
    TeacherError for log-probabilities that cannot be right.
    """
    if not places:
        return {}

    async def look() -> dict[str, int | None]:
        found = await asyncio.gather(*(_look(config, name, vocabularies.of(name).size, spec) for name in places))
        return dict(zip(places, found, strict=True))

    with ThreadPoolExecutor(1) as pool:  # whoever calls may be in an event loop of its own
        return pool.submit(lambda: asyncio.run(look())).result()


def notes_on(config: RunConfig, places: Mapping[str, TeacherElsewhere]) -> list[str]:
    """What is to be known of the teachers elsewhere."""
    notes: list[str] = []
    for name, place in places.items():
        limit = "does not tell its context length" if place.context_length is None else f"{place.context_length} tokens"
        notes.append(f"teachers.{name}: served at {place.url} ({config.teachers[name].api}), takes no slot; {limit}")
        if config.teachers[name].api_key_env and place.url.startswith("http:") and not is_loopback(place.url):
            notes.append(
                f"teachers.{name}: its key and all samples go to {place.url} unencrypted; https would hide them"
            )
    return notes


async def _look(config: RunConfig, name: str, vocab_size: int, spec: SignalSpec) -> int | None:
    remote = open_remote(
        name,
        config.teachers[name],
        config.teacher_manager,
        spec,
        vocab_size=vocab_size,
        canaries=None,
        on_event=lambda level, message: None,
        timeout_s=min(LOOK_S, config.teacher_manager.timeout_s),
    )
    try:
        await remote.start()
        return remote.context_length
    finally:
        await remote.close()
