"""The rows that are being written: prefill, one token for all, removal. Per-token work is done on arrays, not on rows.

B running rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache

from distill.serving.embedded.jobs import Finish, Job
from distill.serving.embedded.kv import KVCache
from distill.serving.embedded.sampling import Rules, draw, uniforms
from distill.serving.embedded.served import ServedModel, not_finite

_PER_ROW = ("last", "length", "count", "limit", "temperature", "top_p", "top_k", "seed", "stops", "out_ids", "out_logp")


class Rows:
    """Running jobs, one row each; row r of every array belongs to `jobs[r]`. Used by the engine thread alone."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.jobs: list[Job] = []
        self.kv = KVCache(capacity)
        self.last: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.length: NDArray[np.int64] = np.zeros(capacity, np.int64)
        """Tokens of the sequence so far, `last` included: the position of the next token."""
        self.count: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.limit: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.temperature: NDArray[np.float32] = np.zeros(capacity, np.float32)
        self.top_p: NDArray[np.float64] = np.zeros(capacity, np.float64)
        self.top_k: NDArray[np.int64] = np.zeros(capacity, np.int64)
        self.seed: NDArray[np.uint64] = np.zeros(capacity, np.uint64)
        self.stops: NDArray[np.int64] = np.full((capacity, 1), -1, np.int64)
        self.out_ids: NDArray[np.int32] = np.zeros((capacity, 0), np.int32)
        self.out_logp: NDArray[np.float32] = np.zeros((capacity, 0), np.float32)
        self._watched = 0
        """Jobs that need attention at every token: streams, and those that want more than the token's own number."""

    def __len__(self) -> int:
        return len(self.jobs)

    def prefill(self, served: ServedModel, jobs: Sequence[Job]) -> None:
        """Read the contexts of `jobs`, draw the next token of each, and run them from now on.

        When this raises, nothing has changed.
        """
        device = served.limits.device
        contexts = [job.context for job in jobs]
        lengths = np.array([len(context) for context in contexts], np.int64)
        width = int(lengths.max())
        ids_BT = np.zeros((len(jobs), width), np.int64)
        for row, context in enumerate(contexts):
            ids_BT[row, width - len(context) :] = context
        positions_BT = np.arange(width) - (width - lengths)[:, None]
        cache = DynamicCache()
        hidden_BTD = served.hidden_after(
            cache,
            torch.from_numpy(ids_BT).to(device),
            torch.from_numpy(positions_BT.clip(min=0)).to(device),
            torch.from_numpy(positions_BT >= 0).to(device),
        )
        logits_BV = served.logits(hidden_BTD[:, -1])
        self.kv.append(cache, lengths)
        first = len(self.jobs)
        for job, length in zip(jobs, lengths, strict=True):
            self._append(job, int(length))
        try:
            self._record(logits_BV, first)
        except BaseException:
            for row in range(len(self.jobs) - 1, first - 1, -1):
                self.remove(row)
            raise

    def step(self, served: ServedModel) -> None:
        """One token for every row."""
        device = served.limits.device
        rows = len(self.jobs)
        mask_BL = torch.from_numpy(self.kv.step_mask()).to(device)
        ids_B1 = torch.from_numpy(self.last[:rows, None]).to(device)
        positions_B1 = torch.from_numpy(self.length[:rows, None] - 1).to(device)
        hidden_B1D = served.hidden_after(self.kv.cache, ids_B1, positions_B1, mask_BL)
        logits_BV = served.logits(hidden_B1D[:, 0])
        self.kv.advance()
        self._record(logits_BV, 0)

    def collect(self, version: str, first: int = 0) -> None:
        """After a token of the rows from `first` on: finish those that are complete, tell streams how far they are."""
        part, count = slice(first, len(self.jobs)), self.count[first : len(self.jobs)]
        stopped_N = (self.last[part, None] == self.stops[part]).any(1)
        broken_N = ~np.isfinite(self.out_logp[np.arange(first, len(self.jobs)), count - 1])
        ended_N = stopped_N | broken_N | (count >= self.limit[part])
        if self._watched:
            for row, job in enumerate(self.jobs[part], first):
                if job.on_progress is not None and not ended_N[row - first]:
                    self._snapshot(row)
                    job.on_progress(job.result(version, None))
        for at in np.flatnonzero(ended_N)[::-1]:
            job = self.remove(first + int(at))
            if broken_N[at]:
                job.fail(not_finite(f"request {job.rid}"))
            elif stopped_N[at]:
                job.finish(version, Finish("stop", matched=int(job.output_ids[-1])))
            else:
                job.finish(version, Finish("length"))

    def remove(self, row: int) -> Job:
        """Take one job out, with what it has written so far. The last row takes its place."""
        self._snapshot(row)
        job, last = self.jobs[row], len(self.jobs) - 1
        if row != last:
            for name in _PER_ROW:
                array = getattr(self, name)
                array[row] = array[last]
            self.jobs[row] = self.jobs[last]
        self.jobs.pop()
        self._watched -= _is_watched(job)
        self.kv.drop(row)
        return job

    def remove_all(self) -> list[Job]:
        """Take all jobs out, in the order in which they came, and free the cache."""
        for row in range(len(self.jobs)):
            self._snapshot(row)
        jobs, self.jobs, self._watched = self.jobs, [], 0
        self.kv.clear()
        return jobs

    def mark(self, version: str) -> None:
        """The next token of every row is written by `version`."""
        for row, job in enumerate(self.jobs):
            job.mark(version, int(self.count[row]))

    def _append(self, job: Job, length: int) -> None:
        row, sampling = len(self.jobs), job.sampling
        written = len(job.output_ids)
        self._widen(sampling.max_new_tokens, len(sampling.stop_ids))
        self.length[row] = length
        self.count[row] = written
        self.limit[row] = sampling.max_new_tokens
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = max(0, sampling.top_k)
        self.seed[row] = sampling.seed
        self.stops[row] = -1
        self.stops[row, : len(sampling.stop_ids)] = sampling.stop_ids
        self.out_ids[row, :written] = job.output_ids
        self.out_logp[row, :written] = job.output_logprobs
        self.jobs.append(job)
        self._watched += _is_watched(job)

    def _widen(self, tokens: int, stops: int) -> None:
        if tokens > self.out_ids.shape[1]:
            more = ((0, 0), (0, tokens - self.out_ids.shape[1]))
            self.out_ids = np.pad(self.out_ids, more)
            self.out_logp = np.pad(self.out_logp, more)
        if stops > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, stops - self.stops.shape[1])), constant_values=-1)

    def _record(self, logits_NV: Tensor, first: int) -> None:
        """Draw a token for the rows from `first` on, and write it down."""
        part = slice(first, len(self.jobs))
        rules = Rules(self.temperature[part], self.top_p[part], self.top_k[part])
        drawn = draw(logits_NV, rules, uniforms(self.seed[part], self.length[part]))
        tokens, logprobs = drawn.tokens_N.cpu().numpy(), drawn.logprobs_N.cpu().numpy()
        if self._watched:
            _note_extras(self.jobs[part], drawn.logp_NV)
        # nothing fails from here on, so a job has as many rows of everything as it has tokens
        self.last[part] = tokens
        at = (np.arange(first, len(self.jobs)), self.count[part])
        self.out_ids[at] = tokens
        self.out_logp[at] = logprobs
        self.count[part] += 1
        self.length[part] += 1

    def _snapshot(self, row: int) -> None:
        job, count = self.jobs[row], int(self.count[row])
        job.output_ids = self.out_ids[row, :count].copy()
        job.output_logprobs = self.out_logp[row, :count].copy()


