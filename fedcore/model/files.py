"""Model files in the formats of safetensors, torch and NumPy."""

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any
from uuid import uuid4
from zipfile import ZipFile, is_zipfile

import numpy as np
import numpy.typing as npt

from fedcore.arrays import F32, Bfloat16Array, Library, dtype_name, library_of, own_class, spans
from fedcore.errors import ArrayError, DtypeError, MissingDependencyError, StoreError, UnknownNameError
from fedcore.files import FOLDER, OpenFolder, open_file, replacing, require_same, sync_folder
from fedcore.model.layout import LOGGER, Layout, named_tensors
from fedcore.model.policy import cast
from fedcore.model.safetensors import (
    BYTES,
    DIMENSIONS,
    PIECE,
    TORCH_SUFFIXES,
    WINDOW,
    Safetensors,
    StoredFile,
    StoredTensor,
    header_of,
    is_part,
)
from fedcore.validation import absolute, shorten

FORMS: dict[str, tuple[Library, ...]] = {
    ".safetensors": ("numpy", "torch"),
    ".pt": ("torch",),
    ".pth": ("torch",),
    ".npz": ("numpy",),
}
"""File suffixes, and the libraries whose tensors each format can hold."""
BESIDE = re.compile(
    r"((adapter|generation|tokenizer|preprocessor|processor)_)?config\.json|(vocab|merges)\.txt|chat_template\.jinja"
    r"|(tokenizer|vocab|added_tokens|special_tokens_map|chat_template)\.json|tokenizer\.tiktoken"
    r"|(tokenizer|spiece|spm|source|target|sentencepiece\.bpe)\.(model|spm)"
)
"""The names of files with configurations and tokenizers that Transformers and PEFT write beside a model."""
LARGEST_BESIDE = 1 << 26
"""The greatest size of such a file, in bytes."""


def form_of(path: str | os.PathLike[str]) -> str:
    """Return the file format, which is the suffix; raise UnknownNameError if it is not in ``FORMS``."""
    form = Path(path).suffix.lower()
    if form not in FORMS:
        raise UnknownNameError.of("suffix", form, FORMS)
    return form


def read_model(path: str | os.PathLike[str], *, key: str | None = None) -> dict[str, Any]:
    """Return the tensors of a model file by name. For a server's folder use ``fedcore.server.folder.read_model``.

    Args:
        path: a file that ``write_model``, safetensors, ``torch.save`` or ``numpy.savez`` wrote (.safetensors; .pt,
            .pth, .bin or .ckpt; .npz), or a folder or index of safetensors files, as for ``Safetensors``.
        key: the key of the ``state_dict`` in a torch checkpoint that has several entries.

    Returns:
        Torch tensors of a torch file, which may be tied; else NumPy arrays. bfloat16 tensors of safetensors files
        become float32 unless ml_dtypes is imported.

    Raises:
        StoreError: the path cannot be read.
        ArrayError, ShapeError, DtypeError: the file is malformed or truncated.
        MissingDependencyError: the file needs torch, which is not installed.

    Cost: reads the model into memory. ``Safetensors(path)`` reads each tensor when it is used.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_model({"w": np.float32([1, 2])}, f"{folder}/model.safetensors")
    ...     read_model(f"{folder}/model.safetensors")
    {'w': array([1., 2.], dtype=float32)}
    """
    place = absolute(path)
    suffix = place.suffix.lower()
    if suffix in TORCH_SUFFIXES and os.path.isfile(place):
        return dict(_load_torch(place, key, mmap=False))
    if key is not None:
        raise ArrayError(f"key={key!r}: {place.name} is not a torch file; leave out the key")
    return {name: np.asarray(tensor) for name, tensor in open_model(place).items()}


def open_model(path: Any, *, key: str | None = None) -> Mapping[str, Any]:
    """Return a model's tensors as ``StoredTensor``: of safetensors files, of a torch file, or of a .npz file.

    Tensors that are compressed, not contiguous in C order, or in another byte order are read into memory.

    Args:
        path: as for ``read_model``; a ``Safetensors`` is returned unchanged.
        key: as for ``read_model``; ignored for other files than those of torch.

    Cost: reads headers; a .npz file as a whole, to check its checksums.
    """
    if isinstance(path, Safetensors):
        return path
    place = absolute(path)
    suffix = place.suffix.lower()
    if suffix not in (*TORCH_SUFFIXES, ".npz") or not os.path.isfile(place):
        return Safetensors(place)
    file, fd = StoredFile.open(str(place))
    if suffix == ".npz":
        return _load_npz(file, fd)
    os.close(fd)
    named = _load_torch(place, key, mmap=True)
    mappings, found = _mappings_of(file), dict[str, Any]()
    for name, leaf in named.items():
        kind, at = dtype_name(leaf), leaf.data_ptr()
        starts = [at - begin + offset for begin, end, offset in mappings if begin <= at < end]
        if kind in BYTES and leaf.is_contiguous() and (starts or leaf.numel() == 0):
            found[name] = StoredTensor(name, file, kind, tuple(leaf.shape), (starts or [0])[0], "torch")
        else:
            found[name] = leaf.contiguous()
    return found


