"""A client of a server that speaks the OpenAI completions API and tells the log-probabilities of a prompt's tokens.

It sends token ids and reads token ids. What another try may cure is raised as `TryAgain`: who may try again, and how
often, is the caller's business (`distill.teacher_manager.remote`). Every call needs a deadline of the caller's.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aiohttp
import msgspec

from distill.errors import ConfigError, DistillError, ServerError, TeacherError
from distill.serving.openai_replies import Choice, Style, decode, has_logprobs, parse_generation, parse_scores
from distill.serving.replies import Asked, Scores
from distill.serving.wire import BrokenReply
from distill.types import GenerateRequest, Generation, Ids, ScoreRequest, Signal, SignalSpec, TeacherScores

BUSY = frozenset({408, 409, 425, 429, 500})
"""Statuses of a server that is there and may answer another time."""
GONE = frozenset({502, 503, 504})
"""Statuses of a proxy whose server is not there, or of one that is starting: what comes back may be another model."""
SHIFT_TOLERANCE = 0.5
"""Nats by which a row may change with tokens that it cannot know of. Another distribution is further away in some of
its entries; another place in a batch is not, even where logits are bfloat16."""
_LIMIT = re.compile(r"(?:max(?:imum)? allowed|maximum|at most|less than or equal to|more than|<=)\D{0,20}(\d+)", re.I)


class TryAgain(Exception):
    """Another try may succeed. `error` is what to raise when none is left; `gone`: the server was not there, so it has
    to be looked at anew before it is believed; `after_s`: what it asked to wait."""

    def __init__(self, error: DistillError, *, gone: bool, after_s: float = 0.0) -> None:
        super().__init__(error.what)
        self.error = error
        self.gone = gone
        self.after_s = after_s


@dataclass(frozen=True, slots=True)
class Served:
    """What was learnt of a server when it was looked at."""

    model: str
    context_length: int | None
    """None: it does not tell."""
    style: Style


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for the URL. A server on this machine is never asked through one."""
    parts = urlsplit(url)
    if is_loopback(url) or urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    return urllib.request.getproxies().get(parts.scheme)


