"""Start or join a Ray cluster, host an object of ours in an actor, call it. The only file that imports ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from distill.errors import DistillError, EnvironmentFault, ServiceError
from distill.ray_folder import RayFolder
from distill.registry import load_target

OBJECT_STORE_BYTES = 2_000_000_000
"""Shared memory for batches on their way to the student. Ray spills to disk past it."""


_NODE_DIED = ("its node has died", "node has crashed")
"""How Ray's ActorDiedError ends when not the actor's process but the raylet that ran it is gone."""


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
        return getattr(self._held, method)(*(_taken(arg) for arg in args), **kwargs)

    def run(self, target: str, args: tuple[Any, ...]) -> Any:
        return load_target(target, "worker")(*args)

    def host(self) -> str:
        import ray

        return ray.util.get_node_ip_address()

    def pid(self) -> int:
        return os.getpid()


@dataclass(frozen=True, slots=True)
class Shared:
    """A value in the cluster's shared memory: given to several actors, it is sent to each machine once."""

    reference: Any

    @classmethod
    def put(cls, value: Any) -> Self:
        import ray

        return cls(ray.put(value))


def _taken(arg: Any) -> Any:
    if not isinstance(arg, Shared):
        return arg
    import ray

    return ray.get(arg.reference)


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

    async def run(self, target: str, *args: Any, deadline_s: float) -> Any:
        """Call the function `target` ("module:name") in the actor's process."""
        return await self._finish(self._actor.run.remote(target, args), target, deadline_s)

    async def host(self, deadline_s: float = 60) -> str:
        """Address of the machine that the actor is on."""
        return await self._finish(self._actor.host.remote(), "host", deadline_s)

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
            what, why = _death(self.name, str(error))
            raise self._failure(f"{what} during {method!r}", why=why, fix=self._fix) from error

    def kill(self) -> None:
        """End the process now. What it should have saved must be saved before."""
        import ray

        ray.kill(self._actor, no_restart=True)


class Cluster:
    """A Ray cluster for the length of a run. With no address, one of our own on this machine."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._folder: RayFolder | None = None

    @property
    def on_this_machine(self) -> bool:
        """It is our own: all of its processes are on this machine."""
        return self._address is None

    def __enter__(self) -> Self:
        import ray

        # Local processes only: nothing of a run is reported anywhere, and no dashboard listens.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "configure_logging": True}
        if self._address is None:
            self._folder = RayFolder()
            options |= {
                "address": "local",
                "_temp_dir": str(self._folder.path),
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
        else:
            options |= {"address": self._address}
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            self._remove_folder()
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
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None

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
        remote = self.actor(name, failure=failure, fix=fix, threads=threads, env=env)
        await remote.make(target, args, kwargs or {}, deadline_s)
        return remote

    def actor(
        self,
        name: str,
        *,
        failure: type[ServiceError],
        fix: str = "",
        threads: int = 1,
        env: Mapping[str, str] | None = None,
    ) -> Remote:
        """An actor that holds nothing yet: call `make` before `call`."""
        import ray

        actor_class: Any = ray.remote(_Actor)  # pyright: ignore[reportArgumentType]
        actor = actor_class.options(
            num_cpus=0,
            max_concurrency=threads,
            runtime_env={"env_vars": dict(env)} if env else None,
        ).remote()
        return Remote(actor, name, failure, fix)


def _death(name: str, said: str) -> tuple[str, str]:
    """What died, and what Ray knows of why. Its first lines only say that the actor is gone; the last one says more."""
    last = said.strip().splitlines()[-1] if said.strip() else ""
    why = last.partition(" Some common causes")[0].strip()  # advice about Ray's own commands
    if any(sign in why for sign in _NODE_DIED):
        return f"{name}: Ray's process on its machine (raylet) died, and {name} with it,", why
    return f"{name}: its process died", why


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
