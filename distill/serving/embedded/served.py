"""A causal language model as the server uses it: hidden states, a head cut to the vocabulary, the ids that end a text.

N rows, B sequences, T positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.cache_utils import Cache

from distill.errors import ConfigError, EnvironmentFault, ServerError
from distill.modeling.head import logits
from distill.modeling.skeleton import Skeleton

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_checked: WeakSet[Any] = WeakSet()
"""Modules whose head is known to be run as they run it, whatever their weights are at the moment."""
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the command line says about any model that this server holds."""

    device: torch.device
    dtype: torch.dtype
    vocab_size: int | None = None
    context_length: int | None = None
    memory_bytes: int | None = None
    """Weights larger than this are refused."""


class ServedModel:
    """The model of one folder, on its device, ready to run. `load` builds it."""

    def __init__(self, model: Any, folder: Path, limits: Limits, skeleton: Skeleton | None = None) -> None:
        """`skeleton`: what `model` belongs to, if its weights lie in buffers from outside; they are all attached."""
        self.model = model
        self.skeleton = skeleton
        self.folder = folder
        self.limits = limits
        self.config: Any = model.config
        self._base = model.base_model
        self._head = model.get_output_embeddings()
        parameters = inspect.signature(self._base.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.vocab_size = self.counted_rows(folder, limits)
        self.context_length = context_length(self.config, folder, limits)
        self.stop_ids = stop_ids(folder)
        if model not in _checked:
            self._check_head()
            _checked.add(model)

    @classmethod
    def load(cls, folder: Path, limits: Limits) -> ServedModel:
        """Read a Hugging Face folder. Raises ConfigError or EnvironmentFault when it cannot be served."""
        model = load_model(folder, limits)
        return cls(model, folder, limits)

    def counted_rows(self, folder: Path, limits: Limits) -> int:
        """Rows of the head that are ids. Raises ConfigError when `limits` says more than there are."""
        rows = int(self._head.weight.shape[0])
        count = limits.vocab_size or int(self.config.vocab_size)
        if count > rows:
            raise ConfigError(
                f"{folder}: the head has {rows} rows, but the vocabulary is said to have {count} entries",
                fix=f"give --vocab-size {rows} or less",
            )
        return count

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Final hidden states (B, T, D) of whole sequences, padded on the right if at all."""
        return self._base(input_ids=ids_BT, use_cache=False).last_hidden_state

    def hidden_after(self, cache: Cache, ids_BT: Tensor, positions_BT: Tensor, mask_BL: Tensor) -> Tensor:
        """Final hidden states (B, T, D) of the tokens that follow what is in `cache`, which takes them in.

        `mask_BL` covers the L = cached + T columns and is False on the padding, which is on the left.
        """
        extra = {self._cache_name: cache}
        output = self._base(
            input_ids=ids_BT, position_ids=positions_BT, attention_mask=mask_BL, use_cache=True, **extra
        )
        return output.last_hidden_state

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 logits (N, V): padding rows of the head are cut before anything is normalised."""
        return logits(self.model, hidden_ND, self.vocab_size)

    def _check_head(self) -> None:
        """The head is run apart from the model, to pick rows: make sure that this gives what the model gives."""
        ids = torch.tensor([[0, 1, 2]], device=self.limits.device) % self.vocab_size
        with torch.inference_mode():
            whole = self.model(input_ids=ids, use_cache=False).logits[0, :, : self.vocab_size].float()
            ours = self.logits(self.hidden(ids)[0])
        if not torch.allclose(whole, ours, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise ConfigError(
                f"{self.folder}: {type(self.model).__name__} changes its logits after the head in a way not known here",
                fix="serve this model with SGLang",
            )


def context_length(config: Any, folder: Path, limits: Limits) -> int:
    """Tokens that a text may have. Raises ConfigError where nobody says."""
    known = [n for n in (getattr(config, "max_position_embeddings", None), limits.context_length) if n]
    if not known:
        raise ConfigError(f"{folder}: config.json does not say how long a text may be", fix="give --context-length")
    return min(known)


def load_model(folder: Path, limits: Limits) -> Any:
    """The transformers model of `folder`, all of its weights read from there."""
    check_folder(folder, limits)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    loader: Any = transformers.AutoModelForCausalLM  # its stub does not know output_loading_info
    try:
        model, notes = loader.from_pretrained(
            folder, dtype=limits.dtype, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{folder}: cannot be loaded: {_first_line(error)}") from error
    for key, meaning in (("missing_keys", "lacks"), ("mismatched_keys", "has other shapes for")):
        if names := sorted(str(name) for name in notes[key]):
            raise ConfigError(f"{folder}: the weights file {meaning} {some(names)}")
    layers = set(getattr(model.config, "layer_types", None) or ())
    if layers - _KNOWN_LAYERS:
        raise ConfigError(
            f"{folder}: layers of type {some(sorted(layers - _KNOWN_LAYERS))} are not served here",
            fix="serve this model with SGLang",
        )
    return model.to(limits.device).eval().requires_grad_(False)


def check_folder(folder: Path, limits: Limits) -> None:
    """Refuse a folder that is no model, or whose weights are larger than the limit, before reading any of it."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json there", fix="give a folder in Hugging Face layout")
    size = sum(weight_elements(folder)) * limits.dtype.itemsize
    if limits.memory_bytes is not None and size > limits.memory_bytes:
        raise EnvironmentFault(
            f"{folder}: {size / 1e9:.2f} GB of weights do not fit in the limit of {limits.memory_bytes / 1e9:.2f} GB",
            fix="raise the memory limit, or choose a smaller dtype",
        )


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of its index, or the single one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise ConfigError(f"{folder}: no model.safetensors and no model.safetensors.index.json there")


def weight_elements(folder: Path) -> list[int]:
    """Number of elements of each tensor in the folder, from the headers alone."""
    sizes: list[int] = []
    for file in weight_files(folder):
        try:
            with safe_open(file, "pt") as tensors:
                names = list(tensors.keys())
                sizes += [math.prod(tensors.get_slice(name).get_shape()) for name in names]
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: cannot be read: {_first_line(error)}") from error
    return sizes


def stop_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a text: `eos_token_id` of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        found = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


def choose_device(wanted: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises EnvironmentFault for a device that is not there."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise EnvironmentFault("--device cuda: torch sees no CUDA device", fix="use --device cpu")
    try:
        return torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"--device {wanted}: {_first_line(error)}") from error


def not_finite(where: str) -> ServerError:
    return ServerError(f"{where}: the model gave numbers that are not finite", fix="check its weights")


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def some(names: list[str], most: int = 4) -> str:
    """The first few of many names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
