"""The axis of an experiment's pictures: no figure depends on it, so a run may go on under another."""

from typing import Literal

from pydantic import Field

from fedcore.experiment.schema.fields import Line
from fedcore.experiment.schema.section import Section


class Varied(Section):
    """The key that a family of presets varies, and its value in this one; a sweep's report draws the family over it.

    The variants of a preset's file say ``varies = { p = 0.1 }``, and the rest is filled in.

    Attributes:
        family: what those have in common that are to be drawn together; the picture's file is named for it.
        title: of the picture.
        label: what is varied, as the axis is to have it.
        value: here.
    """

    family: Line
    title: Line
    label: Line
    value: float = Field(allow_inf_nan=False)


class Pictures(Section):
    """The axes of an experiment's pictures.

    Attributes:
        over: what the curves are drawn over. Uploadings are rounds times the vectors that a client sends in one, as the
            MimiC paper counts.
        varied: what the experiment's family varies, or None.
    """

    over: Literal["rounds", "uploadings"] = "rounds"
    varied: Varied | None = None
