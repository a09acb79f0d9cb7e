"""A user's participation pattern."""

from fedcore.sim.participation import Active, Participation


class OddAndEven(Participation):
    """The clients whose number is odd in odd rounds, and the others in even ones."""

    def __init__(self, clients: int, shift: int = 0, **more) -> None:
        super().__init__(clients, **more)
        self.shift = shift

    def _choose(self, round, candidates):
        return Active(candidates.clients[candidates.clients % 2 == (round + self.shift) % 2])
