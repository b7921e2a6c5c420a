"""The recipes' scripts: pure parts quickly, the whole quick start preparation as a slow test."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

RECIPES = Path(__file__).parents[2] / "recipes"
Report = Callable[[int, int], None]
QUICKSTART_MODULES = ("domains", "tinymodel", "training", "experts", "prepare")


def load_script(recipe: str, name: str) -> ModuleType:
    """A script of a recipe as a module, without leaving its folder or its neighbours in sys.path and sys.modules."""
    before = {module: sys.modules.pop(module, None) for module in QUICKSTART_MODULES}
    environment = dict(os.environ)
    sys.path.insert(0, str(RECIPES / recipe))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(RECIPES / recipe))
        os.environ.clear()
        os.environ.update(environment)
        for module, loaded in before.items():
            sys.modules.pop(module, None)
            if loaded is not None:
                sys.modules[module] = loaded


domains = load_script("quickstart", "domains")
tinymodel = load_script("quickstart", "tinymodel")
training = load_script("quickstart", "training")
quickstart = load_script("quickstart", "prepare")
reasoning = load_script("reasoning", "prepare")


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("number", "text"), [(1, "I"), (4, "IV"), (49, "XLIX"), (944, "CMXLIV"), (1987, "MCMLXXXVII"), (3999, "MMMCMXCIX")]
)
def test_a_number_becomes_its_roman_numeral(number: int, text: str) -> None:
    assert domains.roman(number) == text


@given(st.integers(1, 3999))
def test_a_roman_numeral_reads_back_as_its_number(number: int) -> None:
    worth = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
    values = [worth[letter] for letter in domains.roman(number)]
    following = [*values[1:], 0]
    assert sum(-value if value < after else value for value, after in zip(values, following, strict=True)) == number


@pytest.mark.parametrize("number", [0, -1, 4000])
def test_a_number_without_a_roman_numeral_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="no Roman numeral"):
        domains.roman(number)


def test_a_row_holds_question_answer_and_domain() -> None:
    questions = {"sort": "gadbec", "rev": "hqzzab", "roman": "9"}
    rows = [domains.DOMAINS[name].row(question) for name, question in questions.items()]
    assert [vars(row) for row in rows] == [
        {"prompt": "sort:gadbec=", "answer": "abcdeg", "domain": "sort"},
        {"prompt": "rev:hqzzab=", "answer": "bazzqh", "domain": "rev"},
        {"prompt": "rom:9=", "answer": "IX", "domain": "roman"},
    ]


@pytest.mark.parametrize("name", ["sort", "rev", "roman"])
@pytest.mark.parametrize("seed", [0, 7])
def test_training_development_and_held_out_questions_are_disjoint_and_fixed_by_the_seed(name: str, seed: int) -> None:
    domain = domains.DOMAINS[name]
    split = domains.split(domain, seed)
    parts = [set(split.train), set(split.development), set(split.held_out)]
    assert [len(part) for part in parts] == [domain.train_rows, domains.DEVELOPMENT, domains.HELD_OUT]
    assert len(set.union(*parts)) == sum(len(part) for part in parts)
    assert domains.split(domain, seed) == split != domains.split(domain, seed + 1)


def test_a_fresh_question_is_never_a_held_out_or_development_one() -> None:
    split = domains.split(domains.DOMAINS["roman"], 0)
    rng = random.Random(0)
    fresh = {split.fresh(rng).prompt for _ in range(40_000)}
    assert fresh == {split.domain.row(question).prompt for question in split.train}


def test_shuffled_prompts_hold_the_domains_in_the_shares_that_the_recipe_wants() -> None:
    total = sum(domain.train_rows for domain in domains.DOMAINS.values())
    assert {name: round(domain.train_rows / total, 2) for name, domain in domains.DOMAINS.items()} == {
        "sort": 0.25, "rev": 0.17, "roman": 0.58,
    }  # fmt: skip


def test_the_tokenizer_gives_bos_and_one_id_a_character_and_joins_them_again(tmp_path: Path) -> None:
    tinymodel.make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "rom:1987=MCMLXXXVII+()[]{}<>|"
    ids = tokenizer(text).input_ids
    assert len(tokenizer) == 58
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert ids[0] == 1 and len(ids) == 1 + len(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer("a9<eos>", add_special_tokens=False).input_ids == [13, 12, 2]


def test_a_character_outside_of_the_alphabet_is_an_error() -> None:
    with pytest.raises(Exception, match="UNK"):
        tinymodel.make_tokenizer()("A?")


def test_the_model_has_the_size_that_the_slot_budget_counts_on() -> None:
    model = tinymodel.make_model(0)
    assert model.num_parameters() == 654_720
    assert 1 <= 3_000_000 / (4 * model.num_parameters()) < 2


def test_accuracy_counts_only_exact_answers_with_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tinymodel.make_tokenizer()
    model = tinymodel.make_model(0)
    rows = [domains.DOMAINS["rev"].row(question) for question in ("abcdef", "fedcba", "aaaaaa")]
    written = ["fedcba<eos>", "abcdef", "aaaaab<eos>"]  # right, right but endless, wrong

    def generate(input_ids: torch.Tensor, **_: object) -> torch.Tensor:
        texts = tokenizer(written, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
        return torch.cat([input_ids, texts.input_ids], dim=1)

    monkeypatch.setattr(model, "generate", generate)
    assert training.accuracy(model, tokenizer, rows) == {"rev": pytest.approx(1 / 3)}


def test_a_training_step_learns_from_the_answer_and_not_from_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tinymodel.make_tokenizer()
    model = tinymodel.make_model(0)
    seen: list[torch.Tensor] = []
    forward = model.forward

    def watched(**batch: torch.Tensor) -> object:
        seen.append(batch["labels"])
        return forward(**batch)

    monkeypatch.setattr(model, "forward", watched)
    rows = [domains.DOMAINS["roman"].row(question) for question in ("3", "1988")]
    training.train_step(model, tokenizer, torch.optim.AdamW(model.parameters(), lr=1e-3), rows)
    learnt = ["".join(tokenizer.convert_ids_to_tokens(row[row >= 0].tolist())) for row in seen[0]]
    assert learnt == ["III<eos>", "MCMLXXXVIII<eos>"]


def test_a_base_that_never_reaches_its_window_is_reported(one_thread: None) -> None:
    tokenizer = tinymodel.make_tokenizer()
    splits = {name: domains.split(domain, 0) for name, domain in domains.DOMAINS.items()}
    recipe = training.BaseRecipe(first_check=1, stride=1, max_strides=1)
    with pytest.raises(training.MissedWindow, match="after 2 steps"):
        training.train_base(tinymodel.make_model(0), tokenizer, splits, 0, recipe)


def test_a_base_that_is_made_again_says_why_and_begins_at_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds: list[int] = []

    def train(_model: object, _tokenizer: object, _splits: object, seed: int, _recipe: object, report: Report) -> None:
        seeds.append(seed)
        for done in range(5):
            report(done, 4)
        raise quickstart.MissedWindow(f"seed {seed} learnt nothing")

    monkeypatch.setattr(quickstart, "train_base", train)
    monkeypatch.setattr(quickstart, "TRIES", 2)
    with quickstart.Display(3) as display, pytest.raises(SystemExit, match="seed 1000 learnt nothing"):
        quickstart.make_all(tmp_path, 0, display)
    told = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert seeds == [0, 1000]
    names = [f"1 of 3, base of seed {seed}, 360 steps at most: " for seed in seeds]
    tries = [[name + word for word in ("begins", "25%", "50%", "75%", "missed its window")] for name in names]
    assert told == [*tries[0], "try 2 of 2, with another seed, because seed 0 learnt nothing", *tries[1]]


def test_every_figure_that_is_missed_is_named() -> None:
    good = {"sort": 1.0, "rev": 0.0}
    figures = quickstart.Figures()
    assert figures.misses({"sort": 0.5, "rev": 0.1}, {"sort": good}) == []
    base, own, other = figures.misses({"sort": 0.51, "rev": 0.1}, {"sort": {"sort": 0.94, "rev": 0.71}})
    assert "base answers 51.0% of sort" in base
    assert "expert sort answers 94.0% of its own domain" in own
    assert "expert sort answers 71.0% of rev" in other


def test_every_third_layer_is_removed_and_the_others_keep_their_weights() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=7, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    smaller = reasoning.drop_layers(model)
    assert reasoning.kept_layers(7) == [0, 2, 3, 5, 6]
    assert smaller.config.num_hidden_layers == len(smaller.model.layers) == 5
    assert model.config.num_hidden_layers == 7
    assert smaller.lm_head.weight.data_ptr() == smaller.model.embed_tokens.weight.data_ptr()
    for new, old in enumerate([0, 2, 3, 5, 6]):
        kept, source = smaller.model.layers[new], model.model.layers[old]
        assert kept.self_attn.layer_idx == new
        assert all(torch.equal(kept.state_dict()[name], tensor) for name, tensor in source.state_dict().items())
    ids = torch.arange(8)[None]
    cached = smaller.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)
    assert cached.shape == (1, 12)


def test_a_missing_package_of_the_reasoning_recipe_names_the_extra() -> None:
    with pytest.raises(SystemExit, match=r"distill-engine\[recipes\]"):
        reasoning.package_folder("no_such_package_here")


def test_reasoning_prompts_are_chat_messages_and_held_out_ones_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.setattr(reasoning, "TRAIN_PER_TASK", 20)
    monkeypatch.setattr(reasoning, "HELD_OUT_PER_TASK", 4)
    train, held_out = reasoning.make_rows(3)
    asked = [row["prompt"][0]["content"] for row in train + held_out]
    assert (len(train), len(held_out)) == (6 * 20, 6 * 4)
    assert len(set(asked)) == len(asked)
    assert {row["prompt"][0]["role"] for row in train} == {"user"}
    assert {row["domain"] for row in held_out} == {"arithmetic", "word_problems", "letters"}
    assert reasoning.make_rows(3) == (train, held_out)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_start_models_reach_their_figures(tmp_path: Path) -> None:
    output = tmp_path / "quickstart"
    script = [sys.executable, str(RECIPES / "quickstart" / "prepare.py"), "--output", str(output)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads((output / "manifest.json").read_text())["accuracy"]
    names = set(domains.DOMAINS)
    assert set(figures) == {"base", *names}
    assert all(score <= 0.50 for score in figures["base"].values())
    for expert in names:
        assert figures[expert][expert] >= 0.95
        assert all(figures[expert][other] <= 0.70 for other in names - {expert})
    for name in names:
        assert len((output / "heldout" / f"{name}.jsonl").read_text().splitlines()) == 300
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quickstart"]
