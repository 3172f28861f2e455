"""What a folder of data holds, and what is wrong with it: named, with what would help."""

import io
import tarfile

import numpy
import pytest
import torch

from bayplan.data.errors import FileFault, UsageError
from bayplan.running.inputs.feed import Feed, FeedOptions
from bayplan.running.inputs.sources import BatchForm, open_data
from bayplan.running.inputs.training import check_data, form_of
from bayplan.step import split_batch

IMAGES = BatchForm(batch_size=4, image_shape=(3, 24, 24), num_outputs=3)
TEXT = BatchForm(batch_size=4, sequence=20, num_outputs=17)


def first_batches(folder, form=IMAGES, **options):
    """Inputs and targets of an epoch, read in this process."""
    if form.image_shape:
        place = torch.zeros(form.batch_size, *form.image_shape), torch.zeros(form.batch_size).long()
    else:
        place = tuple(torch.zeros(2, form.batch_size, form.sequence).long())
    feed = Feed(open_data(str(folder)), form, place, FeedOptions(workers=0, **options))
    return feed, [(fed.inputs.clone(), fed.targets.clone()) for fed in feed]


def test_folder_and_shards_of_the_same_images_are_told_apart_and_alike(image_folder, shard_folder):
    folder, shards = open_data(str(image_folder)), open_data(str(shard_folder))
    assert (folder.kind, shards.kind) == ("images", "tar shards")
    assert folder.classes == ("blue", "green", "red")
    assert folder.num_classes == shards.num_classes == 3
    assert shards.training.shards == (10, 10, 4)
    contents = [
        sorted((int(part.labels()[n]), part.content(n)) for n in range(len(part)))
        for data in (folder, shards)
        for part in (data.training, data.evaluation)
    ]
    assert contents[0] == contents[2]
    assert contents[1] == contents[3]
    assert shards.training.name(11).startswith("0011.jpg in ")


def test_table_of_a_shard_is_kept_until_the_shard_changes(tmp_path, make_shard, monkeypatch):
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "data" / "a.tar"
    path.parent.mkdir()
    members = [("1.jpg", b"x"), ("1.cls", b"0"), ("2.jpg", b"yy"), ("2.cls", b"1")]
    make_shard(path, members)
    assert open_data(str(path.parent)).training.labels().tolist() == [0, 1]
    (kept,) = (tmp_path / "cache" / "shards").iterdir()
    monkeypatch.setattr(tarfile, "open", None)  # is not asked again
    assert open_data(str(path.parent)).training.content(1) == b"yy"
    kept.write_bytes(b"damaged")
    monkeypatch.undo()
    assert open_data(str(path.parent)).training.content(1) == b"yy"
    make_shard(path, [*members, ("3.png", b"zzz"), ("3.cls", b"2")])
    assert len(open_data(str(path.parent)).training) == 3


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("1.jpg", b"x")], ("1 in ", "has no label", "1.cls")),
        ([("1.cls", b"0")], ("1 in ", "has no image")),
        ([("1.jpg", b"x"), ("1.cls", b"cat")], ("1.cls in ", "no class number but b'cat'")),
        ([("1.jpg", b"x"), ("1.cls", b"0" * 99)], ("1.cls in ", "no class number")),
        ([("1.jpg", b""), ("1.cls", b"0")], ("1.jpg in ", "has 0 bytes")),
        ([("1.jpg", b"x"), ("1.cls", b"0")], ("has one class",)),
        ([], ("has no images",)),
    ],
)
def test_bad_member_of_a_shard_is_named(tmp_path, make_shard, members, words):
    make_shard(tmp_path / "bad.tar", members)
    with pytest.raises((FileFault, UsageError)) as refusal:
        open_data(str(tmp_path))
    assert all(word in str(refusal.value) for word in words)


def test_link_in_a_shard_is_refused(tmp_path):
    with tarfile.open(tmp_path / "bad.tar", "w") as shard:
        link = tarfile.TarInfo("1.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        shard.addfile(link)
    with pytest.raises(FileFault, match=r"1.jpg in .* is not a file but a link or a device"):
        open_data(str(tmp_path))


@pytest.mark.parametrize("how", ["cut", "noise", "compressed"])
def test_shard_that_is_no_whole_tar_file_is_refused(tmp_path, make_shard, how):
    path = tmp_path / "bad.tar"
    make_shard(path, [("1.jpg", bytes(5000)), ("1.cls", b"0")])
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[:3000])
    elif how == "noise":
        path.write_bytes(numpy.random.default_rng(0).bytes(4000))
    else:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w:gz") as shard:
            shard.addfile(tarfile.TarInfo("1.cls"))
        path.write_bytes(stream.getvalue())
    with pytest.raises(FileFault, match=r"bad.tar"):
        open_data(str(tmp_path))


def test_folders_without_images_or_with_one_class_are_refused(tmp_path):
    with pytest.raises(UsageError, match="has no images; expected are folders train/CLASS"):
        open_data(str(tmp_path))
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"has one class \(cat\)"):
        open_data(str(tmp_path))
    (tmp_path / "dog").mkdir()
    with pytest.raises(UsageError, match="dog has no images; remove the folder"):
        open_data(str(tmp_path))
    with pytest.raises(FileFault, match=r"cannot read .*missing: No such file"):
        open_data(str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="synthetic:many: say how many samples"):
        open_data("synthetic:many")


