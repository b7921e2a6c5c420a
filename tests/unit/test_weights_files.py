"""Safetensors without torch: digests, casts, and files that are not what they say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from distill.errors import ConfigError, TeacherError
from distill.teacher_manager.teachers import Teacher
from distill.transfermesh.digest import tensor_digest
from distill.weights.files import cast_checksum, stored_tensors, tensor_checksums

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def octets(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_checksums_are_those_of_the_raw_bytes_in_every_dtype(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(3, 5).bfloat16(),
        "single": torch.randn(7),
        "ids": torch.arange(9),
        "none": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }
    write(tmp_path, **tensors)
    assert tensor_checksums(tmp_path) == {name: tensor_digest(octets(tensor)) for name, tensor in tensors.items()}


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("held", DTYPES)
def test_a_cast_checksum_is_that_of_the_tensor_that_torch_casts(tmp_path: Path, stored: str, held: str) -> None:
    values = torch.cat([torch.randn(1000), torch.tensor([0.0, -0.0, 1e-8, 7e4, -3e38, 1 + 2**-8, 1 + 3 * 2**-8])])
    tensor = values.to(DTYPES[stored])
    folder = write(tmp_path, w=tensor)
    assert cast_checksum(stored_tensors(folder)["w"], held) == tensor_digest(octets(tensor.to(DTYPES[held])))


def test_integers_are_never_cast(tmp_path: Path) -> None:
    folder = write(tmp_path, ids=torch.arange(5))
    assert cast_checksum(stored_tensors(folder)["ids"], "F32") == tensor_digest(octets(torch.arange(5)))


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "x-2.safetensors")
    save_file({"stray": torch.zeros(3)}, tmp_path / "other.safetensors")
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    teacher = Teacher.open("t", tmp_path)
    assert set(teacher.tensors) == {"a", "b"}
    assert teacher.bytes == 4 * (2 + 3)


def test_a_teacher_is_as_large_as_the_server_holds_it(tmp_path: Path) -> None:
    folder = write(tmp_path, half=torch.ones(4).bfloat16(), single=torch.ones(2), ids=torch.arange(3))
    sizes = {dtype: Teacher.open("t", folder, server_dtype=dtype).bytes for dtype in (None, "float32", "bfloat16")}
    assert sizes == {None: 8 + 8 + 24, "float32": 16 + 8 + 24, "bfloat16": 8 + 4 + 24}


def test_a_stray_file_beside_the_model_is_not_read(tmp_path: Path) -> None:
    folder = write(tmp_path, w=torch.ones(2))
    (folder / "consolidated.safetensors").write_bytes(b"broken")
    assert set(Teacher.open("t", folder).tensors) == {"w"}


def test_a_truncated_file_says_how_many_bytes_were_expected_and_found(tmp_path: Path) -> None:
    file = write(tmp_path, w=torch.randn(100)) / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: size - 50])
    with pytest.raises(TeacherError, match=f"expected {size} bytes, found {size - 50}"):
        Teacher.open("t", tmp_path)
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(TeacherError, match=r"expected at least \d+ bytes, found 20"):
        Teacher.open("t", tmp_path)
    file.write_bytes(b"abc")
    with pytest.raises(TeacherError, match="expected at least 8 bytes, found 3"):
        Teacher.open("t", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x05" + bytes(7) + b"{not}", "header is broken"),
        (b"\x02" + bytes(7) + b"[]", "header is broken"),
        (b"\xff" * 16, "is no safetensors file"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(TeacherError, match=message):
        Teacher.open("t", tmp_path)


def test_a_missing_shard_and_a_folder_without_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no safetensors file there"):
        Teacher.open("t", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(TeacherError, match=r"gone\.safetensors: cannot be read: No such file"):
        Teacher.open("t", tmp_path)


def test_a_server_agrees_in_the_files_dtype_and_in_a_wider_one_but_not_with_other_values(tmp_path: Path) -> None:
    tensor = torch.randn(8, 4).bfloat16()
    teacher = Teacher.open("t", write(tmp_path, w=tensor, v=torch.ones(2)))
    v = tensor_digest(octets(torch.ones(2)))
    assert teacher.differences({"w": tensor_digest(octets(tensor)), "v": v}) == []
    assert teacher.differences({"w": tensor_digest(octets(tensor.float())), "v": v}) == []
    changed = tensor.float()
    changed[3, 2] += 1e-3
    assert teacher.differences({"w": tensor_digest(octets(changed)), "v": v}) == ["w"]


def test_a_tensor_that_the_server_does_not_list_is_a_difference_unless_it_is_tied_or_renamed(tmp_path: Path) -> None:
    shared = torch.randn(4)
    teacher = Teacher.open("t", write(tmp_path, embed=shared, head=shared.clone(), q=torch.ones(2)))
    digests = tensor_checksums(tmp_path)
    assert teacher.differences({"embed": digests["embed"], "q": digests["q"]}) == [], "head equals embed"
    assert teacher.differences({"embed": digests["embed"]}) == ["q"]
    assert teacher.differences({"embed": digests["embed"], "qkv": "0" * 16}) == [], "the canary stands in for q"
    assert teacher.differences({"embed": "1" * 16, "qkv": "0" * 16}) == ["embed"]


def test_files_that_change_their_layout_during_a_run_are_noticed(tmp_path: Path) -> None:
    teacher = Teacher.open("t", write(tmp_path, w=torch.ones(2)))
    teacher.check_files()
    write(tmp_path, w=torch.ones(3))
    with pytest.raises(TeacherError, match="are not those of the run's start"):
        teacher.check_files()


def test_the_version_names_the_teacher_and_its_files(tmp_path: Path) -> None:
    one = Teacher.open("math", write(tmp_path / "one", w=torch.ones(2)))
    two = Teacher.open("math", write(tmp_path / "two", w=torch.zeros(2)))
    assert one.version.startswith("math@") and one.version != two.version
    assert one.version == Teacher.open("math", tmp_path / "one").version
