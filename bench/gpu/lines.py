"""The lines of the GPU tables: the work, its bytes and seconds, the rivals and the targets. Does not need a GPU."""

import json


def line(what, ours, moved=None, *, floor=None, due=None, rivals=None, targets=None):
    """Return a line of the tables.

    Args:
        what: the name of the work.
        ours: fedcore's seconds.
        moved: the bytes read and written.
        floor: the bytes per second of the floor: a copy on the device, or the bus.
        due: the target share of the floor.
        rivals: seconds by rival.
        targets: by rival, the target ratio of the rival's time to fedcore's.
    """
    made = {"what": what, "seconds": ours, "bytes": moved}
    if ours is not None and moved is not None:
        made["GB/s"] = moved / ours / 1e9
        if floor is not None:
            made["of the floor"] = moved / ours / floor
    made["due of the floor"] = due
    took = rivals or {}
    made["rivals"] = {name: None if ours is None else theirs / ours for name, theirs in took.items()}
    made["due"] = targets or {}
    return made


def met(made):
    """Whether a line meets its targets; None without targets or measurements."""
    output = []
    if made["due of the floor"] is not None and "of the floor" in made:
        output.append(made["of the floor"] >= made["due of the floor"])
    output += [made["rivals"][name] >= due for name, due in made["due"].items() if made["rivals"].get(name) is not None]
    return all(output) if output else None


def show(made):
    """Print a line as JSON for ``bench.gpu.day``."""
    print(json.dumps(made), flush=True)
