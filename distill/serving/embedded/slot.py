"""A device that several teachers share: which objects are known, which are resident, and copies while others score.

Residents change on the event loop only. The copy of a load runs on a worker thread, one at a time; when it fails, every
byte that it took is back before anybody hears of it. Each resident model has an engine, whose thread sleeps while
nobody asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from distill.errors import ServerError
from distill.modeling.adapters import LoraAdapter
from distill.modeling.naming import live_tensors
from distill.modeling.skeleton import Skeleton
from distill.protocols import Loaded, WeightSource
from distill.serving.embedded.arena import Arena
from distill.serving.embedded.copying import Feed, OriginTensors, check_digests
from distill.serving.embedded.engine import Engine
from distill.serving.embedded.jobs import Refusal
from distill.serving.embedded.objects import WeightObject, open_object
from distill.serving.embedded.served import Limits, ServedModel
from distill.serving.embedded.weights import octets
from distill.weights.files import Checkpoint
from distill.weights.host import HostStore
from distill.weights.link import Link
from distill.weights.origin import FileOrigin, Origin

log = logging.getLogger("distill.embedded")
_STOP_S = 30.0
"""An engine that nobody uses ends at once; longer than this means that it hangs."""


class EngineSettings(NamedTuple):
    """What every engine of a slot is started with."""

    max_batch_size: int
    threads: int
    reproducible: bool


@dataclass(slots=True)
class Resident:
    """An object on the device. An adapter has the engine of its base."""

    object: WeightObject
    engine: Engine
    skeleton: Skeleton | None = None
    adapter: LoraAdapter | None = None
    buffer: Tensor | None = None
    """Of an adapter."""
    users: int = 0
    """Calls that are being answered with it, those of its adapters included."""
    adapters: set[str] = field(default_factory=set[str])
    """Resident adapters over it."""

    def tensors(self) -> Mapping[str, Tensor]:
        """As the device holds them, by their names in the files."""
        if self.adapter is not None and self.buffer is not None:
            return self.adapter.views(self.buffer)
        assert self.skeleton is not None
        return live_tensors(self.skeleton.model)


class Slot:
    """The objects of one device within the budget of `arena`."""

    def __init__(
        self, arena: Arena, limits: Limits, engines: EngineSettings, *, host: HostStore | None, link: Link
    ) -> None:
        self.arena = arena
        self.limits = limits
        self.host = host
        self.link = link
        self.residents: dict[str, Resident] = {}
        self.on_death: Callable[[], None] = lambda: None
        """Called when the thread of an engine dies."""
        self.engines = engines
        self._objects: dict[str, WeightObject] = {}
        self._loading = asyncio.Lock()
        self._under_way: str | None = None
        """The object that is being copied."""

    # --- what is known ------------------------------------------------------------------------------------------------

    async def register(self, source: WeightSource) -> WeightObject:
        """Know an object from now on. The same source again changes nothing, but files that were put back are read."""
        known = self._objects.get(source.name)
        if known is not None and source.name in self.residents:
            if known.source == source:
                return known
            raise Refusal(409, f"{source.name} is resident with version {known.source.version}: release it first")
        if known is not None and source.name == self._under_way:
            if known.source == source:
                return known
            raise Refusal(409, f"{source.name} is being loaded with version {known.source.version}")
        base = None
        if source.base is not None:
            base = self.known(source.base)
            if base.is_adapter:
                raise Refusal(400, f"{source.name}: its base {source.base} is an adapter itself")
        found = await asyncio.to_thread(open_object, source, base, self.limits)
        if known is not None and known.source == source:
            found.digests = known.digests
        self._objects[source.name] = found
        return found

    def known(self, name: str) -> WeightObject:
        """Raises Refusal (404) for a name that was not registered."""
        found = self._objects.get(name)
        if found is None:
            there = ", ".join(sorted(self._objects)) or "nothing"
            raise Refusal(404, f"{name!r} is not registered; known here: {there}")
        return found

    @property
    def objects(self) -> Mapping[str, WeightObject]:
        return self._objects

    # --- residents ----------------------------------------------------------------------------------------------------

    async def load(self, name: str) -> Loaded:
        """Copy an object into the arena. Raises EnvironmentFault where it does not fit, TeacherError for its files."""
        async with self._loading:
            thing = self.known(name)
            if name in self.residents:
                return Loaded(0.0, False, dict(thing.digests))
            base = self._base_of(thing)
            if base is not None:
                base.users += 1  # it stays until the adapter is there
            began = time.monotonic()
            self._under_way = name
            try:
                resident, from_disk, digests = await asyncio.to_thread(self._copy_in, thing, base)
            finally:
                self._under_way = None
                if base is not None:
                    base.users -= 1
            self.residents[name] = resident
            if base is not None:
                base.adapters.add(name)
            seconds = time.monotonic() - began
            log.info("%s is resident: %d bytes in %.3f s", name, thing.costs.bytes, seconds)
            return Loaded(seconds, from_disk, digests)

    async def release(self, name: str) -> int:
        """Give up a resident, and return its bytes; 0 where it was none. Refused while requests use it."""
        self.known(name)
        resident = self.residents.get(name)
        if resident is None:
            return 0
        if resident.users:
            raise Refusal(409, f"{name} is in use by {resident.users} calls")
        if resident.adapters:
            raise Refusal(409, f"{name} is the base of {', '.join(sorted(resident.adapters))}: release them first")
        del self.residents[name]
        if resident.object.source.base is not None:
            self.residents[resident.object.source.base].adapters.discard(name)
        await asyncio.to_thread(self._end, resident)
        return self.arena.give_back(name)

    def resident(self, name: str) -> Resident:
        """Raises Refusal (409) for an object that is not resident."""
        found = self.residents.get(self.known(name).name)
        if found is None:
            raise Refusal(409, f"{name} is not resident: load it, or stream it")
        return found

    def base_of(self, resident: Resident) -> Resident:
        """The resident whose engine computes it: itself, or an adapter's base."""
        base = resident.object.source.base
        return resident if base is None else self.residents[base]

    async def checksums(self, name: str) -> dict[str, str]:
        """Tensor name -> xxh3-64 of the bytes on the device, between two steps of its engine. Of an object that is not
        resident: of the bytes that were read when it was last copied or streamed, as far as whole tensors were. Raises
        Refusal (409) where it was neither."""
        thing = self.known(name)
        if name not in self.residents and thing.digests:
            return dict(thing.digests)
        resident = self.resident(name)

        def digests() -> dict[str, str]:
            return {each: xxhash.xxh3_64_hexdigest(octets(tensor)) for each, tensor in resident.tensors().items()}

        resident.users += 1
        try:
            return await asyncio.wrap_future(resident.engine.run_between_steps(digests))
        finally:
            resident.users -= 1

    @property
    def running(self) -> list[Engine]:
        """The engines of all residents."""
        return [resident.engine for resident in self.residents.values() if resident.adapter is None]

    def abort_all(self) -> None:
        """Whoever waits gets what was written so far, with the finish reason "abort"."""
        for engine in self.running:
            with contextlib.suppress(Refusal):  # that engine is down already
                engine.run_between_steps(lambda engine=engine: engine.abort(lambda job: True))

    def stop(self, deadline_s: float) -> None:
        """End all engines, and leave the host memory to others."""
        for engine in self.running:
            engine.stop(deadline_s)
        if self.host is not None:
            self.host.close()

    @property
    def failure(self) -> BaseException | None:
        """What the thread of an engine died of."""
        return next((engine.failure for engine in self.running if engine.failure is not None), None)

    # --- copies: on any thread ----------------------------------------------------------------------------------------

    def origin(self, checkpoint: Checkpoint) -> Origin:
        """Host memory where it has, or can take, the checkpoint; its files otherwise."""
        held = None if self.host is None else self.host.hold(checkpoint)
        return FileOrigin(checkpoint) if held is None else held

    def _base_of(self, thing: WeightObject) -> Resident | None:
        return None if thing.source.base is None else self.resident(thing.source.base)

    def _copy_in(self, thing: WeightObject, base: Resident | None) -> tuple[Resident, bool, dict[str, str]]:
        thing.checkpoint.check_unchanged()
        try:
            if base is not None:
                return self._copy_adapter(thing, base)
            return self._copy_model(thing)
        except BaseException:
            self.arena.give_back(thing.name)
            raise

    def _copy_model(self, thing: WeightObject) -> tuple[Resident, bool, dict[str, str]]:
        limits = replace(self.limits, vocab_size=thing.source.vocab_size)
        skeleton = Skeleton.build(thing.source.folder, dtype=limits.dtype, device=limits.device)
        try:
            buffers = self.arena.take_all(thing.name, [piece.nbytes for piece in skeleton.pieces])
            origin = self.origin(thing.checkpoint)
            try:
                feed = Feed(skeleton, thing.checkpoint.tensors, origin, self.link, thing.digests)
                for piece, buffer in zip(skeleton.pieces, buffers, strict=True):
                    skeleton.attach(piece.index, buffer)
                    feed.fill(piece.index, buffer)
                _wait_for(limits.device)
            finally:
                origin.close()
            thing.checkpoint.check_unchanged()
            with torch.inference_mode():
                served = ServedModel(skeleton.model, thing.source.folder, limits, skeleton)
            engine = Engine(
                served,
                max_batch_size=self.engines.max_batch_size,
                version=thing.source.version,
                threads=self.engines.threads,
                reproducible=self.engines.reproducible,
            )
        except BaseException:
            skeleton.give_back()
            raise
        engine.on_death = lambda: self.on_death()
        engine.start()
        return Resident(thing, engine, skeleton=skeleton), origin.from_disk, feed.source.digests

    def _copy_adapter(self, thing: WeightObject, base: Resident) -> tuple[Resident, bool, dict[str, str]]:
        assert base.skeleton is not None
        adapter = LoraAdapter.build(thing.source.folder, base.skeleton.model, self.limits.dtype)
        buffer = self.arena.take(thing.name, adapter.nbytes)
        origin = self.origin(thing.checkpoint)
        began = time.monotonic()
        try:
            source = OriginTensors(thing.checkpoint.tensors, origin)
            adapter.attach(buffer)
            adapter.read(source)
            _wait_for(self.limits.device)
        finally:
            origin.close()
        check_digests(thing.digests, source.digests, thing.checkpoint.tensors)
        self.link.carry(adapter.nbytes, began=began)
        return Resident(thing, base.engine, adapter=adapter, buffer=buffer), origin.from_disk, source.digests

    def _end(self, resident: Resident) -> None:
        """Stop its engine and let go of its buffers. Nobody uses it any more."""
        if resident.adapter is not None:
            resident.adapter.detach()
            return
        if not resident.engine.stop(_STOP_S):
            raise ServerError(f"{resident.object.name}: its engine did not end in {_STOP_S:g} s")
        resident.engine.served = None
        assert resident.skeleton is not None
        resident.skeleton.give_back()


def _wait_for(device: torch.device) -> None:
    """Copies from pinned memory are under way when their calls return."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def same_base(slot: Slot, names: Sequence[str]) -> list[Resident]:
    """The residents of these names, which one engine computes. Raises Refusal."""
    found = [slot.resident(name) for name in names]
    engines = {id(resident.engine) for resident in found}
    if len(engines) > 1:
        raise Refusal(400, f"{', '.join(sorted(set(names)))} are not of one base: ask for each in a call of its own")
    return found
