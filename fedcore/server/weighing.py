"""The weights of a round's replies, and the examples that they count with."""

from dataclasses import replace

import numpy as np

from fedcore.aggregation import Replies
from fedcore.algorithms import check_weights
from fedcore.server.report import Lowered
from fedcore.server.settings import Settings
from fedcore.server.state import State
from fedcore.typing import F64


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
        registry = self._state.store.registry
        return self._state.population.bound(registry, replies.clients, replies.claims.examples)

    def count_known_examples(self, replies: Replies) -> None:
        """Count no more examples than the server was told."""
        self.count_examples(replies, self.known_at_most(replies))

    def count_examples(self, replies: Replies, examples: F64) -> None:
        """Count some replies with fewer examples than they claim."""
        claimed = replies.claims.examples
        if examples is claimed:
            return
        lower = np.flatnonzero(examples < claimed).tolist()
        if lower:
            self.lowered += [Lowered(replies.clients[i], int(claimed[i]), int(examples[i])) for i in lower]
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