def folder_of(path: Any) -> Path | None:
    """Return the folder of Transformers or PEFT in which a model is, or None for a file of another name."""
    place = absolute(getattr(path, "path", path))
    if os.path.isdir(place):
        return place
    names = ("adapter_model", "model.safetensors", "pytorch_model")
    return place.parent if place.name.startswith(names) and os.path.exists(place) else None


def files_beside(paths: Mapping[str, Any], given: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the configurations and tokenizers beside the first model, which are those of the result.

    Log a warning for each of them that differs beside another model.

    Args:
        paths: the models by label, the base first.
        given: files that replace those of the models.

    Raises:
        StoreError: a file is too large, cannot be read, or is a link to another place.
    """
    found, first = dict[str, bytes](), next(iter(paths), "")
    for label, folder in [(label, folder) for label, path in paths.items() if (folder := folder_of(path))]:
        for name in sorted(filter(BESIDE.fullmatch, os.listdir(folder))):
            if name in given or (label != first and name not in found):
                continue
            content = _read_beside(folder, name)
            if found.setdefault(name, content) != content:
                LOGGER.warning(f"{label}: {name} differs from that of {first}, which the result gets")
    return {**found, **given}


def _read_beside(folder: Path, name: str) -> bytes:
    """Return a file beside a model. A link must lead into the folder, or into the blobs of a cache of snapshots."""
    target, home = (Path(os.path.realpath(path)) for path in (folder / name, folder))
    homes = [home, *(outer.with_name("blobs") for outer in home.parents if outer.name == "snapshots")]
    if not any(target.is_relative_to(os.path.realpath(place)) for place in homes):
        raise StoreError(f"{folder / name}: is a link out of the model's folder; put a copy of the file in its place")
    try:
        with open(open_file(target), "rb") as file:
            content = file.read(LARGEST_BESIDE + 1)
    except OSError as error:
        raise StoreError(f"{folder / name}: cannot be read: {error.strerror}") from None
    if len(content) > LARGEST_BESIDE:
        raise StoreError(f"{folder / name}: is larger than {LARGEST_BESIDE >> 20} MiB; remove it from the folder")
    return content


def _load_npz(file: StoredFile, fd: int) -> dict[str, Any]:
    """Return the tensors of an open .npz file, and close it."""
    found: dict[str, Any] = {}
    try:
        with os.fdopen(fd, "rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            for info in arrays.zip.infolist():
                name = info.filename.removesuffix(".npy")
                with arrays.zip.open(info) as member:
                    is_first = np.lib.format.read_magic(member) == (1, 0)
                    read = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
                    shape, is_fortran, dtype = read(member)
                    start, size = member.tell(), math.prod(shape) * dtype.itemsize
                    while member.read(PIECE):  # the end raises an error if the checksum is wrong
                        pass
                is_sound = all(type(side) is int and side >= 0 for side in shape) and len(shape) <= DIMENSIONS
                is_sound &= math.prod(filter(None, shape)) < 2**62
                if name in found or not is_sound or not (dtype.hasobject or start + size == info.file_size):
                    raise ValueError(f"{name!r} occurs twice, or does not have the size of its header")
                if info.compress_type or is_fortran or not dtype.isnative or dtype.name not in BYTES:
                    found[name] = np.asarray(arrays[info.filename], dtype.newbyteorder("="), order="C")
                else:
                    lengths = np.frombuffer(os.pread(fd, 4, info.header_offset + 26), "<u2")  # of name and extra field
                    start += info.header_offset + 30 + int(lengths.sum())
                    found[name] = StoredTensor(name, file, dtype.name, shape, start)
            if not found:
                raise ValueError("it has no tensors")
    except Exception as error:  # NumPy and zipfile raise errors of many classes for invalid files
        raise StoreError(f"{file.path}: cannot be read as .npz: {shorten(str(error))}") from None
    return found


def _load_torch(path: Path, key: str | None, *, mmap: bool) -> dict[str, Any]:
    """Return the state_dict of a torch file. With ``mmap``, its tensors are views of the mapped file if possible."""
    if find_spec("torch") is None:
        raise MissingDependencyError.of(path.name, "torch", extra="torch", instead="convert it to .safetensors")
    torch, keys, content = import_module("torch"), "", None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and _is_mappable(path))
        if isinstance(content, Mapping):
            keys = f"; its keys are {', '.join(map(repr, list(content)[:3]))}{', ...' * (len(content) > 3)}"
        named = content if key is None else content[key]
        odd = [name for name, leaf in named.items() if not isinstance(leaf, torch.Tensor)]
        if odd or not named or len({*map(str, named)}) < len(named):
            reason = "two names are equal as str" if named else "it is empty"
            raise TypeError(f"{odd[0]!r} is not a tensor" if odd else reason)
    except Exception as error:  # torch raises errors of many classes for invalid files
        reason = f"{type(error).__name__}: {shorten(str(error).partition(chr(10))[0].partition('. ')[0])}"
        advice = "copy it again" if content is None else "pass the key of the state_dict"
        advice += ", or save the file with torch.save(model.state_dict(), path)"
        entries = content.items() if key is None and isinstance(content, Mapping) else ()
        inner = [name for name, one in entries if isinstance(one, Mapping) and any(map(torch.is_tensor, one.values()))]
        if inner:
            advice = f"pass key={inner[0]!r}, or --key {inner[0]} in a command"
        raise ArrayError(f"{path}: cannot be read as a state_dict ({reason}){keys}; {advice}") from None
    return {str(name): own_class(f"{path.name}, {name}", leaf) for name, leaf in named.items()}


def _is_mappable(path: Path) -> bool:
    """Whether the bytes in a torch file are numbers of this machine. An older file names no byte order."""
    if not is_zipfile(path):
        return False
    with ZipFile(path) as file:
        orders = {file.open(info).read(8) for info in file.infolist() if info.filename.endswith("/byteorder")}
    return orders <= {sys.byteorder.encode()}


def _mappings_of(file: StoredFile) -> list[tuple[int, int, int]]:
    """Return the first and last address and the file's offset of each place where this process has mapped a file."""
    device = f"{os.major(file.state[0]):02x}:{os.minor(file.state[0]):02x}"
    line = rf"^(\w+)-(\w+) \S+ (\w+) {device} {file.state[1]}\s"
    found = re.findall(line, Path("/proc/self/maps").read_text(), re.MULTILINE)
    return [(int(begin, 16), int(end, 16), int(offset, 16)) for begin, end, offset in found]


def write_model(tensors: Any, path: str | os.PathLike[str]) -> None:
    """Write a model's tensors by name into a file, atomically and durably.

    Args:
        tensors: NumPy arrays or torch tensors, as ``Server.tensors()`` returns them. Tensors in lists and trees get
            names such as "0" and "layers.0.w". Tied tensors are written once for each name.
        path: the file. Its suffix determines the format: .safetensors, .npz (NumPy), or .pt or .pth (torch, a
            ``state_dict`` for ``torch.load(path, weights_only=True)``).

    Raises:
        UnknownNameError: the suffix is unknown.
        ArrayError, DtypeError: the format cannot hold tensors of that library, dtype or name. No format but torch's
            holds half of a surrogate pair, safetensors not "__metadata__", and .npz not "file", "allow_pickle" and
            names with a zero character or more than 65,531 bytes, nor objects and dtypes that NumPy does not define.
        StoreError: the file cannot be written.

    Example (writes a model every tenth round):

        server = fedcore.Server(..., callbacks=[lambda report: report.round % 10 or
            write_model(server.tensors(), f"models/round{report.round}.safetensors")])

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_model({"w": np.float32([1, 2])}, f"{folder}/model.npz")
    ...     dict(np.load(f"{folder}/model.npz"))
    {'w': array([1., 2.], dtype=float32)}
    """
    tensors = named_tensors(tensors)
    target, form, library = absolute(path), form_of(path), library_of(tensors.values())
    if library not in FORMS[form]:
        raise ArrayError(f"tensors: a {form} file holds {' or '.join(FORMS[form])} tensors, got {library} tensors")
    try:
        with replacing(target, "wb") as file:
            _write(dict(tensors), form, file)
    except OSError as error:
        raise StoreError(f"{target}: cannot write the model: {error}") from error


def _write(tensors: dict[str, Any], form: str, file: IO[bytes]) -> None:
    if form == ".npz":
        for name, leaf in tensors.items():
            written = name.encode(errors="ignore").replace(b"\0", b"")
            if name in ("file", "allow_pickle") or written.decode() != name or len(written + b".npy") >= 1 << 16:
                raise ArrayError(f"{name!r}: a .npz file cannot have a tensor of this name; rename it")
            if getattr(leaf.dtype, "kind", "V") in "OTV" or leaf.dtype.isbuiltin == 2:
                raise DtypeError(f"{name}: a .npz file cannot hold {dtype_name(leaf)}; convert the tensor")
        np.savez(file, allow_pickle=False, **tensors)
    elif form == ".safetensors":
        kinds = {name: dtype_name(leaf) for name, leaf in tensors.items()}
        for name, kind in kinds.items():
            if kind not in BYTES:
                raise DtypeError(f"{name}: a safetensors file cannot hold {kind}; convert the tensor")
        # The widest dtypes come first, so that all tensors are aligned.
        order = sorted(tensors, key=lambda name: (-BYTES[kinds[name]], name))
        file.write(header_of((name, kinds[name], tuple(tensors[name].shape)) for name in order))
        for name in order:
            file.write(bytes_of(tensors[name]).data)
    else:
        # A view would bring its whole memory along.
        parts = {name: one for name, one in tensors.items() if one.untyped_storage().nbytes() > one.nbytes}
        import_module("torch").save(tensors | {name: one.clone() for name, one in parts.items()}, file)


def write_flat(
    path: str | os.PathLike[str], layout: Layout, x: F32, outside: Mapping[str, Any], base: Safetensors | None
) -> None:
    """Write a flat model, float32[n], and its tensors ``outside`` to a new folder; see ``Server.write``."""
    target = absolute(path)
    tensors = layout.every
    headers, stored = ((), {}) if base is None else (base.headers, base)  # which has personal and frozen tensors too
    files = {Path(header.file.path).name: (header.text, list(header.tensors)) for header in headers}
    if base is not None and base.index is None and is_part(*files):
        files = {"model.safetensors": files.popitem()[1]}
    if not files:
        order = sorted(tensors, key=lambda name: (-BYTES[tensors[name].dtype], name))
        text = header_of((name, tensors[name].dtype, tensors[name].shape) for name in order)
        files = {"model.safetensors": (text, order)}

    def content(text: bytes, names: list[str]) -> Iterator[Any]:
        yield text
        for name in names:
            if (piece := tensors.get(name)) is None:
                parts = _parts(stored[name], stored[name].kind)
            else:
                vector = x[piece.start : piece.stop] if piece in layout.slices else outside[piece.name]
                parts = _parts(vector.reshape(-1), piece.dtype)
            yield from (part.data for part in parts)

    index = {} if base is None or base.index is None else dict([base.index])
    beside = files_beside({} if base is None else {"model": base}, index)
    contents = {name: content(*file) for name, file in files.items()} | {name: [text] for name, text in beside.items()}
    try:
        with _new_folder(target) as folder:
            for name, parts in contents.items():
                with open(name, "xb", opener=folder.open) as opened:
                    opened.writelines(parts)
                    opened.flush()
                    os.fsync(opened.fileno())
    except OSError as error:
        raise StoreError(f"{target}: cannot be written: {error.strerror}; choose a folder with space") from error


def _parts(vector: Any, kind: str) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of a vector, or of a ``StoredTensor``, in another dtype, in windows."""
    for span in spans(vector.size, 2 * vector.itemsize, WINDOW):
        part = vector.read(span.start, span.stop) if isinstance(vector, StoredTensor) else vector[span]
        yield bytes_of(cast(part, kind))


@contextmanager
def _new_folder(target: Path) -> Iterator[OpenFolder]:
    """Yield a folder that becomes ``target`` after the block."""
    if os.path.lexists(target):
        raise StoreError(f"{target}: exists; choose a new folder")
    draft = target.with_name(f".{target.name}.{uuid4().hex[:12]}")
    draft.mkdir(parents=True)
    with closing(OpenFolder.of(draft, FOLDER)) as folder:
        try:
            yield folder
            sync_folder(Path(), folder)
            require_same(draft, os.fstat(folder.fd), os.lstat(draft))
            os.rename(draft, target)
        except BaseException:
            for name in os.listdir(folder.fd):
                os.unlink(name, dir_fd=folder.fd)
            with suppress(OSError):
                draft.rmdir()
            raise
    sync_folder(target.parent)


def bytes_of(leaf: Any) -> npt.NDArray[np.uint8]:
    """Return a tensor's bytes in C order, little-endian; a view if it is in that form."""
    if hasattr(leaf, "detach"):
        column = leaf.cpu().contiguous().reshape(-1).unsqueeze(-1)  # a single element keeps its stride, else
        view: npt.NDArray[np.uint8] = column.view(import_module("torch").uint8).reshape(-1).numpy()
        return view
    array = np.ascontiguousarray(leaf.codes if isinstance(leaf, Bfloat16Array) else leaf)
    little = array if array.dtype.byteorder in "=|<" else array.astype(array.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8)
