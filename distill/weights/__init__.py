"""Weights at rest: safetensors files, and the memory of a machine that its model servers share. Loads no torch."""
