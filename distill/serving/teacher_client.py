"""A client of the embedded server of a slot that teachers share (`python -m distill.serving.embedded --teachers`)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from distill.errors import ConfigError, DistillError, EnvironmentFault, ServerError, TeacherError
from distill.packing import CONTENT_TYPE
from distill.protocols import Loaded, ServerInfo, SlotLedger, WeightCosts, WeightSource
from distill.serving.calls import QUICK_S, as_object, said_in
from distill.serving.generations import generate_body, parse_generations
from distill.serving.limits import check_generate, check_score
from distill.serving.packed import parse_packed
from distill.serving.packed_calls import PackedCalls
from distill.serving.replies import score_error
from distill.serving.scoring import asked_for, packed_body, teacher_scores
from distill.serving.wire import ServerAtFault
from distill.types import GenerateRequest, Generation, ScoreRequest, Signal, SignalSpec, TeacherScores

_KINDS: dict[str, type[DistillError]] = {
    kind.__name__: kind for kind in (ConfigError, EnvironmentFault, ServerError, TeacherError)
}


@dataclass(frozen=True, slots=True)
class _Known:
    """A registered object, and what requests to it must respect."""

    source: WeightSource
    info: ServerInfo
    costs: WeightCosts

    @property
    def group(self) -> str:
        """Objects of one group may share a call."""
        return self.source.base or self.source.name


class TeacherClient(PackedCalls):
    """Implements `TeacherServer`. One HTTP session; use and close it in one event loop."""

    def __init__(self, url: str, *, name: str = "", timeout_s: float = 600.0, half: bool = False) -> None:
        super().__init__(url, name=name, timeout_s=timeout_s, half=half)
        self._known: dict[str, _Known] = {}

    @property
    def holds_one(self) -> bool:
        return False

    async def info(self) -> ServerInfo:
        server = await self.json("GET", "/server_info", None, QUICK_S)
        if server.get("teachers") is not True:
            raise ServerError(
                f"{self.label} is {server.get('program') or 'a server'} that holds one model",
                fix="start it with --teachers, or use it as a server of one teacher at a time",
            )
        return ServerInfo(
            program=str(server.get("program", "")),
            version=str(server.get("version", "unknown")),
            vocab_size=int(server.get("vocab_size") or 0),
            context_length=int(server.get("context_length") or 0),
            weight_version="",
            packed=True,
        )

    async def register(self, source: WeightSource) -> WeightCosts:
        body = {
            "name": source.name,
            "folder": str(source.folder),
            "version": source.version,
            "vocab_size": source.vocab_size,
            "base": source.base,
        }
        reply = await self._asked("POST", "/teachers/register", body)
        costs = WeightCosts(
            bytes=reply["bytes"],
            layers=reply["layers"],
            total_params=reply["total_params"],
            active_params=reply["active_params"],
            stream_bytes=reply["stream_bytes"],
        )
        info = ServerInfo("", "", reply["vocab_size"], reply["context_length"], source.version, packed=True)
        self._known[source.name] = _Known(source, info, costs)
        return costs

    async def load(self, name: str) -> Loaded:
        self._require(name)
        reply = await self._asked("POST", "/teachers/load", {"name": name})
        return Loaded(reply["seconds"], reply["from_disk"], reply["checksums"])

    async def release(self, name: str) -> None:
        """Also of what another client has left there."""
        await self._asked("POST", "/teachers/release", {"name": name})

    async def checksums(self, name: str) -> dict[str, str]:
        self._require(name)
        reply = await self._asked("POST", "/weights_checker", {"action": "checksum", "teacher": name})
        return dict(reply["ranks"][0]["checksums"])

    async def score(
        self, requests: Sequence[ScoreRequest], spec: SignalSpec, *, stream: bool = False
    ) -> list[TeacherScores]:
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            known = self._require(request.teacher)
            check_score(request, spec, known.info, self.label)
            groups[known.group].append(index)
        parts = await asyncio.gather(
            *(self._score_group([requests[index] for index in members], spec, stream) for members in groups.values())
        )
        order = [index for members in groups.values() for index in members]
        found = dict(zip(order, (scores for part in parts for scores in part), strict=True))
        return [found[index] for index in range(len(requests))]

    async def generate(self, requests: Sequence[GenerateRequest], teacher: str) -> list[Generation]:
        known = self._require(teacher)
        for request in requests:
            check_generate(request, known.info, self.label)
        body = generate_body(requests) | {"teacher": teacher}
        status, _, reply = await self.call("POST", "/generate", body, awaited=f"{len(requests)} answers")
        if status != 200:
            self._raise_said("/generate", status, reply)
        written = parse_generations(reply, requests, self.label)
        for item in written:
            if other := set(item.versions) - {known.source.version}:
                raise TeacherError(
                    f"{self.label}: {item.id} should be written by {known.source.version}, found {sorted(other)}",
                    teacher=teacher,
                )
        return written

    async def ledger(self) -> SlotLedger:
        reply = await self._asked("GET", "/teachers", None)
        host: dict[str, Any] = reply.get("host") or {}
        return SlotLedger(
            budget_bytes=reply["budget_bytes"],
            used_bytes=reply["used_bytes"],
            peak_bytes=reply["peak_bytes"],
            residents=reply["residents"],
            host_budget_bytes=host.get("budget_bytes", 0),
            host_bytes=host.get("stored_bytes", 0),
        )

    async def _score_group(
        self, requests: Sequence[ScoreRequest], spec: SignalSpec, stream: bool
    ) -> list[TeacherScores]:
        """Scores by objects of one group: adapters and their base."""
        asked = [
            one
            for request in requests
            for known in [self._known[request.teacher]]
            for one in asked_for([request], spec, known.info, known.source.version, half=self.half)
        ]
        names = [request.teacher for request in requests]
        teacher = ", ".join(dict.fromkeys(names))
        more: dict[str, Any] = {"teacher": names[0] if len(set(names)) == 1 else names}
        if stream:
            more["stream_weights"] = True
        full, hidden = spec.signal is Signal.FULL, spec.signal is Signal.HIDDEN
        body = packed_body(asked, more, full=full, hidden=hidden)
        status, kind, reply = await self.packed_reply(body, f"{len(asked)} scores")
        if status != 200:
            self._raise_said("/generate", status, bytes(reply))
        if kind != CONTENT_TYPE:
            rule = ServerAtFault(f"the reply is {kind or 'without a content type'}, not packed")
            raise score_error(teacher, asked, rule)
        found = parse_packed(reply, asked, teacher, full=full, hidden=hidden)
        return [teacher_scores(name, spec, one, scores) for name, one, scores in zip(names, asked, found, strict=True)]

    async def _asked(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """The JSON object that a call is answered with. Raises what the server says, by its kind."""
        status, _, reply = await self.call(method, path, body)
        if status != 200:
            self._raise_said(path, status, reply)
        return as_object(reply)

    def _raise_said(self, path: str, status: int, reply: bytes) -> NoReturn:
        said = said_in(reply)
        kind = _KINDS.get(said.kind)
        if kind is None:
            self.raise_status(path, status, reply)
        raise kind(f"{self.label}: {said.message}", why=said.why, fix=said.fix)

    def _require(self, name: str) -> _Known:
        found = self._known.get(name)
        if found is None:
            raise ServerError(
                f"{self.label}: {name!r} was not registered with this client",
                why="a server that was started again knows nobody",
                fix="register it first",
            )
        return found
