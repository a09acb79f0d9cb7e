"""Fuzz the safetensors reader: ``python -m tests.model.fuzz_safetensors 10000 [SEED]``.

The reader must return what the format's own library returns, and refuse by one of fedcore's errors what the library
refuses. It refuses more on purpose: see ``DELIBERATE``.
"""

import json
import math
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from fedcore import Safetensors
from fedcore.errors import FedcoreError
from fedcore.model.safetensors import CODES, DIMENSIONS, DTYPES

PIECES = (b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u0000", b"\\u0041", b"0", b"-1", b"1e3", b"9" * 19)
PIECES += (b"null", b" ", b"\n", b"\xef\xbb\xbf", b"\xff", b'"a":', b'"dtype":"F32",', b"true", b"1.0")
KINDS = ("<f4", "<f8", "<f2", "|i1", "<i8", "|b1", "|u1", "<u2", "<i4")
NAMES = (
    "w",
    "model.layers.0.self_attn.q_proj.weight",
    "lm_head.weight",
    "running_mean",
    'a "b"',
    "\n",
    "ä",
    "\U0001f600",
)


def plain(rng):
    """Return the bytes of a valid file."""
    tensors = {}
    for i in range(rng.randrange(4)):
        shape = [rng.randrange(4) for _ in range(rng.randrange(3))]
        tensors[f"{rng.choice(NAMES)}{i}"] = np.full(shape, i + 1).astype(rng.choice(KINDS))
    return save(tensors, {"format": "pt"} if rng.random() < 0.5 else None)


def file_of(text, rest):
    return len(text).to_bytes(8, "little") + text + rest


def parts(data):
    """Return the header of a valid file, and the bytes after it."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def changed_entry(rng, data):
    """Change an entry of the header, with a correct length."""
    header, rest = parts(data)
    names = [name for name in header if name != "__metadata__"]
    if names:
        entry, field = header[rng.choice(names)], rng.choice(["dtype", "shape", "data_offsets"])
        if field == "dtype":
            entry[field] = rng.choice([*DTYPES, "F8_E4M3", "F8_E5M2", "F4", "C64", "f32", "", 3, None])
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
    return file_of(text, rest)


def written_anew(rng, data):
    """Write the same header in another way: order, spaces, escapes, views of the same dtype's width, metadata."""
    header, rest = parts(data)
    for name in [name for name in header if name != "__metadata__"]:
        entry = header[name]
        same = [code for code in (*DTYPES, "F8_E4M3") if width(code) == width(entry["dtype"])]
        entry |= {"dtype": rng.choice(same), "shape": [*entry["shape"], *[1] * rng.choice([0, 0, 1, 31])]}
        header[name] = dict(rng.sample([*entry.items()], len(entry)))
        if rng.random() < 0.1:
            header[name] = [entry["dtype"], entry["shape"], entry["data_offsets"]]
        if rng.random() < 0.1:
            header[name] = entry | {"more": rng.choice([None, 5, {}])}
    if rng.random() < 0.3:
        header["__metadata__"] = rng.choice([None, {}, {"a": "b", "": "ä"}, {"a": 1}, {"a": None}, [], "x"])
    text = json.dumps(
        dict(rng.sample([*header.items()], len(header))),
        ensure_ascii=rng.random() < 0.5,
        indent=rng.choice([None, None, 1, "\t", "\r\n "]),
        separators=rng.choice([None, (",", ":"), (" ,  ", "\t:\r")]),
    )
    if rng.random() < 0.1:
        text = text.replace('"dtype"', '"d\\u0074ype"').replace('"F', '"\\u0046')
    if rng.random() < 0.1 and len(header):
        text = f"{text[:-1]},{json.dumps(dict([rng.choice([*header.items()])]))[1:]}"
    return file_of(rng.choice(["", "", "", " "]).encode() + text.encode() + b" " * rng.randrange(9), rest)


def width(code):
    return {"F8_E4M3": 1, "F64": 8, "I64": 8, "U64": 8, "BOOL": 1}.get(code) or int(re.sub(r"\D", "", code)) // 8


def case(rng):
    data = plain(rng)
    kind = rng.randrange(6)
    if kind == 1:
        data = changed_entry(rng, data)
    elif kind == 2:
        data = written_anew(rng, data)
    for _ in range(rng.randrange(1, 4) if kind > 2 else 0):
        at = rng.randrange(max(1, min(len(data), 200)))
        if kind == 3:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind == 4:
            header, rest = data[8:at], data[max(8, at) + rng.randrange(3) :]
            data = data[:8] + header + rng.choice(PIECES) + rest
            if rng.random() < 0.7:  # with the length that the library expects
                end = 8 + int.from_bytes(data[:8], "little")
                data = file_of(data[8:end], data[end:])
        else:
            data = data[: rng.randrange(len(data) + 1)] + bytes(rng.randrange(3))
    return data


def some(applies):
    return lambda text, pairs, entries: any(isinstance(one, dict) and applies(one) for one in entries.values())


DELIBERATE = {
    "a name or a field twice": lambda text, pairs, entries: any(len(dict(each)) < len(each) for each in pairs),
    "an unknown field": some(lambda entry: entry.keys() - {"dtype", "shape", "data_offsets"}),
    "an entry as a list": lambda text, pairs, entries: any(isinstance(one, list) for one in entries.values()),
    "metadata of null": lambda text, pairs, entries: any(("__metadata__", None) in each for each in pairs),
    "a field or a dtype with escapes": lambda text, pairs, entries: re.search(rb'"(d|)\\u00', text),
    "a space before the header": lambda text, pairs, entries: text[:1] != b"{",
    "no tensors": lambda text, pairs, entries: not entries,
    "an unsupported dtype": some(lambda entry: entry.get("dtype") not in DTYPES),
    "a shape that NumPy cannot have": some(
        lambda entry: len(entry["shape"]) > DIMENSIONS or math.prod(filter(None, entry["shape"])) >= 2**62
    ),
}
"""What the library reads and fedcore refuses: two programs could read such a file differently, or NumPy cannot."""


def reason_of(data):
    """Return why the reader refuses what the library reads, or None."""
    pairs = []

    def noted(found):
        pairs.append(found)
        return dict(found)

    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    header = json.loads(text, object_pairs_hook=noted)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return next((name for name, applies in DELIBERATE.items() if applies(text, pairs, entries)), None)


def by_library(data):
    """Return the tensors as the library reads them, (dtype, shape, bytes) by name; None if it refuses the file."""
    try:
        return {name: (view["dtype"], view["shape"], bytes(view["data"])) for name, view in deserialize(data)}
    except SafetensorError:
        return None


def check(data, file):
    """Return how the reader handles the bytes; raise AssertionError if it handles them wrongly."""
    file.write_bytes(data)
    due = by_library(data)
    try:
        model = Safetensors(file)
        found = {}
        for name, tensor in model.items():
            memory = np.empty(tensor.size * tensor.itemsize, np.uint8)
            tensor.read_into(memory)
            found[name] = CODES[tensor.kind], [*tensor.shape], memory.tobytes()
    except FedcoreError as error:
        reason = "refused by both" if due is None else reason_of(data)
        if reason is None:
            raise AssertionError(data) from error
        return reason
    assert found == due, data
    assert all(math.prod(tensor.shape) == tensor.size for tensor in model.values())
    return "accepted"


def fuzz(cases, seed, folder):
    """Return the number of files by how the reader handled them."""
    rng = random.Random(seed)
    return Counter(check(case(rng), Path(folder, "fuzzed.safetensors")) for _ in range(cases))


if __name__ == "__main__":
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as folder:
        for what, number in fuzz(count, seed, folder).most_common():
            print(f"{number:9,}  {what}")
