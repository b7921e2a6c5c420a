"""What a model server is, from its /server_info and /model_info, whichever program it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from distill.errors import ServerError
from distill.protocols import ServerInfo

EMBEDDED = "distill-embedded"
"""What the embedded server calls itself."""


def describe_server(
    server: Mapping[str, Any], model: Mapping[str, Any], label: str, *, assumed_vocab: int | None = None
) -> ServerInfo:
    """Raises ServerError when the vocabulary or the context length cannot be learnt. `assumed_vocab`: what to take the
    vocabulary to be where nobody tells.

    SGLang names neither the vocabulary nor, unless it was set, the context length: they are read from the model's
    config.json, which has to be visible here. Its /server_info holds the weight version of its start, /model_info the
    present one.
    """
    program = str(server.get("program", "sglang"))
    model_path = str(model.get("model_path") or server.get("model_path") or "")
    config = {} if "vocab_size" in server and server.get("context_length") else _model_config(model_path)
    vocab_size = server.get("vocab_size") or config.get("vocab_size") or assumed_vocab
    context_length = server.get("context_length") or config.get("max_position_embeddings")
    if not vocab_size or not context_length:
        missing = "context length" if vocab_size else "vocabulary size"
        raise ServerError(
            f"{label} does not tell its {missing}, and {Path(model_path, 'config.json')} does not either",
            why="requests are checked against it before they are sent, because a bad one can end the server",
            fix="give the server a model folder that this machine can read, and --context-length",
        )
    return ServerInfo(
        program=program,
        version=str(server.get("version", "unknown")),
        vocab_size=int(vocab_size),
        context_length=int(context_length),
        weight_version=str(model.get("weight_version") or server.get("weight_version") or ""),
        packed=bool(server.get("packed", False)),
    )


def _model_config(model_path: str) -> dict[str, Any]:
    """config.json of a model folder; the text part of a model with several. Empty when it cannot be read."""
    try:
        config: Any = json.loads(Path(model_path, "config.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    whole = cast("dict[str, Any]", config)
    return whole | cast("dict[str, Any]", whole.get("text_config") or {})