def test_class_that_is_only_evaluated_is_refused(tmp_path):
    for place in ("train/cat", "train/dog", "val/cow"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "1.jpg").write_bytes(b"x")
    with pytest.raises(UsageError, match=r"has the class cow, which .* has not"):
        open_data(str(tmp_path))


@pytest.fixture
def damaged_folder(image_folder, tmp_path):
    """The images, of which one is cut off in the middle."""
    for path in (image_folder / "train").rglob("*.jpg"):
        target = tmp_path / path.relative_to(image_folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    bad = tmp_path / "train" / "green" / "001.jpg"
    bad.write_bytes(bad.read_bytes()[:300])
    return tmp_path


def test_unreadable_image_is_named_and_skipped_only_when_asked(damaged_folder):
    with pytest.raises(FileFault, match=r"green/001.jpg is no image that can be read.*--skip-unre"):
        first_batches(damaged_folder)
    feed, batches = first_batches(damaged_folder, skip_unreadable=True, epochs=2)
    assert len(batches) == 12
    record = feed.record(num_warm=0, num_measured=12)
    assert record.num_skipped == 2
    assert all("green/001.jpg" in name for name in record.skipped)


def test_images_are_normalised_and_drawn_anew_each_epoch(image_folder):
    _, batches = first_batches(image_folder, epochs=2)
    epochs = [torch.cat([images for images, _ in batches[part : part + 6]]) for part in (0, 6)]
    assert epochs[0].mean().abs() < 1
    assert 0.2 < epochs[0].std() < 2
    assert not torch.equal(epochs[0].sum((1, 2, 3)).sort()[0], epochs[1].sum((1, 2, 3)).sort()[0])


def test_windows_of_tokens_and_what_comes_next(token_folder):
    _, batches = first_batches(token_folder, TEXT)
    training, evaluation = 3999 // 20, 699 // 20
    assert len(batches) == training // 4 + -(-evaluation // 4)
    for inputs, targets in batches:
        assert torch.equal(targets, (inputs + 3) % 17)


@pytest.mark.parametrize(
    ("name", "dtype", "vocabulary"),
    [
        ("train.bin", "<u2", 17),
        ("train.bin", "<u4", 17),
        ("train.bin", "<u4", 100_000),
        ("train.npy", "uint16", 17),
        ("train.npy", "int64", 17),
    ],
)
def test_widths_of_tokens_are_told_apart(tmp_path, name, dtype, vocabulary):
    tokens = (numpy.arange(500) * 7 % 17).astype(dtype)
    if name.endswith(".npy"):
        numpy.save(tmp_path / name, tokens)
    else:
        (tmp_path / name).write_bytes(tokens.tobytes())
    form = BatchForm(batch_size=2, sequence=10, num_outputs=vocabulary)
    samples, _ = open_data(str(tmp_path)).samples(form)
    assert len(samples) == 49
    assert samples.window(3).tolist() == tokens[30:41].tolist()


def test_token_above_the_vocabulary_is_named_with_its_place(token_folder):
    with pytest.raises(FileFault, match=r"train.bin has the token 16 at place \d+, .* 0 to 15"):
        first_batches(token_folder, BatchForm(batch_size=4, sequence=20, num_outputs=16))


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "is empty"), (b"123", "odd number of bytes"), (b"1234", "a sample needs 21")],
)
def test_token_file_that_is_none_is_refused(tmp_path, content, words):
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises((FileFault, UsageError), match=words):
        first_batches(tmp_path, TEXT)


def test_array_of_objects_is_not_loaded(tmp_path):
    numpy.save(tmp_path / "train.npy", numpy.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(FileFault, match="is not a NumPy array"):
        first_batches(tmp_path, TEXT)


def test_data_that_the_model_cannot_learn_from_are_refused_before_anything_runs(
    image_folder, token_folder, prepare_with, classifier, reader
):
    images, tokens = open_data(str(image_folder)), open_data(str(token_folder))
    options = FeedOptions()
    with pytest.raises(UsageError, match="has 3 classes, and the model tells 2 apart"):
        check_data(images, prepare_with("classifier", num_classes=2), options)
    with pytest.raises(UsageError, match="has images, and the model takes tokens"):
        check_data(images, reader, options)
    with pytest.raises(UsageError, match="has tokens, and the model takes images"):
        check_data(tokens, classifier, options)
    with pytest.raises(UsageError, match="a batch of 25 is larger than the 24 samples"):
        check_data(images, classifier.at(25), options)
    with pytest.raises(UsageError, match="needs an optimizer"):
        check_data(images, classifier.changed(optimizer="none"), options)
    assert check_data(images, classifier, FeedOptions(epochs=2, steps=5)) == 5
    assert check_data(images, classifier, FeedOptions(epochs=1, steps=5)) == 3


def test_form_of_a_step_is_that_of_its_batch_and_its_output(classifier, reader):
    assert form_of(classifier) == BatchForm(8, image_shape=(3, 24, 24), num_outputs=3)
    assert form_of(reader) == BatchForm(8, sequence=20, num_outputs=17)
    loss_fn = torch.nn.functional.mse_loss
    with pytest.raises(UsageError, match="the target's own batch is neither"):
        BatchForm.of((torch.zeros(4, 3), torch.zeros(4, 3)), loss_fn)
    assert split_batch((1, 2), loss_fn) == (1, (2,))
