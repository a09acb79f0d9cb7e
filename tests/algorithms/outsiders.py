"""Methods that fedcore does not have, as somebody who knows nothing but the table would write them."""

from fedcore.algorithms import MEAN_GRADIENT, Algorithm, Direction, Step


class FedVARP(Algorithm):
    """v = (1/S) sum of (h_i - r_i) + (1/N) sum of all rows (Jhunjhunwala et al. 2022)."""

    adds = "h - r"
    keeps_total = True

    def step(self, cohort):
        return Step(from_sum=1 / cohort.S, from_total=1 / cohort.N, keep_sum=1)


class FedDyn(Algorithm):
    """Rows in units of 1 / alpha: r_i' = r_i + x - y_i, and v = mean h + the mean of all rows (Acar et al. 2021)."""

    adds = "raw - r"
    keeps_total = True
    averages_models = True

    def __init__(self, alpha=0.1):
        self.alpha = alpha
        self.direction = Direction(mu=alpha, from_row=-alpha)

    def step(self, cohort):
        return Step(from_sum=1 / cohort.S + 1 / cohort.N, from_total=1 / cohort.N, keep_sum=1)


class HeavyBall(Algorithm):
    """v = 2 mean h + g / 2: no multiple of the mean."""

    def weigh(self, claims):
        return claims.examples

    def step(self, cohort):
        return Step(from_sum=2 / cohort.W, from_momentum=0.5)


class Frozen(Algorithm):
    """x stays where it is, whatever comes."""

    def step(self, cohort):
        return Step(from_sum=0.0)


class WeighedMIFA(Algorithm):
    """MIFA whose sum weighs by examples, and whose clients step along half of g."""

    adds = "h - r"
    keeps_total = True

    def weigh(self, claims):
        return claims.examples / 7

    def step(self, cohort):
        return Step(from_sum=1 / cohort.W, from_total=1 / cohort.N, keep_sum=1)


class HalfSCAFFOLD(Algorithm):
    """SCAFFOLD's rows under half of its step, and with momentum in the server's step alone."""

    adds = "raw - r"
    keeps_total = True
    direction = Direction(a=0.5, from_row=-0.5, from_mean=0.5, from_momentum=0.25)

    def step(self, cohort):
        return Step(from_sum=0.5 / (2 * cohort.S), from_momentum=0.75, keep_sum=1)


class Remembered(Algorithm):
    """v = mean h + the mean of all second vectors of before, with which no client corrects itself."""

    second = MEAN_GRADIENT
    keeps_total = True

    def step(self, cohort):
        return Step(from_sum=1 / cohort.S, from_total=1 / cohort.N, keep_control=1)


METHODS = {
    method.__name__: method for method in (FedVARP, FedDyn, HeavyBall, Frozen, WeighedMIFA, HalfSCAFFOLD, Remembered)
}
