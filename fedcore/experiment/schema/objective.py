"""The table of the configuration that says what arrivals and departures do to the objective."""

from typing import Literal

from fedcore.experiment.schema.section import Section


class Objective(Section):
    """The part of clients that arrive and depart (a ``Schedule`` in the participation) in the objective sum p^k F_k.

    A client counts in p^k = n_k / n, and the test set holds its examples, from its arrival on. Where it departs,
    "exclude" forgets it in both, and "include" keeps its share in the weights although it is never heard again.

    Attributes:
        departures: "include" or "exclude".
        restart: whether a rate eta_0 / t (``Staircase``) or ``InverseRound`` begins anew where the objective changes.
        test: whose test examples count: of the clients in the "objective", or of those "present", which differ after a
            departure that is included.

    Reference: Ruan et al., "Towards Flexible Device Participation in Federated Learning", AISTATS 2021, Sec. 4.2, 4.3.
    """

    departures: Literal["include", "exclude"] = "exclude"
    restart: bool = True
    test: Literal["objective", "present"] = "objective"
