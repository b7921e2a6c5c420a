"""Names of tensors in a checkpoint, and where in a model each of them lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

_NOT_THE_MODEL = {
    "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "eos_token_id",
    "bos_token_id", "pad_token_id", "_attn_implementation", "tokenizer_class",
}  # fmt: skip
"""Keys of config.json that do not change which function the weights compute."""


def function_of(config: Any) -> dict[str, Any]:
    """What a transformers config says about the function that the weights compute: equal for models that differ in
    their weights alone."""
    return {key: value for key, value in config.to_dict().items() if key not in _NOT_THE_MODEL}


def live_tensors(model: Any, named_by: Any = None) -> dict[str, Tensor]:
    """The tensors that a checkpoint of `model` holds, by their names there, as views of the model's own memory: writing
    to one changes the model. Tied weights appear once.

    Where the model fuses what files keep apart, such as experts, each is a window onto the fused tensor. `named_by`:
    the model whose checkpoint gives the names, when it is another one of the same architecture.
    """
    tied = tied_names(model)
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    found = _as_in_files(named_by or model, own)
    memory = {_memory(tensor) for tensor in own.values()}
    if all(_memory(tensor) in memory for tensor in found.values()):
        return found
    return own  # what files hold is computed from it, not a part of it: only whole folders can be loaded


def tied_names(model: Any) -> dict[str, str]:
    """Name that is only an alias -> name under which the tensor is saved."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


@dataclass(frozen=True, slots=True)
class Window:
    """One tensor of a checkpoint as a part of a tensor of the model."""

    name: str
    """In the checkpoint."""
    param: str
    """In the model's state dict."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Elements from the beginning of `param`."""

    def of(self, param: Tensor) -> Tensor:
        """The part of `param`, sharing its memory."""
        return param.as_strided(self.shape, self.stride, param.storage_offset() + self.offset)


def windows(model: Any) -> dict[str, list[Window]] | None:
    """For each tensor of the model's state dict, the tensors of a checkpoint that make it up. The model may be without
    memory. None where files hold something that is computed from the model's tensors."""
    tied = tied_names(model)
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    owners = {_memory(tensor): name for name, tensor in own.items()}
    parts: dict[str, list[Window]] = {name: [] for name in own}
    for name, tensor in _as_in_files(model, own).items():
        owner = owners.get(_memory(tensor))
        if owner is None:
            return None
        parts[owner].append(Window(name, owner, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())))
    return parts


def _as_in_files(named_by: Any, own: dict[str, Tensor]) -> dict[str, Tensor]:
    with _Uncopied():
        return revert_weight_conversion(named_by, own)


def _memory(tensor: Tensor) -> int:
    """Which memory a tensor is a view of; tensors on the meta device have no address, but a storage of their own."""
    storage: Any = tensor.untyped_storage()
    return storage._cdata


class _Uncopied(TorchFunctionMode):
    """Inside, parts of a tensor stay views: transformers gives each memory of its own when it splits for a file."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


class Weightless(TorchFunctionMode):
    """Inside, on this thread, tensors that are made to be filled have no memory (device meta), and those that are
    computed do: a module that is built has its constants, such as rotary frequencies, and no weights."""

    _TO_BE_FILLED = frozenset({torch.empty, torch.ones, torch.zeros, torch.full, torch.rand, torch.randn})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._TO_BE_FILLED and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
