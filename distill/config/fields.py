"""Kinds of values that the sections of a configuration hold, and what all sections share."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

NAME = re.compile(r"\w[\w.-]*")
"""Of a teacher and of a domain: they become parts of metrics' names, whose parts are separated by `/`."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6
"""Of a teacher, a domain, an outcome. A step is summed up in float32, which holds seven digits: what weighs less than a
millionth is lost beside the rest, and what weighs more leaves no room for it."""
INT32 = 2**31 - 1
"""Ids, counts and lengths are int32 on the wire and in the arrays."""
Positive = Annotated[int, Field(gt=0, le=INT32)]
Count = Annotated[int, Field(ge=0, le=INT32)]
Processes = Annotated[int, Field(gt=0, le=4096)]
"""Processes, or threads of one: more is a slip of the finger on any machine, and one controller watches them all."""
Steps = Annotated[int, Field(gt=0, le=99_999_999)]
"""A checkpoint's folder is named by its step, in eight digits."""
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""A year at most: clocks and locks of the operating system know no infinity."""
PATTERNS = {
    r"^(auto|cpu|cuda(:\d{1,3})?)$": "auto, cpu, cuda or cuda:N",
    r"^\w[\w.-]*$": "a name of letters, digits, '_', '.' and '-' that begins with neither a dot nor a dash",
    r"^[\w.:-]+$": "the address or the name of a host",
    r"^[A-Z_][A-Z0-9_]*$": "the name of an environment variable, in capitals",
}
"""What the patterns of texts mean, for people."""
DEVICE, NAME_PATTERN, HOST, VARIABLE = PATTERNS
_NAME_BYTES, _PATH_BYTES = 255, 4095
"""The longest file name and path of Linux (limits.h: NAME_MAX, PATH_MAX)."""


def _not_empty(value: Any) -> Any:
    if value == "":
        raise PydanticCustomError("unusable_path", "a path")
    return value


def _usable(path: Path) -> Path:
    """The operating system would refuse others with an error that names no setting."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise PydanticCustomError("unusable_path", "a path without the character NUL")
    if len(encoded) > _PATH_BYTES or any(len(part) > _NAME_BYTES for part in encoded.split(b"/")):
        raise PydanticCustomError("unusable_path", "a path that is not longer than the system allows")
    return path


FilePath = Annotated[Path, Field(strict=False), BeforeValidator(_not_empty), AfterValidator(_usable)]
Text = Annotated[str, Field(min_length=1)]
Host = Annotated[str, Field(pattern=HOST, max_length=253)]
Device = Annotated[str, Field(pattern=DEVICE, description="auto takes a GPU where there is one; cpu, cuda, cuda:N")]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)
