"""Classes and functions of the user's own, named as `package.module:Name`: imported and held against their interface.

Distill's own parts are known to fit; what is loaded of them is only what the controller needs anyway.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distill import registry
from distill.config import RunConfig
from distill.errors import ConfigError, DistillError, MissingDependency
from distill.protocols import SampleStore, ServerHost, Sink, StudentBackend
from distill.rollout.routing import router_function
from distill.teacher_manager import RunPolicy


@dataclass(frozen=True)
class Interface:
    """What a part of one kind must be: `members` it must have, and arguments it must take when it is called."""

    members: tuple[str, ...] = ()
    args: tuple[Any, ...] = ()
    kwargs: tuple[str, ...] = ()
    takes: str = ""
    """The arguments, for people; empty: how it is called is not checked, and it must be a class."""


def _members(protocol: type) -> tuple[str, ...]:
    """Methods that a protocol asks for. What is a property there may be set in a constructor elsewhere."""
    own = [kind for kind in protocol.__mro__ if getattr(kind, "_is_protocol", False)]
    named = {name: value for kind in reversed(own) for name, value in vars(kind).items()}
    return tuple(name for name, value in named.items() if callable(value) and (name == "__len__" or name[0] != "_"))


INTERFACES = {
    "grader": Interface(args=("", "", True), takes="(text, answer, finished)"),
    "sink": Interface(_members(Sink), (None, None, "", 0), takes="(folder, config, run_name, resumed_from)"),
    "store": Interface(
        _members(SampleStore), kwargs=("capacity", "first_ordinal"), takes="(*, capacity, first_ordinal)"
    ),
    "scheduler": Interface(
        _members(RunPolicy),
        (None,),
        ("visit_tokens",),
        takes="(system, *, visit_tokens)",
    ),
    "student": Interface(_members(StudentBackend)),
    "server": Interface(_members(ServerHost)),
    "objective": Interface(),
}
"""As `distill.build`, the observer and the student's worker call them. `build_objective` checks objectives further."""
_ROUTER = Interface(args=({},), takes="(row)")
"""As `distill.rollout.routing` calls the function of a rule."""
_PACKAGES = {"wandb": ("wandb", "take wandb out of observe.sinks")}
"""Sink -> the package that it needs, and the other way out."""


def check_parts(config: RunConfig) -> None:
    """Raises ConfigError for a part that is not what its place needs, MissingDependency without its package."""
    for key, kind, name in _named(config):
        if ":" in name:
            check_part(key, kind, name)
    for index, rule in enumerate(config.routing.rules):
        if rule.call is not None:
            check_router(f"routing.rules.{index}.call", rule.call)
    for sink in config.observe.sinks:
        package, way_out = _PACKAGES.get(sink, ("", ""))
        if package and importlib.util.find_spec(package) is None:
            raise MissingDependency(
                f"observe.sinks: {sink} needs the package {package!r}, which is not installed",
                fix=f"pip install 'distill-engine[{sink}]', or {way_out}",
            )


def check_part(key: str, kind: str, name: str) -> None:
    """Import the part called `name` and hold it against the interface of its kind. `key` is the setting for errors."""
    part, interface = _imported(key, name), INTERFACES[kind]
    if not (isinstance(part, type) or (interface.takes and callable(part))):
        wanted = "neither a class nor a function" if interface.takes else "no class"
        raise ConfigError(f"{key}: {name} is {wanted}, but {type(part).__name__}")
    missing = [member for member in interface.members if isinstance(part, type) and not hasattr(part, member)]
    if missing:
        raise ConfigError(
            f"{key}: {name} is no {kind}: it has no {', '.join(missing)}",
            fix=f"distill.protocols says what a {kind} is" if kind != "scheduler" else "see distill.teacher_manager",
        )
    if interface.takes and not _accepts(part, interface):
        raise ConfigError(f"{key}: {name} is no {kind}: it cannot be called with {interface.takes}")


def check_router(key: str, name: str) -> None:
    """Import the function of a rule of routing. Raises ConfigError when it cannot be called with a row."""
    if not _accepts(router_function(key, name), _ROUTER):
        raise ConfigError(
            f"{key}: {name} cannot be called with {_ROUTER.takes}",
            why="it is given one row, a mapping of its columns",
            fix="def choose(row): return 'math' if row['level'] > 3 else None",
        )


def _named(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """(setting, kind, name) of every part that the configuration chooses."""
    yield "objective.name", "objective", config.objective.name
    yield "student.backend", "student", config.student.backend
    yield "server.program", "server", config.server.program
    yield "store.name", "store", config.store.name
    yield "teacher_manager.scheduler", "scheduler", config.teacher_manager.scheduler
    yield "evaluation.grader", "grader", config.evaluation.grader
    if config.objective.outcome is not None:
        yield "objective.outcome.grader", "grader", config.objective.outcome.grader
    for index, sink in enumerate(config.observe.sinks):
        yield f"observe.sinks.{index}", "sink", sink


def _imported(key: str, name: str) -> Any:
    try:
        return registry.load_target(name, key)
    except DistillError:
        raise
    except Exception as error:  # code of the user's: anything may come out of its import
        raise ConfigError(
            f"{key}: {name} cannot be imported: {type(error).__name__}: {error}", fix="mend the module it is in"
        ) from error


def _accepts(part: Any, interface: Interface) -> bool:
    try:
        signature = inspect.signature(part)
    except (ValueError, TypeError):  # of C code, which does not tell
        return True
    try:
        signature.bind(*interface.args, **dict.fromkeys(interface.kwargs))
    except TypeError:
        return False
    return True
