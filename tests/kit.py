"""What many tests need: options given flat, as parametrized tests have them."""

from dataclasses import fields

from fedcore import Compute, Limits, Storage
from fedcore.algorithms import MimiC
from fedcore.rules import CapExamples, CapSteps, ClipToMedian, Mean, RejectLong
from fedcore.store import ClientStore

RULES = {"cap_steps": CapSteps, "cap_examples": CapExamples, "reject_long": RejectLong}


def place(spec, **options):
    """The storage of a test's parameter: "ram", "cuda", "mmap:PATH", or a ClientStore."""
    if isinstance(spec, ClientStore):
        return spec
    spec = str(spec)
    if spec.startswith("mmap:"):
        return Storage(spec.removeprefix("mmap:"), **options)
    return Storage(medium=spec, **options)


def flat(**options):
    """``Server``'s arguments from fields of Limits, Storage and Compute by their names, and rules by ratio.

    ``cap_steps=2, cap_examples=2, reject_long=10, clip=True, weights=...`` make a chain; others are passed on.
    """
    rules = [kind(options.pop(name)) for name, kind in RULES.items() if options.get(name) is not None]
    for name in RULES:
        options.pop(name, None)
    if options.pop("clip", False):
        rules.append(ClipToMedian())
    if (weights := options.pop("weights", None)) is not None:
        rules.append(Mean(weights))
    made = {"aggregation": rules} if rules else {}
    for argument, kind in (("limits", Limits), ("storage", Storage), ("compute", Compute)):
        own = {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}
        if own:
            made[argument] = kind(**own)
    return made | options


def with_history(method, rounds):
    """The method, where it is MimiC with the directions of so many rounds."""
    named = method in ("MimiC", MimiC()) if isinstance(method, str | MimiC) else False
    return MimiC(history=rounds) if named else method
