"""Time-shared teachers without this library, in a process of its own: transformers and accelerate.

    python -m benchmarks.teachers_baselines --case JSON

The case: how (from_pretrained or disk_offload), folders, tokens a visit, length of a sample, laps, scratch folder. The
result: seconds of each visit, and of it of each swap. Log-probabilities of the given tokens are computed and kept, as a
teacher server does.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def score(model: Any, ids_BL: torch.Tensor) -> torch.Tensor:
    """(B, L - 1) log p of each token but the first."""
    with torch.inference_mode():
        logits_BLV = model(ids_BL, use_cache=False).logits[:, :-1]
        return logits_BLV.log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0]


def by_loading(folder: str, case: dict[str, Any]) -> Callable[[], Any]:
    """Each visit loads the teacher anew."""
    from transformers import AutoModelForCausalLM

    return lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def by_offload(folder: str, case: dict[str, Any]) -> Callable[[], Any]:
    """The teacher's weights are in files of accelerate's, which read them at every layer."""
    from accelerate import disk_offload
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    disk_offload(model, str(Path(case["scratch"]) / Path(folder).name), execution_device=torch.device("cpu"))
    return lambda: model


WAYS = {"from_pretrained": by_loading, "disk_offload": by_offload}


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each visit and swap, all teachers in turn, one lap to warm up first."""
    ready = {folder: WAYS[case["how"]](folder, case) for folder in case["folders"]}
    torch.manual_seed(0)
    ids_BL = torch.randint(case["vocab"], (max(1, case["tokens"] // case["length"]), case["length"]))
    visit_s: list[float] = []
    swap_s: list[float] = []
    for lap in range(case["laps"] + 1):
        for folder in case["folders"]:
            began = time.perf_counter()
            model = ready[folder]()
            swapped = time.perf_counter()
            score(model, ids_BL)
            if lap:
                visit_s.append(time.perf_counter() - began)
                swap_s.append(swapped - began)
            del model
    return {"visit": visit_s, "swap": swap_s}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True)
    found = measure(json.loads(parser.parse_args().case))
    print(json.dumps(found))
