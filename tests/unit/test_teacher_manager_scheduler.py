"""The scheduler on a virtual clock: whose turn it is, and that no job is lost or given out twice."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distill.teacher_manager.scheduler import AnnouncedScheduler, Job, Visit, Wait

HOLD_S = 1.0


def make(teachers: str = "abc", slots: int = 1, **options: float) -> AnnouncedScheduler:
    settings = {"hold_s": HOLD_S, "max_visit_tokens": 1000} | options
    return AnnouncedScheduler(list(teachers), [f"s{index}" for index in range(slots)], **settings)  # pyright: ignore


def job(id: int, teacher: str, tokens: int = 10, ordinal: int | None = None) -> Job:
    return Job(id, f"sample-{id}", teacher, tokens, id if ordinal is None else ordinal)


def visit(scheduler: AnnouncedScheduler, slot: str = "s0", now: float = 0.0) -> Visit:
    decision = scheduler.next(slot, now)
    assert isinstance(decision, Visit), decision
    return decision


def serve(scheduler: AnnouncedScheduler, slot: str = "s0", now: float = 0.0) -> Visit:
    """A visit that ends well at once."""
    done = visit(scheduler, slot, now)
    scheduler.finish(slot, [], done.teacher, now)
    return done


def test_a_slot_waits_for_an_event_when_nothing_has_arrived() -> None:
    scheduler = make()
    scheduler.announce("sample-1", "a", 10, 0.0)
    assert scheduler.next("s0", 5.0) == Wait(None)


def test_a_visit_takes_all_jobs_of_its_teacher_by_ordinal() -> None:
    scheduler = make()
    for number, (id, teacher) in enumerate([(3, "a"), (1, "a"), (2, "b")]):
        scheduler.arrive(job(id, teacher), float(number))
    assert [item.id for item in visit(scheduler).jobs] == [1, 3]


def test_the_resident_goes_first_although_others_have_waited_longer() -> None:
    scheduler = make()
    scheduler.arrive(job(1, "b"), 0.0)
    assert serve(scheduler).teacher == "b"
    scheduler.arrive(job(2, "a"), 1.0)
    scheduler.arrive(job(3, "b"), 2.0)
    assert serve(scheduler, now=2.0).teacher == "b"
    assert serve(scheduler, now=10.0).teacher == "a"


def test_a_resident_that_has_used_up_its_stay_gives_way_to_others_but_not_to_nobody() -> None:
    scheduler = make(max_visit_tokens=25)
    for id in range(4):
        scheduler.arrive(job(id, "a"), 0.0)
    assert [item.id for item in serve(scheduler).jobs] == [0, 1]
    scheduler.arrive(job(9, "b"), 0.0)
    assert serve(scheduler).teacher == "b"
    assert [item.id for item in serve(scheduler).jobs] == [2, 3]
    scheduler.arrive(job(10, "a", tokens=99), 0.0)
    assert [item.id for item in serve(scheduler).jobs] == [10], "one job goes, however large it is"
    scheduler.arrive(job(11, "a"), 0.0)
    assert serve(scheduler).teacher == "a"


def test_a_slot_holds_its_teacher_for_announced_samples_and_swaps_when_the_time_is_up() -> None:
    scheduler = make()
    scheduler.announce("sample-2", "a", 10, 0.0)
    scheduler.arrive(job(1, "a"), 0.0)
    serve(scheduler, now=3.0)
    scheduler.arrive(job(5, "b"), 3.0)
    assert scheduler.next("s0", 3.5) == Wait(3.0 + HOLD_S)
    assert visit(scheduler, now=3.0 + HOLD_S).teacher == "b"


def test_a_withdrawn_announcement_is_not_waited_for() -> None:
    scheduler = make()
    scheduler.announce("sample-2", "a", 10, 0.0)
    scheduler.arrive(job(1, "a"), 0.0)
    serve(scheduler, now=3.0)
    scheduler.arrive(job(5, "b"), 3.0)
    scheduler.withdraw("sample-2")
    assert visit(scheduler, now=3.1).teacher == "b"


def test_a_job_past_the_longest_wait_goes_before_the_resident() -> None:
    scheduler = make(max_wait_s=60.0)
    scheduler.arrive(job(1, "a"), 0.0)
    serve(scheduler)
    scheduler.arrive(job(2, "c"), 1.0)
    for number in range(10, 16):  # the resident always has work
        scheduler.arrive(job(number, "a"), float(number))
        assert serve(scheduler, now=float(number)).teacher == "a"
    scheduler.arrive(job(99, "a"), 60.0)
    assert serve(scheduler, now=60.9).teacher == "a"
    scheduler.arrive(job(100, "a"), 61.0)
    assert serve(scheduler, now=61.0).teacher == "c"


def test_a_teacher_that_one_slot_holds_is_left_to_that_slot() -> None:
    scheduler = make("ab", slots=2)
    scheduler.arrive(job(1, "a"), 0.0)
    visit(scheduler, "s0")
    scheduler.arrive(job(2, "a"), 0.0)
    assert scheduler.next("s1", 0.0) == Wait(None)
    scheduler.arrive(job(3, "b"), 0.0)
    assert visit(scheduler, "s1").teacher == "b"


def test_a_slot_that_lost_its_server_frees_its_teacher_and_returned_jobs_keep_their_age() -> None:
    scheduler = make("ab", slots=2, max_wait_s=60.0)
    scheduler.arrive(job(1, "a"), 0.0)
    taken = visit(scheduler, "s0")
    scheduler.finish("s0", taken.jobs, None, 50.0)
    scheduler.arrive(job(2, "b"), 50.0)
    assert visit(scheduler, "s1", 60.0) == taken, "older than the limit, so it goes before b"


def test_a_dropped_job_is_never_given_out() -> None:
    scheduler = make()
    scheduler.arrive(job(1, "a"), 0.0)
    scheduler.arrive(job(2, "a"), 0.0)
    scheduler.drop(job(1, "a"))
    assert [item.id for item in visit(scheduler).jobs] == [2]
    scheduler.drop(job(2, "a"))
    scheduler.finish("s0", [], "a", 1.0)
    assert scheduler.next("s0", 1.0) == Wait(None)


def test_behind_a_barrier_a_teacher_waits_for_all_its_announced_samples() -> None:
    scheduler = make(barrier=True)
    for id in (1, 2):
        scheduler.announce(f"sample-{id}", "a", 10, 0.0)
    scheduler.arrive(job(2, "a"), 0.0)
    assert scheduler.next("s0", 500.0) == Wait(None), "however long it takes"
    scheduler.arrive(job(1, "a"), 600.0)
    assert [item.id for item in visit(scheduler, now=600.0).jobs] == [1, 2]


@given(st.data(), st.integers(2, 6), st.integers(1, 3))
def test_behind_a_barrier_the_batches_depend_on_the_samples_and_not_on_their_times(
    data: st.DataObject, teachers: int, slots: int
) -> None:
    names = "abcdef"[:teachers]
    jobs = [job(id, names[id % teachers], tokens=7 + id % 5) for id in range(24)]

    def batches(order: list[Job]) -> set[tuple[int, ...]]:
        scheduler = make(names, slots, barrier=True, max_visit_tokens=20)
        for item in jobs:
            scheduler.announce(item.sample, item.teacher, 10, 0.0)
        served: set[tuple[int, ...]] = set()
        for number, item in enumerate(order):
            scheduler.arrive(item, float(number))
            for slot in data.draw(st.permutations([f"s{index}" for index in range(slots)])):
                if isinstance(decision := scheduler.next(slot, float(number)), Visit):
                    served.add(tuple(item.id for item in decision.jobs))
                    scheduler.finish(slot, [], decision.teacher, float(number))
        drain(scheduler, slots, 100.0, lambda found: served.add(tuple(item.id for item in found.jobs)))
        assert sorted(sum(served, ())) == list(range(24))
        return served

    assert batches(jobs) == batches(data.draw(st.permutations(jobs)))


def drain(scheduler: AnnouncedScheduler, slots: int, now: float, record) -> None:  # pyright: ignore
    """Run until nothing is left; a decision that never comes would end in the assertion."""
    idle = 0
    for turn in range(10_000):
        decision = scheduler.next(f"s{turn % slots}", now)
        if isinstance(decision, Visit):
            record(decision)
            scheduler.finish(f"s{turn % slots}", [], decision.teacher, now)
            idle = 0
        elif decision.until is not None:
            assert decision.until > now
            now, idle = decision.until, 0
        else:
            idle += 1
        if idle > slots:
            return
    raise AssertionError("the scheduler does not come to an end")


@given(st.integers(2, 8), st.integers(1, 4), st.randoms(use_true_random=False))
def test_when_every_teacher_is_needed_each_step_m_slots_load_n_minus_m(n: int, m: int, random) -> None:  # pyright: ignore
    m = min(m, n)
    names = "abcdefgh"[:n]
    scheduler = make(names, m, hold_s=0.0)
    holds: dict[str, str] = {}
    ids = iter(range(100_000))
    loads: list[int] = []
    for step in range(6):
        for name in random.sample(names, n):
            for _ in range(random.randint(1, 3)):
                scheduler.arrive(job(next(ids), name), float(step))
        count = 0
        idle: set[str] = set()
        while len(idle) < m:
            slot = f"s{random.randrange(m)}"
            decision = scheduler.next(slot, float(step))
            if isinstance(decision, Visit):
                count += holds.get(slot) != decision.teacher
                holds[slot] = decision.teacher
                scheduler.finish(slot, [], decision.teacher, float(step))
                idle.clear()
            else:
                idle.add(slot)
        loads.append(count)
    assert loads == [n] + [n - m] * 5


class World:
    """Random events on a scheduler, with the books that a manager would keep."""

    def __init__(self, barrier: bool) -> None:
        self.scheduler = make("abcd", 3, barrier=barrier, max_visit_tokens=40, max_wait_s=20.0)
        self.now = 0.0
        self.next_id = 0
        self.open: dict[int, Job] = {}
        self.announced: list[Job] = []
        self.busy: dict[str, Visit] = {}
        self.finished: Counter[int] = Counter()

    def announce(self, teacher: str, tokens: int) -> None:
        self.announced.append(job(self.next_id, teacher, tokens))
        self.next_id += 1
        self.scheduler.announce(self.announced[-1].sample, teacher, tokens, self.now)

    def arrive(self, index: int) -> None:
        if self.announced:
            item = self.announced.pop(index % len(self.announced))
            self.open[item.id] = item
            self.scheduler.arrive(item, self.now)

    def cancel(self, index: int) -> None:
        if self.announced:
            self.scheduler.withdraw(self.announced.pop(index % len(self.announced)).sample)

    def ask(self, slot: str) -> None:
        if slot in self.busy:
            return
        decision = self.scheduler.next(slot, self.now)
        if isinstance(decision, Visit):
            in_work = {item.id for other in self.busy.values() for item in other.jobs}
            assert decision.jobs and all(item.teacher == decision.teacher for item in decision.jobs)
            assert not in_work & {item.id for item in decision.jobs}, "given out twice"
            assert decision.teacher not in {other.teacher for other in self.busy.values()}
            self.busy[slot] = decision

    def end(self, slot: str, done: int, alive: bool) -> None:
        if slot in self.busy:
            ended = self.busy.pop(slot)
            done = done % (len(ended.jobs) + 1) if not alive else len(ended.jobs)
            for item in ended.jobs[:done]:
                self.finished[item.id] += 1
                del self.open[item.id]
            self.scheduler.finish(slot, ended.jobs[done:], ended.teacher if alive else None, self.now)


@pytest.mark.parametrize("barrier", [False, True])
@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("announce"), st.sampled_from("abcd"), st.integers(1, 60)),
            st.tuples(st.just("arrive"), st.integers(0, 99)),
            st.tuples(st.just("cancel"), st.integers(0, 99)),
            st.tuples(st.just("ask"), st.sampled_from(["s0", "s1", "s2"])),
            st.tuples(st.just("end"), st.sampled_from(["s0", "s1", "s2"]), st.integers(0, 9), st.booleans()),
        ),
        max_size=120,
    )
)
def test_no_job_is_lost_or_done_twice_whatever_happens(barrier: bool, events: list[tuple[object, ...]]) -> None:
    world = World(barrier)
    for name, *arguments in events:
        world.now += 0.3
        getattr(world, str(name))(*arguments)
    while world.announced:
        world.arrive(0)
    for slot in list(world.busy):
        world.end(slot, 0, alive=False)

    def record(found: Visit) -> None:
        for item in found.jobs:
            world.finished[item.id] += 1
            del world.open[item.id]

    drain(world.scheduler, 3, world.now, record)
    assert not world.open
    assert set(world.finished.values()) <= {1}
