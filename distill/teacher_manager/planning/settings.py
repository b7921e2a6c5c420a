"""The constants of the scheduler, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

TURN_COPIES = 8.0
"""A turn of so many copies: where all queues are always full, changing between them takes a ninth of the time."""


@dataclass(frozen=True)
class Settings:
    """Times are seconds, the rest are ratios or counts. Chosen on random traces; none is sharp."""

    announced_share: float = 0.4
    """What a second of announced work counts beside a queued one: it will come, but nobody knows when."""
    age_weight: float = 1.0
    """By how much a second of mean wait raises a teacher's claim to the next copy; 0 starves small queues."""
    worth_copies: float = 2.0
    """A copy waits until the queued work is this many times its length: small batches move bytes for little work ..."""
    patience_copies: float = 16.0
    """... or until its jobs have waited for this many times its length, all together (the rule of ski rental)."""
    replicate_copies: float = 2.0
    """A teacher that a device holds comes to one more if that device's share of the queue is so many copies long."""
    prefetch_gain: float = 2.0
    """Announced work of a prefetch over that of what it displaces: less would swap to and fro on a guess."""
    drain_ahead_copies: float = 2.5
    """When the work that would hide the next copy falls below so many copies, serve what that copy displaces first."""
    deadline_margin_s: float = 2.0
    """Slack under which a teacher is copied, and 2 x under which jobs are served, by deadline alone: a job that runs on
    the device cannot be stopped, and the longest takes about so long."""
    stream_copies: float = 1.0
    """A teacher that deadlines call for is streamed if its queued work is this many copies long: nothing is exposed."""
    jitter_s: float = 0.05
    """Added to the length of a copy: ends of visits do not fall on the instant at which it must start."""
    look_at_links: int = 8
    """Idle links that an arrival is offered to."""
    most_candidates: int = 16
    """Teachers that are compared for one copy, those that wait longest: with `looks_at_once` it bounds the time of a
    decision in a large fleet and changes nothing in a small one."""
    looks_at_once: int = 2
    """Devices that are offered a copy in one instant; the others follow in the next."""
    visit_tokens: int = 0
    """A visit takes further jobs of its teacher up to so many tokens, at least one job. 0: one job, which is best where
    a visit costs nothing beyond its jobs."""
    turn_copies: float = 0.0
    """A teacher that no device holds displaces residents with work when its jobs have waited, on average, for so many
    lengths of its copy and those have been there as long. 0: a queue that never empties keeps its device."""

    recurring: bool = False
    """Teachers are needed again and again, beyond what is announced: what has room comes to stay, and is streamed only
    where computing hides the reading or it can never be resident. Otherwise all that is known is what is announced."""

    @classmethod
    def for_runs(cls, visit_tokens: int) -> Settings:
        """For real servers: a visit is one batch, queues may never empty, and every step needs its teachers anew."""
        return cls(visit_tokens=visit_tokens, turn_copies=TURN_COPIES, recurring=True)
