"""A custom method and rate, found by their names."""

from fedcore.algorithms import Algorithm, Linear, Step, Terms


class Own(Algorithm):
    adds = Terms(h=1)

    def __init__(self, part=1.0):
        self.part = part

    def step(self, cohort):
        return Step(v=Linear(A=self.part / cohort.weight))


class Fading:
    def __init__(self, first):
        self.first = first

    def __call__(self, t):
        return self.first / (1 + t)


class Untold(Own):
    """A method without a signature."""

    __signature__ = "none"

    def __repr__(self):
        return "Untold"
