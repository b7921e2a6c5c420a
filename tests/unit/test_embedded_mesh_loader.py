"""Weights from the mesh: staged beside the live ones, checked, and changed between two tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from distill.errors import MeshError
from distill.objectives.divergence import JSD
from distill.serving.embedded.jobs import Result
from distill.serving.embedded.mesh_loader import TorchLoader
from distill.serving.embedded.served import Limits, ServedModel
from distill.serving.embedded.weights import checksums, live_tensors, octets, prepare
from distill.transfermesh import Manifest, TensorSpec, model_digest, tensor_digest
from tests.builders_embedded import CPU32, finish, job, prompt, reference, running_engine, save_model, wait
from tests.builders_student import make_batch, start_student, write_experts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "a")


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return live_tensors(reference(save_model(tmp_path_factory.mktemp("model") / "b", seed=1)))


def manifest(tensors: dict[str, torch.Tensor], version: int = 5) -> Manifest:
    return Manifest(
        version,
        tuple(
            TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes)
            for name, tensor in tensors.items()
        ),
    )


def stage(loader: TorchLoader, tensors: dict[str, torch.Tensor], version: int = 5) -> str:
    loader.begin(manifest(tensors, version))
    for name, tensor in tensors.items():
        data = np.frombuffer(octets(tensor), np.uint8).copy()
        loader.load(name, data)
        data[:] = 0  # the view is valid only during the call
    return loader.digest()


def digest(tensors: dict[str, torch.Tensor]) -> str:
    return model_digest({name: tensor_digest(octets(tensor)) for name, tensor in tensors.items()})


def test_staged_weights_are_not_live_until_the_commit(folder: Path, sent: dict[str, torch.Tensor]) -> None:
    with running_engine(folder) as engine:
        before = checksums(engine.require_model())
        loader = TorchLoader(engine)
        assert stage(loader, sent) == digest(sent)
        assert checksums(engine.require_model()) == before and engine.version == "v0"
        assert loader.commit(5) == digest(sent)
        assert checksums(engine.require_model()) != before and engine.version == "5"
        assert digest(live_tensors(engine.require_model().model)) == digest(sent)


def test_a_commit_between_two_tokens_shows_in_the_spans(folder: Path, sent: dict[str, torch.Tensor]) -> None:
    with running_engine(folder) as engine:
        loader = TorchLoader(engine)
        stage(loader, sent)

        def progress(result: Result) -> None:
            if len(result.output_ids) == 7:
                engine.run_between_steps(lambda: loader._go_live(5, loader._staged))

        writer = job(prompt(5), 20, seed=1)
        writer.on_progress = progress
        (result,) = finish(engine, writer)
    assert result.spans == [("v0", 0, 7), ("5", 7, 20)]


def test_an_aborted_update_leaves_everything_as_it_was_and_the_next_one_works(
    folder: Path, sent: dict[str, torch.Tensor]
) -> None:
    with running_engine(folder) as engine:
        before = checksums(engine.require_model())
        loader = TorchLoader(engine)
        stage(loader, sent)
        loader.abort()
        loader.abort()
        assert checksums(engine.require_model()) == before
        stage(loader, sent, 6)
        assert loader.commit(6) == digest(sent) and engine.version == "6"


def test_a_commit_whose_turn_comes_after_it_was_given_up_changes_nothing(
    folder: Path, sent: dict[str, torch.Tensor]
) -> None:
    with running_engine(folder) as engine:
        before = checksums(engine.require_model())
        loader = TorchLoader(engine)
        stage(loader, sent)
        given_up = loader._staged
        loader.abort()
        with pytest.raises(MeshError, match="given up"):
            wait(engine.run_between_steps(lambda: loader._go_live(5, given_up)))
        assert checksums(engine.require_model()) == before and engine.version == "v0"


def test_tensors_that_do_not_cover_the_model_are_named(folder: Path, sent: dict[str, torch.Tensor]) -> None:
    norm = "model.norm.weight"
    with running_engine(folder) as engine:
        loader = TorchLoader(engine)
        with pytest.raises(MeshError, match=norm):
            loader.begin(manifest({name: tensor for name, tensor in sent.items() if name != norm}))
        with pytest.raises(MeshError, match="lm_head"):
            loader.begin(manifest(sent | {"lm_head.weight": torch.zeros(2)}))
        with pytest.raises(MeshError, match=r"\(31,\) instead of \(32,\)"):
            loader.begin(manifest(sent | {norm: torch.zeros(31)}))
        with pytest.raises(MeshError, match="int32"):
            loader.begin(manifest(sent | {norm: torch.zeros(32, dtype=torch.int32)}))


def test_another_dtype_is_cast_and_the_digest_stays_that_of_what_was_sent(
    folder: Path, sent: dict[str, torch.Tensor]
) -> None:
    half = Limits(torch.device("cpu"), torch.bfloat16)
    with running_engine(folder, limits=half) as engine:
        loader = TorchLoader(engine)
        assert stage(loader, sent) == digest(sent)
        assert loader.commit(5) == digest(sent)
        live = live_tensors(engine.require_model().model)
        assert all(torch.equal(live[name], tensor.bfloat16()) for name, tensor in sent.items())


def test_an_update_is_refused_while_the_weights_are_released(folder: Path, sent: dict[str, torch.Tensor]) -> None:
    with running_engine(folder) as engine:
        served = engine.served

        def release() -> None:
            engine.served = None

        wait(engine.run_between_steps(release))
        with pytest.raises(MeshError, match="released"):
            TorchLoader(engine).begin(manifest(sent))
        engine.served = served


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_come_one_by_one_as_files_name_them(kind: str, tmp_path: Path) -> None:
    start = write_experts(tmp_path / "start", kind)
    student = start_student(start)
    student.step(make_batch(JSD().spec), JSD())
    student.export(tmp_path / "new")
    published = {
        name: torch.from_numpy(data).view(torch.float32).reshape(shape) for name, _, shape, data in student.weights()
    }
    assert sum(".experts." in name for name in published) == 18
    with running_engine(start) as engine:
        loader = TorchLoader(engine)
        assert stage(loader, published) == digest(published)
        assert loader.commit(5) == digest(published)
        served = engine.require_model()
        held, expected = served.model.state_dict(), reference(tmp_path / "new").state_dict()
        assert held.keys() == expected.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
        assert checksums(served) == {name: tensor_digest(octets(tensor)) for name, tensor in published.items()}
        lacking = dict(list(published.items())[:-1])
        with pytest.raises(MeshError, match="the sent weights lack"):
            loader.begin(manifest(lacking))


def test_a_folder_that_holds_experts_fused_is_loaded_all_the_same(tmp_path: Path) -> None:
    start = write_experts(tmp_path / "start", "mixtral")
    new = reference(write_experts(tmp_path / "new", "mixtral", seed=1))
    save_file(new.state_dict(), tmp_path / "new" / "model.safetensors", metadata={"format": "pt"})
    served = ServedModel.load(start, CPU32)
    served = prepare(served, tmp_path / "new", None, CPU32).apply(served)
    assert all(torch.equal(served.model.state_dict()[name], tensor) for name, tensor in new.state_dict().items())
