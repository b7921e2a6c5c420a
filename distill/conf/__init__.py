"""Hydra's groups, one folder a seam, one YAML an implementation: the file holds the settings that implementation has."""
