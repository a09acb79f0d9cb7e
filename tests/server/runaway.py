"""An optimizer whose step can be too long."""

import numpy as np


class Runaway:
    """A custom optimizer that multiplies its steps by ``factor``."""

    factor = 1.0

    def start(self, n):
        return ()

    def turn(self, v, moments, x, *, gamma, moments_out, x_out):
        with np.errstate(over="ignore"):
            np.subtract(x, np.float32(gamma) * (v * np.float32(self.factor)), out=x_out)
        return float(np.square(x_out, dtype=np.float64).sum())
