"""Lines of the tables: what was done and moved, how fast, against whom, and what was due. It knows no GPU."""

import json


def line(what, ours, moved=None, *, floor=None, due=None, rivals=None, targets=None):
    """A row of the tables.

    Args:
        what: was done.
        ours: seconds.
        moved: bytes, read and written.
        floor: bytes a second of whoever is the floor: a copy on the device, or the bus.
        due: the share of the floor that is due.
        rivals: name -> seconds.
        targets: name -> how many times ours the rival's time is due to be.
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
    """Whether a line is what it is due to be: True, False, or None where nothing is due, or measured."""
    said = []
    if made["due of the floor"] is not None and "of the floor" in made:
        said.append(made["of the floor"] >= made["due of the floor"])
    said += [made["rivals"][name] >= due for name, due in made["due"].items() if made["rivals"].get(name) is not None]
    return all(said) if said else None


def show(made):
    """Print a line for whoever collects them."""
    print(json.dumps(made), flush=True)