def _is_watched(job: Job) -> bool:
    return job.on_progress is not None or job.wanted.top_k > 0 or job.wanted.token_ids is not None


def _note_extras(jobs: Sequence[Job], logp_NV: Tensor) -> None:
    """Note what each job wants to know of its row beside the token's own number: all of it, or nothing on an error."""
    topped = [row for row, job in enumerate(jobs) if job.wanted.output and job.wanted.top_k]
    picking = [row for row, job in enumerate(jobs) if job.wanted.output and job.wanted.token_ids is not None]
    picked = [logp_NV[row, torch.from_numpy(jobs[row].wanted.token_ids).long()].cpu().numpy() for row in picking]
    if topped:
        # one selection and one copy for all rows
        logp_MV = logp_NV if len(topped) == len(jobs) else logp_NV[topped]
        values_MK, ids_MK = logp_MV.topk(max(jobs[row].wanted.top_k for row in topped), dim=-1)
        ids, values = ids_MK.to(torch.int32).cpu().numpy(), values_MK.cpu().numpy()
        for at, row in enumerate(topped):
            k = jobs[row].wanted.top_k
            jobs[row].output_tops.append((ids[at, :k], values[at, :k]))
    for row, numbers in zip(picking, picked, strict=True):
        jobs[row].output_picked.append(numbers)
