"""Data sets: files, digests, readers and downloads of published ones, and SYNTHETIC(alpha, beta), a generated one."""

import gzip
import hashlib
import math
import os
import shutil
import tarfile
import tomllib
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedcore.arrays import F64
from fedcore.errors import MissingDataError, MissingDependencyError, UnknownNameError
from fedcore.runtime import generator
from fedcore.sim.data.arrays import Dataset, Inputs, Labels
from fedcore.sim.data.partitions import LAWS
from fedcore.validation import absolute, check_number

LIMIT = 1 << 30
"""The maximum number of bytes in an IDX file (EMNIST's largest has 547 MB), so that no gzip file can fill memory."""
CIFAR_RECORDS = 10_000
"""Records in each of CIFAR-10's files."""
CIFAR_BYTES = 1 + 3 * 32 * 32
CIFAR_MEAN = (0.49139968, 0.48215841, 0.44653091)
CIFAR_DEVIATION = (0.24703223, 0.24348513, 0.26158784)
"""Mean and standard deviation of the training pixels / 255, for each colour."""


@dataclass(frozen=True)
class Published:
    """The files of a published data set.

    Attributes:
        folder: the folder in ``$FEDCORE_DATA_DIR``, and in pooch's cache.
        address: the URL of the publisher's folder, which ends in a slash, or of the archive.
        files: paths in the folder or the archive. For IDX: the images and labels for training, then those of the test.
        digests: the SHA-256 of each IDX file's decompressed content, since mirrors may compress it differently. For
            CIFAR-10, see ``load_cifar10``. Empty if the publisher gives none.
        md5: the archive's MD5 from its publisher; pooch verifies it.
        first: the lowest label in the files.
        transposed: whether the files hold transposed images.
    """

    folder: str
    address: str
    about: str
    files: tuple[str, ...]
    digests: tuple[str, ...] = ()
    md5: str | None = None
    classes: int = 10
    shape: tuple[int, ...] = (1, 28, 28)
    first: int = 0
    transposed: bool = False


def _published() -> dict[str, Published]:
    tables = tomllib.loads((resources.files("fedcore.sim.data") / "published.toml").read_text(encoding="utf-8"))
    lists = {
        name: {key: tuple(one) for key, one in own.items() if isinstance(one, list)} for name, own in tables.items()
    }
    return {name: Published(**own | lists[name]) for name, own in tables.items()}


PUBLISHED = _published()
"""The data sets with files, keyed by name."""


