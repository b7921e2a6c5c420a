"""report.html: one page, right figures, no reference to anything outside, for runs of any length."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from distill.observe.svg import Bar, Lane, Line, lanes, line_chart, number, ticks
from tests.builders_observe import TEACHERS, evaluated, observer, tell_step, wind

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Tags that close in order, the texts, the cells of the headline table, and every attribute."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.headline: list[list[str]] = []
        self.headings: list[str] = []
        self._in_headline = False
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)
        self._in_headline = self._in_headline or ("id", "headline") in attrs
        if tag == "tr" and self._in_headline:
            self.headline.append([])
        if tag in ("td", "th") and self._in_headline:
            self.headline[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._in_headline = self._in_headline and tag != "table"

    def handle_data(self, data: str) -> None:
        if self._in_headline and self.open[-1] in ("td", "th", "span"):
            self.headline[-1][-1] += data
        if self.open and self.open[-1] in ("h2", "h3"):
            self.headings.append(data)


def page_of(folder: Path) -> tuple[Page, str]:
    text = (folder / "report.html").read_text()
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(drawing)
    return Page(text), text


def made_up_run(folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> tuple[Page, str]:
    clock = wind(monkeypatch)
    seen = observer(folder, total_steps=steps, config_text="student: {model: <b>./base</b>}\n")
    for domain in ("sums", "programs"):
        evaluated(seen, "base", domain, 0.25)
        for teacher in TEACHERS:
            evaluated(seen, teacher, domain, 0.8 if teacher == "math" else 0.75)
    for version in range(1, steps + 1):
        start = clock.now
        for index, teacher in enumerate(TEACHERS):
            at = start + 0.3 * index
            seen.add_span("swap", at, at + 0.1, teacher, 1e6)
            seen.add_span("score", at + 0.1, at + 0.3, teacher, 100)
        seen.add_span("rollout", start, start + 0.9, "rollout-0", 100)
        with seen.span("train", amount=100):
            clock.now = start + 0.6
        clock.now = start + 1.0
        tell_step(seen, version, objective={"gated_low": {"math": 0.1, "code": 0.2}})
    evaluated(seen, "student", "sums", 0.6, step=steps, kl=0.05)
    seen.event("warning", "rollout-1 & <script>alert(1)</script>")
    seen.finish("done", export_dir=folder / "student")
    return page_of(folder)


def test_the_report_shows_the_figures_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, text = made_up_run(tmp_path, monkeypatch, steps=20)
    assert page.headline == [
        ["domain", "base", "teacher", "student", "student / teacher", "KL, first", "KL, last"],
        ["sums", "25.0 %", "80.0 % math", "60.0 %", "75.0 %", "0.0500", "0.0500"],
        ["programs", "25.0 %", "75.0 % code", "–", "–", "–", "–"],
    ]
    assert "<span>weight updates</span><b>20</b>" in text
    assert "<span>teacher swaps</span><b>60</b>" in text
    # each second: rollout 0-0.9; scoring 0.1-0.3, 0.4-0.6, 0.7-0.9; training 0-0.6: two at once for 0.8 s
    assert "<span>overlap</span><b>80.0 %</b>" in text
    for heading in (
        "KL per teacher",
        "Gated low",
        "Loss",
        "Staleness",
        "Pipeline, a few steps",
        "Swap timeline",
        "Time per phase",
        "Events",
    ):
        assert heading in page.headings
    assert "style: 0.60 to 0.90 s, loaded in 0.10 s" in text


def test_the_report_refers_to_nothing_outside_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, text = made_up_run(tmp_path, monkeypatch, steps=2)
    assert not re.search(r"https?://|//[a-z]|url\(|@import|<script|<link|<img|<iframe", text, re.IGNORECASE)
    assert not [
        name for name, _ in page.attributes if name in ("src", "href", "srcset", "data", "action") or name[:2] == "on"
    ]
    assert "rollout-1 &amp; &lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "&lt;b&gt;./base&lt;/b&gt;" in text


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_of_no_or_one_step_has_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    page, _ = made_up_run(tmp_path, monkeypatch, steps=steps)
    assert len(page.headline) == 3


def test_a_run_that_failed_at_once_shows_its_error(tmp_path: Path) -> None:
    observer(tmp_path, domain_teachers={}).finish("failed", error="no <disk> space\n  fix: make some")
    page, text = page_of(tmp_path)
    assert "no &lt;disk&gt; space\n  fix: make some" in text
    assert page.headline == [["domain", "base", "teacher", "student", "student / teacher"]]
    assert "<svg" not in text


def test_a_long_run_makes_a_small_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = made_up_run(tmp_path, monkeypatch, steps=1500)
    assert len(text) < 600_000
    assert "4500 swaps. The last 4500 stays" in text
    assert re.search(r"math: resident \d+\.\d % of 0 to 6 s", text)


def test_a_curve_goes_through_its_points() -> None:
    drawing = line_chart("x", [Line("loss", [(0, 0.0), (10, 1.0)], "c0")], y_range=(0, 1), width=164, height=136)
    assert 'd="M50.0 110.0L150.0 10.0"' in drawing
    assert "loss: 1 at 10" in drawing
    assert line_chart("x", [Line("loss", [], "c0")]) == ""


def test_bars_that_a_pixel_cannot_part_are_one() -> None:
    many = [Bar(second, second + 0.9, "c1") for second in range(100_000)]
    assert lanes("x", [Lane("score", many)], 0, 100_000).count("<rect") == 1
    apart = lanes(
        "x", [Lane("score", [Bar(1, 2, "c1"), Bar(2, 3, "c2"), Bar(50, 60, "c1"), Bar(200, 300, "c1")])], 0, 100
    )
    assert apart.count("<rect") == 3


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.5, 1]), (0, 60, [0, 20, 40, 60]), (3, 3, [3]), (0.1, 0.35, [0.1, 0.2, 0.3])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 3) == pytest.approx(expected)


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.02, "0.02"), (1500, "1.5k"), (2e6, "2M"), (-3e9, "-3G")])
def test_axis_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
