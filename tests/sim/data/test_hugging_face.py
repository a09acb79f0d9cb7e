"""Data sets of Hugging Face, created in memory without downloads."""

import numpy as np
import pytest

from fedcore.errors import ArrayError, DtypeError, ShapeError, UnknownNameError
from fedcore.sim.data import divide, from_hf

datasets = pytest.importorskip("datasets", reason="datasets is not installed")

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 5, 4), dtype=np.uint8)
LABELS = [2, 0, 1, 1, 0, 2]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def images(pixels):
    PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abcd"))})
    pictures = [PIL.fromarray(one) for one in pixels]
    return datasets.Dataset.from_dict({"image": pictures, "label": LABELS[: len(pixels)]}, features=features)


def vectors(count=6, **columns):
    x = RNG.normal(size=(count, 3)).astype(np.float32)
    fields = {"x": list(x), "y": LABELS[:count], **columns}
    return x, datasets.Dataset.from_dict(fields).cast_column("x", datasets.Sequence(datasets.Value("float32")))


@pytest.mark.parametrize("colours", [(), (3,)])
def test_images(colours):
    pixels = RNG.integers(0, 256, (6, 5, 4, *colours), dtype=np.uint8)
    dataset = from_hf(images(pixels), images(pixels[:2]), "image", "label", name="mine")
    expected = pixels.reshape(6, 5, 4, -1).transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(dataset.train_x, expected)
    np.testing.assert_array_equal(dataset.test_x, expected[:2])
    assert dataset.train_x.dtype == np.float32
    assert dataset.train_y.tolist() == LABELS
    assert (dataset.classes, dataset.name) == (4, "mine")  # One class has no examples.


def test_vectors_are_not_scaled(tmp_path):
    x, train = vectors()
    test_x, test = vectors(4)
    train.save_to_disk(tmp_path / "train")
    dataset = from_hf(datasets.load_from_disk(tmp_path / "train"), test, "x", "y")
    np.testing.assert_array_equal(dataset.train_x, x)
    np.testing.assert_array_equal(dataset.test_x, test_x)
    assert dataset.classes == 3


@pytest.mark.parametrize("writers", [[7, 3, 7, 3, 3, 9], list("babaac")])
def test_a_client_column_makes_a_natural_partition(writers):
    _, train = vectors(writer=writers)
    dataset = from_hf(train, vectors(2)[1], "x", "y", client="writer")
    assert [part.tolist() for part in divide(dataset, "natural", 3, seed=0)] == [[1, 3, 4], [0, 2], [5]]


def test_an_unknown_column_gets_a_suggestion():
    with pytest.raises(UnknownNameError, match="column of train: 'imag' is unknown; did you mean 'image'"):
        from_hf(images(PIXELS), images(PIXELS), "imag", "label")


def test_inputs_of_several_shapes_are_rejected():
    ragged = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [1.0]], "y": [0, 1]})
    with pytest.raises(ShapeError, match=r"^train: .*'x'"):
        from_hf(ragged, ragged, "x", "y")


def test_other_objects_are_rejected():
    splits = datasets.DatasetDict(train=vectors()[1])
    with pytest.raises((ArrayError, UnknownNameError)):
        from_hf(splits, splits, "x", "y")
    with pytest.raises(ArrayError, match=r"^train: .*list"):
        from_hf([], [], "x", "y")
    streamed = vectors()[1].to_iterable_dataset()
    with pytest.raises(ArrayError, match="streamed"):
        from_hf(streamed, streamed, "x", "y")


def test_text_labels_are_rejected():
    _, train = vectors(name=list("abcabc"))
    with pytest.raises(DtypeError):
        from_hf(train, train, "x", "name")
