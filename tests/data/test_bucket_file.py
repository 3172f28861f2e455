"""Files of buckets: what they must hold, and for which model."""

import pytest

from bayplan.data import files
from bayplan.data.errors import FileFault, ForeignPlan
from bayplan.data.exchange import BucketFile


def buckets(*groups):
    return BucketFile(model="small", buckets=groups)


def test_buckets_of_the_same_parameters_are_taken(tmp_path):
    own = buckets(("b", "c"), ("a",))
    own.check(["a", "b", "c"])
    files.write(tmp_path / "own.json", own)
    assert files.read(tmp_path / "own.json", BucketFile) == own


@pytest.mark.parametrize(
    ("parameters", "phrase"),
    [
        (["a", "b"], "1 of its parameters are not in this model (c)"),
        (["a", "b", "c", "d"], "1 of this model's are in no bucket (d)"),
        ([*"abc", *"defgh"], "5 of this model's are in no bucket (d, e, f and 2 more)"),
        (["x"], "3 of its parameters are not in this model (a, b, c), 1 of this model's"),
    ],
)
def test_another_model_s_are_refused(parameters, phrase):
    with pytest.raises(ForeignPlan) as fault:
        buckets(("b", "c"), ("a",)).check(parameters)
    assert phrase in str(fault.value)
    assert "for small" in str(fault.value)


@pytest.mark.parametrize(
    ("groups", "phrase"),
    [('[["a"], ["b", "a"]]', "buckets name a more than once"), ("[[]]", "a bucket is empty")],
)
def test_files_of_nonsense_are_refused(tmp_path, groups, phrase):
    path = tmp_path / "bad.json"
    path.write_text(
        f'{{"schema": "bayplan/buckets", "version": 1, "model": "x", "buckets": {groups}}}'
    )
    with pytest.raises(FileFault, match=phrase):
        files.read(path, BucketFile)
