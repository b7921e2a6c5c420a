"""Hydra's groups, one folder a seam, one YAML an implementation: each holds the settings of its own."""
