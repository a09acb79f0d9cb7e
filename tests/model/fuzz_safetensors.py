"""Fuzz the safetensors reader: ``python -m tests.model.fuzz_safetensors 10000 [SEED]``.

The reader must raise one of fedcore's errors, or return what the format's own library returns.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load, save

from fedcore import Safetensors
from fedcore.errors import FedcoreError

PIECES = (b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u0000", b"0", b"-1", b"1e3", b"9" * 19, b"null", b" ")
KINDS = ("<f4", "<f8", "<f2", "|i1", "<i8", "|b1")


def plain(rng):
    """Return the bytes of a valid file."""
    tensors = {}
    for i in range(rng.randrange(4)):
        shape = [rng.randrange(4) for _ in range(rng.randrange(3))]
        tensors[f"t{i}" * rng.randrange(1, 3)] = np.full(shape, i + 1).astype(rng.choice(KINDS))
    return save(tensors, {"format": "pt"} if rng.random() < 0.5 else None)


def changed_header(rng, data):
    """Change an entry of the header, with a correct length."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    if names:
        entry, field = header[rng.choice(names)], rng.choice(["dtype", "shape", "data_offsets"])
        if field == "dtype":
            entry[field] = rng.choice(["F32", "BF16", "F8_E4M3", "f32", "", 3, None])
        elif entry[field] and rng.random() < 0.8:
            entry[field][rng.randrange(len(entry[field]))] += rng.choice([-4, -1, 1, 4, 2**31, 2**62, 2**64, 0.5])
        else:
            entry[field] = rng.choice([[], {}, [0, 0, 0], [[0], 4], "0", None, [True, 4]])
        if rng.random() < 0.2:
            entry.pop(field)
        if rng.random() < 0.2:
            entry["more"] = [[[[]]]]
    text = json.dumps(header).encode()
    if names and rng.random() < 0.2:  # an entry twice
        text = text[:-1] + b"," + json.dumps({names[0]: header[names[0]]}).encode()[1:]
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def case(rng):
    data = plain(rng)
    kind = rng.randrange(5)
    if kind == 1:
        data = changed_header(rng, data)
    for _ in range(rng.randrange(1, 4) if kind > 1 else 0):
        at = rng.randrange(max(1, min(len(data), 200)))
        if kind == 2:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind == 3:
            data = data[:at] + rng.choice(PIECES) + data[at + rng.randrange(3) :]
        else:
            data = data[: rng.randrange(len(data) + 1)] + bytes(rng.randrange(3))
    return data


def check(data, file):
    """Return whether the reader accepts the bytes; raise AssertionError if it handles them wrongly."""
    file.write_bytes(data)
    try:
        model = Safetensors(file)
        found = {name: np.asarray(tensor) for name, tensor in model.items()}
    except FedcoreError:
        return False
    if any(tensor.kind == "bfloat16" for tensor in model.values()):  # the library's NumPy half cannot read it
        return True
    due = load(data)
    assert found.keys() == due.keys(), data
    for name, array in found.items():
        assert (array.dtype, array.shape, array.tobytes()) == (due[name].dtype, due[name].shape, due[name].tobytes())
    return True


def fuzz(cases, seed, folder):
    """Return the number of accepted files."""
    rng = random.Random(seed)
    return sum(check(case(rng), Path(folder, "fuzzed.safetensors")) for _ in range(cases))


if __name__ == "__main__":
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as folder:
        print(f"{fuzz(count, seed, folder):,} of {count:,} files accepted, all as safetensors reads them")
