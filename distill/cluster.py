"""Start or join a Ray cluster, host an object of ours in an actor, call it. The only file that imports ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, Self

from distill.errors import DistillError, EnvironmentFault, ServiceError
from distill.registry import load_target

OBJECT_STORE_BYTES = 2_000_000_000
"""Shared memory for batches on their way to the student. Ray spills to disk past it."""


class _Actor:
    """Holds one object of ours inside a Ray worker process.

    The object is made in a call, not in `__init__`: an error of a constructor would reach the caller as the death of
    the actor, without its class.
    """

    def __init__(self) -> None:
        self._held: Any = None

    def make(self, target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._held = load_target(target, "worker")(*args, **kwargs)

    def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return getattr(self._held, method)(*args, **kwargs)

    def pid(self) -> int:
        return os.getpid()


class Remote:
    """An object that lives in an actor. `failure` is the error class for the death of its process."""

    def __init__(self, actor: Any, name: str, failure: type[ServiceError], fix: str) -> None:
        self._actor = actor
        self._failure = failure
        self._fix = fix
        self.name = name

    async def call(self, method: str, *args: Any, deadline_s: float, **kwargs: Any) -> Any:
        """Run `method` in the actor. Raises what it raises, or `failure` past the deadline or when the process died."""
        return await self._finish(self._actor.call.remote(method, args, kwargs), method, deadline_s)

    async def make(self, target: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], deadline_s: float) -> None:
        await self._finish(self._actor.make.remote(target, args, kwargs), "make", deadline_s)

    async def pid(self, deadline_s: float = 60) -> int:
        return await self._finish(self._actor.pid.remote(), "pid", deadline_s)

    async def _finish(self, reference: Any, method: str, deadline_s: float) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            async with asyncio.timeout(deadline_s):
                return await reference
        except TimeoutError as error:
            raise self._failure(f"{self.name}: no answer to {method!r} in {deadline_s:.0f} s", fix=self._fix) from error
        except RayTaskError as error:
            if isinstance(error.cause, DistillError):
                raise error.cause from None
            raise
        except RayActorError as error:
            raise self._failure(
                f"{self.name}: its process died during {method!r}", why=_first_line(error), fix=self._fix
            ) from error

    def kill(self) -> None:
        """End the process now. What it should have saved must be saved before."""
        import ray

        ray.kill(self._actor, no_restart=True)


class Cluster:
    """A Ray cluster for the length of a run. With no address, one of our own on this machine."""

    def __init__(self, address: str | None) -> None:
        self._address = address

    def __enter__(self) -> Self:
        import ray

        # Local processes only: nothing of a run is reported anywhere, and no dashboard listens.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "configure_logging": True}
        if self._address is None:
            options |= {
                "address": "local",
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        else:
            options |= {"address": self._address}
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = self._address or "this machine"
            raise EnvironmentFault(
                f"Ray did not start on {where}",
                why=_first_line(error),
                fix="check ray_address, or free memory and /dev/shm on this machine",
            ) from error
        return self

    def __exit__(self, *_exc: object) -> None:
        import ray

        ray.shutdown()

    async def spawn(
        self,
        name: str,
        target: str,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        failure: type[ServiceError],
        fix: str = "",
        deadline_s: float,
        threads: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> Remote:
        """Make a `target` ("module:Class") in an actor of its own, in which `threads` calls may run at once.

        Raises what its constructor raises, or `failure` when that takes longer than the deadline.
        """
        import ray

        actor_class: Any = ray.remote(_Actor)  # pyright: ignore[reportArgumentType]
        actor = actor_class.options(
            num_cpus=0,
            max_concurrency=threads,
            runtime_env={"env_vars": dict(env)} if env else None,
        ).remote()
        remote = Remote(actor, name, failure, fix)
        await remote.make(target, args, kwargs or {}, deadline_s)
        return remote


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
