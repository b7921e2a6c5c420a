"""Scoring: log-probabilities of tokens that are already there, for several sequences in one forward pass.

Sequences lie end to end without padding, and what they begin with alike is computed once. Models that cannot be packed
get them padded on the right, where causal attention never looks. Only the rows that were asked for reach the head, a
bounded number at a time. R rows of one job, N rows of all jobs, K top-k entries, J ids of a row's own, V vocabulary, D
hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from distill.modeling.adapters import LoraAdapter, applied
from distill.modeling.forward import Feed, hidden, stream
from distill.modeling.head import logits
from distill.modeling.packed import PackedBatch
from distill.modeling.packed_attention import why_not
from distill.modeling.skeleton import Skeleton
from distill.serving.embedded.jobs import Floats, Hidden, Ids, InputScores, Job
from distill.serving.embedded.served import ServedModel

_HEAD_ELEMENTS = 1 << 26
"""Logits held at once (float32: 256 MiB)."""
_TOKENS = {"cpu": 8192, "cuda": 65536}
"""Tokens of one forward pass."""

_why_padded: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()
"""For each model that has scored, why it cannot be packed, or None."""
_log = logging.getLogger("distill.embedded")


def next_group(waiting: Sequence[Job], device: str, *, one_call: bool) -> list[Job]:
    """The jobs to score now: the oldest, and those behind it that fit into the token budget with it.

    With `one_call` only jobs of the same HTTP request share a group.
    """
    oldest = waiting[0]
    left = _budget(device) - len(oldest.prompt)
    group = [oldest]
    for job in waiting[1:]:
        if one_call and job.call != oldest.call:
            continue
        if len(job.prompt) > left:
            break
        group.append(job)
        left -= len(job.prompt)
    return group


def score(
    served: ServedModel, jobs: Sequence[Job], adapters: Sequence[LoraAdapter | None] | None = None
) -> list[InputScores]:
    """Scores of each job's prompt, at the temperature that it wants. `adapters`: what each job is computed with beside
    the model."""
    owners, by_owner = _owners(jobs, adapters)
    batch = _batch(jobs, served.limits.device, owners)
    if not sum(batch.counts):
        return [_room(job, 0, served.vocab_size) for job in jobs]
    if _can_pack(served):
        hidden_ND = hidden(served.model, batch, by_owner)
    else:
        hidden_ND = _padded_hidden(served, jobs, owners, by_owner)
    return score_hidden(hidden_ND, jobs, served.logits, served.vocab_size)


def score_streamed(
    skeleton: Skeleton, feed: Feed, room: Tensor, jobs: Sequence[Job], vocab_size: int
) -> list[InputScores]:
    """Scores by a model that is not there, whose weights pass through `room`; see `distill.modeling.forward.stream`.

    The skeleton has nothing attached before and after.
    """
    batch = _batch(jobs, skeleton.device, [None] * len(jobs))
    if not sum(batch.counts):
        return [_room(job, 0, vocab_size) for job in jobs]
    try:
        hidden_ND = stream(skeleton, batch, feed, room)
        return score_hidden(hidden_ND, jobs, lambda rows_ND: logits(skeleton.model, rows_ND, vocab_size), vocab_size)
    finally:
        skeleton.detach_all()


def score_hidden(
    hidden_ND: Tensor, jobs: Sequence[Job], head: Callable[[Tensor], Tensor], vocab_size: int
) -> list[InputScores]:
    """Scores from final hidden states: rows `start` to P - 2 of each job, job after job. `head`: (n, D) -> float32
    logits (n, V)."""
    counts = [_rows_of(job) for job in jobs]
    rooms = [_room(job, count, vocab_size) for job, count in zip(jobs, counts, strict=True)]
    firsts = np.concatenate([[0], np.cumsum(counts)])
    rooms = [
        replace(room, hidden=as_numpy(hidden_ND[begin : begin + count])) if job.wanted.hidden else room
        for job, room, begin, count in zip(jobs, rooms, firsts[:-1].tolist(), counts, strict=True)
    ]
    step = max(1, _HEAD_ELEMENTS // vocab_size)
    for low in range(0, len(hidden_ND), step):
        high = min(len(hidden_ND), low + step)
        logits_NV = head(hidden_ND[low:high])
        logp_NV = torch.log_softmax(logits_NV, dim=-1)
        for job, room, first, end in zip(jobs, rooms, firsts[:-1].tolist(), firsts[1:].tolist(), strict=True):
            begin, stop = max(low, first), min(high, end)
            if begin < stop:
                here = slice(begin - low, stop - low)
                logp_RV = logp_NV[here] if job.wanted.temperature == 1.0 else _cooled(logits_NV[here], job)
                _fill(room, slice(begin - first, stop - first), logp_RV, job)
    return rooms


def _cooled(logits_RV: Tensor, job: Job) -> Tensor:
    return torch.log_softmax(logits_RV / job.wanted.temperature, dim=-1)


def as_numpy(hidden_RD: Tensor) -> Hidden:
    """Exactly what the head is applied to. numpy has no bfloat16: int16 holds its bits."""
    host_RD = hidden_RD.detach().cpu().contiguous()
    return host_RD.view(torch.int16).numpy() if host_RD.dtype is torch.bfloat16 else host_RD.numpy()


def _owners(
    jobs: Sequence[Job], adapters: Sequence[LoraAdapter | None] | None
) -> tuple[list[Hashable], dict[Hashable, LoraAdapter]]:
    """A key for what each job is computed with, None for the model alone, and the adapters by their keys."""
    chosen = adapters or [None] * len(jobs)
    by_owner: dict[Hashable, LoraAdapter] = {id(adapter): adapter for adapter in chosen if adapter is not None}
    return [None if adapter is None else id(adapter) for adapter in chosen], by_owner


def _batch(jobs: Sequence[Job], device: torch.device, owners: Sequence[Hashable]) -> PackedBatch:
    starts = [job.wanted.start for job in jobs]
    return PackedBatch.of([job.prompt for job in jobs], starts, owners=owners, device=device)


def _rows_of(job: Job) -> int:
    return len(job.prompt) - 1 - job.wanted.start


def _budget(device: str) -> int:
    return _TOKENS.get(device, _TOKENS["cpu"])


def _can_pack(served: ServedModel) -> bool:
    if served.model not in _why_padded:
        reason = _why_padded[served.model] = why_not(served.model, served.vocab_size)
        if reason is not None:
            _log.info("%s is scored with padding: %s", served.folder, reason)
    return _why_padded[served.model] is None


def _padded_hidden(
    served: ServedModel, jobs: Sequence[Job], owners: Sequence[Hashable], adapters: dict[Hashable, LoraAdapter]
) -> Tensor:
    """(N, D) as `hidden`, from sequences of similar length side by side; a group's padded tokens keep to the budget."""
    found: dict[int, Tensor] = {}
    for owner in dict.fromkeys(owners):
        parts = [(adapters[owner], None)] if owner in adapters else []
        order = sorted((i for i, other in enumerate(owners) if other == owner), key=lambda i: -len(jobs[i].prompt))
        while order:
            room = max(1, _budget(served.limits.device.type) // len(jobs[order[0]].prompt))
            group, order = order[:room], order[room:]
            with applied(served.model, parts):
                hidden_BTD = served.hidden(_padded(jobs, group).to(served.limits.device))
            for row, index in enumerate(group):
                found[index] = hidden_BTD[row, jobs[index].wanted.start : len(jobs[index].prompt) - 1]
    return torch.cat([found[index] for index in range(len(jobs))])


def _padded(jobs: Sequence[Job], group: Sequence[int]) -> Tensor:
    """(B, T) ids, zeros on the right."""
    ids_BT = np.zeros((len(group), len(jobs[group[0]].prompt)), np.int64)
    for row, index in enumerate(group):
        ids_BT[row, : len(jobs[index].prompt)] = jobs[index].prompt
    return torch.from_numpy(ids_BT)


def _room(job: Job, rows: int, vocab: int) -> InputScores:
    """Where the scores of a job go."""
    wanted = job.wanted

    def values(columns: int) -> Floats:
        return np.empty((rows, columns), np.float32)

    return InputScores(
        token_ids=job.prompt[wanted.start + 1 :],
        logprobs=np.empty(rows, np.float32),
        top_ids=np.empty((rows, wanted.top_k), np.int32) if wanted.top_k else None,
        top_logprobs=values(wanted.top_k) if wanted.top_k else None,
        log_tail=np.empty(rows, np.float32) if wanted.top_k or wanted.row_ids is not None else None,
        picked=None if wanted.token_ids is None else values(len(wanted.token_ids)),
        row_logprobs=None if wanted.row_ids is None else values(wanted.row_ids.shape[1]),
        full=values(vocab) if wanted.full else None,
    )


def _fill(room: InputScores, here: slice, logp_RV: Tensor, job: Job) -> None:
    """Write down what the job wants of its rows `here`, which are `logp_RV`."""
    room.logprobs[here] = logp_RV.gather(1, _on(logp_RV, room.token_ids[here, None]))[:, 0].cpu().numpy()
    named: list[Tensor] = []
    if room.top_ids is not None and room.top_logprobs is not None:
        top_RK, ids_RK = logp_RV.topk(job.wanted.top_k, dim=-1)
        room.top_logprobs[here], room.top_ids[here] = top_RK.cpu().numpy(), ids_RK.cpu().numpy()
        named.append(ids_RK)
    if room.row_logprobs is not None and job.wanted.row_ids is not None:
        ids_RJ = _on(logp_RV, job.wanted.row_ids[here])
        room.row_logprobs[here] = logp_RV.gather(1, ids_RJ).cpu().numpy()
        named.append(ids_RJ)
    if room.log_tail is not None:
        # summed over the complement, not as 1 - mass: a tiny tail keeps its digits
        rest_RV = logp_RV.scatter(1, torch.cat(named, -1), -torch.inf)
        room.log_tail[here] = rest_RV.logsumexp(-1).cpu().numpy()
    if room.picked is not None and job.wanted.token_ids is not None:
        room.picked[here] = logp_RV[:, _on(logp_RV, job.wanted.token_ids)].cpu().numpy()
    if room.full is not None:
        room.full[here] = logp_RV.cpu().numpy()


def _on(like: Tensor, ids: Ids) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64)).to(like.device)
