"""What a checkpoint says of itself: names and sizes that lead nowhere, tied weights, strides."""

import msgspec
import pytest

from bayplan.data import files
from bayplan.data.checkpoint import Checkpoint, SavedFile, SavedTensor, is_strided_apart
from bayplan.data.errors import FileFault


def file_of(**changes):
    tensor = SavedTensor(dtype="F32", shape=(4,), offset=8)
    fields = {
        "name": "model-00000.safetensors",
        "size_bytes": 24,
        "sha256": "0" * 64,
        "tensors": {"model.weight": tensor},
    }
    return msgspec.to_builtins(SavedFile(**fields)) | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../../etc/passwd"}, "must be like model-00000"),
        ({"name": "/etc/passwd"}, "must be like model-00000"),
        ({"size_bytes": -1}, "size_bytes is -1"),
        ({"size_bytes": 23}, "ends at byte 24 of a file of 23"),
        ({"sha256": "x"}, "64 hexadecimal"),
        ({"tensors": {"a": {"dtype": "F32", "shape": [1 << 50], "offset": 0}}}, "ends at byte"),
        ({"tensors": {"a": {"dtype": "F32", "shape": [0, 1 << 62], "offset": 0}}}, "no memory"),
        ({"tensors": {"a": {"dtype": "O8", "shape": [1], "offset": 0}}}, "dtype is 'O8'"),
        ({"tensors": {"a": {"dtype": "F32", "shape": [-1], "offset": 0}}}, r"shape\[0\] is -1"),
        (
            {"tensors": {"a": {"dtype": "U8", "shape": [2], "offset": 0, "strides": [1 << 40]}}},
            "do not keep",
        ),
        (
            {"tensors": {"a": {"dtype": "U8", "shape": [2, 2], "offset": 0, "strides": [1, 1]}}},
            "do not keep",
        ),
        ({"code": "import os"}, "unknown field"),
    ],
)
def test_hostile_manifests_are_refused_with_the_place(changes, message):
    content = msgspec.json.encode(
        {"schema": "bayplan/checkpoint", "version": 1, "step": 1, "files": [file_of(**changes)]}
    )
    with pytest.raises(FileFault, match=message):
        files.decode(content, Checkpoint, name="manifest.json")


def test_each_file_and_tensor_is_there_once_and_other_names_lead_to_one():
    file = msgspec.convert(file_of(), SavedFile)
    whole = Checkpoint(step=1, files=(file,), aliases={"model.tied": "model.weight"})
    assert (
        whole.tensors["model.tied"]
        == whole.tensors["model.weight"]
        == (
            file,
            file.tensors["model.weight"],
        )
    )
    other = msgspec.structs.replace(file, name="model-00001.safetensors")
    for wrong, message in (
        ({"files": (file, file)}, "file 'model-00000.safetensors' is there twice"),
        ({"files": (file, other)}, "tensor 'model.weight' is there twice"),
        ({"aliases": {"model.weight": "model.weight"}}, "must be a tensor's name"),
        ({"aliases": {"model.tied": "model.gone"}}, "must be a tensor's name"),
        ({"num_ranks": 0}, "num_ranks is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Checkpoint(**{"step": 1, "files": (file,), **wrong})


@pytest.mark.parametrize(
    ("shape", "strides", "is_apart"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),  # transposed
        ((2, 3), (1, 1), False),
        ((1, 3), (0, 1), True),  # whatever the stride of a single one
        ((2,), (16,), True),
        ((2,), (32,), False),  # mostly gaps
        ((2,), (1, 1), False),
        ((), (), True),
    ],
)
def test_elements_have_places_of_their_own_without_many_gaps(shape, strides, is_apart):
    assert is_strided_apart(shape, strides) is is_apart
