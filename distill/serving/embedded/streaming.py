"""Scoring by teachers that are not resident: their weights pass through two layers' room of the arena."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from distill.errors import ConfigError, DistillError, ServerError
from distill.modeling.skeleton import Skeleton
from distill.serving.embedded.copying import Feed
from distill.serving.embedded.jobs import Finish, Job, Refusal
from distill.serving.embedded.objects import WeightObject
from distill.serving.embedded.scoring import score_streamed
from distill.serving.embedded.slot import Slot

log = logging.getLogger("distill.embedded")


class Streamer:
    """Streams one batch at a time, on a thread of its own; batches wait for their turn."""

    def __init__(self, slot: Slot, threads: int) -> None:
        self._slot = slot
        self._gone: set[str] = set()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "stream", initializer=torch.set_num_threads, initargs=(threads,))

    def submit(self, thing: WeightObject, jobs: Sequence[Job]) -> None:
        """Score all of them in one pass. Their futures tell the rest."""
        for job in jobs:
            job.done.set_running_or_notify_cancel()
        self._worker.submit(self._run, thing, list(jobs))

    def abort(self, rids: set[str]) -> None:
        """A batch all of whose requests were aborted ends with the layer under way."""
        with self._lock:
            self._gone |= rids

    def _run(self, thing: WeightObject, jobs: list[Job]) -> None:
        began = time.monotonic()
        try:
            self._check(jobs)
            with torch.inference_mode():
                self._score(thing, jobs)
            log.info("%s scored %d samples streamed, in %.3f s", thing.name, len(jobs), time.monotonic() - began)
        except (DistillError, Refusal) as error:
            for job in jobs:
                job.fail(error)
        except BaseException as error:
            log.exception("%s: streaming failed", thing.name)
            for job in jobs:
                job.fail(ServerError(f"{thing.name}: streaming failed: {type(error).__name__}: {error}"))
        finally:
            with self._lock:
                self._gone.difference_update(job.rid for job in jobs)

    def _score(self, thing: WeightObject, jobs: list[Job]) -> None:
        slot, source = self._slot, thing.source
        thing.checkpoint.check_unchanged()
        owner = f"stream of {thing.name}"
        skeleton = Skeleton.build(source.folder, dtype=slot.limits.dtype, device=slot.limits.device)
        try:
            room = slot.arena.take(owner, _room_of(thing))
            origin = slot.origin(thing.checkpoint)
            try:
                feed = Feed(
                    skeleton, thing.checkpoint.tensors, origin, slot.link, thing.digests, lambda: self._check(jobs)
                )
                scores = score_streamed(skeleton, feed, room, jobs, thing.bounds.vocab_size)
            finally:
                origin.close()
        finally:
            skeleton.give_back()
            slot.arena.give_back(owner)
        for job, found in zip(jobs, scores, strict=True):
            job.scores = found
            job.finish(source.version, Finish("length"))

    def _check(self, jobs: Sequence[Job]) -> None:
        """Raises Refusal when nobody waits for these any more."""
        with self._lock:
            if all(job.rid in self._gone for job in jobs):
                raise Refusal(499, "the client is gone")


def _room_of(thing: WeightObject) -> int:
    if thing.costs.stream_bytes is None:
        raise ConfigError(
            f"{thing.name}: a model of this architecture cannot be streamed", fix="load it, in a slot with room for it"
        )
    return thing.costs.stream_bytes
