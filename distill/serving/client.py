"""One client for every model server: SGLang's native HTTP API, and the packed scoring replies of the embedded server.

A request that would kill the server is refused before it is sent (`limits`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distill.errors import ServerError, TeacherError
from distill.packing import CONTENT_TYPE
from distill.protocols import ServerInfo
from distill.serving.calls import QUICK_S, as_object, said_in
from distill.serving.describe import EMBEDDED, describe_server
from distill.serving.generations import generate_body, parse_generations
from distill.serving.limits import check_generate, check_score
from distill.serving.packed import parse_packed
from distill.serving.packed_calls import PackedCalls
from distill.serving.replies import Asked, Scores, parse_scores, score_error
from distill.serving.scoring import Piece, asked_for, calls_of_pieces, joined, json_body, packed_body, teacher_scores
from distill.serving.wire import ServerAtFault
from distill.types import GenerateRequest, Generation, ScoreRequest, Signal, SignalSpec, TeacherScores


class ServerClient(PackedCalls):
    """Implements `ModelServer`. One HTTP session; use and close it in one event loop.

    `name` is what errors call the server; `timeout_s` is the deadline of each call that computes or loads. `half`: the
    log-probabilities of top-k rows travel as float16, where the server has packed replies.
    """

    def __init__(self, url: str, *, name: str = "", timeout_s: float = 600.0, half: bool = False) -> None:
        super().__init__(url, name=name, timeout_s=timeout_s, half=half)
        self._last_info: ServerInfo | None = None

    async def info(self) -> ServerInfo:
        """Ask the server what it is. Vocabulary and context length are remembered to check requests against."""
        server = await self.json("GET", "/server_info", None, QUICK_S)
        model = await self.json("GET", "/model_info", None, QUICK_S)
        self._last_info = describe_server(server, model, self.label)
        return self._last_info

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Continue all prompts in one HTTP request; the answers come in the order of the requests."""
        info = await self._known()
        for request in requests:
            check_generate(request, info, self.label)
        _, reply = await self.post("/generate", generate_body(requests), f"{len(requests)} answers")
        return parse_generations(reply, requests, self.label)

    async def score(
        self, requests: Sequence[ScoreRequest], spec: SignalSpec, teacher: str, expected_version: str
    ) -> list[TeacherScores]:
        """Score finished responses by the weights `expected_version`; any other version is a TeacherError."""
        info = await self._known()
        for request in requests:
            check_score(request, spec, info, self.label)
        asked = asked_for(requests, spec, info, expected_version, half=self.half)
        if info.packed:
            found = await self._score_packed(asked, teacher, spec.signal)
        elif spec.student_k:
            found = await self._score_in_pieces(asked, teacher)
        else:
            _, reply = await self.post("/generate", json_body(asked), f"{len(asked)} scores")
            found = parse_scores(reply, asked, teacher)
        return [teacher_scores(teacher, spec, one, scores) for one, scores in zip(asked, found, strict=True)]

    async def _score_packed(self, asked: Sequence[Asked], teacher: str, signal: Signal) -> list[Scores]:
        full, hidden = signal is Signal.FULL, signal is Signal.HIDDEN
        body = packed_body(asked, full=full, hidden=hidden)
        status, kind, reply = await self.packed_reply(body, f"{len(asked)} scores")
        if status != 200:
            self.raise_status("/generate", status, bytes(reply))
        if kind != CONTENT_TYPE:
            rule = ServerAtFault(f"the reply is {kind or 'without a content type'}, not packed")
            raise score_error(teacher, asked, rule)
        return parse_packed(reply, asked, teacher, full=full, hidden=hidden)

    async def _score_in_pieces(self, asked: Sequence[Asked], teacher: str) -> list[Scores]:
        found: list[tuple[Piece, Scores]] = []
        for call in calls_of_pieces(asked):
            parts = [piece.asked for piece in call]
            _, reply = await self.post("/generate", json_body(parts), f"{len(parts)} pieces of scores")
            found.extend(zip(call, parse_scores(reply, parts, teacher), strict=True))
        return joined(found)

    async def load_weights(self, path: Path, version: str, vocab_size: int | None = None) -> None:
        """Load the Hugging Face folder `path`, as seen by the server, and call it `version`.

        `vocab_size` is told to the embedded server only: SGLang counts all rows of the head. Raises TeacherError when
        the server cannot load it; what it holds then is unknown.
        """
        body: dict[str, Any] = {"model_path": str(path), "weight_version": version}
        if vocab_size is not None and (await self._known()).program == EMBEDDED:
            body["vocab_size"] = vocab_size
        self._last_info = None  # another model may have another vocabulary and context
        status, _, reply = await self.call("POST", "/update_weights_from_disk", body)
        answer = as_object(reply)
        if status != 200 or answer.get("success") is not True:
            said = said_in(reply)
            raise TeacherError(
                f"{self.label} did not load {path}: {said.message or f'HTTP {status}'}",
                why=said.why or "the weights of the server are unknown after an update that failed",
                fix=said.fix
                or "check that the folder is complete and of the architecture that the server was started with",
            )

    async def checksums(self) -> dict[str, str]:
        """Tensor name -> digest of its bytes as the server holds it. With several ranks, "rank<i>/" goes before.

        The embedded server gives xxh3-64 of Hugging Face tensors. Another program has its own algorithm and names:
        its digests say whether two loads agree, not whether a file does, so the program's name goes before theirs.
        """
        program = (await self._known()).program
        answer = await self.json("POST", "/weights_checker", {"action": "checksum"})
        ranks: Any = answer.get("ranks")
        if answer.get("success") is not True or not isinstance(ranks, list) or not ranks:
            raise ServerError(f"{self.label} gives no checksums: {answer.get('message') or answer}")
        own = "" if program == EMBEDDED else f"{program}/"
        return {
            f"{own}{f'rank{i}/' if len(ranks) > 1 else ''}{name}": digest
            for i, rank in enumerate(ranks)
            for name, digest in rank["checksums"].items()
        }

    async def pause(self, mode: str) -> None:
        """Stop computing. `mode`: abort ends running requests, retract and in_place keep them for `resume`."""
        await self._action("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._action("/continue_generation", {})

    async def abort(self, request_id: str | None) -> None:
        """End one request, or all of them. They answer with what they have and the finish reason "abort"."""
        await self._action("/abort_request", {"abort_all": True} if request_id is None else {"rid": request_id})

    async def flush(self) -> None:
        """Forget cached prefixes. Refused while requests run."""
        await self._action("/flush_cache", {})

    async def release(self, tags: Sequence[str]) -> None:
        """Give memory back: "weights", "kv_cache". The server must be idle: SGLang dies otherwise."""
        await self._action("/release_memory_occupation", {"tags": list(tags)})

    async def reoccupy(self, tags: Sequence[str]) -> None:
        """Take back what `release` gave away; only that (SGLang dies otherwise). Weights must be loaded again."""
        await self._action("/resume_memory_occupation", {"tags": list(tags)})

    async def _known(self) -> ServerInfo:
        return self._last_info or await self.info()

    async def _action(self, path: str, body: dict[str, Any]) -> None:
        await self.post(path, body, "an acknowledgement")
