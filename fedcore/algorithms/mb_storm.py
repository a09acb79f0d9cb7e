"""MB-STORM: Patel et al., "Towards Optimal Communication Complexity in Distributed Non-Convex Optimization", 2022.

CE-LSGD of the same paper is not here, for its algorithm was not at hand in print: that it goes on from MB-STORM's v_t
by local steps along v_k = v_{k-1} + grad(y_k; xi) - grad(y_{k-1}; xi) is known, but not from a text that says which
clients take them, and how x' is made of theirs. In any case CE-LSGD asks for two things that no method here has: a
round of two exchanges (the v_t that is averaged first, then the local steps), and a local rule whose offset changes
with every step (gradients at y_k and y_{k-1} on one minibatch, their difference carried along).
"""

from dataclasses import dataclass, replace

from fedcore.algorithms.algorithm import Step
from fedcore.algorithms.cohort import Cohort
from fedcore.algorithms.fedavg_m import FedAvgMVR
from fedcore.arguments import whole
from fedcore.local_rules import OneMinibatch


@dataclass(frozen=True)
class MBSTORM(FedAvgMVR):
    """v_t = (1/S) sum of [grad_i(x_t; xi) + (1 - beta) (v_{t-1} - grad_i(x_{t-1}; xi))]; x' = x - gamma v_t.

    Clients take no local steps: each spends the examples of its K minibatches on one gradient at both points. So it is
    FedAvg-M-VR with K = 1 and a K times larger minibatch. Here v_{-1} = 0 and x_{-1} = x_0, but ``Server.warm_start``
    makes v_{-1} a mean of gradients at x_0; without a server rate gamma = eta K.

    Args:
        beta: in (0, 1]; 1 is minibatch SGD.
        steps: K, how many of a client's steps along v the server goes. Cheng et al. compare with K as many as the local
            steps of the other methods (Appendix D.1).
    """

    steps: int = 1

    local_rule = OneMinibatch()

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("steps", self.steps, 1)

    def step(self, cohort: Cohort) -> Step:
        """v = A / W, W = S draws; gamma = K times the draws' mean of eta_i."""
        if self.steps == 1 or not cohort.S:
            return super().step(cohort)
        counts = cohort.claims.counts
        eta = float((cohort.eta_steps * counts).sum() / counts.sum())
        return replace(super().step(cohort), gamma=self.steps * eta)
