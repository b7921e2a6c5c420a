"""What the threads of one publish share: who has staged, who has failed, and whether to commit."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from distill.errors import MeshError
from distill.transfermesh.buckets import Bucket
from distill.transfermesh.link import Link
from distill.transfermesh.manifest import Manifest

_TICK_S = 0.5


class Round:
    """One version on its way. Nobody commits before everybody has staged it or has been given up on."""

    def __init__(self, manifest: Manifest, buckets: Sequence[Bucket], receivers: Iterable[str]) -> None:
        self.manifest = manifest
        self.buckets = buckets
        self.digest: Future[str] = Future()
        self.failed: dict[str, str] = {}
        self._moving = set(receivers)
        self._links: dict[str, Link] = {}
        self._commit: bool | None = None
        self._changed = threading.Condition()

    def connected(self, name: str, link: Link) -> None:
        """`name` is reachable over `link`. Raises MeshError when the round was cancelled meanwhile."""
        with self._changed:
            self._links[name] = link
            if self._commit is False:
                raise MeshError("the publisher gave the update up")

    def fail(self, name: str, reason: str) -> None:
        with self._changed:
            self.failed[name] = reason

    def settle(self, name: str) -> None:
        """`name` has staged the version, or has failed."""
        with self._changed:
            self._moving.discard(name)
            self._changed.notify_all()

    def wait_until_staged(self) -> None:
        """Wait for every receiver to settle. Each has a deadline for its every step, so this ends."""
        with self._changed:
            while self._moving:
                self._changed.wait(_TICK_S)

    def decide(self, *, commit: bool) -> None:
        with self._changed:
            self._commit = commit
            self._changed.notify_all()

    def cancel(self) -> None:
        """Give the round up: nobody commits who has not yet, and no thread keeps waiting for its receiver."""
        self.decide(commit=False)
        if not self.digest.done():
            self.digest.cancel()
        with self._changed:
            links = list(self._links.values())
        for link in links:
            link.interrupt()

    def wait_for_decision(self, link: Link) -> None:
        """Wait until all others have settled, telling the receiver that we live. Raises MeshError if it is an abort."""
        while True:
            with self._changed:
                if self._commit is None:
                    self._changed.wait(min(_TICK_S, link.keep_alive_s))
                decision = self._commit
            if decision is not None:
                break
            link.keep_alive()
        if not decision:
            raise MeshError("the publisher gave the update up")

    def wait_for_digest(self, link: Link) -> str:
        """The model's digest, which is computed while the buckets travel. Tells the receiver meanwhile that we live."""
        while True:
            try:
                return self.digest.result(min(_TICK_S, link.keep_alive_s))
            except TimeoutError:
                link.keep_alive()
