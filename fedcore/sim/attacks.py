"""Attacks: the updates that dishonest clients send, to measure what a server's rules tolerate.

In an experiment, the last clients attack::

    attack = { name = "ALIE", clients = 3 }

In your own loop, ``Liars`` replaces the updates of some clients::

    liars = Liars(ALIE(), clients=[7, 8, 9])
    report = server.round(liars.updates(broadcast, updates))

An attack is a pure function of the round's updates, the seed and the round. It acts on the parameters of y - x and on
the second vector in the same way; float buffers stay honest.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import isclass
from typing import Annotated, Any, ClassVar

import numpy as np

from fedcore.arrays import F32, I64
from fedcore.kernels import squared_norms
from fedcore.runtime import generator
from fedcore.server import Broadcast, Update
from fedcore.sim.checks import Checked, Real, Whole
from fedcore.sim.data import Dataset
from fedcore.store.registry import ClientId
from fedcore.validation import Registry

Factor = Annotated[float, Real("(-inf, inf)")]


class Attack(Checked):
    """An attack. A subclass is a frozen dataclass, and overrides at least one method; its fields are options.

    Attributes:
        sees_honest: whether the attack knows the honest updates of the round; if not, ``honest`` is empty.
    """

    sees_honest: ClassVar[bool] = False

    def vector(self, own: F32, honest: Sequence[F32], *, seed: int, round: int, client: int) -> F32:
        """Return the vector that a dishonest client sends, float32[p]. Default: its own.

        Args:
            own: float32[p], read-only: the parameters of the client's y - x, or its second vector.
            honest: the same vector of each honest client of the round, in the order of arrival.
            seed: the seed of the dishonest clients.
            round: the round.
            client: the client's position among the dishonest clients.
        """
        return own

    def counts(self, update: Update) -> Update:
        """Return the update with the numbers that the client reports. Default: the true ones."""
        return update

    def labels(self, labels: I64, classes: int) -> I64:
        """Return the labels, int64[m], on which a dishonest client trains. Default: the true ones."""
        return labels


@dataclass(frozen=True)
class Honest(Attack):
    """Send honest updates: the baseline of a comparison."""


@dataclass(frozen=True)
class Scaling(Attack):
    """Send a multiple of the own update (model replacement; Bagdasaryan et al., AISTATS 2020).

    Args:
        factor: the multiple.
    """

    factor: Factor = 10.0

    def vector(self, own: F32, honest: Sequence[F32], *, seed: int, round: int, client: int) -> F32:
        """``factor`` times ``own``."""
        return np.float32(self.factor) * own


@dataclass(frozen=True)
class SignFlip(Scaling):
    """Send the own update with the opposite sign (Li et al., "RSA", AAAI 2019).

    Args:
        factor: a further factor of the update.
    """

    factor: Factor = 1.0

    def vector(self, own: F32, honest: Sequence[F32], *, seed: int, round: int, client: int) -> F32:
        """``-factor`` times ``own``."""
        return np.float32(-self.factor) * own


@dataclass(frozen=True)
class Noise(Scaling):
    """Send Gaussian noise in place of an update (Blanchard et al., NeurIPS 2017).

    Args:
        factor: the noise's norm, as a multiple of the own update's.
    """

    def vector(self, own: F32, honest: Sequence[F32], *, seed: int, round: int, client: int) -> F32:
        """Noise that differs between rounds, clients, and lengths of vectors."""
        noise = generator(seed, "attack: noise", round=round, client=client).normal(size=len(own))
        return with_norm(noise.astype(np.float32), self.factor * norm(own))


@dataclass(frozen=True)
class ALIE(Attack):
    """Send the mean of the honest updates minus z standard deviations (Baruch et al., NeurIPS 2019).

    Args:
        z: the number of standard deviations of each coordinate.
    """

    z: Factor = 1.5
    sees_honest: ClassVar[bool] = True

    def vector(self, own: F32, honest: Sequence[F32], *, seed: int, round: int, client: int) -> F32:
        """The same vector for all dishonest clients."""
        stacked = np.stack(honest)
        lie: F32 = stacked.mean(axis=0) - np.float32(self.z) * stacked.std(axis=0)
        return lie


@dataclass(frozen=True)
class IPM(Attack):
    """Send a negative multiple of the mean of the honest updates (inner product manipulation; Xie et al., UAI 2020).

    Args:
        epsilon: the multiple. With one dishonest client of k, the mean of all updates is zero if it is k - 1.
    """

    epsilon: Factor = 1.0
    sees_honest: ClassVar[bool] = True

    def vector(self, own: F32, honest: Sequence[F32], *, seed: int, round: int, client: int) -> F32:
        """The same vector for all dishonest clients."""
        lie: F32 = np.float32(-self.epsilon) * np.stack(honest).mean(axis=0)
        return lie


@dataclass(frozen=True)
class Drift(Scaling):
    """Send the same direction in every round, at the norm of an honest update (Karimireddy et al., ICML 2021).

    Rules that look at one round cannot see the attack: each update is within their limits.

    Args:
        factor: the norm, as a multiple of the honest updates' median norm.
    """

    factor: Factor = 1.0
    sees_honest: ClassVar[bool] = True

    def vector(self, own: F32, honest: Sequence[F32], *, seed: int, round: int, client: int) -> F32:
        """The same vector for all dishonest clients; its direction follows from the seed."""
        direction = generator(seed, "attack: drift").normal(size=len(own)).astype(np.float32)
        return with_norm(direction, self.factor * float(np.median([norm(one) for one in honest])))


@dataclass(frozen=True)
class FreeRider(Attack):
    """Send back the model of the last round without training it (Fraboni et al., AISTATS 2021)."""

    def vector(self, own: F32, honest: Sequence[F32], *, seed: int, round: int, client: int) -> F32:
        """Zeros."""
        return np.zeros_like(own)


@dataclass(frozen=True)
class LabelFlip(Attack):
    """Train on the labels C - 1 - y, with C classes (Fang et al., USENIX Security 2020)."""

    def labels(self, labels: I64, classes: int) -> I64:
        """The mirrored labels."""
        return classes - 1 - labels


@dataclass(frozen=True)
class FalseExamples(Scaling):
    """Report a false number of examples, to get a large weight.

    Args:
        examples: the reported number, at least 1.
        factor: a factor of the update; -1 turns its sign.
    """

    factor: Factor = -1.0
    examples: Annotated[int, Whole(1)] = 10**9

    def counts(self, update: Update) -> Update:
        """The reported examples."""
        return update._replace(examples=self.examples)


@dataclass(frozen=True)
class FalseSteps(Scaling):
    """Report a false number of steps: the mean gradient is the update divided by it.

    Args:
        steps: the reported number, at least 1.
        factor: a factor of the update; -1 turns its sign.
    """

    factor: Factor = -1.0
    steps: Annotated[int, Whole(1)] = 1

    def counts(self, update: Update) -> Update:
        """The reported steps."""
        return update._replace(steps=self.steps)


_ATTACKS = (Honest, SignFlip, Scaling, Noise, ALIE, IPM, Drift, FreeRider, LabelFlip, FalseExamples, FalseSteps)
REGISTRY: Registry[type[Attack]] = Registry(
    "attack",
    {attack.__name__: attack for attack in _ATTACKS},
    expected="a subclass of fedcore.sim.attacks.Attack",
    fits=lambda row: isclass(row) and issubclass(row, Attack) and row is not Attack,
    group="fedcore.attacks",
)
"""The attacks, keyed by name."""


Vectors = tuple[F32, F32 | None]
"""What a client moved, y - x or its mean gradient, and its second vector, if any; both float32[n_parameters]."""


@dataclass(frozen=True)
class Liars:
    """The dishonest clients of a federation, which share an attack.

    Args:
        attack: their attack.
        clients: their ids.
        seed: the seed of random attacks.
    """

    attack: Attack
    clients: Sequence[ClientId]
    seed: int = 0

    def poisoned(self, dataset: Dataset, parts: Sequence[I64]) -> Dataset:
        """Return a data set with the labels on which the dishonest clients train; ``parts[i]`` belongs to client i."""
        labels = dataset.train_y.copy()
        for client in self.clients:
            part = parts[int(client)]
            labels[part] = self.attack.labels(labels[part], dataset.classes)
        return replace(dataset, train_y=labels)

    def updates(self, broadcast: Broadcast, updates: Iterable[Update]) -> Iterator[Update]:
        """Yield a round's updates, with those of the dishonest clients replaced and last.

        Args:
            broadcast: the broadcast that the updates answer.
            updates: the updates as honest clients would send them. ``value`` is a vector: float32[n], or
                float32[n_parameters] of the kind "gradient". All are of the same kind.

        Raises:
            ShapeError: an update is not a vector; flatten its tensors first.

        Cost: stores the updates of the dishonest clients, and all others too if the attack ``sees_honest``.
        """
        sent, p = broadcast.on_host(), len(broadcast.offset(broadcast.ids[0])) if broadcast.ids else 0
        honest: list[Vectors] = []
        to_replace: list[tuple[Update, F32, Vectors]] = []
        for update in updates:
            is_honest = update.client not in self.clients
            if not is_honest or self.attack.sees_honest:
                x = sent.start(update.client)
                y = update.vector("value", p if update.kind == "gradient" else len(x))
                moved = y - x if update.kind == "model" else y.copy()
                control = None if update.control is None else update.vector("control", p).copy()
                vectors = moved[:p], control
                if is_honest:
                    honest.append(vectors)
                else:
                    to_replace.append((update, moved, vectors))
            if is_honest:
                yield update
        for update, moved, own in to_replace:
            others = honest or [own] if self.attack.sees_honest else []
            moved[:p], control = (
                None if vector is None else self._lie(update, broadcast.round, vector, [one[kind] for one in others])
                for kind, vector in enumerate(own)
            )
            value = sent.start(update.client) + moved if update.kind == "model" else moved
            yield self.attack.counts(update._replace(value=value, control=control, keep=True))

    def _lie(self, update: Update, round: int, own: F32, honest: Sequence[Any]) -> F32:
        client = self.clients.index(update.client)
        return self.attack.vector(own, honest, seed=self.seed, round=round, client=client)


def norm(vector: F32) -> float:
    """Return the norm of float32[n]."""
    return math.sqrt(float(squared_norms([vector])[0]))


def with_norm(direction: F32, length: float) -> F32:
    """Return a vector along a direction, float32[n], with a norm."""
    return np.float32(length / norm(direction)) * direction
