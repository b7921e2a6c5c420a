"""What is learnt. One file an objective family; an objective is a frozen dataclass whose fields are its YAML settings.

Importing this package loads no torch: `build_objective` imports the family that a configuration names.
"""

from distill.objectives.build import build_objective

__all__ = ["build_objective"]
