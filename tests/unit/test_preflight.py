"""Preflight: what is read of models, tokenizers and the machine before anything is loaded."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from distill.config import PrepareConfig
from distill.config.compose import load_config
from distill.errors import ConfigError, EnvironmentFault, MissingDependency, TeacherError
from distill.preflight import inspect, inspect_early, is_prepared, prepare
from distill.preflight.folder import inspect_folder, read_header
from distill.preflight.machine import disk_bytes
from tests.builders_config import HIDDEN, weights, write_jsonl, write_model, write_run

ROWS = 14


def preflight(folder: Path, **changes: Any) -> Any:
    return inspect(load_config(write_run(folder, **changes)).config)


def test_a_run_is_known_before_it_starts(tmp_path: Path) -> None:
    student = {"model": "./base", "warmup_steps": 2}
    found = preflight(tmp_path, student=student, rollout={"max_new_tokens": 8, "servers": 2})
    assert (found.vocab_size, found.end_ids, found.models.context_length, found.prompts.longest) == (ROWS, (2,), 32, 4)
    parameters = 2 * ROWS * HIDDEN + HIDDEN
    assert found.models.student.parameters == parameters
    assert found.models.slot_bytes == parameters * 4 + 32, "32 bytes of a tensor take 64 in a slot"
    assert found.disk_bytes == 3 * 12 * parameters + 4 * parameters
    assert found.objective.contract.optimises and found.notes == ()
    plan = found.plan
    assert (plan.steps, plan.samples, plan.prompts, plan.epochs) == (3, 12, 12, 4.0)
    assert (plan.max_tokens, plan.swaps_per_step, plan.update_bytes) == (96, 1, parameters * 4 * 2)


@pytest.mark.parametrize(
    ("warmup", "says"),
    [(3, "reaches its peak in the last step only"), (4, "never reaches its peak: 7.5e-06 at most")],
)
def test_a_warm_up_that_lasts_as_long_as_the_run_is_a_note(tmp_path: Path, warmup: int, says: str) -> None:
    notes = preflight(tmp_path, student={"model": "./base", "warmup_steps": warmup, "lr": 1e-5}).notes
    assert notes == (f"student.warmup_steps is {warmup}, and trainer.steps 3: the learning rate {says}",)


def test_a_smaller_dtype_needs_a_smaller_slot(tmp_path: Path) -> None:
    assert preflight(tmp_path, server={"dtype": "bfloat16"}).models.slot_bytes == 2 * 256 + 64, (
        "each tensor begins at a multiple of 64 bytes"
    )


def test_held_out_prompts_are_limited_and_routed_as_in_training(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "held.jsonl", [{"prompt": "ab", "answer": "c", "domain": "mix"}] * 5)
    found = preflight(
        tmp_path,
        data=[{"path": "math.jsonl", "domain": "mix", "teachers": {"math": 0.7, "code": 0.3}}],
        evaluation={"data": [{"path": "held.jsonl"}], "limit": 3},
    )
    assert list(found.prompts.held_out) == ["mix"]
    prompts = found.prompts.held_out["mix"]
    assert [prompt.ordinal for prompt in prompts] == [0, 1, 2]
    assert prompts[0].teachers == {"math": 0.7, "code": 0.3} and prompts[0].answer == "c"


def test_held_out_prompts_without_answers_need_another_measure(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "held.jsonl", [{"prompt": "ab", "domain": "math"}])
    data = [{"path": "held.jsonl"}]
    with pytest.raises(ConfigError, match=r"held.jsonl:1: no column 'answer'"):
        preflight(tmp_path, evaluation={"data": data})
    assert preflight(tmp_path, evaluation={"data": data, "kl": True}).prompts.held_out["math"][0].answer is None


def test_a_teacher_whom_no_row_names_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"teachers\.code: no prompt of data is routed to it"):
        preflight(tmp_path, data=[{"path": "math.jsonl", "domain": "math"}])


def test_an_adapter_is_refused_with_what_to_do_and_a_base_that_would_be_ignored_too(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    adapter = tmp_path / "style"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "trained/on"}')
    save_file({"a": np.ones(HIDDEN, np.float32)}, adapter / "adapter_model.safetensors")
    alone = "teachers.math.model=" + str(adapter)
    with pytest.raises(
        ConfigError, match=r"LoRA adapter over trained/on, which is no folder here[\s\S]*in teachers\.math\.base"
    ):
        inspect(load_config(path, [alone]).config)
    based = [alone, f"teachers.math.base={tmp_path / 'base'}"]
    attached = ["server=attach", "server.rollout_urls=[http://a:1]", "server.teacher_urls=[http://b:1]"]
    with pytest.raises(ConfigError, match=r"over trained/on, which a server of attach[\s\S]*merge_and_unload"):
        inspect(load_config(path, [*based, *attached]).config)
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    with pytest.raises(ConfigError, match=r"adapter_config\.json: use_dora=true"):
        inspect(load_config(path, based).config)
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "trained/on"}')
    found = inspect(load_config(path, based).config).models.teachers["math"]
    assert (found.base, found.folder, found.slot_bytes) == (tmp_path / "base", adapter, 960 + 64)
    with pytest.raises(ConfigError, match=r"teachers\.code\.base: .* would be ignored: .* is a whole model"):
        inspect(load_config(path, [f"teachers.code.base={tmp_path / 'base'}"]).config)


def test_ends_of_answers_come_from_the_tokenizer_and_the_generation_config(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": [0, 2, 99]}')
    assert inspect(load_config(path).config).end_ids == (0, 2)


def test_ends_of_answers_come_from_the_configuration_where_there_is_no_generation_config(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 1}))
    assert inspect(load_config(path).config).end_ids == (1, 2)


def write_ends(model: Path, tokenizer_end: str, *, generation: list[int] | None = None) -> None:
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": tokenizer_end}))
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))


def test_a_teacher_that_never_ends_where_the_student_does_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    write_ends(tmp_path / "experts/math", "<bos>")
    with pytest.raises(
        ConfigError, match=r"teachers\.math: it ends its answers with 1 \('<bos>'\), and the student with 2 \('<eos>'\)"
    ) as caught:
        inspect(load_config(path).config)
    assert "answers would grow to rollout.max_new_tokens" in str(caught.value)
    assert f"add 1 to eos_token_id (a list) in {tmp_path / 'base' / 'generation_config.json'}" in caught.value.fix
    write_ends(tmp_path / "base", "<eos>", generation=[2, 1])
    assert inspect(load_config(path).config).end_ids == (1, 2), "what the error says helps"


def test_a_teacher_with_ends_of_its_own_beside_the_students_is_a_note(tmp_path: Path) -> None:
    path = write_run(tmp_path, student={"model": "./base", "warmup_steps": 2})
    write_ends(tmp_path / "experts/math", "<eos>", generation=[2, 12])
    (note,) = inspect(load_config(path).config).notes
    assert "teachers.math: it also ends answers with 12 ('j'), where the student goes on" in note
    write_ends(tmp_path / "base", "<eos>", generation=[2, 11, 12])
    assert inspect(load_config(path).config).notes == (), "a student that ends at more than its teachers is well served"


def test_a_prompt_without_an_answer_cannot_have_an_outcome(tmp_path: Path) -> None:
    outcome = {"name": "policy_gradient", "outcome": {"baseline": "batch"}}
    path = write_run(tmp_path, objective=outcome)
    with pytest.raises(
        ConfigError, match=r"math\.jsonl:1: no answer, as in 3 of 3 prompts, and objective\.outcome is set"
    ):
        inspect(load_config(path).config)
    for name in ("math", "code"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": "ab=", "answer": "c"}])
    assert inspect(load_config(path).config).prompts.stream.at(0).answer == "c"


def test_a_mixture_needs_a_prompt_with_several_teachers(tmp_path: Path) -> None:
    path = write_run(tmp_path, objective={"mixture": "arithmetic"})
    with pytest.raises(ConfigError, match=r"objective\.mixture: arithmetic has no effect: each of the 3 prompts"):
        inspect(load_config(path).config)
    write_jsonl(tmp_path / "math.jsonl", [{"prompt": "ab="}, {"prompt": "a=", "teacher": ["math", "code"]}])
    assert inspect(load_config(path).config).prompts.rows_per_teacher == {"math": 2, "code": 2}


def test_domain_weights_are_held_against_the_domains_of_the_rows(tmp_path: Path) -> None:
    balanced = {"reduction": "domain_balanced", "domain_weights": {"math": 1, "cod": 1}}
    path = write_run(tmp_path, objective=balanced, data=[{"path": "rows.jsonl"}])
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "ab=", "domain": name} for name in ("math", "code")])
    with pytest.raises(ConfigError, match=r"objective\.domain_weights\.cod: no prompt has this domain") as caught:
        inspect(load_config(path).config)
    assert "did you mean 'code'?" in caught.value.fix
    with pytest.raises(ConfigError, match=r"none for the domain 'code' of .*rows\.jsonl:2"):
        inspect(load_config(path, ["objective.domain_weights=null", "++objective.domain_weights.math=1"]).config)


def test_an_objective_that_cannot_be_is_refused_before_a_recipe_makes_anything(tmp_path: Path) -> None:
    path = write_run(tmp_path, objective={"name": "jsd", "beta": 2.0})
    with pytest.raises(ConfigError, match=r"objective\.beta: must be between 0 and 1"):
        inspect_early(load_config(path).config)


def test_the_smallest_context_of_all_models_counts(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    write_model(tmp_path / "experts/code", context=11)
    with pytest.raises(ConfigError, match=r"math.jsonl:1: .* more than the context of 11 \(teachers\.code\.model\)"):
        inspect(load_config(path).config)


@pytest.mark.parametrize(
    ("options", "says", "hint"),
    [
        (
            {"support": "teacher_topk"},
            "objective.k: must be at least 1 with support=teacher_topk, and was not given",
            "remove",
        ),
        ({"support": "union", "k": -1}, "objective.k: must be at least 1 with support=union, got -1", "remove"),
        (
            {"support": "teacher_topk", "k": 15},
            "objective.k is 15, and the vocabulary has 14 ids",
            "set objective.k=14 or less; or compare the whole vocabulary: remove objective.support and objective.k",
        ),
    ],
)
def test_a_support_has_as_many_tokens_as_there_are(
    tmp_path: Path, options: dict[str, Any], says: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        preflight(tmp_path, objective=options)
    assert says in caught.value.what and hint in caught.value.fix


def inspect_adapted(folder: Path, targets: Any) -> tuple[str, ...]:
    """Preflight of a student with two layers of attention, of which `targets` get adapters: the names of its layers."""
    path = write_run(folder, student={"model": "./base", "lora": {"targets": targets}})
    names = [f"model.layers.{index}.self_attn.{name}.weight" for index in range(2) for name in ("q_proj", "v_proj")]
    layers = {name: np.zeros((HIDDEN, HIDDEN), np.float32) for name in names}
    save_file(weights(ROWS) | layers, folder / "base" / "model.safetensors")
    return inspect(load_config(path).config).models.student.layers


@pytest.mark.parametrize(
    "targets",
    ["all-linear", ["q_proj"], ["self_attn.q_proj", "v_proj"], ["1.self_attn.q_proj"], r".*\.0\..*_proj"],
)
def test_layers_that_are_in_the_students_files_can_have_adapters(tmp_path: Path, targets: Any) -> None:
    layers = inspect_adapted(tmp_path, targets)
    assert {name.rpartition(".")[2] for name in layers} == {"embed_tokens", "lm_head", "q_proj", "v_proj"}


@pytest.mark.parametrize(
    ("targets", "says", "hint"),
    [
        (["qproj"], "'qproj' fits no layer", "did you mean 'q_proj'?"),
        (["q_proj", "v_prj"], "'v_prj' fits no layer", "did you mean 'v_proj'?"),
        (["self_atn.q_proj"], "'self_atn.q_proj' fits no layer", "did you mean 'self_attn.q_proj'?"),
        (["proj"], "'proj' fits no layer", "known: embed_tokens, lm_head, q_proj, v_proj"),
        (["norm"], "'norm' fits no layer", "known:"),
        ("q_proj", "the expression 'q_proj' fits no layer", "a list, [q_proj]"),
    ],
    ids=str,
)
def test_a_target_that_fits_no_layer_is_refused_with_the_nearest_one(
    tmp_path: Path, targets: Any, says: str, hint: str
) -> None:
    with pytest.raises(ConfigError, match=r"student\.lora\.targets") as caught:
        inspect_adapted(tmp_path, targets)
    assert says in caught.value.what and hint in caught.value.fix


def test_sharded_weights_are_counted_together(tmp_path: Path) -> None:
    whole = inspect_folder(write_model(tmp_path / "one"), "student", TeacherError)
    split = write_model(tmp_path / "two")
    (split / "model.safetensors").unlink()
    names: dict[str, str] = {}
    for index, (name, tensor) in enumerate(weights(ROWS).items()):
        names[name] = f"part-{index}.safetensors"
        save_file({name: tensor}, split / names[name])
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    found = inspect_folder(split, "student", TeacherError)
    assert (found.parameters, found.stored_bytes, found.dtype) == (whole.parameters, whole.stored_bytes, "F32")


def test_a_configuration_that_contradicts_its_weights_is_named(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": ROWS + 1}))
    with pytest.raises(TeacherError, match=r"has 14 rows, and config\.json says vocab_size 15"):
        inspect_folder(model, "teachers.m", TeacherError)


WHOLE = save(weights(4))


@given(cut=st.integers(0, len(WHOLE) - 1))
def test_a_file_that_is_cut_anywhere_is_noticed(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("cut") / "model.safetensors"
    file.write_bytes(WHOLE[:cut])
    with pytest.raises(TeacherError):
        read_header(file, "teachers.m", TeacherError)


def test_a_whole_file_is_read_and_a_longer_one_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(WHOLE)
    assert read_header(file, "t", TeacherError)["lm_head.weight"].shape == (4, HIDDEN)
    file.write_bytes(WHOLE + b"x")
    with pytest.raises(TeacherError, match=f"expected {len(WHOLE)} bytes, found {len(WHOLE) + 1}"):
        read_header(file, "t", TeacherError)


def test_disk_holds_one_checkpoint_more_than_is_kept(tmp_path: Path) -> None:
    config = load_config(write_run(tmp_path, trainer={"keep_checkpoints": 4, "steps": 3, "batch_size": 4})).config
    assert disk_bytes(config, 1000) == 5 * 12_000 + 4_000


def recipe(folder: Path, program: str) -> PrepareConfig:
    folder.mkdir(exist_ok=True)
    (folder / "make.py").write_text(
        "import sys, pathlib\nout = pathlib.Path(sys.argv[sys.argv.index('--output') + 1])\n" + program
    )
    return PrepareConfig(script=folder / "make.py", output=folder / "cache" / "made")


COUNT = "out.mkdir(parents=True, exist_ok=True)\nopen(out.parent / 'runs', 'a').write('x')\n"


def runs(config: PrepareConfig) -> int:
    return len((config.output.parent / "runs").read_text())


def test_a_recipe_is_prepared_once_and_again_when_its_script_changes(tmp_path: Path) -> None:
    config = recipe(tmp_path, COUNT)
    assert not is_prepared(config)
    prepare(config)
    prepare(config)
    assert is_prepared(config) and runs(config) == 1
    (tmp_path / "helper.py").write_text("x = 1\n")
    assert not is_prepared(config)
    (config.output / "stale").touch()
    prepare(config)
    assert runs(config) == 2 and not (config.output / "stale").exists()


def test_two_runs_that_start_together_prepare_once(tmp_path: Path) -> None:
    config = recipe(tmp_path, "import time; time.sleep(0.3)\n" + COUNT)
    threads = [threading.Thread(target=prepare, args=(config,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert runs(config) == 1


def test_a_failing_script_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"failed with exit code 7[\s\S]*no luck") as caught:
        prepare(recipe(tmp_path, "print('no luck', file=sys.stderr); sys.exit(7)"))
    assert caught.value.exit_code == 3
    with pytest.raises(MissingDependency, match="No module named 'no_such_package'"):
        prepare(recipe(tmp_path, "import no_such_package"))
    with pytest.raises(EnvironmentFault, match="killed by signal 9"):
        prepare(recipe(tmp_path, "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(EnvironmentFault, match="made no folder"):
        prepare(recipe(tmp_path, ""))
    config = recipe(tmp_path, COUNT)
    with pytest.raises(ConfigError, match=r"did you mean 'make\.py'"):
        prepare(config.model_copy(update={"script": tmp_path / "mak.py"}))


def test_an_interrupted_script_counts_as_not_run(tmp_path: Path) -> None:
    config = recipe(tmp_path, COUNT + "sys.exit(1)")
    with pytest.raises(EnvironmentFault):
        prepare(config)
    assert config.output.is_dir() and not is_prepared(config)


def test_a_teacher_that_can_only_be_streamed_is_not_asked_to_write(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    write_jsonl(tmp_path / "held_out.jsonl", [{"prompt": "ab=", "answer": "b", "domain": "math", "teacher": "math"}])
    small = ["teacher_manager.slot_gb=9e-7", f"evaluation.data=[{{path: {tmp_path}/held_out.jsonl}}]"]
    with pytest.raises(ConfigError, match=r"has 960 bytes of weights, and a slot holds 900: .* cannot write") as caught:
        inspect(load_config(path, small).config)
    assert "evaluation.teachers=false" in caught.value.fix
    found = inspect(load_config(path, [*small, "evaluation.teachers=false"]).config)
    assert found.models.slot_bytes == 900