class OpenAIClient:
    """One server and one model on it. Use and close it in one event loop.

    `teacher` is for errors, `key` goes into the Authorization header and nowhere else.
    """

    def __init__(self, url: str, *, teacher: str, vocab_size: int, model: str | None = None, key: str = "") -> None:
        self._root = url.rstrip("/").removesuffix("/v1")
        self._teacher = teacher
        self._vocab_size = vocab_size
        self._asked_model = model
        self._key = key
        self._served: Served | None = None
        self._session: aiohttp.ClientSession | None = None
        self.label = f"teacher {teacher} ({self._root})"

    async def connect(self, ids: Ids, k: int) -> Served:
        """Look at the server: the model is there, it tells k ids a row of a prompt, and each row is about its own
        token. `ids`: a sequence to try it with, at least three tokens.

        Raises ConfigError for a model that is not there and a k that is too large, TeacherError for log-probabilities
        that cannot be used.
        """
        model, context_length = await self._find_model()
        style = await self._find_style(ids, k, model)
        self._served = Served(model, context_length, style)
        await self._check_places(ids, k)
        return self._served

    async def score(self, requests: Sequence[ScoreRequest], spec: SignalSpec) -> list[TeacherScores]:
        """Score all sequences in one HTTP call. `spec` is SAMPLED, or TOPK of the teacher's own ids."""
        scores = await self._scores([_asked(request, spec, self._vocab_size) for request in requests])
        if spec.signal is Signal.SAMPLED:
            return [TeacherScores(self._teacher, each.logprobs) for each in scores]
        return [
            TeacherScores(self._teacher, each.logprobs, each.topk_ids, each.topk_logprobs, each.log_tail)
            for each in scores
        ]

    async def generate(self, requests: Sequence[GenerateRequest], version: str) -> list[Generation]:
        """Continue each prompt, one HTTP call each."""
        return await asyncio.gather(*(self._answer(request, version) for request in requests))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def _known(self) -> Served:
        assert self._served is not None, f"{self.label} was not connected"
        return self._served

    async def _scores(self, asked: Sequence[Asked]) -> list[Scores]:
        served, k = self._known, asked[0].k
        fields = _scoring_fields(served.style, k)
        choices = await self._complete([one.input_ids for one in asked], fields, served.model, k=k)
        # tens of thousands of rows take a while, and other answers are on their way
        return await asyncio.to_thread(parse_scores, choices, asked, served.style, self._teacher)

    async def _answer(self, request: GenerateRequest, version: str) -> Generation:
        if request.report_k:
            raise ConfigError(
                f"{self.label} cannot report {request.report_k} ids with each token that it writes",
                fix="set evaluation.kl=false, or an objective.support of the teacher's own ids",
            )
        fields: dict[str, Any] = {
            "max_tokens": request.max_new_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        if request.top_k > 0:
            fields["top_k"] = request.top_k
        if request.stop_token_ids:
            fields["stop_token_ids"] = list(request.stop_token_ids)
        if request.seed is not None:
            fields["seed"] = request.seed
        (choice,) = await self._complete([request.input_ids], fields, self._known.model)
        return parse_generation(choice, request, version, self.label)

    async def _find_style(self, ids: Ids, k: int, model: str) -> Style:
        """The form in which the server tells of a prompt's tokens. What it does not know it leaves out or refuses."""
        refusals: list[str] = []
        styles: tuple[Style, ...] = ("prompt_logprobs", "echo")
        for style in styles:
            try:
                (choice,) = await self._complete([ids], _scoring_fields(style, k), model, k=k)
            except ServerError as error:
                refusals.append(error.what)
                continue
            if has_logprobs(choice, style):
                return style
        raise TeacherError(
            f"{self.label} tells no log-probabilities of the tokens of a prompt with their ids"
            + "".join(f"; {refusal}" for refusal in refusals),
            why="asked for prompt_logprobs, and for echo with logprobs and return_tokens_as_token_ids; a token's text "
            "does not tell its id",
            fix="use vLLM, or SGLang with api: sglang",
        )

    async def _check_places(self, ids: Ids, k: int) -> None:
        """What a row says must not depend on the token that it is about: it would be the next token's row."""
        requests = []
        for step in range(3):
            changed = ids.copy()
            changed[-1] = (int(ids[-1]) + step) % self._vocab_size
            requests.append(ScoreRequest(f"probe-{step}", changed, 1))
        asked = [_asked(request, SignalSpec(Signal.TOPK, k), self._vocab_size) for request in requests]
        tops = [scores.topk_logprobs for scores in await self._scores(asked)]
        first, *others = [top[0] for top in tops if top is not None]
        apart = max(float(abs(other - first).max()) for other in others)
        if not apart <= SHIFT_TOLERANCE:
            raise TeacherError(
                f"{self.label}: the probabilities at the last token of a prompt changed by {apart:.3g} nat when that "
                f"token alone was changed, at most {SHIFT_TOLERANCE:g} were expected",
                why="a row tells what comes at its token, given the tokens before: these rows are shifted by one",
                fix="use a server whose prompt_logprobs are about their own token, as vLLM's are",
            )

    async def _find_model(self) -> tuple[str, int | None]:
        """(name, context length) of the model to ask. Only where it was named may a server have no list of models."""
        try:
            answer = _object(await self._call("GET", "/v1/models", None))
        except ServerError:
            if self._asked_model is None:
                raise
            return self._asked_model, None
        models = {str(each.get("id")): each for each in answer.get("data") or [] if isinstance(each, dict)}
        name = self._asked_model or (next(iter(models)) if len(models) == 1 else "")
        if name not in models:
            raise ConfigError(
                f"{self.label} serves {', '.join(models) or 'no model'}"
                + (f", and not {self._asked_model!r}" if self._asked_model else ", and which to ask was not said"),
                fix=f"set teachers.{self._teacher}.remote_model to one of them",
            )
        longest = models[name].get("max_model_len")
        return name, longest if isinstance(longest, int) else None

    async def _complete(
        self, prompts: Sequence[Ids], fields: dict[str, Any], model: str, *, k: int = 0
    ) -> list[Choice]:
        body = {"model": model, "prompt": [ids.tolist() for ids in prompts], **fields}
        reply = await self._call("POST", "/v1/completions", body, k=k)
        try:
            return await asyncio.to_thread(decode, reply, [len(ids) for ids in prompts])
        except BrokenReply as error:
            broken = TeacherError(f"{self.label}: {error}", fix="check what stands between here and the server")
            raise TryAgain(broken, gone=False) from None

    async def _call(self, method: str, path: str, body: Any, *, k: int = 0) -> bytes:
        """The body of a reply with status 200. Raises TryAgain, ServerError, or ConfigError for a k that is refused."""
        url = self._root + path
        try:
            async with self._opened().request(
                method,
                url,
                data=None if body is None else msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
                allow_redirects=False,  # the key is meant for this host
            ) as response:
                reply = await response.read()
                if response.status != 200:
                    self._refuse(path, response.status, response.headers.get("Retry-After"), reply, k)
                return reply
        except aiohttp.ClientConnectorCertificateError as error:
            raise ServerError(
                f"{self.label}: its certificate is not trusted: {error.certificate_error}",
                why="somebody else could answer in its place",
                fix="install the authority's certificate, and name it in SSL_CERT_FILE",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise TryAgain(
                ServerError(
                    f"{self.label} gave no whole answer to {path}: {self._clean(str(error)) or type(error).__name__}",
                    why="the server died, is restarting or cannot be reached from here",
                    fix=f"check teachers.{self._teacher}.url, and that the server is up",
                ),
                gone=True,
            ) from error

    def _refuse(self, path: str, status: int, retry_after: str | None, reply: bytes, k: int) -> NoReturn:
        said = self._clean(_message(reply))
        what = f"{self.label} answered {path} with HTTP {status}: {said or 'no message'}"
        if status in BUSY or status in GONE:
            error = ServerError(what, why="the server is overloaded, or failed", fix="look at the server's log")
            raise TryAgain(error, gone=status in GONE, after_s=_seconds(retry_after))
        if status in (401, 403):
            key = f"teachers.{self._teacher}.api_key_env"
            raise ServerError(what, fix=f"name the environment variable that holds the server's key in {key}")
        limit = _limit_in(said, k)
        if limit is not None:
            raise ConfigError(
                f"{self.label} gives at most {limit} ids a row, and {k} are asked for: {said}",
                why="objective.k is the number of the teacher's most probable ids at each token",
                fix=f"set objective.k={limit} or less, or start the server with a higher limit "
                f"(vLLM: --max-logprobs {k})",
            )
        raise ServerError(what, fix=f"check teachers.{self._teacher}.url: it ends before /v1" if status == 404 else "")

    def _clean(self, text: str) -> str:
        """Servers and libraries quote what they were sent."""
        return text.replace(self._key, "***") if self._key else text

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),  # below uvicorn's 5 s
                timeout=aiohttp.ClientTimeout(total=None),  # each call has a deadline of the caller's
                proxy=proxy_for(self._root),
            )
        return self._session


