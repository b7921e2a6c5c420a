"""Scoring: log-probabilities of tokens that are already there, for several sequences in one forward pass.

Sequences are padded on the right, where causal attention never looks. Only the rows that were asked for reach the
head, a bounded number at a time. R rows of one job, N rows of all jobs, K top-k entries, J ids of a row's own, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from distill.serving.embedded.jobs import Floats, Hidden, Ids, InputScores, Job
from distill.serving.embedded.served import ServedModel

_HEAD_ELEMENTS = 1 << 26
"""Logits held at once (float32: 256 MiB)."""
_TOKENS = {"cpu": 8192, "cuda": 65536}
"""Padded tokens of one forward pass."""


def next_group(waiting: Sequence[Job], device: str, *, one_call: bool) -> list[Job]:
    """The jobs to score now: the oldest, and those nearest to it in length, within the token budget.

    With `one_call` only jobs of the same HTTP request share a group.
    """
    budget = _TOKENS.get(device, _TOKENS["cpu"])
    oldest = waiting[0]
    company = [job for job in waiting if job.call == oldest.call] if one_call else waiting
    by_distance = sorted(company, key=lambda job: abs(len(job.prompt) - len(oldest.prompt)))
    group: list[Job] = []
    width = 0
    for job in by_distance:
        wider = max(width, len(job.prompt))
        if group and wider * (len(group) + 1) > budget:
            break
        group.append(job)
        width = wider
    return group


def score(served: ServedModel, jobs: Sequence[Job]) -> list[InputScores]:
    """Scores of each job's prompt, at the temperature that it wants."""
    device = served.limits.device
    width = max(len(job.prompt) for job in jobs)
    ids_BT = np.zeros((len(jobs), width), np.int64)
    for row, job in enumerate(jobs):
        ids_BT[row, : len(job.prompt)] = job.prompt
    starts = [job.wanted.start for job in jobs]
    counts = [len(job.prompt) - 1 - start for job, start in zip(jobs, starts, strict=True)]
    rooms = [_room(job, count, served.vocab_size) for job, count in zip(jobs, counts, strict=True)]
    if not sum(counts):
        return rooms
    hidden_BTD = served.hidden(torch.from_numpy(ids_BT).to(device))
    flat = np.concatenate(
        [row * width + np.arange(start, start + n) for row, (start, n) in enumerate(zip(starts, counts, strict=True))]
    )
    hidden_ND = hidden_BTD.flatten(0, 1)[torch.from_numpy(flat).to(device)]
    firsts = np.concatenate([[0], np.cumsum(counts)])
    rooms = [
        replace(room, hidden=as_numpy(hidden_ND[begin : begin + count])) if job.wanted.hidden else room
        for job, room, begin, count in zip(jobs, rooms, firsts[:-1].tolist(), counts, strict=True)
    ]
    step = max(1, _HEAD_ELEMENTS // served.vocab_size)
    for low in range(0, len(flat), step):
        high = min(len(flat), low + step)
        logits_NV = served.logits(hidden_ND[low:high])
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
