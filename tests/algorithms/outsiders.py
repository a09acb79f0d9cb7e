"""Custom methods, written from the documented table only."""

from dataclasses import dataclass

from fedcore.algorithms import MEAN_GRADIENT, Algorithm, Direction, Linear, Step, Terms

CHANGE = Terms(row=1, r=-1)


class HeavyBall(Algorithm):
    """v = 2 mean h + g / 2, which is no multiple of the mean."""

    keeps_momentum = True

    def weigh(self, claims):
        return claims.examples

    def step(self, cohort):
        return Step(v=Linear(A=2 / cohort.W, g=0.5))


class Frozen(Algorithm):
    """x never changes."""

    def step(self, cohort):
        return Step(v=Linear())


class WeighedMIFA(Algorithm):
    """MIFA with a sum weighted by examples, so that T is not the sum of the rows."""

    row = Terms(h=1)
    adds = CHANGE
    keeps_total = True
    total_is_whole = True

    def weigh(self, claims):
        return claims.examples / 7

    def step(self, cohort):
        return Step(v=Linear(A=1 / cohort.W, T=1 / cohort.N), T=Linear(T=1, A=1))


class HalfSCAFFOLD(Algorithm):
    """SCAFFOLD's rows with half of its step, and momentum only in the server's step."""

    row = Terms(h=2, r=1, q=-2)
    adds = CHANGE
    anchor = "offset"
    keeps_total = True
    total_is_whole = True
    total_sums_rows = True
    direction = Direction(a=0.5, from_row=-0.5, from_mean=0.5, from_momentum=0.25)

    def step(self, cohort):
        return Step(v=Linear(A=0.5 / (2 * cohort.S), g=0.75), T=Linear(T=1, A=1))


class Remembered(Algorithm):
    """v = mean h + the mean of all earlier second vectors, which no client uses."""

    second_vector = MEAN_GRADIENT
    keeps_total = True
    total_is_whole = True
    total_sums_rows = True

    def step(self, cohort):
        return Step(v=Linear(A=1 / cohort.S, T=1 / cohort.N), T=Linear(T=1, B=1))


@dataclass(frozen=True)
class Averaged(Algorithm):
    """Rows are running means, and the sum uses all terms: h, the row before and after, and v[t_i]."""

    fresh: float = 0.25

    anchor = "v[t]"
    keeps_total = True
    keeps_momentum = True

    @property
    def row(self):
        return Terms(h=self.fresh, r=1 - self.fresh)

    @property
    def adds(self):
        return Terms(h=1, row=1, r=-self.fresh, q=0.5)

    def step(self, cohort):
        return Step(v=Linear(A=1 / cohort.S, T=0.125, g=0.125), T=Linear(T=0.5, A=1 / cohort.N, g=0.25, v=-0.5))


METHODS = {method.__name__: method for method in (HeavyBall, Frozen, WeighedMIFA, HalfSCAFFOLD, Remembered, Averaged)}