def load_digits() -> Dataset:
    """Load scikit-learn's digits: pixels / 16 as float32[m, 1, 8, 8], 1,437 training and 360 test examples, 10 classes.

    The split is a fixed permutation, the same in every run.

    Reference: E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998 (its test part).
    """
    try:
        scikit_learn = distribution("scikit-learn")
    except PackageNotFoundError as error:
        raise MissingDependencyError.of("digits", "scikit-learn", extra="sim") from error
    # Read the file directly, since importing scikit-learn takes two seconds in each process.
    table = np.loadtxt(str(scikit_learn.locate_file("sklearn/datasets/data/digits.csv.gz")), delimiter=",")
    x = (table[:, :64] / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    y = table[:, 64].astype(np.int64)
    train, test = np.split(generator(0, "data: digits split").permutation(len(x)), [1437])
    return Dataset("digits", x[train], y[train], x[test], y[test], classes=10)


def load_idx(name: str) -> Dataset:
    """Load MNIST, Fashion-MNIST or a split of EMNIST: pixels / 255 as float32[m, 1, 28, 28].

    The images are upright, and the labels count from 0 (the files of ``emnist-letters`` have 1 .. 26).

    Raises:
        MissingDataError: a file is missing, cannot be downloaded, or differs from the published one.
        MissingDependencyError: pooch, which downloads files, is not installed.

    Cost: 4 bytes a pixel: 220 MB of memory for MNIST, 2.6 GB for EMNIST's ``byclass`` and ``bymerge``, and a quarter
        more during loading.

    Reference: Y. LeCun, C. Cortes, C. Burges, "The MNIST database", 1998; H. Xiao, K. Rasul, R. Vollgraf,
    "Fashion-MNIST", arXiv 1708.07747, 2017; G. Cohen, S. Afshar, J. Tapson, A. van Schaik, "EMNIST: Extending MNIST to
    handwritten letters", 2017.
    """
    published, paths = PUBLISHED[name], find_files(name)
    digests = published.digests or (None,) * len(paths)
    train_x, train_y = _read_labelled(published, paths[:2], digests[:2])
    test_x, test_y = _read_labelled(published, paths[2:], digests[2:])
    return Dataset(name, train_x, train_y, test_x, test_y, published.classes)


def _read_labelled(published: Published, paths: Sequence[Path], digests: Sequence[str | None]) -> tuple[Inputs, Labels]:
    images, labels = paths
    pixels = read_idx(images, ndim=3, sha256=digests[0])
    if pixels.shape[1:] != (28, 28) or not len(pixels):
        raise _corrupt(images, "images of 28 x 28", f"{list(pixels.shape)}")
    raw = read_idx(labels, ndim=1, sha256=digests[1])
    if len(raw) != len(pixels):
        raise _corrupt(labels, f"{len(pixels)} labels, one for each image", f"{len(raw)}")
    first, last = published.first, published.first + published.classes - 1
    if not first <= raw.min() <= raw.max() <= last:
        raise _corrupt(labels, f"labels {first} .. {last}", f"{raw.min()} .. {raw.max()}")
    upright = pixels.transpose(0, 2, 1) if published.transposed else pixels
    # Without order="C", NumPy keeps the transposed memory layout, in which gathering minibatches is slow.
    x = np.divide(upright[:, None], np.float32(255), dtype=np.float32, order="C")
    return x, raw.astype(np.int64) - first


def read_idx(path: Path, *, ndim: int, sha256: str | None = None) -> npt.NDArray[np.uint8]:
    """Read a gzip'd IDX file of unsigned bytes: uint8[d_1, ..., d_ndim], read-only.

    The format is 00 00, the type (08: unsigned bytes), the number of dimensions, each dimension as a big-endian uint32,
    and then the content. Nothing after the content is decompressed. ``sha256`` is the digest of the decompressed
    content; by default it is not verified. A MissingDataError reports a missing, malformed or different file.
    """
    length = 4 + 4 * ndim
    try:
        with gzip.open(path) as file:
            header = file.read(length)
            if header[:3] != b"\0\0\x08" or len(header) < 4:
                raise _corrupt(path, "an IDX file of unsigned bytes (00 00 08)", header[:4].hex(" ") or "nothing")
            if header[3] != ndim:
                raise _corrupt(path, f"{ndim} dimensions", f"{header[3]}")
            if len(header) < length:
                raise _corrupt(path, f"a header of {length} bytes", f"{len(header)}")
            shape = np.frombuffer(header, ">u4")[1:].tolist()
            size = math.prod(shape)
            if size > LIMIT:
                raise _corrupt(path, f"at most {LIMIT} bytes of content", f"a header of {shape}")
            content = file.read(size)
            extra = file.read(1)  # Reading to the end makes gzip compare its checksum.
    except (OSError, EOFError, zlib.error) as error:
        raise MissingDataError(f"{path}: not a readable gzip file: {error}") from error
    if len(content) < size or extra:
        raise _corrupt(path, f"{size} bytes for {shape}", "more bytes" if extra else f"{len(content)}")
    if sha256 is not None:
        digest = hashlib.sha256(header)
        digest.update(content)
        if digest.hexdigest() != sha256:
            raise _corrupt(path, f"content with SHA-256 {sha256}", digest.hexdigest())
    return np.frombuffer(content, np.uint8).reshape(shape)


def load_cifar10(standardise: bool = False) -> Dataset:
    """Load CIFAR-10: pixels / 255 as float32[m, 3, 32, 32], 50,000 training and 10,000 test examples, 10 classes.

    A record of its files has one label byte and 3,072 pixel bytes: 32 rows of 32, first red, then green, then blue.
    Mirrors store the records in different orders. So a digest is computed over the records' SHA-256 digests in
    ascending order: one digest for all training files together, one for the test file.

    Args:
        standardise: whether to subtract the mean of the training pixels and divide by their standard deviation, for
            each colour.

    Raises:
        MissingDataError, MissingDependencyError: as for ``load_idx``.

    Determinism: the examples are in the order of their SHA-256 digests, so a partition does not depend on the mirror.
    Cost: 740 MB of memory, and 370 MB more during loading.

    Reference: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    paths, (train, test) = find_files("cifar-10"), PUBLISHED["cifar-10"].digests
    train_x, train_y = _read_records(paths[:-1], train, standardise)
    test_x, test_y = _read_records(paths[-1:], test, standardise)
    return Dataset("cifar-10", train_x, train_y, test_x, test_y, classes=10)


def _read_records(paths: Sequence[Path], sha256: str, standardise: bool) -> tuple[Inputs, Labels]:
    records = np.concatenate([_read_cifar(path) for path in paths])
    digests = [hashlib.sha256(record).digest() for record in records]
    order = sorted(range(len(records)), key=digests.__getitem__)
    digest = hashlib.sha256(b"".join(digests[index] for index in order)).hexdigest()
    if digest != sha256:
        raise _corrupt(", ".join(map(str, paths)), f"records with SHA-256 {sha256}", digest)
    records = records[order]
    x = np.divide(records[:, 1:].reshape(-1, 3, 32, 32), np.float32(255), dtype=np.float32)
    if standardise:
        x -= np.array(CIFAR_MEAN, np.float32)[:, None, None]
        x /= np.array(CIFAR_DEVIATION, np.float32)[:, None, None]
    return x, records[:, 0].astype(np.int64)


def _read_cifar(path: Path) -> npt.NDArray[np.uint8]:
    """Return the records of one file, uint8[10000, 3073]."""
    size = CIFAR_RECORDS * CIFAR_BYTES
    with path.open("rb") as file:
        content = file.read(size + 1)
    if len(content) != size:
        raise _corrupt(path, f"{size} bytes", f"{len(content)}" if len(content) < size else "more bytes")
    records = np.frombuffer(content, np.uint8).reshape(CIFAR_RECORDS, CIFAR_BYTES)
    if (highest := records[:, 0].max()) > 9:
        raise _corrupt(path, "labels 0 .. 9", f"{highest}")
    return records


def _corrupt(path: Path | str, expected: str, found: str) -> MissingDataError:
    return MissingDataError(f"{path}: expected {expected}, got {found}; delete the file and download it again")


def find_files(name: str) -> list[Path]:
    """Return the paths of a data set's files; for the errors see ``load_idx``.

    If ``FEDCORE_DATA_DIR`` is set, the files must be in its subfolder ``Published.folder``. Otherwise they are
    downloaded once, into pooch's cache.
    """
    published = PUBLISHED[name]
    directory = os.environ.get("FEDCORE_DATA_DIR")
    if not directory:
        return _download(published)
    folder = absolute(directory) / published.folder
    if missing := [file for file in published.files if not (folder / file).is_file()]:
        address = published.address
        how = f"download them from {address}" if published.md5 is None else f"unpack {address} there"
        raise MissingDataError(
            f"{published.folder}: expected {', '.join(missing)} in {folder}; {how}, "
            "or unset FEDCORE_DATA_DIR to download the files automatically"
        )
    return [folder / file for file in published.files]


def _download(published: Published) -> list[Path]:
    name, files, address = published.folder, published.files, published.address
    try:
        import pooch
    except ImportError as error:
        how = "set FEDCORE_DATA_DIR"
        raise MissingDependencyError.of(name, "pooch for downloads", extra="sim", instead=how) from error
    folder = pooch.os_cache("fedcore") / name
    try:
        if published.md5 is None:
            cache = pooch.create(folder, address, registry=dict.fromkeys(files))
            return [Path(cache.fetch(file)) for file in files]
        archive = pooch.retrieve(address, f"md5:{published.md5}", address.rpartition("/")[2], folder)
        return _unpack(Path(archive), files)
    except (OSError, ValueError) as error:  # requests raises OSErrors, a wrong hash a ValueError.
        raise MissingDataError(
            f"{name}: {', '.join(files)} could not be downloaded from {address} ({error}); "
            f"put the files into a directory {name!r} and set FEDCORE_DATA_DIR to its parent"
        ) from error


def _unpack(archive: Path, files: Sequence[str]) -> list[Path]:
    """Return the paths of an archive's files; missing ones are unpacked into the archive's folder."""
    paths = [archive.parent / file for file in files]
    for file, path in zip(files, paths, strict=True):
        if path.is_file():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as fresh:
            if archive.suffix == ".zip":
                with zipfile.ZipFile(archive) as unzipped, unzipped.open(file) as packed:
                    shutil.copyfileobj(packed, fresh)
            else:
                with tarfile.open(archive) as untarred, untarred.extractfile(file) as packed:  # type: ignore[union-attr]
                    shutil.copyfileobj(packed, fresh)
        os.replace(fresh.name, path)  # Atomic, since other processes may read the file.
    return paths


# SYNTHETIC: generated data with a separate law for each client, and its IID variant.


FEATURES = 60
CLASSES = 10

Law = Literal["pareto", "lognormal"]


def load_synthetic(
    alpha: float,
    beta: float,
    *,
    clients: int,
    seed: int,
    sizes: Law = "pareto",
    smallest: int = 50,
    largest: int = 2000,
    test_share: float = 0.1,
) -> Dataset:
    """Generate SYNTHETIC(alpha, beta): client k has x ~ N(v_k, diag(j^-1.2)), labelled argmax(softmax(W_k x + b_k)).

    B_k ~ N(0, beta^2), and every entry of v_k ~ N(B_k, 1): beta controls how much the clients' features differ.
    u_k ~ N(0, alpha^2), and every entry of W_k and b_k ~ N(u_k, 1): alpha is meant to control how much their models
    differ. But u_k adds the same number to the scores of all classes, which changes neither softmax nor argmax: the
    data is the same for all alpha. (0, 0) is far from IID, because each client has its own W_k, b_k and v_k;
    ``load_synthetic_iid`` is IID.

    The result is float32[m, 60] with 10 classes; ``parts`` and ``test_parts`` have the examples of each client.

    Args:
        alpha, beta: standard deviations, as in the authors' public code; their paper does not specify it.
        sizes: the law of the clients' sizes, see ``fedcore.sim.data.partitions``.
        smallest, largest: the law's scale and cap; if they are equal, all clients have this size.
        test_share: a client's examples in the common test set, as a share of its training examples, rounded up.

    Determinism: the result depends only on the arguments (the labels, up to rounding in float64 matrix products). A
    client's data does not depend on the other clients, and its first examples do not depend on its size.

    Reference: T. Li et al., "Federated Optimization in Heterogeneous Networks", 2018, Sec. 5.1.
    """
    for name, value in (("alpha", alpha), ("beta", beta)):
        check_number(name, value, "[0, inf)")
    counts = _counts(clients, seed, sizes, smallest, largest, test_share)
    pieces = []
    for client, (train, test) in enumerate(counts):
        random = generator(seed, "data: synthetic", client=client)
        u, B = random.normal(size=2) * (alpha, beta)
        W, b = u + random.normal(size=(FEATURES, CLASSES)), u + random.normal(size=CLASSES)
        v = B + random.normal(size=FEATURES)
        pieces.append(_examples(random, v, W, b, train + test))
    return _gather("synthetic", pieces, [train for train, _ in counts])


def load_synthetic_iid(
    *, clients: int, seed: int, sizes: Law = "pareto", smallest: int = 50, largest: int = 2000, test_share: float = 0.1
) -> Dataset:
    """Generate SYNTHETIC with one law for all clients: W and b ~ N(0, 1) are shared, and v_k = 0.

    Arguments, result and errors are those of ``load_synthetic``; W and b depend only on the seed.
    """
    counts = _counts(clients, seed, sizes, smallest, largest, test_share)
    shared = generator(seed, "data: synthetic, shared")
    W, b = shared.normal(size=(FEATURES, CLASSES)), shared.normal(size=CLASSES)
    pieces = [
        _examples(generator(seed, "data: synthetic", client=client), np.zeros(FEATURES), W, b, train + test)
        for client, (train, test) in enumerate(counts)
    ]
    return _gather("synthetic-iid", pieces, [train for train, _ in counts])


Examples = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def _counts(
    clients: int, seed: int, sizes: Law, smallest: int, largest: int, test_share: float
) -> list[tuple[int, int]]:
    """Return the numbers of training and test examples of each client."""
    check_number("test_share", test_share, "(0, 1]")
    if sizes not in LAWS:
        raise UnknownNameError.of("sizes", sizes, LAWS)
    drawn: list[int] = LAWS[sizes](clients, seed=seed, smallest=smallest, largest=largest).tolist()
    return [(train, math.ceil(train * test_share)) for train in drawn]


def _examples(random: np.random.Generator, v: F64, W: F64, b: F64, count: int) -> Examples:
    deviation = np.arange(1, FEATURES + 1) ** -0.6  # the covariance is diag(j^-1.2)
    x = v + deviation * random.normal(size=(count, FEATURES))
    return x.astype(np.float32), (x @ W + b).argmax(axis=1)  # softmax does not change the argmax


def _gather(name: str, pieces: Sequence[Examples], train: Sequence[int]) -> Dataset:
    def parts(counts: Sequence[int]) -> tuple[npt.NDArray[np.int64], ...]:
        return tuple(np.arange(end - count, end) for end, count in zip(np.cumsum(counts), counts, strict=True))

    cut = [(x[:m], y[:m], x[m:], y[m:]) for (x, y), m in zip(pieces, train, strict=True)]
    test = [len(test_y) for _, _, _, test_y in cut]
    train_x, train_y, test_x, test_y = map(np.concatenate, zip(*cut, strict=True))
    return Dataset(name, train_x, train_y, test_x, test_y, CLASSES, parts(train), parts(test))
