"""A step that is too long."""

import numpy as np


class Runaway:
    """A server optimiser of one's own, which makes steps too long if it is told so."""

    factor = 1.0

    def start(self, n):
        return ()

    def turn(self, v, moments):
        with np.errstate(over="ignore"):
            return v * np.float32(self.factor), moments
