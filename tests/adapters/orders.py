"""Every method of the registry, and methods of other options: messages must carry every field of the instructions."""

from fedcore.algorithms import (
    MBSTORM,
    REGISTRY,
    SCAFFOLD,
    SCAFFOLDM,
    SCAFFOLDMVR,
    Algorithm,
    Direction,
    FedProx,
    FlexibleFedAvg,
    Linear,
    LocalDescent,
    MimiC,
    QFedAvg,
    Step,
    named,
)
from fedcore.algorithms.rates import InverseStep
from tests.outsiders.house.mine.methods import Accelerated
from tests.sim.outsider import Share


class Everything(Algorithm):
    """A method that sets every field of the instructions to another value than the default."""

    direction = Direction(a=0.5, b=0.25, mu=0.125, from_mean=0.5, from_momentum=0.75)
    local_rule = Share(0.25)
    placement = "client"
    second_vector = "words of one's own"
    keeps_total = True
    needs_plain_steps = True
    needs_loss = True

    def step(self, cohort):
        return Step(v=Linear(A=1 / cohort.S), T=Linear(T=1, B=1))


ORDERS = {
    **{name: named(name) for name in REGISTRY if name != "FedAWE"},  # messages cannot carry each client's start
    "Accelerated": Accelerated(lam=0.5),
    "FlexibleFedAvg": FlexibleFedAvg(local_steps=5),
    "FedProx, mu 0": FedProx(mu=0.0),
    "MBSTORM, beta 1": MBSTORM(beta=1.0),
    "LocalDescent, full gradient": LocalDescent(full_gradient=True),
    "MimiC, units update": MimiC(units="update"),
    "MimiC, rows on clients": MimiC(placement="client"),
    "QFedAvg, q 2": QFedAvg(2.0),
    "SCAFFOLD, control sent": SCAFFOLD(control="sent"),
    "SCAFFOLD, rows on clients": SCAFFOLD(placement="client"),
    "SCAFFOLDM, rows on clients": SCAFFOLDM(placement="client"),
    "SCAFFOLDMVR, rows on clients": SCAFFOLDMVR(placement="client"),
    "everything": Everything(),
}
PLAIN = ["FedAvg", "MIFA", "MimiC", "FlexibleFedAvg", "LocalDescent", "FedProx, mu 0", "MimiC, units update"]
PLAIN += ["FedAU", "FedAsync", "FedVARP", "FedStale", "FedNova", "FedExP", "QFedAvg"]
"""Methods whose clients only step along their gradients, so that messages need only the model."""
OF_STEPS = InverseStep(mu=1.0, alpha=3.0, E=4)
