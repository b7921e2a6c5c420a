"""What one looks at: metrics, the display, result.json and report.html. Loads no torch."""

from distill.observe.observer import Observer
from distill.observe.record import EvalRecord

__all__ = ["EvalRecord", "Observer"]
