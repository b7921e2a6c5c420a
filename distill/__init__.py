"""Distill: a multi-teacher on-policy distillation engine. `from distill import run, RunConfig`; loads no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distill.build import run
    from distill.config import RunConfig

__all__ = ["RunConfig", "__version__", "run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Looked up on first use: `import distill` must stay cheap.
    if name == "run":
        from distill.build import run

        return run
    if name == "RunConfig":
        from distill.config import RunConfig

        return RunConfig
    raise AttributeError(f"module 'distill' has no attribute {name!r}")
