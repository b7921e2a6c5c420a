"""One client for every model server: SGLang's native HTTP API, and the packed scoring replies of the embedded server.

Whatever aiohttp or the operating system raises becomes a ServerError here and nowhere else. A request that would kill
the server (SGLang dies of a token id outside the vocabulary) is refused before it is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import aiohttp
import msgspec
import numpy as np

from distill.errors import ServerError, TeacherError
from distill.packing import CONTENT_TYPE
from distill.protocols import ServerInfo
from distill.serving.describe import EMBEDDED, describe_server
from distill.serving.generations import parse_generations
from distill.serving.packed import parse_packed
from distill.serving.replies import Asked, Scores, parse_scores, score_error
from distill.serving.reply_files import HEADER, LEAST_BYTES, LostReplyError, ReplyFile, ReplyFolder
from distill.serving.scoring import Piece, asked_for, calls_of_pieces, joined, json_body, packed_body, teacher_scores
from distill.serving.wire import ServerAtFault
from distill.types import GenerateRequest, Generation, Ids, ScoreRequest, Signal, SignalSpec, TeacherScores

CONNECTIONS = 512
"""Calls in flight on one server; more wait for their turn. Above what a server decodes together."""
IDLE_S = 2.0
"""Idle connections are dropped before the server (uvicorn: after 5 s) drops them: no call meets a closed one."""
QUICK_S = 30.0
"""Longest wait for a call that computes nothing."""


class ServerClient:
    """Implements `ModelServer`. One HTTP session; use and close it in one event loop.

    `name` is what errors call the server; `timeout_s` is the deadline of each call that computes or loads. `half`: the
    log-probabilities of top-k rows travel as float16, where the server has packed replies.
    """

    def __init__(self, url: str, *, name: str = "", timeout_s: float = 600.0, half: bool = False) -> None:
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._half = half
        self._files = ReplyFolder()
        self.label = f"{name} ({self._url})" if name else self._url
        self._open_session: aiohttp.ClientSession | None = None
        self._last_info: ServerInfo | None = None

    async def info(self) -> ServerInfo:
        """Ask the server what it is. Vocabulary and context length are remembered to check requests against."""
        server = await self._json("GET", "/server_info", None, QUICK_S)
        model = await self._json("GET", "/model_info", None, QUICK_S)
        self._last_info = describe_server(server, model, self.label)
        return self._last_info

    async def wait_ready(self, deadline_s: float) -> None:
        """Return when the server answers /ready, or raise ServerError after `deadline_s`."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                status, _, _ = await self._call("GET", "/ready", None, min(QUICK_S, deadline_s))
                if status == 200:
                    return
                reason = f"/ready answers {status}"
            except ServerError as error:
                reason = error.what
            if time.monotonic() >= end:
                raise ServerError(f"{self.label} was not ready after {deadline_s:g} s", why=reason)
            await asyncio.sleep(0.1)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Continue all prompts in one HTTP request; the answers come in the order of the requests."""
        info = await self._known()
        for request in requests:
            self._check_ids(request.id, request.input_ids, request.max_new_tokens, info)
            if request.report_k > info.vocab_size:
                self._refuse_width(request.report_k, info)
        body: dict[str, Any] = {
            "input_ids": [request.input_ids.tolist() for request in requests],
            "rid": [request.id for request in requests],
            "sampling_params": [_sampling_params(request) for request in requests],
            "return_logprob": True,
        }
        if any(request.report_k for request in requests):
            body |= {
                "top_logprobs_num": [request.report_k for request in requests],
                # the flag of the prompt's rows, of which there are none, is for a version that knows only that one:
                # SGLang refuses the encoding beside no flag that it knows
                "return_flat_raw_top_logprobs": True,
                "return_flat_raw_output_top_logprobs": True,
                "return_flat_raw_top_logprobs_b64": True,
            }
        _, reply = await self._post("/generate", body, f"{len(requests)} answers")
        return parse_generations(reply, requests, self.label)

    async def score(
        self, requests: Sequence[ScoreRequest], spec: SignalSpec, teacher: str, expected_version: str
    ) -> list[TeacherScores]:
        """Score finished responses by the weights `expected_version`; any other version is a TeacherError."""
        info = await self._known()
        for request in requests:
            self._check_score(request, spec, info)
        asked = asked_for(requests, spec, info, expected_version, half=self._half)
        if info.packed:
            found = await self._score_packed(asked, teacher, spec.signal)
        elif spec.student_k:
            found = await self._score_in_pieces(asked, teacher)
        else:
            _, reply = await self._post("/generate", json_body(asked), f"{len(asked)} scores")
            found = parse_scores(reply, asked, teacher)
        return [teacher_scores(teacher, spec, one, scores) for one, scores in zip(asked, found, strict=True)]

    async def _score_packed(self, asked: Sequence[Asked], teacher: str, signal: Signal) -> list[Scores]:
        full, hidden = signal is Signal.FULL, signal is Signal.HIDDEN
        kind, reply = await self._packed_reply(packed_body(asked, full, hidden), f"{len(asked)} scores")
        if kind != CONTENT_TYPE:
            rule = ServerAtFault(f"the reply is {kind or 'without a content type'}, not packed")
            raise score_error(teacher, asked, rule)
        return parse_packed(reply, asked, teacher, full=full, hidden=hidden)

    async def _packed_reply(self, body: dict[str, Any] | bytes, awaited: str) -> tuple[str, bytes | memoryview]:
        """(content type, body) of a reply that comes through shared memory where it can. A file that is not what the
        server says costs one more call, through HTTP."""
        file = self._files.file()
        if file is not None:
            try:
                return await self._through(file, body, awaited)
            except LostReplyError:
                pass
            finally:
                file.close()
        return await self._post("/generate", body, awaited)

    async def _through(
        self, file: ReplyFile, body: dict[str, Any] | bytes, awaited: str
    ) -> tuple[str, bytes | memoryview]:
        reply = await self._exchange("POST", "/generate", body, self._timeout_s, awaited, {HEADER: file.header})
        if reply.status != 200:
            self._raise_status("/generate", reply.status, reply.body)
        told = reply.headers.get(HEADER)
        if told is not None:
            return reply.kind, await asyncio.to_thread(file.take, told)
        if len(reply.body) >= LEAST_BYTES:
            self._files.give_up()
        return reply.kind, reply.body

    async def _score_in_pieces(self, asked: Sequence[Asked], teacher: str) -> list[Scores]:
        found: list[tuple[Piece, Scores]] = []
        for call in calls_of_pieces(asked):
            parts = [piece.asked for piece in call]
            _, reply = await self._post("/generate", json_body(parts), f"{len(parts)} pieces of scores")
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
        status, _, reply = await self._call("POST", "/update_weights_from_disk", body, self._timeout_s)
        answer = _as_object(reply)
        if status != 200 or answer.get("success") is not True:
            said = _said(reply)
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
        answer = await self._json("POST", "/weights_checker", {"action": "checksum"}, self._timeout_s)
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

    async def close(self) -> None:
        self._files.close()
        if self._open_session is not None:
            await self._open_session.close()
            self._open_session = None

    async def _known(self) -> ServerInfo:
        return self._last_info or await self.info()

    def _check_ids(self, request_id: str, ids: Ids, new_tokens: int, info: ServerInfo) -> None:
        if not len(ids):
            self._refuse(f"request {request_id} has no tokens", "give at least one token")
        if ids.min() < 0 or ids.max() >= info.vocab_size:
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            self._refuse(
                f"request {request_id} has token id {wrong}, outside the vocabulary of {info.vocab_size}",
                "check that the tokenizer belongs to the model",
            )
        if len(ids) + new_tokens > info.context_length:
            self._refuse(
                f"request {request_id}: {len(ids)} tokens and {new_tokens} new ones exceed the context length of "
                f"{info.context_length}",
                "shorten the prompt, lower max_new_tokens or raise server.context_length",
            )

    def _check_score(self, request: ScoreRequest, spec: SignalSpec, info: ServerInfo) -> None:
        """Refuse what cannot be right, by the request at fault."""
        if spec.k > info.vocab_size or (spec.signal is Signal.TOPK and spec.k < 1):
            self._refuse_width(spec.k, info)
        self._check_ids(request.id, request.input_ids, 0, info)
        if not 0 < request.response_len < len(request.input_ids):
            self._refuse(
                f"request {request.id}: a response of {request.response_len} among {len(request.input_ids)} tokens",
                "give at least one prompt token and one response token",
            )
        if not spec.student_k:
            return
        ids_Rk, shape = request.student_ids, (request.response_len, spec.student_k)
        if ids_Rk is None or ids_Rk.shape != shape:
            found = "none" if ids_Rk is None else f"those of shape {ids_Rk.shape}"
            self._refuse(
                f"request {request.id} has to be scored at the student's ids of shape {shape}, and has {found}",
                "the rollout server reports them with each token: ask it for report_k of them",
            )
        ordered_Rk = np.sort(ids_Rk, axis=1)
        if ordered_Rk[:, 0].min() < 0 or ordered_Rk[:, -1].max() >= info.vocab_size:
            self._refuse(
                f"request {request.id}: one of the student's ids lies outside the vocabulary of {info.vocab_size}",
                "check that the student and the teacher share a vocabulary",
            )
        if (ordered_Rk[:, 1:] == ordered_Rk[:, :-1]).any():
            self._refuse(f"request {request.id} names an id of the student's twice in a row", "give each id once")

    def _refuse_width(self, k: int, info: ServerInfo) -> NoReturn:
        self._refuse(f"top-{k} of a vocabulary of {info.vocab_size}", "set objective.k to at most the vocabulary")

    def _refuse(self, what: str, fix: str) -> NoReturn:
        raise ServerError(
            f"{self.label}: not sent: {what}",
            why="a request like this can end a model server for all its users",
            fix=fix,
        )

    async def _action(self, path: str, body: dict[str, Any]) -> None:
        await self._post(path, body, "an acknowledgement")

    async def _json(self, method: str, path: str, body: Any, deadline_s: float) -> dict[str, Any]:
        status, _, reply = await self._call(method, path, body, deadline_s)
        if status != 200:
            self._raise_status(path, status, reply)
        return _as_object(reply)

    async def _post(self, path: str, body: dict[str, Any] | bytes, awaited: str) -> tuple[str, bytes]:
        """(content type, body) of the reply to a JSON or a packed body. Raises ServerError for any status but 200."""
        status, kind, reply = await self._call("POST", path, body, self._timeout_s, awaited)
        if status != 200:
            self._raise_status(path, status, reply)
        return kind, reply

    def _raise_status(self, path: str, status: int, reply: bytes) -> NoReturn:
        said = _said(reply)
        raise ServerError(
            f"{self.label} answered {path} with HTTP {status}: {said.message or 'no message'}",
            why=said.why,
            fix=said.fix or ("the server's log says more" if status >= 500 else ""),
        )

    async def _call(
        self, method: str, path: str, body: Any, deadline_s: float, awaited: str = "an answer"
    ) -> tuple[int, str, bytes]:
        """(status, content type, body) of one HTTP call, as `_exchange`."""
        return (await self._exchange(method, path, body, deadline_s, awaited))[:3]

    async def _exchange(
        self,
        method: str,
        path: str,
        body: Any,
        deadline_s: float,
        awaited: str = "an answer",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> _Reply:
        """What one HTTP call brings, or ServerError: no answer, or none within `deadline_s`."""
        packed = isinstance(body, bytes)
        data = None if body is None else body if packed else msgspec.json.encode(body)
        kind = CONTENT_TYPE if packed else "application/json"
        try:
            async with asyncio.timeout(deadline_s):
                async with self._session().request(
                    method, self._url + path, data=data, headers={"Content-Type": kind, **headers}
                ) as response:
                    return _Reply(response.status, response.content_type, await response.read(), response.headers)
        except TimeoutError as error:
            raise ServerError(
                f"waited {deadline_s:g} s for {awaited} to {path} from {self.label}",
                why="the server is overloaded, stuck or paused",
                fix="raise the timeout if it is only slow; its log says what it does",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(
                f"{self.label} gave no answer to {path}: {str(error) or type(error).__name__}",
                why="the server died, is restarting or cannot be reached from here",
                fix="its log says why it ended",
            ) from error

    def _session(self) -> aiohttp.ClientSession:
        if self._open_session is None:
            self._open_session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS, keepalive_timeout=IDLE_S),
                timeout=aiohttp.ClientTimeout(total=None),  # each call has its own deadline
            )
        return self._open_session


def _sampling_params(request: GenerateRequest) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop_token_ids": list(request.stop_token_ids),
    }
    if request.seed is not None:
        params["sampling_seed"] = request.seed
    return params


def _as_object(reply: bytes) -> dict[str, Any]:
    """The JSON object in `reply`; an empty one for anything else, which no caller takes for an answer."""
    try:
        decoded = msgspec.json.decode(reply)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


class _Reply(NamedTuple):
    status: int
    kind: str
    """Content type."""
    body: bytes
    headers: Mapping[str, str]
    """Names in any case."""


class _Said(NamedTuple):
    """What a server says of an error. Only the embedded one has reasons and remedies."""

    message: str
    why: str
    fix: str


def _said(reply: bytes) -> _Said:
    """Read {"error": {"message"}}, {"error"}, {"message"}, {"detail"}, or the text itself; "why" and "fix" beside."""
    answer = _as_object(reply)
    error = answer.get("error")
    told: dict[str, Any] = error if isinstance(error, dict) else answer
    text = error if isinstance(error, str) else ""
    message = told.get("message") or text or answer.get("message") or answer.get("detail")
    return _Said(
        str(message or reply[:500].decode("utf-8", "replace")).strip(),
        str(told.get("why") or ""),
        str(told.get("fix") or ""),
    )
