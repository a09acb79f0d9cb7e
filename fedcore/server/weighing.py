"""The weights of a round's replies, and the examples that they count with."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from fedcore.aggregation import COUNTED, WEIGHTED, Replies
from fedcore.algorithms import Algorithm, Claims, check_weights
from fedcore.arguments import real
from fedcore.clients import ClientId
from fedcore.errors import RangeError
from fedcore.server.report import Lowered
from fedcore.server.settings import Settings
from fedcore.server.state import State
from fedcore.server.update import Update
from fedcore.typing import F64

Weights = Mapping[ClientId, float] | Callable[[Claims], F64]
"""Weights in the place of n_i: by client, or made of the clients' claims."""


class Weighing:
    """Weighs the replies of an open round by their claims, as the method says.

    Attributes:
        lowered: the clients that were counted with fewer examples than they claimed.
    """

    def __init__(self, settings: Settings, state: State) -> None:
        self._algorithm, self._state = settings.algorithm, state
        self.lowered: list[Lowered] = []

    def close(self) -> None:
        """Let the state go: a round that is over keeps no store open."""
        del self._state

    def known_at_most(self, replies: Replies) -> F64:
        """float64[k], the replies' examples, or as many as the server was told that the clients have."""
        population, claimed = self._state.population, replies.claims.examples
        if not population.is_sized:
            return claimed
        known = population.examples(self._state.store.registry, replies.clients)
        claims_less = (replies.sources == COUNTED) & (claimed < known)
        return np.where(claims_less | (replies.sources == WEIGHTED), claimed, known)

    def count_known_examples(self, replies: Replies) -> None:
        """Count no more examples than the server was told."""
        self.count_examples(replies, self.known_at_most(replies))

    def count_examples(self, replies: Replies, examples: F64) -> None:
        """Count some replies with other examples than they claim, unless the weight is the server's own."""
        claimed = replies.claims.examples
        if examples is claimed:
            return
        examples = np.where(replies.sources == WEIGHTED, claimed, examples)
        for i in np.flatnonzero((examples < claimed) & (replies.sources == COUNTED)).tolist():
            self.lowered.append(Lowered(replies.clients[i], int(claimed[i]), int(examples[i])))
        replies.claims = replace(replies.claims, examples=examples)

    def weigh(self, replies: Replies) -> None:
        """Set the replies' weights by their claims, their shares and their ages."""
        number, population = self._state.snapshot.round_number, self._state.population
        registry, clients, claims = self._state.store.registry, replies.clients, replies.claims
        shares, ages = population.shares(registry, clients), population.ages(registry, clients, number)
        if claims.clients is not clients or shares is not claims.shares or ages is not claims.ages:
            replies.claims = replace(claims, shares=shares, ages=ages, clients=clients)
        weights = self._algorithm.weigh(replies.claims)
        replies.weights = check_weights(self._algorithm, weights, replies.claims)


def require_weighing(algorithm: Algorithm, name: str) -> None:
    """Refuse weights for a method that does not weigh by examples.

    Raises:
        RangeError: it does not.
    """
    if not algorithm.weighs_claims:
        due = "None, or a method that weighs by examples, such as FedAvg"
        raise RangeError(f"{name}: expected {due}, got one for {algorithm}: leave it out")


def weight_of(weights: Weights, update: Update, client: ClientId) -> float:
    """The weight of an update whose claims were checked.

    Raises:
        RangeError: there is none for this client, or it is no finite number >= 0.
    """
    if not callable(weights):
        if client not in weights:
            raise RangeError(f"weights: expected a number for each client, got none for {client!r}: add it to weights=")
        return real("weights", weights[client], "[0, inf)")
    missing = np.nan if update.examples is None else update.examples
    steps, examples, counts = (np.array([n], np.float64) for n in (update.steps, missing, update.count))
    weight = np.asarray(weights(Claims(steps, examples, counts, clients=[client]))).item()
    if update.examples is None and weight != weight:
        raise RangeError("examples: expected a number, from which weights= makes the weight, got None")
    return real("weights", weight, "[0, inf)")
