"""Everything that is known of a run so far, over all its resumes. Results, display and report are functions of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distill.observe.record import EvalRecord, Event, Span, StepRecord, Visit
from distill.observe.timeline import Timeline
from distill.protocols import TeacherFigures

KEPT_EVENTS = 500
KEPT_VISITS = 10_000
SAVED_VISITS = 2_000
KEPT_SPANS = 6_000
"""Recent spans that the report can zoom into."""


@dataclass(frozen=True, slots=True)
class DomainRow:
    """Accuracies of one domain; `teacher` is the best of the domain's teachers on it."""

    domain: str
    base: float | None
    teacher_name: str
    teacher: float | None
    student: float | None

    @property
    def ratio(self) -> float | None:
        """Student / teacher."""
        return self.student / self.teacher if self.student is not None and self.teacher else None


@dataclass(slots=True)
class Counters:
    version: int = 0
    samples: int = 0
    tokens: int = 0
    weight_updates: int = 0
    max_staleness: int = 0
    peak_memory_bytes: int = 0


@dataclass(slots=True)
class History:
    run_name: str
    total_steps: int
    teachers: Sequence[str]
    domain_teachers: Mapping[str, Sequence[str]]
    counters: Counters = field(default_factory=Counters)
    evals: list[EvalRecord] = field(default_factory=list[EvalRecord])
    events: deque[Event] = field(default_factory=lambda: deque[Event](maxlen=KEPT_EVENTS))
    visits: deque[Visit] = field(default_factory=lambda: deque[Visit](maxlen=KEPT_VISITS))
    spans: deque[Span] = field(default_factory=lambda: deque[Span](maxlen=KEPT_SPANS))
    timeline: Timeline = field(default_factory=Timeline)
    swaps: dict[str, int] = field(default_factory=dict[str, int])
    quarantined: dict[str, int] = field(default_factory=dict[str, int])
    """Samples that were set aside, by the teacher at fault ("": no teacher)."""
    slots: TeacherFigures = field(default_factory=TeacherFigures)
    last: StepRecord | None = None
    _slots_before: TeacherFigures = field(default_factory=TeacherFigures)
    _swaps_before: dict[str, int] = field(default_factory=dict[str, int])
    _stay: dict[str, Visit] = field(default_factory=dict[str, Visit])

    def add_span(self, span: Span) -> None:
        self.timeline.add(span.kind, span.start, span.end)
        self.spans.append(span)
        if span.kind == "swap":
            self._begin_visit(Visit(span.label, span.start, span.end, span.end))
        elif span.kind == "score" and span.label in self._stay:
            stay = self._stay[span.label]
            stay.end = max(stay.end, span.end)
        elif span.kind == "score":  # it was in its slot before we looked
            self._begin_visit(Visit(span.label, span.start, span.start, span.end))

    def _begin_visit(self, visit: Visit) -> None:
        self._stay[visit.teacher] = visit
        self.visits.append(visit)

    def count_swaps(self, counts: Mapping[str, int]) -> None:
        """Take this process' counts; those of the processes before it are added."""
        names = dict.fromkeys([*self.teachers, *self._swaps_before, *counts])
        self.swaps = {name: self._swaps_before.get(name, 0) + counts.get(name, 0) for name in names}

    def count_slots(self, figures: TeacherFigures) -> None:
        """As `count_swaps`."""
        self.slots = self._slots_before.plus(figures)

    def evaluated(self, who: str) -> bool:
        return any(record.who == who for record in self.evals)

    def accuracy(self, who: str, domain: str) -> float | None:
        """The latest."""
        found = [item for item in self.evals if item.who == who and item.domain == domain and item.accuracy is not None]
        return found[-1].accuracy if found else None

    def domains(self) -> list[DomainRow]:
        """The headline: every domain with base, its best teacher, and student."""
        names = dict.fromkeys([*self.domain_teachers, *(record.domain for record in self.evals)])
        return [self._domain(name) for name in names]

    def _domain(self, domain: str) -> DomainRow:
        own = list(self.domain_teachers.get(domain, ()))
        marks = {name: mark for name in own if (mark := self.accuracy(name, domain)) is not None}
        best = max(own, key=lambda name: marks.get(name, -1.0), default="")
        return DomainRow(domain, self.accuracy("base", domain), best, marks.get(best), self.accuracy("student", domain))

    def curve(self, domain: str, field_name: str) -> list[tuple[int, float]]:
        """(step, value) of "accuracy" or "kl" of the student on a domain; the base is its step 0."""
        return [
            (record.step, getattr(record, field_name))
            for record in self.evals
            if record.domain == domain and record.who in ("base", "student") and getattr(record, field_name) is not None
        ]

    def state(self, now: float) -> dict[str, Any]:
        """Plain JSON for a checkpoint."""
        return {
            "clock": now,
            "counters": asdict(self.counters),
            "evals": [asdict(record) for record in self.evals],
            "events": [asdict(event) for event in self.events],
            "visits": [asdict(visit) for visit in list(self.visits)[-SAVED_VISITS:]],
            "timeline": self.timeline.state(),
            "swaps": dict(self.swaps),
            "slots": asdict(self.slots),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()` of an earlier process. Comes before anything else is recorded."""
        self.counters = Counters(**state["counters"])
        self.evals = [EvalRecord(**record) for record in state["evals"]]
        self.events.extendleft(reversed(_each(Event, state["events"])))
        self.visits.extend(_each(Visit, state["visits"]))
        self.timeline.restore(state["timeline"], horizon=float(state["clock"]))
        self._swaps_before = {name: int(count) for name, count in state["swaps"].items()}
        self.count_swaps({})
        self._slots_before = TeacherFigures(**state["slots"])
        self.count_slots(TeacherFigures())


def _each(kind: Any, rows: Iterable[Mapping[str, Any]]) -> list[Any]:
    return [kind(**row) for row in rows]
