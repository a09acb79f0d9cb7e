"""The report of a network's round."""

from dataclasses import dataclass

from fedcore.server import RoundReport


@dataclass(frozen=True, repr=False)
class NetworkReport(RoundReport):
    """The outcome of one round of a network: a ``RoundReport``, and how far the models are apart.

    The fields of ``RoundReport`` are those of the nodes heard; h_j is measured from what node j itself held, and
    diversity weighs it by q_j. There is no server's step, so gamma is 0.

    Attributes:
        zeta: max(|lambda_2|, |lambda_k|) of the matrix that mixed the k nodes heard; 1 where it has two parts that do
            not mix, or nobody was heard.
        consensus: sqrt((1/p) sum_j |y_j - mean|^2) over the parameters of all models after mixing.
    """

    zeta: float = 1.0
    consensus: float = 0.0
