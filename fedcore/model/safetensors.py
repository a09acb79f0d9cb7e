"""Safetensors files as models: strictly checked headers, and tensors that are read when they are used."""

import collections
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedcore.arrays import LINE, NARROW, Bfloat16Array, Library, empty, spans
from fedcore.errors import ArrayError, CorruptionError, DtypeError, ShapeError, StoreError
from fedcore.files import OpenFolder, open_file
from fedcore.validation import Represented, absolute, shorten

LONGEST_HEADER = 100_000_000
"""The maximum number of bytes of a header, as in the format's own library."""
DIMENSIONS = 32
DTYPES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"},
    **{f"{sign}{bits}": f"{name}{bits}" for sign, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
BYTES = {dtype: 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize for dtype in CODES}
READERS = 4
"""The number of threads that read files."""
PIECE = 8 << 20
"""The number of bytes that a thread reads in one call."""
WINDOW = READERS * PIECE
"""The number of bytes that are read at a time into a vector."""
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
"""The suffixes of files that are read by ``torch.load``."""
MOST_TENSORS, LONGEST_METADATA = 100_000, 1 << 24
"""The maximum number of tensors of a file, and of bytes of its metadata, so that a header takes little memory."""
INDICES = (".safetensors.index.json", ".bin.index.json")
"""The endings of indices."""
_PART = re.compile(r"(.*?)(\d{1,9})[-_]of[-_](\d{1,9})(\.\w+)", re.IGNORECASE)
"""The name of one file of several, such as ``model-00001-of-00005.safetensors``."""

# The grammar of a header. It admits no nesting beyond the format's, so a short header cannot need much memory or stack.


def _grammar(text: bytes, **parts: bytes) -> bytes:
    """Insert named parts, and white space at each space."""
    for name, part in parts.items():
        text = text.replace(b"<%s>" % name.encode(), part)
    return text.replace(b" ", rb"[\x20\t\r\n]*+")


_STRING = rb'"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_LIST = _grammar(rb"\[ (?:<n> (?:, <n> )*+)?+\]", n=rb"(?:0|[1-9][0-9]{0,18})")
_FIELD = _grammar(rb'"(?:dtype" : "[A-Z0-9_]{1,16}"|(?:shape|data_offsets)" : <list>) ', list=_LIST)
_PAIR = _grammar(rb"<s> : <s> ", s=_STRING)
_NAME = re.compile(_grammar(rb" (<s>) : ", s=_STRING))
_TENSOR = re.compile(_grammar(rb"\{ (<f>, <f>, <f>)\} ", f=_FIELD))
_METADATA = re.compile(_grammar(rb"\{ (?:<p>(?:, <p>)*+)?+\} ", p=_PAIR))


def over(memory: npt.NDArray[np.uint8], kind: str) -> Any:
    """Return bytes as a vector of a dtype, given by its name, that the kernels can read and write."""
    return Bfloat16Array(memory.view(np.uint16)) if kind == "bfloat16" else memory.view(kind)


class Bfloat16:
    """The dtype of bfloat16 tensors if ml_dtypes is not imported."""

    itemsize = 2

    def __str__(self) -> str:
        return "bfloat16"


@dataclass(frozen=True)
class StoredFile:
    """A file, and the state in which its header was read. The bytes of a changed file are never read.

    Attributes:
        path: the absolute path.
        state: device, inode, size, and the times of the last changes of the content and of the inode. A program can
            set the former, but not the latter.
        folder: the open folder in which the file is; links in it are not followed.
    """

    path: str
    state: tuple[int, int, int, int, int]
    folder: OpenFolder | None = None

    @classmethod
    def open(cls, path: str, folder: OpenFolder | None = None) -> tuple["StoredFile", int]:
        """Return a file and its descriptor; raise StoreError if it cannot be read or is not a regular file."""
        try:
            name = path if folder is None else os.path.relpath(path, folder.path)
            fd = open_file(name, folder=folder, follows=folder is None)
        except (OSError, ValueError) as error:  # ValueError: no file can have this name
            raise StoreError(f"{shorten(path)}: cannot be read: {getattr(error, 'strerror', error)}") from None
        found = os.fstat(fd)
        state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        return cls(path, state, folder), fd

    def reopen(self) -> int:
        """Return a descriptor; raise CorruptionError if the file has changed."""
        now, fd = self.open(self.path, self.folder)
        if now != self:
            os.close(fd)
            raise CorruptionError(f"{self.path}: was changed while it was in use; write new models to new files")
        return fd


def read_at(fd: int, start: int, memory: npt.NDArray[np.uint8], path: str) -> None:
    """Fill ``memory`` with the bytes of a file from ``start`` on."""
    done = 0
    while done < memory.size:
        count = os.preadv(fd, [memory[done : done + (1 << 30)].data], start + done)
        if count == 0:
            raise CorruptionError(f"{path}: was cut off while it was in use; write new models to new files")
        done += count


class StoredTensor:
    """A tensor in a file. It is read when it is used: by ``np.asarray`` as a whole, by ``read`` in part.

    NumPy has bfloat16 only if ml_dtypes is imported; otherwise ``np.asarray`` returns float32.

    Attributes:
        name: the name in its model.
        file: the file, which must not change while the tensor is in use.
        shape: the shape.
        kind: the dtype's name, such as "bfloat16".
        start: the position of the first byte in the file.
        library: the library of the tensors that its file format holds.
    """

    def __init__(
        self, name: str, file: StoredFile, kind: str, shape: tuple[int, ...], start: int, library: Library = "numpy"
    ) -> None:
        self.name, self.file, self.kind, self.shape, self.start, self.library = name, file, kind, shape, start, library
        self.size, self.itemsize = math.prod(shape), BYTES[kind]

    @property
    def dtype(self) -> Any:
        """The NumPy dtype, or a stand-in for bfloat16."""
        if self.kind != "bfloat16":
            return np.dtype(self.kind)
        return np.dtype("bfloat16") if "ml_dtypes" in sys.modules else Bfloat16()

    @property
    def place(self) -> tuple[Any, ...]:
        """File, position, dtype and shape. Tied tensors of a torch file have the same place."""
        return self.file.path, self.start, self.kind, self.shape

    def read(self, start: int = 0, stop: int | None = None) -> Any:
        """Return the elements [start, stop) in C order as a vector: a NumPy array, or a ``Bfloat16Array``."""
        stop = self.size if stop is None else stop
        memory = np.empty((stop - start) * self.itemsize, np.uint8)
        self._fill(memory, start)
        return over(memory, self.kind)

    def read_into(self, out: npt.NDArray[Any]) -> None:
        """Write the elements into a vector of floats, in windows. uint8 memory gets the bytes as they are."""
        if out.dtype.name == self.kind:
            out = out.view(np.uint8)
        for span in spans(self.size, self.itemsize + out.itemsize, WINDOW):
            if out.dtype == np.uint8:
                self._fill(out[span.start * self.itemsize : span.stop * self.itemsize], span.start)
            else:
                vector = self.read(span.start, span.stop)
                out[span] = vector.astype(out.dtype) if self.kind == "bfloat16" else vector

    def _fill(self, memory: npt.NDArray[np.uint8], start: int) -> None:
        at = self.start + start * self.itemsize
        spans = [(i, min(i + PIECE, memory.size)) for i in range(0, memory.size, PIECE)]
        fd = self.file.reopen()
        with open(fd, "rb"):  # closes it
            os.posix_fadvise(fd, at, memory.size, os.POSIX_FADV_SEQUENTIAL)
            if len(spans) > 1:
                with ThreadPoolExecutor(READERS) as pool:
                    list(pool.map(lambda span: read_at(fd, at + span[0], memory[slice(*span)], self.file.path), spans))
            else:
                read_at(fd, at, memory, self.file.path)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError(f"{self.name}: cannot be read from a file without a copy")
        vector = self.read()
        if isinstance(vector, Bfloat16Array):
            vector = vector.codes.view(self.dtype) if "ml_dtypes" in sys.modules else vector.astype(np.float32)
        return np.asarray(vector.reshape(self.shape), dtype)

    def astype(self, dtype: Any) -> npt.NDArray[Any]:
        """Return the tensor as a NumPy array of a dtype."""
        return np.asarray(self, dtype)

    def __repr__(self) -> str:
        return f"StoredTensor({self.name!r}, {self.kind}{list(self.shape)}, {self.file.path!r})"


def read_tensors(tensors: Mapping[str, StoredTensor], device: str) -> dict[str, Any]:
    """Return vectors of float tensors for the kernels, in one new vector on a device: in 16 bits, or in float32."""
    kinds = {name: tensor.kind if tensor.kind in NARROW else "float32" for name, tensor in tensors.items()}
    sizes = {name: tensor.size * BYTES[kinds[name]] for name, tensor in tensors.items()}
    memory = empty(sum(-(-size // LINE) * LINE for size in sizes.values()), np.uint8, device=device)
    vectors, at = {}, 0
    for name, tensor in tensors.items():
        out = memory[at : at + sizes[name]]
        tensor.read_into(out if tensor.kind == kinds[name] else out.view(np.float32))
        vectors[name] = over(out, kinds[name])
        at += -(-sizes[name] // LINE) * LINE
    return vectors


class Header(NamedTuple):
    """The header of a safetensors file.

    Attributes:
        file: the file.
        text: the bytes before the data, which begin with the header's length.
        tensors: the tensors by name, in the order of their data.
    """

    file: StoredFile
    text: bytes
    tensors: dict[str, StoredTensor]


def read_header(path: str | os.PathLike[str], folder: OpenFolder | None = None) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        StoreError: the path cannot be read or is not a regular file.
        ArrayError, ShapeError: the file is truncated, its header is malformed or too large, a name occurs twice, or the
            tensors do not fill the file without gaps and overlaps.
        DtypeError: a dtype is none of floats of 16 to 64 bits, integers of 8 to 64 bits, and bool.

    Cost: reads the header, at most 100 MB with 100,000 tensors and 16 MiB of metadata; allocates about 14 times its
        length.
    """
    file, fd = StoredFile.open(str(path), folder)
    with open(fd, "rb"):  # closes it
        size = file.state[2]
        first = os.pread(fd, 8, 0)
        length = int.from_bytes(first, "little")
        if size < 8 or length > min(LONGEST_HEADER, size - 8):
            if length > LONGEST_HEADER:
                advice = "read a torch file by read_model(path, key=), name a NumPy file .npz, or run `git lfs pull`"
                raise ArrayError(f"{path}: is not in safetensors format; {advice} (it starts with {first!r})")
            raise ArrayError(f"{path}: a header of {length} bytes does not fit into {size} bytes; copy the file again")
        header = os.pread(fd, length, 8)
    tensors: dict[str, StoredTensor] = {}
    begin, at = 8 + length, 0
    for (start, stop), name, code, shape in sorted(_entries(str(path), header)):
        count, dtype = math.prod(shape), DTYPES.get(code)
        if dtype is None:
            known = ", ".join(DTYPES)
            raise DtypeError(f"{path}, {shorten(name)}: dtype {code} is not supported; convert it to one of {known}")
        if len(shape) > DIMENSIONS or (count == 0 and math.prod(filter(None, shape)) >= 2**62):
            raise ShapeError(f"{path}, {shorten(name)}: shape {shorten(str(shape))} is too large; write it again")
        if start != at or stop - start != count * BYTES[dtype]:
            needs = f"{code}{shorten(str(list(shape)))} must have {count * BYTES[dtype]} bytes from byte {at} on"
            raise ShapeError(f"{path}, {shorten(name)}: {needs}, has {start} to {stop}; write the file again")
        tensors[name] = StoredTensor(name, file, dtype, shape, begin + start)
        at = stop
    if begin + at != size:
        raise ShapeError(f"{path}: must have {begin + at} bytes, has {size}; copy the file again")
    return Header(file, first + header, tensors)


def _entries(path: str, header: bytes) -> Iterator[tuple[list[int], str, str, tuple[int, ...]]]:
    """Yield offsets, name, dtype and shape of each tensor of a header."""
    end, names, at = len(header.rstrip(b"\x20\t\r\n")) - 1, set(), 1
    if header[:1] != b"{" or header[end:][:1] != b"}":
        raise ArrayError(f"{path}: the header must be a JSON object; the file is damaged or has a different format")
    if header.count(b'"data_offsets"') > MOST_TENSORS:  # each entry has these bytes
        raise ArrayError(f"{path}: has more than {MOST_TENSORS:,} tensors; write the model to several files")
    more = header[1:end].strip() != b""
    while more:
        key = _NAME.match(header, at)
        name = None if key is None else _parsed(key[1])
        pattern = _METADATA if name == "__metadata__" else _TENSOR
        value = None if key is None else pattern.match(header, key.end())
        if value is not None and pattern is _METADATA and len(value[0]) > LONGEST_METADATA:
            raise ArrayError(f"{path}: has more than {LONGEST_METADATA:,} bytes of metadata; write it with less")
        fields = None if value is None or value.end() > end else _parsed(value[0])
        if name is None or value is None or fields is None:
            raise ArrayError(f"{path}: the header is malformed at byte {at}: {header[at : at + 60]!r}; write it again")
        if name in names:
            raise ArrayError(f"{path}: two entries are named {shorten(name)!r}; write the file again")
        names.add(name)
        if pattern is _TENSOR:
            if len(fields) != 3 or len(fields["data_offsets"]) != 2:
                raise ArrayError(f"{path}, {shorten(name)}: needs a dtype, a shape and two offsets; write it again")
            yield fields["data_offsets"], name, fields["dtype"], tuple(fields["shape"])
        at = value.end()
        more = at < end
        if more and header[at : at + 1] != b",":
            raise ArrayError(f"{path}: the header is malformed at byte {at}: {header[at : at + 60]!r}; write it again")
        at += 1


def _parsed(literal: bytes) -> Any:
    """Return a JSON value, or None if a text in it is not valid Unicode."""
    try:
        value = json.loads(literal.decode())  # json itself would accept surrogates in UTF-8
        if b"\\u" in literal:
            json.dumps(value, ensure_ascii=False).encode()  # raises for half of a surrogate pair
    except ValueError:
        return None
    return value


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes before the data of a file with these (name, dtype, shape), whose data are in the same order."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        if name == "__metadata__" or name.encode(errors="ignore").decode() != name:  # for half of a surrogate pair
            raise ArrayError(f"{name!r}: a safetensors file cannot have a tensor of this name; rename it")
        stop = at + math.prod(shape) * BYTES[dtype]
        entries[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Safetensors(Mapping[str, StoredTensor], Represented):
    """A model in safetensors files. It is a model wherever fedcore takes one; tensors are read when they are used.

    Args:
        path: a file, a folder with one safetensors file, a folder with an index and its shards
            (``model.safetensors.index.json``), or such an index. A folder with a part of a model, or with several
            models, is refused; the path of one file or index is always allowed.

    Attributes:
        path: the absolute path.
        headers: the headers of the files, in the order of their names.
        index: the index as (name, content), or None.

    Raises:
        StoreError: a file is missing or cannot be read.
        ArrayError, ShapeError, DtypeError: a file is truncated or malformed, or the index does not fit its files.

    The files must not change while the model is in use. A changed file raises CorruptionError.

    Cost: reads the headers only. ``np.asarray(model[name])`` reads a tensor with four threads.

    >>> from tempfile import TemporaryDirectory
    >>> from fedcore import aggregate, write_model
    >>> with TemporaryDirectory() as folder:
    ...     for k in (1, 2):
    ...         write_model({"w": np.full(3, k, np.float32)}, f"{folder}/{k}.safetensors")
    ...     aggregate([Safetensors(f"{folder}/{k}.safetensors") for k in (1, 2)])
    {'w': array([1.5, 1.5, 1.5], dtype=float32)}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = absolute(path)
        self.index: tuple[str, bytes] | None = None
        named: dict[str, str] = {}
        main = _main_of(self.path) if os.path.isdir(self.path) else self.path
        files = [main]
        if main.name.endswith(".index.json"):
            self.index, named = _read_index(main)
            files = [main.parent / name for name in sorted(set(named.values()))]
        self.headers = [read_header(file) for file in files]
        self._tensors: dict[str, StoredTensor] = {}
        for header in self.headers:
            if twice := self._tensors.keys() & header.tensors.keys():
                raise ArrayError(f"{header.file.path}: {min(twice)!r} is in another file too; write the model again")
            self._tensors |= header.tensors
        if self.index is not None:
            found = {name: Path(tensor.file.path).name for name, tensor in self._tensors.items()}
            if odd := sorted(name for name in found.keys() | named.keys() if found.get(name) != named.get(name)):
                raise ArrayError(f"{main}: tensors are not in its files ({', '.join(odd[:3])}); copy the folder again")
        if not self._tensors:
            raise ArrayError(f"{main}: has no tensors; copy it again, or pass the file of a model")

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the first file."""
        found: dict[str, str] = json.loads(self.headers[0].text[8:]).get("__metadata__", {})
        return found

    def _facts(self) -> dict[str, Any]:
        size = sum(header.file.state[2] for header in self.headers)
        return {"path": str(self.path), "tensors": len(self), "files": len(self.headers), "bytes": size}


def _main_of(folder: Path) -> Path:
    """Return the index or the only file of the model in a folder."""
    names = sorted(path.name for path in folder.glob("*") if not path.is_dir())
    own = ".safetensors"
    stems = {Path(name).stem for name in names if name.lower().endswith(own)}

    def is_model(name: str) -> bool:  # torch also writes optimizers, random states, ...
        stem, suffix = os.path.splitext(name)
        is_named = stem in stems or any(part in stem.lower() for part in ("model", "weights", "consolidated"))
        return suffix.lower() == own or (suffix.lower() in (*TORCH_SUFFIXES, ".npz") and is_named)

    found = [name for name in names if name.endswith(INDICES)]
    listed = _read_index(folder / found[0])[1].values() if len(found) == 1 else ()
    found += sorted({name for name in names if is_model(name)} - set(listed))
    if not found:
        problem = "has no safetensors file" if os.access(folder, os.R_OK) else "cannot be listed"
        raise ArrayError(f"{folder}: {problem}; pass the folder or the file of a model")
    part = _incomplete(found)
    if len(found) == 1 and not part and not found[0].lower().endswith((own, *INDICES)):
        raise ArrayError(f"{folder}: has no safetensors file; pass the path of the file, {folder / found[0]}")
    if part or len(found) > 1:
        several = ", ".join(found[:3]) + ", ..." * (len(found) > 3)
        reason = f"has {part or 'several models, or one without an index'} ({several})"
        raise ArrayError(f"{folder}: {reason}; copy the folder again, or pass the path of one file or index")
    return folder / found[0]


def is_part(name: str) -> bool:
    """Whether a file's name is that of one file of several."""
    part = _PART.fullmatch(name)
    return part is not None and int(part[3]) > 1


def _incomplete(names: Iterable[str]) -> str:
    """Return "1 of 5 files of a model" if files are missing according to the names of the others, else ""."""
    parts = filter(None, map(_PART.fullmatch, set(names)))
    found = collections.Counter((part[1], part[4], int(part[3])) for part in parts)
    return next((f"{n} of {count} files of a model" for (*_, count), n in found.items() if n < count), "")


def read_json(path: Path, folder: OpenFolder | None = None) -> tuple[dict[str, Any], bytes]:
    """Return the content and the bytes of a file with one JSON object; raise ArrayError if it is malformed."""
    file, fd = StoredFile.open(str(path), folder)
    with open(fd, "rb") as opened:
        if file.state[2] > LONGEST_HEADER:
            raise ArrayError(f"{path}: must have at most {LONGEST_HEADER} bytes, has {file.state[2]}")
        text = opened.read(file.state[2])
    try:
        content = json.loads(text, object_pairs_hook=_unique)
        json.dumps(content, ensure_ascii=False).encode()  # raises for half of a surrogate pair
        if not isinstance(content, dict):
            raise TypeError("must be a JSON object")
    except (ValueError, TypeError, RecursionError) as error:
        raise ArrayError(f"{path}: malformed: {shorten(str(error))}; copy the folder again") from None
    return content, text


def _read_index(path: Path) -> tuple[tuple[str, bytes], dict[str, str]]:
    """Return an index as (name, content), and the files of its tensors."""
    content, text = read_json(path)
    named: Any = content.get("weight_map")
    files = list(named.values()) if isinstance(named, dict) else []
    if not files or any(type(name) is not str or Path(name).name != name for name in files):
        raise ArrayError(f"{path}: malformed: weight_map must name files in the index's folder; copy the folder again")
    if part := _incomplete(files):
        raise ArrayError(f"{path}: names {part}; copy the folder again")
    return (path.name, text), named


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found
