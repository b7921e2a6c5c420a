"""Scoring: log-probabilities of tokens that are already there, for several sequences in one forward pass.

Sequences are padded on the right, where causal attention never looks. Only the rows that were asked for reach the
head, a bounded number at a time. R rows of one job, N rows of all jobs, K top-k entries, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.serving.embedded.jobs import Floats, InputScores, Job
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
    """Scores of each job's prompt, at temperature 1."""
    device = served.limits.device
    width = max(len(job.prompt) for job in jobs)
    ids_BT = np.zeros((len(jobs), width), np.int64)
    for row, job in enumerate(jobs):
        ids_BT[row, : len(job.prompt)] = job.prompt
    starts = [job.wanted.start for job in jobs]
    counts = [len(job.prompt) - 1 - start for job, start in zip(jobs, starts, strict=True)]
    if not sum(counts):
        return [_nothing(job, served.vocab_size) for job in jobs]
    hidden_BTD = served.hidden(torch.from_numpy(ids_BT).to(device))
    flat = np.concatenate(
        [row * width + np.arange(start, start + n) for row, (start, n) in enumerate(zip(starts, counts, strict=True))]
    )
    hidden_ND = hidden_BTD.flatten(0, 1)[torch.from_numpy(flat).to(device)]
    targets_N = np.concatenate([job.prompt[job.wanted.start + 1 :] for job in jobs])
    owner_N = np.repeat(np.arange(len(jobs)), counts)
    rows = _Rows(served, jobs, hidden_ND, torch.from_numpy(targets_N.astype(np.int64)).to(device), owner_N)
    return rows.run(counts)


def _nothing(job: Job, vocab: int) -> InputScores:
    wanted = job.wanted
    none = np.empty(0, np.float32)
    return InputScores(
        token_ids=np.empty(0, np.int32),
        logprobs=none,
        top_ids=np.empty((0, wanted.top_k), np.int32) if wanted.top_k else None,
        top_logprobs=none.reshape(0, wanted.top_k) if wanted.top_k else None,
        log_tail=none if wanted.top_k else None,
        picked=none.reshape(0, len(wanted.token_ids)) if wanted.token_ids is not None else None,
        full=none.reshape(0, vocab) if wanted.full else None,
    )


@dataclass(slots=True)
class _Rows:
    """All rows of one scoring pass, on the device."""

    served: ServedModel
    jobs: Sequence[Job]
    hidden_ND: Tensor
    targets_N: Tensor
    owner_N: NDArray[np.int64]

    def run(self, counts: Sequence[int]) -> list[InputScores]:
        total = len(self.owner_N)
        k = max(job.wanted.top_k for job in self.jobs)
        logprobs_N = np.empty(total, np.float32)
        top_ids_NK = np.empty((total, k), np.int32)
        top_NK = np.empty((total, k), np.float32)
        picked: list[Floats | None] = [_pick_room(job, n) for job, n in zip(self.jobs, counts, strict=True)]
        tail = [np.empty(n, np.float32) if job.wanted.top_k else None for job, n in zip(self.jobs, counts, strict=True)]
        full = [_full_room(job, n, self.served) for job, n in zip(self.jobs, counts, strict=True)]
        firsts = np.concatenate([[0], np.cumsum(counts)])
        step = max(1, _HEAD_ELEMENTS // self.served.vocab_size)
        for low in range(0, total, step):
            high = min(total, low + step)
            logp_NV = torch.log_softmax(self.served.logits(self.hidden_ND[low:high]), dim=-1)
            logprobs_N[low:high] = logp_NV.gather(1, self.targets_N[low:high, None])[:, 0].cpu().numpy()
            if k:
                values, ids = logp_NV.topk(k, dim=-1)
                top_NK[low:high] = values.cpu().numpy()
                top_ids_NK[low:high] = ids.cpu().numpy()
            for owner in range(int(self.owner_N[low]), int(self.owner_N[high - 1]) + 1):
                job, first = self.jobs[owner], int(firsts[owner])
                begin, end = max(low, first), min(high, int(firsts[owner + 1]))
                part_RV, here = logp_NV[begin - low : end - low], slice(begin - first, end - first)
                if (room := picked[owner]) is not None:
                    ids = torch.from_numpy(job.wanted.token_ids).long().to(part_RV.device)
                    room[here] = part_RV[:, ids].cpu().numpy()
                if (room := full[owner]) is not None:
                    room[here] = part_RV.cpu().numpy()
                if (room := tail[owner]) is not None:
                    room[here] = _log_tail(part_RV, torch.from_numpy(top_ids_NK[begin:end, : job.wanted.top_k]))
        return [
            InputScores(
                token_ids=job.prompt[job.wanted.start + 1 :],
                logprobs=logprobs_N[firsts[i] : firsts[i + 1]],
                top_ids=top_ids_NK[firsts[i] : firsts[i + 1], : job.wanted.top_k] if job.wanted.top_k else None,
                top_logprobs=top_NK[firsts[i] : firsts[i + 1], : job.wanted.top_k] if job.wanted.top_k else None,
                log_tail=tail[i],
                picked=picked[i],
                full=full[i],
            )
            for i, job in enumerate(self.jobs)
        ]


def _pick_room(job: Job, rows: int) -> Floats | None:
    ids = job.wanted.token_ids
    return None if ids is None else np.empty((rows, len(ids)), np.float32)


def _full_room(job: Job, rows: int, served: ServedModel) -> Floats | None:
    return np.empty((rows, served.vocab_size), np.float32) if job.wanted.full else None


def _log_tail(logp_RV: Tensor, top_ids_RK: Tensor) -> Floats:
    """log of the mass beside the top-k, summed over the complement so that a tiny tail keeps its digits."""
    rest_RV = logp_RV.scatter(1, top_ids_RK.long().to(logp_RV.device), -torch.inf)
    return rest_RV.logsumexp(-1).cpu().numpy()
