"""A record of a store's writes, syncs and commits, and every disk that a loss of power can leave."""

import copy
import itertools
import math
import os
import random
import shutil
import sqlite3
from pathlib import Path

from fedcore.store.files import disk
from fedcore.store.files.slot_file import SlotFile

HEADER = 4096
NORMAL = 1
"""SQLite's ``synchronous`` of a commit that does not wait for the disk, but comes behind all earlier ones."""
ZEROS = 1 << 16
"""More bytes than a slot of the tests has; a file of slots may end behind the last one."""


class Recorder:
    """Records what happens in a folder and its ``parts``, from a durable state; several may record a folder each.

    Files are named by their path in the folder.

    Attributes:
        events: ("write", file, offset, bytes), ("size", file, bytes), ("new", file), ("names", folder) when a folder is
            synced, ("sync", file), ("commit", index, its bytes, what is committed, whether it waits for the disk), and
            ("mark", what the test says).
        upcoming: what the next commit will make of the store; set by the test.
        mark: the last mark before the disk that ``crashes`` has yielded.
        latest: what the index of that disk has committed, perhaps without a sync.
    """

    def __init__(self, folder, monkeypatch, *parts):
        self.folder, self.events, self.upcoming, self.mark = folder, [], None, None
        self.latest = None
        self.folders = [folder, *(folder / part for part in parts)]
        self.start = {}
        for entry in [entry for one in self.folders for entry in one.iterdir() if entry.is_file()]:
            content = entry.read_bytes()
            end = len(content.rstrip(b"\0")) + ZEROS if entry.suffix == ".slots" else len(content)
            self.start[self._name(entry)] = content[:end]
        for name in ("resize", "free", "sync", "sync_path", "write", "commit"):
            monkeypatch.setattr(disk, name, self._recorded(getattr(disk, name), getattr(self, f"_{name}")))
        seal, copied = SlotFile.seal, SlotFile.copy

        def note(slots, slot):
            if slots.path.parent not in self.folders:
                return
            self.events.append(("write", self._name(slots.path), slots._end(slot - 1), bytes(slots._whole(slot))))

        def recorded_seal(slots, slot, *sums):
            result = seal(slots, slot, *sums)
            note(slots, slot)
            return result

        def recorded_copy(slots, slot):
            result = copied(slots, slot)
            note(slots, result)
            return result

        monkeypatch.setattr(SlotFile, "seal", recorded_seal)
        monkeypatch.setattr(SlotFile, "copy", recorded_copy)

    def _recorded(self, act, note):
        def recorded(*arguments):
            result = act(*arguments)
            if self._is_here(arguments[0]):
                note(*arguments)
            return result

        return recorded

    def _is_here(self, what):
        """Tell whether a file that is open, a path or an index's connection is of the folder."""
        match what:
            case int():
                return Path(os.readlink(f"/proc/self/fd/{what}")).parent in self.folders
            case sqlite3.Connection():
                return _index(what).parent in self.folders
        return Path(what) in self.folders

    def _name(self, file):
        """The name of a file that is open, or of a path."""
        return str(
            Path(os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file).relative_to(self.folder)
        )

    def _resize(self, fd, size):
        self.events.append(("size", self._name(fd), size))

    def _free(self, fd, start, size):
        self.events.append(("size", self._name(fd), start))  # up to the end: equivalent to a shorter file

    def _sync(self, fd):
        self.events.append(("sync", self._name(fd)))

    def _sync_path(self, path):
        self.events.append(("names", self._name(path)))

    def _write(self, fd, content, start=0):
        if start == 0:
            self.events.append(("new", self._name(fd)))
        if start < HEADER:  # behind it there are checksums, which are noted with their slots
            self.events.append(("write", self._name(fd), start, content))

    def _commit(self, connection):
        with sqlite3.connect(_index(connection)) as reader:
            image = reader.serialize()
        reader.close()
        (synchronous,) = connection.execute("PRAGMA synchronous").fetchone()
        state = copy.deepcopy(self.upcoming)
        self.events.append(("commit", self._name(_index(connection)), image, state, synchronous != NORMAL))

    def crashes(self, most=None):
        """Every distinct disk that a loss of power could leave, after every prefix of the record.

        What was not synced is there, or not, or half of it, each on its own.

        Args:
            most: disks after one prefix; so many are drawn, if there are more. None for all.

        Yields:
            files by name, and what was committed durably.
        """
        files, pending, committed, unsynced = dict(self.start), [], None, []
        for event in [("begin",), *self.events]:
            match event:
                case ("begin",):
                    pass
                case ("mark", what):
                    self.mark = what
                case ("commit", index, image, state, True):
                    files[index], committed, unsynced = image, state, []
                case ("commit", *commit, False):
                    unsynced.append(commit)
                case ("sync", name):
                    for synced in [kept for kept in pending if kept[1] == name and kept[0] != "new"]:
                        pending.remove(synced)
                        _apply(files, synced, "whole")
                case ("names", folder):
                    pending = [kept for kept in pending if kept[0] != "new" or Path(kept[1]).parent != Path(folder)]
                case ("new", name):
                    files[name] = b""
                    pending.append(event)
                case _:
                    pending.append(event)
            self.latest = committed
            yield from self._left(files, pending, committed, most)
            for index, image, self.latest in unsynced:  # the log ends behind any of them
                yield from self._left(files | {index: image}, pending, committed, most)

    def _left(self, files, pending, committed, most):
        seen = set()
        options = [("whole", "none", "torn") if event[0] == "write" else ("whole", "none") for event in pending]
        choices = itertools.product(*options)
        if most is not None and math.prod(map(len, options)) > most:
            chance = random.Random(len(pending))
            choices = [[chance.choice(option) for option in options] for _ in range(most)]
        for choice in choices:
            left = dict(files)
            for event, how in zip(pending, choice, strict=True):
                _apply(left, event, how)
            for event, how in zip(pending, choice, strict=True):
                if event[0] == "new" and how == "none":
                    left.pop(event[1], None)  # the file has its content, but not its name
            key = hash(tuple(sorted(left.items())))
            if key not in seen:
                seen.add(key)
                yield left, committed


def put(files, folder):
    """Make a folder that holds these files."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).parent.joinpath("readers").mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _apply(files, event, how):
    match event:
        case ("size", name, size) if how == "whole":
            # What is added are zeros without an end to them: a file that ends where its slots do is as good.
            files[name] = files[name][:size]
        case ("write", name, offset, content) if how != "none":
            content = content[: len(content) // 2] if how == "torn" else content
            old = files[name].ljust(offset, b"\0")
            files[name] = old[:offset] + content + old[offset + len(content) :]


def _index(connection):
    """The path of an index by its connection."""
    ((_, _, path),) = connection.execute("PRAGMA database_list")
    return Path(path)
