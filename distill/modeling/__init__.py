"""Decoders whose weights are put in place, taken away and moved layer by layer: structure without memory of its own,
packed batches, streaming, LoRA adapters."""