def _asked(request: ScoreRequest, spec: SignalSpec, vocab_size: int) -> Asked:
    return Asked(
        id=request.id,
        input_ids=request.input_ids,
        response_len=request.response_len,
        start=0,
        vocab_size=vocab_size,
        weight_version="",
        k=max(spec.k, 1),  # with 0, some servers give no rows at all
        sample_id=request.id,
    )


def _scoring_fields(style: Style, k: int) -> dict[str, Any]:
    """One token is written, and thrown away: vLLM accepts 0 only beside echo."""
    plain = {"temperature": 1.0, "top_p": 1.0}
    if style == "prompt_logprobs":
        return {**plain, "max_tokens": 1, "prompt_logprobs": k}
    return {**plain, "max_tokens": 0, "echo": True, "logprobs": k, "return_tokens_as_token_ids": True}


def _object(reply: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(reply)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _message(reply: bytes) -> str:
    """From {"error": {"message"}}, {"error"}, {"message"} or {"detail"}; else the text itself."""
    answer = _object(reply)
    error = answer.get("error")
    inner = error.get("message") if isinstance(error, dict) else error
    return str(inner or answer.get("message") or answer.get("detail") or reply[:500].decode("utf-8", "replace")).strip()


def _limit_in(said: str, k: int) -> int | None:
    """The largest k that an error message allows, where it is about log-probabilities and less than k."""
    if not k or "logprobs" not in said:
        return None
    found = [int(number) for number in _LIMIT.findall(said) if int(number) < k]
    return found[0] if found else None


def _seconds(retry_after: str | None) -> float:
    """Of a Retry-After header: seconds, or a date."""
    if not retry_after:
        return 0.0
    if re.fullmatch(r"\d{1,9}(\.\d+)?", retry_after):
        return float(retry_after)
    try:
        return max(parsedate_to_datetime(retry_after).timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0
