"""Configuration -> the slots that teachers share, and the manager over them: for runs, and for scoring files."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distill.cluster import Cluster
from distill.config import RunConfig
from distill.errors import ConfigError, ServerError
from distill.preflight import Preflight
from distill.protocols import Objective, ServerAddress, TeacherCaps, TeacherServer
from distill.registry import KINDS, load
from distill.remote import RemoteServer
from distill.serving.client import ServerClient
from distill.serving.launch import SlotSettings, has_gpu
from distill.serving.single import SingleTeacherServer
from distill.serving.teacher_client import TeacherClient
from distill.teacher_manager import (
    CPU,
    CUDA,
    CanaryStore,
    Catalogue,
    EventSink,
    Rates,
    Slot,
    SpanSink,
    Teacher,
    TeacherManager,
    Translation,
)
from distill.teacher_manager.remote_apis import open_remote
from distill.teacher_manager.reuse import Reuse
from distill.teacher_manager.score_cache import ScoreCache
from distill.types import Signal, SignalSpec

_SAMPLE_SHARE = 16
"""The scores of one sample may take so much of the score cache: one in so many of its bytes."""


@dataclass(frozen=True, slots=True)
class Teaching:
    """What the teachers of a run need to know of it."""

    config: RunConfig
    checked: Preflight
    folder: Path
    """Logs and canaries go there."""
    on_span: SpanSink
    on_event: EventSink

    @property
    def slots(self) -> int:
        """None where every teacher is served elsewhere."""
        return self.config.teacher_manager.slots if self._here else 0

    async def start_slot(self, cluster: Cluster, stack: contextlib.AsyncExitStack, index: int) -> RemoteServer:
        """A server with a budget; a program that holds one model begins with some teacher."""
        config, first = self.config, self._here[0]
        program, name = config.server.program, f"slot-{index}"
        return await start_server(
            cluster,
            stack,
            config,
            name,
            {
                "name": name,
                "model": self.checked.models.teachers[first].model.path,
                "vocab_size": self.checked.teacher_vocab_sizes[first],
                "folder": self.folder / "logs",
                "index": config.rollout.servers + index,
                "weight_version": "none",
                "run_key": None,
                "memory_limit_gb": self._slot_bytes / 1e9,
                "slot": self._slot_settings(),
                "attach_url": config.server.teacher_urls[index] if program == "attach" else None,
            },
            self.on_event,
        )

    def manager(self, servers: Sequence[RemoteServer], *, barrier: bool) -> TeacherManager:
        """Over started slots. With `barrier` what is computed together depends on the samples alone."""
        config, checked = self.config.teacher_manager, self.checked
        canaries = CanaryStore(self.folder / "canaries.json")
        spec = checked.full_rows.asked(checked.objective.spec)
        catalogue = Catalogue([self._open(name) for name in self._here], self._bases())
        manager = TeacherManager(
            catalogue,
            [Slot(server.name, server.locate, self._connect, self._slot_bytes, server.restart) for server in servers],
            # behind the barrier the manager settles what is computed together: one job a visit
            functools.partial(load("scheduler", config.scheduler), visit_tokens=0 if barrier else config.call_tokens),
            spec,
            config,
            vocab_size=checked.vocab_size,
            canaries=canaries,
            on_span=self.on_span,
            on_event=self.on_event,
            translations=checked.translations,
            remotes={
                name: open_remote(
                    name,
                    teacher,
                    config,
                    spec,
                    vocab_size=checked.teacher_vocab_sizes[name],
                    canaries=canaries,
                    on_event=self.on_event,
                )
                for name, teacher in self.config.teachers.items()
                if teacher.model is None
            },
            batch_size=self.config.trainer.batch_size,
            rates=self._rates,
            barrier=barrier,
            # what the cache still holds depends on when scores came, and what is left to ask on what it holds
            reuse=None if barrier else self._reuse(catalogue, spec),
        )
        check_signal(checked.objective, manager.caps)
        return manager

    def _reuse(self, catalogue: Catalogue, spec: SignalSpec) -> Reuse:
        config, checked = self.config.teacher_manager, self.checked
        memory_bytes = round(config.cache_mb * 1e6)
        folder = (config.cache_folder or self.folder / "scores") if config.cache_disk_gb else None
        try:
            cache = ScoreCache(memory_bytes, folder, round(config.cache_disk_gb * 1e9)) if memory_bytes else None
        except OSError as error:
            raise ConfigError(
                f"teacher_manager.cache_folder: {folder} cannot be used: {error}",
                why="scores that memory has no room for are to be written there",
                fix="name a folder that can be written, or set teacher_manager.cache_disk_gb=0",
            ) from error
        own = {name for name, reader in checked.translations.items() if isinstance(reader, Translation)}
        return Reuse(
            catalogue,
            cache,
            spec=spec,
            vocab_size=checked.vocab_size,
            tokenizers={name: "its own" if name in own else checked.vocabulary.fingerprint for name in self._here},
            numerics=f"{self.config.server.program}/{self.config.server.dtype}/{config.topk_dtype}",
            largest_bytes=memory_bytes // _SAMPLE_SHARE,
            digest_s=config.timeout_s,
            on_event=self.on_event,
        )

    @property
    def _here(self) -> list[str]:
        """The teachers that our own servers hold."""
        return [name for name, teacher in self.config.teachers.items() if teacher.model is not None]

    @property
    def _slot_bytes(self) -> int:
        return self.checked.models.slot_bytes

    @property
    def _rates(self) -> Rates:
        device = self.config.server.device
        return CUDA if device.startswith("cuda") or (device == "auto" and has_gpu()) else CPU

    def _slot_settings(self) -> SlotSettings:
        config = self.config.teacher_manager
        return SlotSettings(
            slot_gb=self._slot_bytes / 1e9, host_gb=config.host_gb, host_differences=config.host_differences
        )

    def _open(self, name: str) -> Teacher:
        teacher = self.config.teachers[name]
        assert teacher.model is not None
        return Teacher.open(
            name,
            teacher.model,
            server_dtype=self.config.server.dtype,
            vocab_size=self.checked.teacher_vocab_sizes[name],
            temperature=teacher.temperature,
        )

    def _bases(self) -> Mapping[str, Teacher]:
        """Of each LoRA adapter, what it stands on."""
        return {
            name: Teacher.open(
                f"base {base.name}",
                base,
                server_dtype=self.config.server.dtype,
                vocab_size=self.checked.teacher_vocab_sizes[name],
            )
            for name, teacher in self.checked.models.teachers.items()
            if (base := teacher.base) is not None
        }

    def _connect(self, address: ServerAddress) -> TeacherServer:
        timeout_s = self.config.teacher_manager.timeout_s
        half = self.config.teacher_manager.topk_dtype == "float16"
        if self.config.server.program == "embedded":
            return TeacherClient(address.url, name=address.name, timeout_s=timeout_s, half=half)
        return SingleTeacherServer(
            ServerClient(address.url, name=address.name, timeout_s=timeout_s, half=half),
            dtype=self.config.server.dtype,
            budget_bytes=self._slot_bytes,
        )


async def start_server(
    cluster: Cluster,
    stack: contextlib.AsyncExitStack,
    config: RunConfig,
    name: str,
    settings: Mapping[str, object],
    on_event: EventSink,
) -> RemoteServer:
    """A launcher in an actor, its server up; `stack` ends it. `settings`: see `serving.launch.LaunchSettings`."""
    remote = await cluster.spawn(
        name,
        KINDS["server"].get(config.server.program, config.server.program),
        (config.server,),
        dict(settings),
        failure=ServerError,
        fix=f"look at {settings['folder']}",
        threads=4,
        deadline_s=config.server.start_timeout_s,
    )
    server = RemoteServer(remote)
    stack.push_async_callback(server.stop)
    address = await server.start(config.server.start_timeout_s + 30)
    on_event("debug", f"{name} serves at {address.url}")
    return server


def check_signal(objective: Objective, caps: TeacherCaps) -> None:
    """Raises ConfigError when the objective needs what the teachers cannot give."""
    spec = objective.spec
    if spec.signal not in caps.signals or spec.k > caps.max_k:
        raise ConfigError(
            f"objective: it needs {spec.signal} scores{f' with k = {spec.k}' if spec.k else ''}, and the teachers give "
            f"{', '.join(sorted(caps.signals))} with k up to {caps.max_k}",
            fix="lower objective.k, or choose another objective.support",
        )
    if spec.signal is Signal.TOPK and spec.support not in caps.supports:
        raise ConfigError(
            f"objective.support: the teachers cannot be asked about {spec.support}, only about "
            f"{', '.join(sorted(caps.supports)) or 'no tokens at all'}",
            why="their backend does not score tokens of somebody else's choice",
            fix="choose another objective.support, or a teacher backend that can",
        )
