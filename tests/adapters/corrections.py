"""Clients that keep their own corrections (``placement="client"``), or leave them to the server."""

import numpy as np

from fedcore.algorithms import SCAFFOLD, MimiC

LR, STEPS, ROUNDS = 0.1, 3, 8
METHODS = [MimiC, SCAFFOLD]
TARGETS = [np.float32([1, -2, 3]), np.float32([-1, 5, 0]), np.float32([4, 0, -6])]
AWAY = {1: [2], 3: [0, 1], 4: [1], 6: [0]}
"""The absent clients by round."""


class Client:
    """Its gradient is y - target; its steps are float64, so that equal methods end close to each other."""

    def __init__(self, method, placement, target):
        self.is_mimic, self.keeps, self.target = method is MimiC, placement == "client", target
        self.own = np.zeros(3)
        self._h = None

    def work(self, x, offset):
        """The model to send, and the control for SCAFFOLD."""
        y, raw = x.astype(np.float64), np.zeros(3)
        shift = (0 if offset is None else offset) - (0 if self.is_mimic else self.own)
        for _ in range(STEPS):
            raw += (y - self.target) / STEPS
            y = y - LR * (y - self.target + shift)
        control = raw - self.own
        if not self.keeps:
            return y.astype(np.float32), None
        if self.is_mimic:
            self._h = (x - y) / (LR * STEPS)
            y = y - LR * STEPS * self.own
        else:
            self.own = raw
        return y.astype(np.float32), control.astype(np.float32)

    def accepted(self, v):
        """Update the own correction after a round, from the server's direction."""
        if self.keeps and self.is_mimic:
            self.own = v - self._h


def assert_same_trajectory(at_server, at_clients, averaged):
    """Each list has x of every round; ``averaged`` is that of FedAvg, from which the others must differ."""
    assert len(at_server) == len(at_clients) == ROUNDS
    np.testing.assert_allclose(at_clients, at_server, rtol=0, atol=2e-5)
    assert np.abs(np.array(at_server[-1]) - averaged[-1]).max() > 0.05
