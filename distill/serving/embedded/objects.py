"""Weight objects that a teacher server knows: what they are made of and what they take, from headers alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from distill.errors import ConfigError
from distill.modeling.adapters import LoraAdapter
from distill.modeling.forward import stream_bytes, why_no_stream
from distill.modeling.skeleton import Skeleton
from distill.protocols import WeightCosts, WeightSource
from distill.serving.embedded.requests import Bounds
from distill.serving.embedded.served import Limits, context_length, some, stop_ids
from distill.weights.files import Checkpoint


@dataclass(slots=True)
class WeightObject:
    """One registered object."""

    source: WeightSource
    checkpoint: Checkpoint
    costs: WeightCosts
    bounds: Bounds
    digests: dict[str, str] = field(default_factory=dict[str, str])
    """Tensor name -> xxh3-64, of what was copied: filled by the first copy, compared with by all later ones."""

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def is_adapter(self) -> bool:
        return self.source.base is not None


def open_object(source: WeightSource, base: WeightObject | None, limits: Limits) -> WeightObject:
    """Read the headers and check that all tensors have a place. No weights are read.

    Raises ConfigError for a folder that cannot be served, TeacherError for files that are broken.
    """
    if (source.folder / "adapter_config.json").is_file() != (base is not None):
        said = "no base is named" if base is None else f"it is no adapter, and {base.name} is named as its base"
        raise ConfigError(f"{source.name}: {source.folder}: {said}", fix="name a base for adapters only")
    checkpoint = Checkpoint.open(source.folder)
    skeleton = Skeleton.build(
        source.folder if base is None else base.source.folder, dtype=limits.dtype, device=limits.device
    )
    try:
        if base is not None:
            adapter = LoraAdapter.build(source.folder, skeleton.model, limits.dtype)
            costs = WeightCosts(adapter.nbytes, skeleton.layers, adapter.total_params, adapter.total_params, None)
            return WeightObject(source, checkpoint, costs, base.bounds)
        check_names(skeleton, checkpoint)
        return WeightObject(source, checkpoint, _costs(skeleton), _bounds(source, skeleton, limits))
    finally:
        skeleton.give_back()


def _costs(skeleton: Skeleton) -> WeightCosts:
    return WeightCosts(
        bytes=skeleton.nbytes,
        layers=skeleton.layers,
        total_params=skeleton.total_params,
        active_params=skeleton.active_params,
        stream_bytes=None if why_no_stream(skeleton) else stream_bytes(skeleton),
    )


def _bounds(source: WeightSource, skeleton: Skeleton, limits: Limits) -> Bounds:
    rows = int(skeleton.model.get_output_embeddings().weight.shape[0])
    count = source.vocab_size or int(skeleton.config.vocab_size)
    if count > rows:
        raise ConfigError(
            f"{source.name}: the head has {rows} rows, but the vocabulary is said to have {count} entries",
            fix=f"give a vocabulary of {rows} or less",
        )
    return Bounds(count, context_length(skeleton.config, source.folder, limits), stop_ids(source.folder))


def check_names(skeleton: Skeleton, checkpoint: Checkpoint) -> None:
    """Each tensor of the model is in the files with its shape, and nothing else is. Raises ConfigError."""
    wanted = {name: shape for piece in skeleton.pieces for name, shape in skeleton.sources(piece.index).items()}
    aliases = skeleton.aliases
    found = set(checkpoint.tensors)
    by_saved = {saved: alias for alias, saved in aliases.items()}
    where: Path = checkpoint.folder
    if missing := sorted(name for name in wanted if name not in found and by_saved.get(name) not in found):
        raise ConfigError(f"{where}: the weights file lacks {some(missing)}", fix="serve this model with SGLang")
    if strays := sorted(found - set(wanted) - set(aliases)):
        raise ConfigError(f"{where}: the model has no place for {some(strays)}", fix="serve this model with SGLang")
    for name, shape in wanted.items():
        stored = checkpoint.tensors.get(name)
        if stored is not None and stored.shape != shape:
            raise ConfigError(f"{where}: {name} has shape {stored.shape}, the model needs {shape}")
