"""The programs and devices that the run's processes will use on this machine. Another process is asked about torch."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import lru_cache

from distill.config import RunConfig, StudentConfig
from distill.errors import ConfigError, EnvironmentFault, MissingDependency
from distill.objectives import kernels
from distill.protocols import Objective

_PROBE_TIMEOUT_S = 120.0
"""torch has been seen to take half a minute from a cold network disk."""
_COUNT_GPUS = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
_FIND = "import importlib.util as i, sys; print(*[name for name in sys.argv[1:] if i.find_spec(name) is None], '.')"
_MODULES = {"embedded": ("distill", "torch", "transformers"), "sglang": ("sglang",)}
"""Server program -> the modules that its interpreter must have."""
_PACKAGES = {"embedded": "distill-engine", "sglang": "distill-engine[sglang]"}


def check_programs(config: RunConfig) -> str:
    """A note where nothing could be checked, else an empty text.

    Raises ConfigError for an interpreter that is none, MissingDependency where it lacks the server program or the
    student a package, EnvironmentFault for a CUDA device that is not there.
    """
    if config.ray_address is not None:
        return (
            f"devices and programs were not looked at: the run's processes start where Ray at {config.ray_address} says"
        )
    if config.server.program in _MODULES:
        interpreter = _interpreter(config)
        _check_modules(interpreter, config.server.program)
        _check_device("server.device", config.server.device, interpreter)
    _check_device("student.device", config.student.device, sys.executable)
    _check_ranks(config)
    if config.student.backend == "hf":
        _check_student_packages(config.student)
    return ""


def _check_student_packages(student: StudentConfig) -> None:
    if student.lora is not None:
        _require("student.lora", "peft", "lora", "remove student.lora")
    if student.optimizer == "adamw_8bit":
        _require("student.optimizer=adamw_8bit", "bitsandbytes", "adam8bit", "set student.optimizer=adamw")


def _require(setting: str, package: str, extra: str, way_out: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingDependency(
            f"{setting} needs the package {package!r}, which is not installed",
            fix=f"pip install 'distill-engine[{extra}]', or {way_out}",
        )


def _check_ranks(config: RunConfig) -> None:
    """On GPUs every rank of the student needs one of its own. On the CPU there may be any number."""
    ranks, device = config.student.ranks, config.student.device
    if ranks == 1 or device == "cpu":
        return
    there = int(_ask("student.device", sys.executable, _COUNT_GPUS))
    if ranks > there and (there or device != "auto"):
        raise EnvironmentFault(
            f"student.ranks is {ranks}, and torch sees {there} CUDA device{'' if there == 1 else 's'} here",
            why="each rank trains on a device of its own",
            fix=f"set student.ranks to {max(there, 1)} or less, student.device=cpu, or ray_address for more machines",
        )


def check_loss_kernel(config: RunConfig, objective: Objective) -> str:
    """A note where log p of the sampled tokens will come from a kernel that is not ours, else an empty text.

    Raises as `kernels.choose` does; the student, which also knows its model, asks it again when it starts.
    """
    student = config.student
    if student.backend != "hf":
        return ""
    head = kernels.Head(device=None, dtype=student.dtype, sampled_only=objective.contract.reads_sampled_only)
    # torch is asked about devices only where the answer can change anything
    if not kernels.choose(student.loss_kernel, head, kernels.why_absent).kernel or config.ray_address is not None:
        return ""
    head = replace(head, device=device_type(student.device))
    if not kernels.choose(student.loss_kernel, head, kernels.why_absent).kernel:
        return ""
    return f"{kernels.KEY}: cut-cross-entropy's kernel computes log p of the sampled tokens, if this release of it can"


def device_type(device: str) -> str:
    """cpu or cuda, of a `device` setting. Raises EnvironmentFault where torch cannot tell what auto is."""
    if device != "auto":
        return device.partition(":")[0]
    return "cuda" if int(_ask("student.device", sys.executable, _COUNT_GPUS)) else "cpu"


def _interpreter(config: RunConfig) -> str:
    if config.server.python is None:
        return sys.executable
    found = shutil.which(config.server.python)
    if found is None:
        raise ConfigError(
            f"server.python: {config.server.python} is not a program that can be run",
            fix="give the path of a Python interpreter",
        )
    return found


def _check_modules(interpreter: str, program: str) -> None:
    if interpreter == sys.executable:
        missing = [name for name in _MODULES[program] if importlib.util.find_spec(name) is None]
    else:
        missing = _ask("server.python", interpreter, _FIND, *_MODULES[program]).split()[:-1]
    if missing:
        raise MissingDependency(
            f"server.program is {program!r}, and {interpreter} has no {missing[0]}",
            fix=f"pip install '{_PACKAGES[program]}' there, or give server.python an interpreter that has it",
        )


def _check_device(key: str, device: str, interpreter: str) -> None:
    """`auto` and `cpu` are always there."""
    if not device.startswith("cuda"):
        return
    there = int(_ask(key, interpreter, _COUNT_GPUS))
    wanted = int(device.partition(":")[2] or 0)
    if wanted >= there:
        raise EnvironmentFault(
            f"{key} is {device}, and torch sees {there} CUDA device{'' if there == 1 else 's'} here",
            why=f"asked {interpreter}",
            fix=f"set {key} to "
            + (f"one of cuda:0 to cuda:{there - 1}" if there > 1 else "cuda:0" if there else "cpu or auto")
            + ", or see what `distill-run doctor` says of torch",
        )


@lru_cache(maxsize=16)
def _ask(key: str, interpreter: str, *program: str) -> str:
    """What the interpreter prints when it runs `program` (code and arguments)."""
    try:
        done = subprocess.run(
            [interpreter, "-c", *program], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(
            f"{key}: {interpreter} did not answer within {_PROBE_TIMEOUT_S:g} s", why=f"it was asked: {program[0]}"
        ) from error
    except OSError as error:
        raise ConfigError(f"{key}: {interpreter} cannot be run: {error.strerror}") from error
    if done.returncode or not done.stdout.strip():
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EnvironmentFault(f"{key}: {interpreter} cannot tell: {said}", why=f"it was asked: {program[0]}")
    return done.stdout.strip().splitlines()[-1]
