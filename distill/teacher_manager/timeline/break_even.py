"""When a visit is better streamed than loaded, from bandwidth and speed.

A copy takes β·P_total/BW and a token 2·P_active/F, so B* = β·F·P_total / (2·BW·P_active) tokens compute as long as the
weights take to come. With B* tokens a stream hides its copy; the more often a teacher is used before it is evicted,
the better it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from distill.teacher_manager.timeline.case import NS, ceil_div, stream_bytes, stream_ns


@dataclass(frozen=True)
class Placement:
    """One teacher on one device behind one link."""

    total_params: int
    active_params: int
    layers: int
    bytes: int
    flops_per_s: int
    """Peak times MFU."""
    bytes_per_s: int

    @property
    def break_even_tokens(self) -> float:
        return self.bytes * self.flops_per_s / (2 * self.bytes_per_s * self.active_params)

    @property
    def copy_ns(self) -> int:
        return ceil_div(self.bytes * NS, self.bytes_per_s)

    @property
    def stream_bytes(self) -> int:
        """Room on the device for the two layer buffers."""
        return stream_bytes(self.bytes, self.layers)

    def compute_ns(self, tokens: int) -> int:
        return ceil_div(2 * tokens * self.active_params * NS, self.flops_per_s)

    def stream_ns(self, tokens: int) -> int:
        return stream_ns(self.copy_ns, self.compute_ns(tokens), self.layers)

    def exposed_ns(self, tokens: int) -> int:
        """What is left of a copy that runs beside an equal visit."""
        return max(0, self.copy_ns - self.compute_ns(tokens))

    def visits_until_resident_wins(self, tokens: int) -> int:
        """The least number of equal visits before eviction for which loading once is no slower than streaming each."""
        return max(1, ceil_div(self.copy_ns, self.stream_ns(tokens) - self.compute_ns(tokens)))

    def tokens_for_overhead(self, fraction: float) -> float:
        """Tokens a visit at which the copy is this fraction of copy + compute."""
        return (1 - fraction) / fraction * self.break_even_tokens
