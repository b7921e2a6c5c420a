"""The three domains: questions, right answers, and the split into training, development and held-out questions.

A question is the text between tag and "=". A row of the data is
{"prompt": "sort:gadbec=", "answer": "abcdeg", "domain": "sort"}.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase

HELD_OUT = 300
DEVELOPMENT = 99
_NUMERALS = (
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"),
    (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"),
)  # fmt: skip


def roman(number: int) -> str:
    """`number` as a Roman numeral. Defined for 1 to 3999."""
    if not 1 <= number <= 3999:
        raise ValueError(f"{number} has no Roman numeral; 1 to 3999 have")
    text = ""
    for value, symbol in _NUMERALS:
        count, number = divmod(number, value)
        text += symbol * count
    return text


@dataclass(frozen=True)
class Domain:
    """A task whose answers can be checked exactly. `train_rows` sets its share of the shuffled prompts."""

    name: str
    tag: str
    train_rows: int
    draw: Callable[[random.Random], str]
    solve: Callable[[str], str]

    def row(self, question: str) -> Row:
        return Row(f"{self.tag}:{question}=", self.solve(question), self.name)


@dataclass(frozen=True)
class Row:
    prompt: str
    answer: str
    domain: str


def six_distinct_letters(rng: random.Random) -> str:
    return "".join(rng.sample(ascii_lowercase, 6))


def six_letters(rng: random.Random) -> str:
    return "".join(rng.choices(ascii_lowercase, k=6))


def number(rng: random.Random) -> str:
    return str(rng.randint(1, 3999))


# Roman numerals are the slowest to learn and get the most prompts: 25 % sort, 17 % rev, 58 % roman. 3600 is every
# number that is left beside the held-out and the development ones.
DOMAINS: dict[str, Domain] = {
    domain.name: domain
    for domain in (
        Domain("sort", "sort", 1552, six_distinct_letters, lambda text: "".join(sorted(text))),
        Domain("rev", "rev", 1055, six_letters, lambda text: text[::-1]),
        Domain("roman", "rom", 3600, number, lambda text: roman(int(text))),
    )
}


@dataclass(frozen=True)
class Split:
    """Questions of one domain. The three lists share none, and `fresh` draws none of `held_out` and `development`."""

    domain: Domain
    train: tuple[str, ...]
    development: tuple[str, ...]
    held_out: tuple[str, ...]

    def fresh(self, rng: random.Random) -> Row:
        """A random question to train a base or an expert on."""
        while True:
            question = self.domain.draw(rng)
            if question not in self._reserved:
                return self.domain.row(question)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_reserved", frozenset(self.development + self.held_out))

    _reserved = frozenset[str]()


def split(domain: Domain, seed: int) -> Split:
    """The questions of `domain` that belong to `seed`: always the same ones."""
    rng = random.Random(f"{domain.name} questions, seed {seed}")
    distinct: dict[str, None] = {}
    while len(distinct) < HELD_OUT + DEVELOPMENT + domain.train_rows:
        distinct[domain.draw(rng)] = None
    questions = tuple(distinct)
    first_train = HELD_OUT + DEVELOPMENT
    return Split(domain, questions[first_train:], questions[HELD_OUT:first_train], questions[:HELD_OUT])


def write_rows(path: Path, domain: Domain, questions: tuple[str, ...]) -> None:
    """One JSON object a line, as `data` and `evaluation.data` of a run read them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(vars(domain.row(question))) for question in questions]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
