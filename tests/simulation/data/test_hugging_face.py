"""Hugging Face's data sets, made here: nothing is downloaded."""

import numpy as np
import pytest

from fedcore.errors import ArrayError, DtypeError, ShapeError, UnknownNameError
from fedcore.simulation.data import divide, from_hf

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
    told = {"x": list(x), "y": LABELS[:count], **columns}
    return x, datasets.Dataset.from_dict(told).cast_column("x", datasets.Sequence(datasets.Value("float32")))


@pytest.mark.parametrize("colours", [(), (3,)])
def test_images(colours):
    pixels = RNG.integers(0, 256, (6, 5, 4, *colours), dtype=np.uint8)
    made = from_hf(images(pixels), images(pixels[:2]), "image", "label", name="mine")
    due = pixels.reshape(6, 5, 4, -1).transpose(0, 3, 1, 2).astype(np.float32) / np.float32(255)
    np.testing.assert_array_equal(made.train_x, due)
    np.testing.assert_array_equal(made.test_x, due[:2])
    assert made.train_x.dtype == np.float32
    assert made.train_y.tolist() == LABELS
    assert (made.classes, made.name) == (4, "mine")  # one has no example


def test_numbers_stay_as_they_are(tmp_path):
    x, train = vectors()
    test_x, test = vectors(4)
    train.save_to_disk(tmp_path / "train")
    made = from_hf(datasets.load_from_disk(tmp_path / "train"), test, "x", "y")
    np.testing.assert_array_equal(made.train_x, x)
    np.testing.assert_array_equal(made.test_x, test_x)
    assert made.classes == 3


@pytest.mark.parametrize("whose", [[7, 3, 7, 3, 3, 9], list("babaac")])
def test_whose_an_example_is(whose):
    _, train = vectors(writer=whose)
    made = from_hf(train, vectors(2)[1], "x", "y", client="writer")
    assert [part.tolist() for part in divide(made, "natural", 3, seed=0)] == [[1, 3, 4], [0, 2], [5]]


def test_a_column_that_is_none():
    with pytest.raises(UnknownNameError, match="column of train: 'imag' is unknown; did you mean 'image'"):
        from_hf(images(PIXELS), images(PIXELS), "imag", "label")


def test_inputs_of_several_shapes():
    ragged = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [1.0]], "y": [0, 1]})
    with pytest.raises(ShapeError, match="train: expected values of 'x' of one shape"):
        from_hf(ragged, ragged, "x", "y")


def test_what_is_no_data_set():
    splits = datasets.DatasetDict(train=vectors()[1])
    with pytest.raises((ArrayError, UnknownNameError)):
        from_hf(splits, splits, "x", "y")
    with pytest.raises(ArrayError, match=r"train: expected a datasets\.Dataset, got list"):
        from_hf([], [], "x", "y")
    streamed = vectors()[1].to_iterable_dataset()
    with pytest.raises(ArrayError, match="streamed"):
        from_hf(streamed, streamed, "x", "y")


def test_labels_that_are_texts():
    _, train = vectors(name=list("abcabc"))
    with pytest.raises(DtypeError):
        from_hf(train, train, "x", "name")
