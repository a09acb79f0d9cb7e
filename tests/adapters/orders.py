"""Every method of the registry, and methods of other options: messages must carry every field of the instructions."""

from fedcore import algorithms
from fedcore.algorithms.rates import InverseStep
from tests.outsiders.house.mine.methods import Accelerated
from tests.sim.outsider import Share


class Everything(algorithms.Algorithm):
    """A method that sets every field of the instructions to another value than the default."""

    direction = algorithms.Direction(a=0.5, b=0.25, mu=0.125, from_mean=0.5, from_momentum=0.75)
    local_rule = Share(0.25)
    placement = "client"
    second_vector = "words of one's own"
    keeps_total = True
    needs_plain_steps = True
    needs_loss = True

    def step(self, cohort):
        return algorithms.Step(v=algorithms.Linear(A=1 / cohort.S), T=algorithms.Linear(T=1, B=1))


ORDERS = {
    # Messages cannot carry each client's start.
    **{name: algorithms.named(name) for name in algorithms.REGISTRY if name != "FedAWE"},
    "Accelerated": Accelerated(lam=0.5),
    "FlexibleFedAvg": algorithms.FlexibleFedAvg(local_steps=5),
    "FedProx, mu 0": algorithms.FedProx(mu=0.0),
    "MBSTORM, beta 1": algorithms.MBSTORM(beta=1.0),
    "LocalDescent, full gradient": algorithms.LocalDescent(full_gradient=True),
    "MimiC, units update": algorithms.MimiC(units="update"),
    "MimiC, rows on clients": algorithms.MimiC(placement="client"),
    "QFedAvg, q 2": algorithms.QFedAvg(2.0),
    "SCAFFOLD, control sent": algorithms.SCAFFOLD(control="sent"),
    "SCAFFOLD, rows on clients": algorithms.SCAFFOLD(placement="client"),
    "SCAFFOLDM, rows on clients": algorithms.SCAFFOLDM(placement="client"),
    "SCAFFOLDMVR, rows on clients": algorithms.SCAFFOLDMVR(placement="client"),
    "everything": Everything(),
}
PLAIN = ["FedAvg", "MIFA", "MimiC", "FlexibleFedAvg", "LocalDescent", "FedProx, mu 0", "MimiC, units update"]
PLAIN += ["FedAU", "FedAsync", "FedVARP", "FedStale", "FedNova", "FedExP", "QFedAvg"]
"""Methods whose clients only step along their gradients, so that messages need only the model."""
OF_STEPS = InverseStep(mu=1.0, alpha=3.0, E=4)
