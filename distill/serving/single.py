"""A server that holds one model at a time (SGLang, or one that somebody else runs), behind the seam of a slot."""

from __future__ import annotations

import time
from collections.abc import Sequence

from distill.errors import ConfigError, EnvironmentFault, ServerError, TeacherError
from distill.protocols import Loaded, ServerInfo, SlotLedger, WeightCosts, WeightSource
from distill.serving.client import ServerClient
from distill.types import GenerateRequest, Generation, ScoreRequest, SignalSpec, TeacherScores
from distill.weights.costs import costs_of_one
from distill.weights.files import SPELLING, Checkpoint


class SingleTeacherServer:
    """Implements `TeacherServer` over a client of a server of one model: a load replaces what it held.

    `dtype` (float32, bfloat16, float16): what the server holds floats as, None for as they are stored.
    `budget_bytes`: larger objects are refused; None: there is no limit that is known here.
    """

    def __init__(self, client: ServerClient, *, dtype: str | None = None, budget_bytes: int | None = None) -> None:
        self._client = client
        self._dtype = None if dtype is None else SPELLING[dtype]
        self._budget = budget_bytes
        self._known: dict[str, tuple[WeightSource, Checkpoint, WeightCosts]] = {}
        self._resident = ""
        self._peak = 0

    @property
    def holds_one(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return self._client.label

    async def info(self) -> ServerInfo:
        return await self._client.info()

    async def register(self, source: WeightSource) -> WeightCosts:
        if source.base is not None or (source.folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"{source.name}: {source.folder} is an adapter, and {self.label} holds whole models",
                fix="merge it into its base, or serve teachers with the embedded server",
            )
        checkpoint = Checkpoint.open(source.folder)
        costs = costs_of_one(source.folder, self._dtype)
        known = self._known.get(source.name)
        if self._resident == source.name and known is not None and known[0] != source:
            raise ServerError(f"{self.label}: {source.name} is resident with other weights: release it first")
        self._known[source.name] = source, checkpoint, costs
        return costs

    async def load(self, name: str) -> Loaded:
        """Its checksums are left empty: nobody here sees the bytes that the server copies."""
        source, checkpoint, costs = self._require(name)
        if self._resident == name:
            return Loaded(0.0, False, {})
        if self._budget is not None and costs.bytes > self._budget:
            raise EnvironmentFault(
                f"{name} needs {costs.bytes} bytes ({costs.bytes / 1e9:.3f} GB), {self.label} holds {self._budget}",
                fix="raise teacher_manager.slot_gb",
            )
        checkpoint.check_unchanged()
        began = time.monotonic()
        self._resident = ""  # from here on what it holds is unknown, until it says that it has loaded this
        await self._client.load_weights(source.folder, source.version, source.vocab_size)
        self._resident = name
        self._peak = max(self._peak, costs.bytes)
        return Loaded(time.monotonic() - began, True, {})

    async def release(self, name: str) -> None:
        """Forget it; the memory is the next one's."""
        self._require(name)
        if self._resident == name:
            self._resident = ""

    async def checksums(self, name: str) -> dict[str, str]:
        self._require_resident(name)
        return await self._client.checksums()

    async def score(
        self, requests: Sequence[ScoreRequest], spec: SignalSpec, *, stream: bool = False
    ) -> list[TeacherScores]:
        if stream:
            raise ServerError(f"{self.label} cannot stream weights", fix="load the teacher")
        names = {request.teacher for request in requests}
        if len(names) > 1:
            raise ServerError(f"{self.label} holds one teacher, and {', '.join(sorted(names))} are asked together")
        if not requests:
            return []
        (name,) = names
        source = self._require_resident(name)
        return await self._client.score(requests, spec, name, source.version)

    async def generate(self, requests: Sequence[GenerateRequest], teacher: str) -> list[Generation]:
        source = self._require_resident(teacher)
        written = await self._client.generate(requests)
        for item in written:
            if other := set(item.versions) - {source.version}:
                raise TeacherError(
                    f"{self.label}: {item.id} should be written by {source.version}, found {sorted(other)}",
                    teacher=teacher,
                )
        return written

    async def ledger(self) -> SlotLedger:
        used = self._known[self._resident][2].bytes if self._resident else 0
        residents = {self._resident: used} if self._resident else {}
        return SlotLedger(self._budget or 0, used, self._peak, residents, 0, 0)

    async def close(self) -> None:
        await self._client.close()

    def _require(self, name: str) -> tuple[WeightSource, Checkpoint, WeightCosts]:
        found = self._known.get(name)
        if found is None:
            raise ServerError(f"{self.label}: {name!r} was not registered with this client", fix="register it first")
        return found

    def _require_resident(self, name: str) -> WeightSource:
        source = self._require(name)[0]
        if self._resident != name:
            raise ServerError(f"{self.label}: {name} is not resident, {self._resident or 'nobody'} is")
        return source
