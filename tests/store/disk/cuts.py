"""The disks that a loss of power can leave of a recorded one: any part of the writes since the last flush."""

import random
import struct
import subprocess

STYLES = ["dropped", "kept", "torn", "any", "reversed"]
"""Kept writes since the last flush: none, all, some of their sectors, some of them, the later half."""
SECTOR = 512


def entries(log):
    """(kind, place, content) of a record: "w" for a write, "f" for a flush, "m" for a mark."""
    with open(log, "rb") as file:
        while head := file.read(16):
            kind, length, place = struct.unpack("<IIQ", head)
            yield chr(kind), place, file.read(length)


def left(pending, style, chance):
    """The writes since the last flush that reach the disk: (place, content) of each."""
    match style:
        case "dropped":
            return []
        case "kept":
            return pending
        case "any":
            return [write for write in pending if chance.random() < 0.5]
        case "reversed":
            return pending[len(pending) // 2 :]
    return [
        (place + start, content[start : start + SECTOR])
        for place, content in pending
        for start in range(0, len(content), SECTOR)
        if chance.random() < 0.7
    ]


def write(image, writes):
    with open(image, "r+b") as file:
        for place, content in writes:
            file.seek(place)
            file.write(content)


def cuts(log, base, image, stride, seed):
    """Power losses after every stride-th write of a record, each in the next style.

    Args:
        log, base: what ``Disk.record`` made; the base is changed.
        image: where each disk is put that is left.

    Yields:
        the last mark before the loss, as an int, -1 if there was none, and how it was lost.
    """
    chance, pending, mark, writes = random.Random(seed), [], -1, 0
    for kind, place, content in entries(log):
        if kind == "m":
            mark = int(content)
        elif kind == "f":
            write(base, pending)
            pending = []
        else:
            pending.append((place, content))
            writes += 1
            if writes % stride == seed % stride:
                style = STYLES[writes // stride % len(STYLES)]
                image.unlink(missing_ok=True)  # a mount of the last one still uses the deleted file
                subprocess.run(["cp", "--sparse=always", base, image], check=True)
                write(image, left(pending, style, chance))
                yield mark, f"after write {writes}, of which the unflushed were {style}"
