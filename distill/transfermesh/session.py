"""One update, as the receiver lives through it: offer, buckets, digest, commit or abort."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

from distill import registry
from distill.errors import DistillError, MeshError
from distill.transfermesh.buckets import Assembly, layout
from distill.transfermesh.digest import Octets, bucket_digest
from distill.transfermesh.link import Link
from distill.transfermesh.loader import Loader
from distill.transfermesh.transports.base import Inbox, Transport
from distill.transfermesh.wire import Ack, Active, Chunk, Commit, End, Failed, Offer, Ready, Refuse, Staged

log = logging.getLogger(__name__)
T = TypeVar("T")

_BUSY_S = 5.0


class Held:
    """What a receiver has: its loader, the version that is live, and the right to change them."""

    def __init__(self, loader: Loader, run: str, timeout_s: float) -> None:
        self.loader = loader
        self.run = run
        self.timeout_s = timeout_s
        self.version = -1
        self.turn = threading.Lock()


def serve_update(link: Link, held: Held) -> None:
    """Take one update from an authenticated publisher. Raises MeshError when it did not end in a commit.

    The old version stays live until COMMIT. Whatever goes wrong before is told to the publisher, if it still listens.
    """
    offer = link.receive(Offer)
    if not held.turn.acquire(timeout=min(_BUSY_S, held.timeout_s)):
        _refuse(link, "another update is under way")
    try:
        transport = _accept(link, held, offer)
        live = _update(link, held, offer, transport)
    finally:
        held.turn.release()
    log.info("version %d is live, digest %s", held.version, live)
    link.send(Active(held.version, live))


def _accept(link: Link, held: Held, offer: Offer) -> type[Transport]:
    """The transport to use, after the loader made room. Otherwise answers REFUSE and raises MeshError."""
    try:
        offer.manifest.check()
        if offer.manifest.version < held.version:
            raise MeshError(
                f"version {offer.manifest.version} is older than version {held.version}, which is live here"
            )
        # A peer chooses among the known names only: a "module:Class" would let it import what it likes.
        if offer.transport not in registry.names("transport"):
            raise MeshError(f"there is no transport {offer.transport!r} here")
        transport: type[Transport] = registry.load("transport", offer.transport)
        _call("begin", lambda: held.loader.begin(offer.manifest))
    except DistillError as error:
        _call("abort", held.loader.abort)
        _refuse(link, error.what)
    return transport


def _refuse(link: Link, reason: str) -> NoReturn:
    with contextlib.suppress(MeshError):
        link.send(Refuse(reason))
    raise MeshError(f"refused an update: {reason}")


def _update(link: Link, held: Held, offer: Offer, transport: type[Transport]) -> str:
    """Stage and commit the offer; returns the digest of the live tensors. On any failure the loader aborts."""
    try:
        _stage(link, held, offer, transport)
        live = _call("commit", lambda: held.loader.commit(offer.manifest.version))
        held.version = offer.manifest.version
        return live
    except BaseException as error:
        # First abort, then tell: who reads the reason may count on the old state.
        _call("abort", held.loader.abort)
        if isinstance(error, MeshError):
            with contextlib.suppress(MeshError):
                link.send(Failed(error.what))
        raise


def _stage(link: Link, held: Held, offer: Offer, transport: type[Transport]) -> None:
    """Answers READY; returns when the whole offer is staged and the publisher said COMMIT."""
    link.send(Ready(held.timeout_s))
    inbox = transport.inbox(held.run, offer.bucket_bytes)
    try:
        expected = _load_all(link, held.loader, offer, inbox)
    finally:
        inbox.close()
    digest = _call("digest", held.loader.digest)
    link.send(Staged(digest))
    commit = link.receive(Commit)
    if digest != expected or commit.version != offer.manifest.version:
        raise MeshError(f"told to commit version {commit.version}, but {digest} is staged where {expected} was offered")


def _load_all(link: Link, loader: Loader, offer: Offer, inbox: Inbox) -> str:
    """Load every tensor of the offer; returns the model digest that the publisher expects."""
    assembly = Assembly(offer.manifest)
    seq = 0
    while True:
        message = link.receive(Chunk, End)
        if isinstance(message, End):
            if not assembly.complete or message.chunks != seq:
                raise MeshError(f"the update ended after {seq} of {message.chunks} buckets, with tensors missing")
            return message.digest
        if message.seq != seq:
            raise MeshError(f"bucket {message.seq} came where {seq} was due")
        payload = _receive_bucket(link, offer, assembly, inbox, message)
        for name, data in assembly.add(message.slices, payload):
            _call(f"load of {name!r}", _load(loader, name, data))
        link.send(Ack(seq))
        seq += 1


def _receive_bucket(link: Link, offer: Offer, assembly: Assembly, inbox: Inbox, chunk: Chunk) -> Octets:
    """The bucket's bytes, verified. All bounds are checked before anything is allocated or read."""
    assembly.expect(chunk.slices)
    starts, nbytes = layout(chunk.slices)
    if chunk.nbytes != nbytes or nbytes > offer.bucket_bytes:
        raise MeshError(
            f"bucket {chunk.seq} has {chunk.nbytes} bytes; its slices need {nbytes} of {offer.bucket_bytes}"
        )
    payload = inbox.take(link, chunk)
    pieces = (payload[start : start + piece.nbytes] for start, piece in zip(starts, chunk.slices, strict=True))
    if bucket_digest(pieces) != chunk.digest:
        raise MeshError(f"bucket {chunk.seq} arrived damaged: its digest does not fit")
    return payload


def _load(loader: Loader, name: str, data: Octets) -> Callable[[], None]:
    return lambda: loader.load(name, data)


def _call(step: str, act: Callable[[], T]) -> T:
    """Run a step of the loader, and turn whatever it raises into a MeshError that the publisher will read."""
    try:
        return act()
    except DistillError as error:
        raise MeshError(f"the loader's {step} failed: {error.what}", why=error.why, fix=error.fix) from error
    except Exception as error:  # the loader is someone else's code: its failure, whatever it is, is told by name
        log.exception("the loader's %s failed", step)
        raise MeshError(f"the loader's {step} failed: {type(error).__name__}: {error}") from error
