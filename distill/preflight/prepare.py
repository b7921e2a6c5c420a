"""The `prepare` script of a recipe: run once, and again when the script changes.

`OUTPUT/prepared.json` names the version that filled OUTPUT. It is written last, so a script that was interrupted counts
as not run.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from distill.config import PrepareConfig
from distill.errors import ConfigError, DistillError, EnvironmentFault, MissingDependency
from distill.registry import did_you_mean

_STAMP = "prepared.json"
_TAIL = 20
"""Lines of a failed script's messages that its error shows."""


def version_of(script: Path) -> str:
    """A hash of the Python files in the script's folder, which it may import."""
    digest = hashlib.sha256()
    for file in sorted(script.parent.glob("*.py")):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def is_prepared(config: PrepareConfig) -> bool:
    """The output is complete and was made by the script as it is now. Raises ConfigError when there is no script."""
    if not config.script.is_file():
        folder = config.script.parent
        scripts = [file.name for file in folder.glob("*.py")] if folder.is_dir() else []
        raise ConfigError(
            f"prepare.script: there is no file {config.script}",
            fix=did_you_mean(config.script.name, scripts) if scripts else f"{folder} holds no script",
        )
    return _stamp(config) == version_of(config.script)


def prepare(config: PrepareConfig) -> None:
    """Run the script unless its output is there already. Its output goes to this process's terminal.

    Another process that prepares the same output is waited for. Raises the error that `is_prepared` raises,
    MissingDependency when the script lacks a package, EnvironmentFault when it fails otherwise.
    """
    if is_prepared(config):
        return
    with _only_one(config.output):
        if is_prepared(config):
            return
        if _stamp(config) is not None:  # made by us, by another version of the script
            shutil.rmtree(config.output)
        version = version_of(config.script)
        _run_script(config)
        if not config.output.is_dir():
            raise EnvironmentFault(f"prepare.script: {config.script} ended well, but made no folder {config.output}")
        (config.output / _STAMP).write_text(json.dumps({"script": str(config.script), "version": version}) + "\n")


def _stamp(config: PrepareConfig) -> str | None:
    try:
        return str(json.loads((config.output / _STAMP).read_bytes())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextmanager
def _only_one(output: Path) -> Generator[None]:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = (output.parent / f".{output.name}.lock").open("w")
    except OSError as error:
        raise EnvironmentFault(
            f"prepare.output: {output} cannot be made: {error.strerror}", fix="give another prepare.output=FOLDER"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run_script(config: PrepareConfig) -> None:
    command = [sys.executable, str(config.script), "--output", str(config.output)]
    tail: deque[str] = deque(maxlen=_TAIL)
    if sys.stderr.isatty():
        # A script draws its progress on the terminal only when it has the terminal itself.
        code = subprocess.run(command, check=False).returncode
    else:
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace") as process:
            assert process.stderr is not None
            for line in process.stderr:
                sys.stderr.write(line)
                tail.append(line.rstrip())
            code = process.wait()
    if code:
        raise _failure(config, code, list(tail))


def _failure(config: PrepareConfig, code: int, tail: list[str]) -> DistillError:
    said = "\n".join(f"    {line}" for line in tail)
    why = f"its last words were\n{said}" if said else "its messages stand above"
    missing = next((line for line in tail if line.startswith(("ModuleNotFoundError:", "ImportError:"))), None)
    if missing:
        return MissingDependency(
            f"prepare.script: {config.script} lacks a package: {missing.partition(': ')[2]}",
            why=why,
            fix="pip install 'distill-engine[recipes]', or what the recipe's README names",
        )
    how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
    return EnvironmentFault(f"prepare.script: {config.script} {how}", why=why, fix="mend what it says and start again")
