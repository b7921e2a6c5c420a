"""A server of the OpenAI completions API over a real tiny model, to be broken in the ways that real ones break."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from transformers import LlamaForCausalLM

from tests.builders_serving import EOS

NAME = "tiny/teacher"
LEAST = -9999.0


@dataclass
class Behaviour:
    """Set the attributes at any time; they act on the next request."""

    style: str = "vllm"
    """vllm | echo (no prompt_logprobs, tokens as ids on request) | text (tokens as texts only) | strict (refuses fields
    of vLLM) | none (no log-probabilities of prompts)"""
    max_logprobs: int = 20
    key: str = ""
    answers: deque[tuple[int, dict[str, str]]] = field(default_factory=deque)
    """Status and headers of the next completions, instead of an answer."""
    cut: int = 0
    """Replies whose connection breaks in the middle."""
    delay_s: float = 0.0
    lists_models: bool = True
    shifted: bool = False
    """Rows are about the token that comes after theirs."""
    rows: int = 0
    """Rows more, or less, than tokens."""
    null_row: bool = False
    nan: bool = False
    zero_mass: bool = False
    """The last row's token has probability 0."""
    spared: int = 0
    """First prompts of each request that the faults of rows leave alone."""


class OpenAIServer:
    """One model at one address, in this process."""

    def __init__(self, folder: Path, certificate: Path | None = None) -> None:
        """`certificate`: a PEM file with a key, for https."""
        self.be = Behaviour()
        self.bodies: list[dict[str, Any]] = []
        """Of every completion that was asked for."""
        self.in_flight = self.most_in_flight = 0
        self.serve(folder)
        self._certificate = certificate
        self._port = 0
        self._stop: Any = None
        self.start()

    @property
    def url(self) -> str:
        return f"http{'s' if self._certificate else ''}://127.0.0.1:{self._port}"

    def serve(self, folder: Path) -> None:
        """Hold another model, as a server that was started again does."""
        self.context = int(json.loads((folder / "config.json").read_text())["max_position_embeddings"])
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def start(self) -> None:
        """At the same address as before, unless it is running."""
        if self._stop is not None:
            return
        app = Starlette(
            routes=[
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
            ]
        )
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="critical",
                lifespan="off",
                timeout_graceful_shutdown=1,
                ssl_certfile=self._certificate,
            )
        )
        listener = socket.create_server(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        deadline = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < deadline and thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        self._stop = (server, thread, listener)

    def stop(self) -> None:
        if self._stop is not None:
            server, thread, listener = self._stop
            server.should_exit = True
            thread.join(30)
            listener.close()
            self._stop = None

    def _refused(self, request: Request) -> Response | None:
        if self.be.key and request.headers.get("authorization") != f"Bearer {self.be.key}":
            said = f"wrong key: {request.headers.get('authorization')}"
            return JSONResponse({"error": {"message": said}}, 401)
        return None

    async def _models(self, request: Request) -> Response:
        if not self.be.lists_models:
            return JSONResponse({"detail": "Not Found"}, 404)
        entry = {"id": NAME, "object": "model", "max_model_len": self.context}
        return self._refused(request) or JSONResponse({"object": "list", "data": [entry]})

    async def _completions(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.be.delay_s)
            return self._refused(request) or self._answer(body)
        finally:
            self.in_flight -= 1

    def _answer(self, body: dict[str, Any]) -> Response:
        if self.be.answers:
            status, headers = self.be.answers.popleft()
            return JSONResponse({"error": {"message": "not now"}}, status, headers)
        for kind in ("prompt_logprobs", "logprobs"):
            if body.get(kind, 0) > self.be.max_logprobs:
                said = (
                    f"Requested {'prompt' if kind == 'prompt_logprobs' else 'sample'} logprobs of {body[kind]}, which "
                    f"is greater than max allowed: {self.be.max_logprobs}"
                )
                return JSONResponse({"error": {"message": said, "type": "BadRequestError", "code": 400}}, 400)
        if self.be.style == "strict" and "prompt_logprobs" in body:
            return JSONResponse({"error": {"message": "Unrecognized request argument: prompt_logprobs"}}, 400)
        prompts = body["prompt"]
        choices = [self._choice(at, ids, body) for at, ids in enumerate(prompts)]
        reply = {
            "id": "cmpl-1",
            "model": body["model"],
            "choices": choices[::-1],  # the order is that of `index`, and of nothing else
            "usage": {"prompt_tokens": sum(map(len, prompts))},
        }
        raw = json.dumps(reply).encode()
        if self.be.cut:
            self.be.cut -= 1
            return _Cut(raw)
        return Response(raw, media_type="application/json")

    @torch.no_grad()
    def _rows(self, ids: list[int]) -> np.ndarray:
        """(N, V): row i is about what comes after token i."""
        return self.model(torch.tensor([ids])).logits[0].log_softmax(-1).double().numpy()

    def _choice(self, index: int, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        written, rows = list(ids), self._rows(ids)
        for _ in range(max(body["max_tokens"], 0)):
            written.append(int(self._rows(written)[-1].argmax()))
            if written[-1] == EOS or len(written) == self.context:
                break
        choice: dict[str, Any] = {"index": index, "text": "", "finish_reason": "length", "logprobs": None}
        if written[-1] == EOS:
            choice["finish_reason"] = "stop"
        if self.be.style == "vllm" and body.get("prompt_logprobs") is not None:
            found = self._prompt_rows(rows, ids, body["prompt_logprobs"])
            choice["prompt_logprobs"] = found if index < self.be.spared else self._broken(found, ids)
        elif self.be.style != "vllm" and body.get("echo"):
            choice["logprobs"] = self._echoed(rows, ids, body)
        elif body.get("logprobs"):
            whole = self._rows(written)
            new = range(len(ids), len(written))
            choice["logprobs"] = {
                "tokens": [self._token(written[at], body) for at in new],
                "token_logprobs": [float(whole[at - 1, written[at]]) for at in new],
                "top_logprobs": None,
            }
        return choice

    def _entries(self, row: np.ndarray, token: int, k: int) -> dict[int, tuple[float, int]]:
        """The token with its rank, then the k most probable ids, as vLLM lists them."""
        top = np.argsort(-row, kind="stable")[:k]
        entries = {token: (float(row[token]), int((row >= row[token]).sum()))}
        return entries | {int(each): (float(row[each]), rank) for rank, each in enumerate(top, 1)}

    def _prompt_rows(self, rows: np.ndarray, ids: list[int], k: int) -> list[Any]:
        behind = 0 if self.be.shifted else 1
        found: list[Any] = [None]
        for at in range(1, len(ids)):
            entries = self._entries(rows[at - behind], ids[at], k)
            found.append(
                {
                    # the text is the same for all: whoever joins on it gets nonsense
                    str(token): {"logprob": logprob, "rank": rank, "decoded_token": "x"}
                    for token, (logprob, rank) in entries.items()
                }
            )
        return found

    def _broken(self, found: list[Any], ids: list[int]) -> list[Any]:
        if self.be.nan:
            found[-1][str(ids[-1])]["logprob"] = float("nan")
        if self.be.zero_mass:
            found[-1][str(ids[-1])]["logprob"] = LEAST
        if self.be.null_row:
            found[-1] = None
        return found[: self.be.rows] if self.be.rows < 0 else found + found[-1:] * self.be.rows

    def _token(self, token: int, body: dict[str, Any]) -> str:
        as_ids = body.get("return_tokens_as_token_ids") and self.be.style != "text"
        return f"token_id:{token}" if as_ids else "x"

    def _echoed(self, rows: np.ndarray, ids: list[int], body: dict[str, Any]) -> dict[str, Any] | None:
        if self.be.style == "none":
            return None
        entries = [self._entries(rows[at - 1], ids[at], body["logprobs"]) for at in range(1, len(ids))]
        return {
            "tokens": [self._token(token, body) for token in ids],
            "token_logprobs": [None, *(each[token][0] for each, token in zip(entries, ids[1:], strict=True))],
            "top_logprobs": [
                None,
                *({self._token(token, body): value for token, (value, _) in each.items()} for each in entries),
            ],
        }


class _Cut(Response):
    """Promises a whole body, sends half of it and breaks off."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        length = str(len(self.body)).encode()
        headers = [(b"content-length", length), (b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(self.body[: len(self.body) // 2]), "more_body": False})


@contextmanager
def openai_server(folder: Path, certificate: Path | None = None) -> Iterator[OpenAIServer]:
    server = OpenAIServer(folder, certificate)
    try:
        yield server
    finally:
        server.stop()
