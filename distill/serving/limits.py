"""What is wrong with a request is found before it is sent: SGLang dies of a token id outside the vocabulary.

Everything raises ServerError, naming the server (`label`) and the request at fault.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from distill.errors import ServerError
from distill.protocols import ServerInfo
from distill.types import GenerateRequest, Ids, ScoreRequest, Signal, SignalSpec


def check_generate(request: GenerateRequest, info: ServerInfo, label: str) -> None:
    _check_ids(request.id, request.input_ids, request.max_new_tokens, info, label)
    if request.report_k > info.vocab_size:
        _refuse_width(request.report_k, info, label)


def _check_ids(request_id: str, ids: Ids, new_tokens: int, info: ServerInfo, label: str) -> None:
    if not len(ids):
        _refuse(f"request {request_id} has no tokens", "give at least one token", label)
    if ids.min() < 0 or ids.max() >= info.vocab_size:
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        _refuse(
            f"request {request_id} has token id {wrong}, outside the vocabulary of {info.vocab_size}",
            "check that the tokenizer belongs to the model",
            label,
        )
    if len(ids) + new_tokens > info.context_length:
        _refuse(
            f"request {request_id}: {len(ids)} tokens and {new_tokens} new ones exceed the context length of "
            f"{info.context_length}",
            "shorten the prompt, lower max_new_tokens or raise server.context_length",
            label,
        )


def check_score(request: ScoreRequest, spec: SignalSpec, info: ServerInfo, label: str) -> None:
    """Refuse what cannot be right, by the request at fault."""
    if spec.k > info.vocab_size or (spec.signal is Signal.TOPK and spec.k < 1):
        _refuse_width(spec.k, info, label)
    _check_ids(request.id, request.input_ids, 0, info, label)
    if not 0 < request.response_len < len(request.input_ids):
        _refuse(
            f"request {request.id}: a response of {request.response_len} among {len(request.input_ids)} tokens",
            "give at least one prompt token and one response token",
            label,
        )
    if not spec.student_k:
        return
    ids_Rk, shape = request.student_ids, (request.response_len, spec.student_k)
    if ids_Rk is None or ids_Rk.shape != shape:
        found = "none" if ids_Rk is None else f"those of shape {ids_Rk.shape}"
        _refuse(
            f"request {request.id} has to be scored at the student's ids of shape {shape}, and has {found}",
            "the rollout server reports them with each token: ask it for report_k of them",
            label,
        )
    ordered_Rk = np.sort(ids_Rk, axis=1)
    if ordered_Rk[:, 0].min() < 0 or ordered_Rk[:, -1].max() >= info.vocab_size:
        _refuse(
            f"request {request.id}: one of the student's ids lies outside the vocabulary of {info.vocab_size}",
            "check that the student and the teacher share a vocabulary",
            label,
        )
    if (ordered_Rk[:, 1:] == ordered_Rk[:, :-1]).any():
        _refuse(f"request {request.id} names an id of the student's twice in a row", "give each id once", label)


def _refuse_width(k: int, info: ServerInfo, label: str) -> NoReturn:
    _refuse(f"top-{k} of a vocabulary of {info.vocab_size}", "set objective.k to at most the vocabulary", label)


def _refuse(what: str, fix: str, label: str) -> NoReturn:
    raise ServerError(
        f"{label}: not sent: {what}",
        why="a request like this can end a model server for all its users",
        fix=fix,
    )
