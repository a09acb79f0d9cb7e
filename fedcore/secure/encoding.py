"""The integers that are summed: weighted updates on a fixed grid, with the totals of examples and steps."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.algorithms import Claims, FedNova
from fedcore.algorithms.rates import rate_at
from fedcore.arrays import F32, F64, own_class
from fedcore.errors import ArrayError, RangeError
from fedcore.kernels import ExactSum
from fedcore.options import Settings
from fedcore.rules.private import GRID_BITS, SLACK
from fedcore.secure.primitives import HASH, U64, digest_of
from fedcore.server import PartialSum, Server
from fedcore.server.broadcast import Instructions, broadcast_of
from fedcore.server.partial import COLUMNS, GRID, NEAR, fingerprint
from fedcore.store.registry import ClientId
from fedcore.totals import TotalsForm
from fedcore.validation import Checked, check_integer, describe_integers, is_integer

Weights = Literal["uniform", "examples"]

BITS = 62
"""The sum of all clients' integers is below 2^62, so that it cannot overflow."""
FINEST, COARSEST = -GRID[1], -GRID[0]
"""The greatest and the smallest exponent of the grid."""
MOST_SIGMA = 1 << 26
"""The largest deviation of a discrete Gaussian; the largest draw is below nine times the deviation."""
FAR = 9
"""A normal variable is farther from its mean than this number of deviations with probability 2^-61."""
SPAN = 1 << 15
"""Elements per block; their temporaries stay in a core's cache."""
UNKNOWN = "an update in the sum is malformed; masks hide its sender: to find it, sum half of the clients at a time"


@dataclass(frozen=True)
class Encoding(Checked):
    """The form of the integers that clients mask: round(2^exponent w_i h_i), then w_i, then w_i K_i.

    The server sends it to the clients. h_i = x - y_i where models are averaged, else (x - y_i) / (eta K_i); float
    buffers are x - y_i. With ``has_changes``, round(2^exponent (r_i' - r_i)) follows h_i.

    Attributes:
        clients: the greatest number of clients in the sum.
        n, parameters: the elements of the vector, and those of its parameters; the others are float buffers.
        weights: "examples" for w_i = n_i, or "uniform" for w_i = 1.
        eta: the rate of the clients' steps, or None where models are averaged.
        max_norm, max_examples, max_steps: the server's limits, which each client checks for itself. The grid is fine
            enough for sums at these limits.
        has_changes: whether each client keeps a row r_i, and sends its change too.
        noise, honest: with ``PrivateMean``, z and the number of clients whose noise together has the deviation
            z ``max_norm``; else 0. ``max_norm`` is then C: clients scale longer updates down.
        min_clients: with ``PrivateMean``, the smallest number of clients in the sum; else 0.
        round: the server's round. A sum of an earlier round does not count.
        model, work: the digests of x, and of what else clients train by; "" for nothing. See ``of``.
    """

    clients: int
    n: int
    parameters: int
    weights: Weights
    eta: float | None
    max_norm: float
    max_examples: int
    max_steps: int
    has_changes: bool = False
    noise: float = 0.0
    honest: int = 0
    min_clients: int = 0
    round: int = 0
    model: str = ""
    work: str = ""

    _intervals = (
        ("clients", (2, 2**31)),
        *((name, (1, 2**53)) for name in ("n", "max_examples", "max_steps")),
        *((name, (0, None)) for name in ("parameters", "honest", "min_clients", "round")),
        ("max_norm", "(0, 1e30]"),
        ("eta", "(0, inf)", None),
        ("noise", "[0, 1000]"),
    )
    _converts = True

    @classmethod
    def of(cls, server: Server, *, clients: int, colluding: int = 1, x: F32 | None = None, work: Any = None) -> Self:
        """Return the encoding of the server's next round.

        It has digests of what the clients get, so that all of them train from the same.

        Args:
            server: with ``Compute(accumulator="exact")``, and ``Limits(max_norm=, max_examples=)`` or ``PrivateMean``.
            clients: the greatest number of clients in the sum.
            colluding: with ``PrivateMean``, how many clients of a sum may subtract their own noise from it. The noise
                of the other ``policy.min_clients`` - ``colluding`` clients has the rule's deviation.
            x: the model as the clients get it, float32[n], if messages round it. Default: that of ``server.broadcast``.
            work: what else the clients train by, as they pass it to ``encode``: ``Instructions``, or numbers, text,
                arrays, lists and mappings of these. Default: nothing, or the broadcast's instructions if they have
                vectors.

        Raises:
            ArrayError: ``server`` is no ``Server``; ``Totals`` have their own ``encoding``.
            RangeError: masked sums do not support the server's method or options, or the limits are too wide for 64
                bits.
            RoundError: the budget of ``PrivateMean`` is spent.

        Cost: reads x, and the vectors in ``work``.
        """
        if not isinstance(server, Server):
            raise ArrayError(f"server: expected a Server, got {server!r:.200}; for Totals use totals.encoding()")
        form = cls._of(server, state := server._backend, clients=clients, colluding=colluding)
        sent = broadcast_of(server.settings, form.round, (), state.sent_vectors((), set())).on_host()
        if work is None and (instructions := sent.of(0)).vectors():  # they are equal for all clients
            work = instructions
        return replace(form, model=digest_of(sent.x if x is None else x), work=_digest_of_work(work))

    @classmethod
    def _of(cls, server: Server, state: Any, *, clients: int, colluding: int) -> Self:
        """Return the encoding without digests."""
        settings = server.settings
        server.require_partial_sums(has_noise=True)
        limits, weights, rule, layout = settings.all_limits, _weights(settings), settings.rules.private, settings.layout
        most, noise, honest, fewest = limits.max_norm, 0.0, 0, 0
        if rule is not None:
            most, noise, honest, weights = rule.clip, rule.noise, _honest(server, colluding), "uniform"
            fewest = honest + colluding
            rule.require_budget(state.snapshot.ledger)
        if weights == "examples" and state.population.sizes:
            raise RangeError("clients: masks hide n_k, so known sizes cannot be checked; register ids without sizes")
        if most is None:
            raise RangeError("max_norm: masked sums need a limit, since it sets the grid; pass Limits(max_norm=...)")
        eta = None if settings.averages_models else rate_at(settings.lr, server.round_number)
        numbers = most, limits.max_examples if weights == "examples" else 1, limits.max_steps
        now, changes = server.round_number, settings.algorithm.sends_row_change
        n, p = layout.n, layout.n_parameters
        return cls(clients, n, p, weights, eta, *numbers, changes, noise, honest, fewest, now)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("parameters", self.parameters, 0, self.n)
        if self.clients < self.min_clients:
            raise RangeError(f"clients={self.clients}: must be at least min_clients={self.min_clients}; invite more")
        check_integer("honest", self.honest, int(self.noise > 0), self.min_clients)
        if self.noise and not (1 << GRID_BITS <= self.sigma <= MOST_SIGMA):
            raise RangeError(f"clip={self.max_norm:g}, noise={self.noise:g}: the grid of the noise is out of range")
        if self.noise and (self.weights != "uniform" or self.has_changes or self.parameters < self.n):
            raise RangeError(
                "noise: needs uniform weights, and no float buffers and changes, which would have no noise"
            )
        if not all(type(one) is str and len(one) in (0, 2 * HASH) for one in (self.model, self.work)):
            raise ArrayError("model, work: must be SHA-256 digests in hexadecimal")
        if type(self.has_changes) is not bool:
            raise ArrayError(f"has_changes={self.has_changes!r}: must be True or False")
        if self.weights not in get_args(Weights) or (self.weights == "uniform" and self.max_examples != 1):
            raise RangeError(f"weights={self.weights!r}: must be 'examples', or 'uniform' with max_examples=1")
        greatest = max(self.max_norm * 2.0**self.exponent * (self.noise > 0) + FAR * self.sigma, self.max_steps)
        if self.exponent < COARSEST or self.clients * self.max_examples * greatest >= 1 << BITS:
            raise RangeError(
                f"max_examples={self.max_examples}, max_norm={self.max_norm:g}, max_steps={self.max_steps}: too wide "
                f"for the 64-bit sum of {self.clients} clients; set lower limits"
            )

    @property
    def exponent(self) -> int:
        """The grid is 2^-exponent: the finest on which the clients' sum stays below 2^62, and at most 2^-60 fine.

        With noise, a client's noise has a deviation of 2^24 to 2^25 steps of the grid.
        """
        if self.noise:
            return min(FINEST, GRID_BITS + 1 - math.frexp(self.noise * self.max_norm / math.sqrt(self.honest))[1])
        greatest = math.frexp(self.clients * self.max_examples * self.max_norm)[1]
        return min(FINEST, BITS - greatest)

    @property
    def sigma(self) -> int:
        """The deviation of a client's noise, in steps of the grid; 0 without noise.

        ``honest`` clients together have the deviation z (C + rounding), as ``PrivateMean`` on a server.
        """
        sensitivity = self.max_norm * (1 + SLACK) * 2.0**self.exponent + math.sqrt(self.n)
        return math.ceil(self.noise * sensitivity / math.sqrt(max(1, self.honest)))

    @property
    def words(self) -> int:
        """The number of integers that a client sends."""
        return self.n + self.has_changes * self.parameters + 2

    def to_state(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Any:
        """Return the encoding, or the form of totals, of a message; raise ArrayError or RangeError if malformed."""
        if "layout" in state:
            return TotalsForm.read(state)
        try:
            return cls(**state)
        except TypeError:
            raise ArrayError("encoding: a field is missing or unknown") from None

    def encode(
        self, x: F32, y: F32, *, steps: int, examples: int = 1, change: F32 | None = None, work: Any = None
    ) -> U64:
        """Return the client's integers, uint64[words], for ``SecureClient.answer``.

        Args:
            x: the model that the client received, float32[n].
            y: the model after its steps, float32[n].
            steps: K_i.
            examples: n_i; not used by uniform weights.
            change: with ``has_changes``, r_i' - r_i, float32[parameters]. The client replaces its row only if its
                update is in a sum that opened.
            work: what the client got beside x and trained by, as for ``of``.

        Raises:
            ArrayError: x or y is not float32[n], ``change`` is missing or not float32[parameters], or the server
                announced another x or other work to the clients of this sum.
            RangeError: a number exceeds the server's limits, or is not finite. The client must not send this update.
                The message has the limit and not the number, since a framework may send it to the server.

        Determinism: each element is rounded once, to the nearest even integer. Noise is from ``os.urandom``.
        Cost: reads 20 n bytes and writes 8 n; with noise reads 16 n more, and draws n numbers.
        """
        x, y, change = own_class("x", x), own_class("y", y), own_class("change", change)
        vectors = [("x", x, self.n), ("y", y, self.n), ("change", change, self.parameters)]
        for name, vector, n in vectors[: 2 + self.has_changes]:
            if not isinstance(vector, np.ndarray) or vector.dtype != np.float32 or vector.shape != (n,):
                raise ArrayError(f"{name}: expected float32[{n}]; use Layout.flatten")
        digest = self.model and digest_of(x)
        for name, found, due in (("x", digest, self.model), ("work", _digest_of_work(work), self.work)):
            if found != due:
                raise ArrayError(f"{name}: not what the server announced; pass what it sent, or leave the sum")
        weight = 1 if self.weights == "uniform" else examples
        for name, number, limit in (("steps", steps, self.max_steps), ("examples", weight, self.max_examples)):
            if not is_integer(number, 1, limit):
                raise RangeError(f"{name}: must be {describe_integers(1, limit)}")
        steps, weight = int(steps), int(weight)
        out, unit, square, factor = np.empty(self.words, np.int64), 2.0**self.exponent, 0.0, 1.0
        with np.errstate(over="ignore", invalid="ignore"):
            if self.noise:
                norm = math.sqrt(math.fsum(_square(part) for _, part in self._parts(x, y, steps)))
                factor = self.max_norm / max(self.max_norm, norm)
            for start, part in self._parts(x, y, steps):
                if start < self.parameters:
                    square += _square(part)
                elif not np.abs(part).max() <= self.max_norm:  # a NaN too
                    raise RangeError(f"y: a float buffer changed by more than max_norm={self.max_norm:g}")
                part *= weight * factor * unit
                if self.noise:
                    kernels.add_discrete_gaussian(part, 1.0, self.sigma, os.urandom(32), out=part)
                out[start : start + len(part)] = np.rint(part, out=part)
            norm, most = math.sqrt(square), math.inf if self.noise else self.max_norm
            if not (norm <= most and norm < math.inf):
                raise RangeError(f"y: the norm of the update is above max_norm={self.max_norm:g}, or not finite")
            if change is not None and self.has_changes:
                wide = change.astype(np.float64)
                if not math.sqrt(_square(wide)) <= self.max_norm:
                    raise RangeError(f"change: its norm is above max_norm={self.max_norm:g}, or not finite")
                out[self.n : -2] = np.rint(np.multiply(wide, unit, out=wide), out=wide)
        out[-2:] = weight, 1 if self.noise else weight * steps
        return out.view(np.uint64)

    def _parts(self, x: F32, y: F32, steps: int) -> Iterator[tuple[int, F64]]:
        """Yield h in parts of the parameters or of the buffers, with the index of the first element."""
        distance = 1.0 if self.eta is None else self.eta * steps
        for start, end in pairwise(sorted({*range(0, self.n, SPAN), self.parameters, self.n})):
            part = x[start:end].astype(np.float64) - y[start:end]
            yield start, part / distance if start < self.parameters else part

    def partial_sum(
        self,
        server: Server,
        total: npt.NDArray[np.int64],
        clients: Sequence[ClientId],
        rejected: tuple[tuple[ClientId, str], ...] = (),
    ) -> PartialSum:
        """Return the sum of encoded updates, int64[words], for ``Round.add_partial_sum``; see ``SecureServer``.

        Raises:
            RangeError: the total cannot be a sum of valid updates, or the server's next round needs another encoding.
        """
        due = self._of(server, state := server._backend, clients=self.clients, colluding=self.min_clients - self.honest)
        if replace(due, model=self.model, work=self.work) != self:
            raise RangeError("encoding: it belongs to another round or server; open the sum for the next round")
        k, weight, steps = len(clients), int(total[-2]), int(total[-1])
        if not (k <= weight <= k * self.max_examples and weight <= steps <= weight * self.max_steps):
            raise RangeError(f"sum: {weight} examples and {steps} steps x examples of {k} clients; {UNKNOWN}")
        unit, changes = 2.0**-self.exponent, total[self.n : -2]
        norm, root = _length(total[: self.parameters]) * unit / weight, math.sqrt(self.n)
        more = (root * k + (root + FAR) * self.sigma * math.sqrt(k)) * unit / weight  # rounding and noise
        if norm > NEAR * self.max_norm + more or _length(changes) * unit > k * (NEAR * self.max_norm + root * unit):
            raise RangeError(f"sum: the norm of the mean is {norm:g}, but max_norm={self.max_norm:g}; {UNKNOWN}")
        examples, own_steps = equal_parts(weight, steps, k)
        columns = dict.fromkeys(COLUMNS, np.ones(k)) | {
            "steps": own_steps,
            "examples": examples if self.weights == "examples" else np.zeros(k),
            "eta_steps": own_steps * rate_at(server.settings.lr, server.round_number),
            "weights": examples,
            "squares": np.full(k, (norm if self.noise else min(norm, self.max_norm)) ** 2),
            "has_buffers": np.full(k, float(self.n > self.parameters)),
        }
        made_under = fingerprint(server.settings, state)
        sum = server.round_number, made_under, *self._exact(total[: self.n]), tuple(clients)
        exact = self._exact(changes) if self.has_changes else None
        return PartialSum(*sum, **columns, rejected=rejected, changes=exact, noise=self.noise)

    def _exact(self, words: npt.NDArray[np.int64]) -> ExactSum:
        """Return words of this grid on the grid of exact sums."""
        below = self.exponent - COARSEST
        return ExactSum(words >> below, (words & ((1 << below) - 1)) << (FINEST - self.exponent))


def _digest_of_work(work: Any) -> str:
    if isinstance(work, Instructions):
        work = work.numbers() | work.vectors()
    return "" if work is None else digest_of(work)


def _square(part: F64) -> float:
    """Return the sum of the squares. A product of NumPy would start the threads of its BLAS, which keep spinning."""
    return float(np.einsum("i,i->", part, part))


def _length(words: npt.NDArray[np.int64]) -> float:
    """Return the norm of integers, in float64."""
    parts = (words[start : start + SPAN].astype(np.float64) for start in range(0, len(words), SPAN))
    return math.sqrt(math.fsum(_square(part) for part in parts))


def equal_parts(examples: int, example_steps: int, k: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return integers n_i and K_i of k clients, float64[k] each, with sum n_i and sum n_i K_i as given.

    They are as equal as possible: the first clients have one step more than the others.

    >>> equal_parts(10, 24, 3)
    (array([4., 3., 3.]), array([3., 2., 2.]))
    """
    steps, longer = divmod(example_steps, examples)
    first = max(1, longer * k // examples) if longer else 0
    parts = [*_equal(longer, first), *_equal(examples - longer, k - first)]
    return np.array(parts, np.float64), np.array([steps + (i < first) for i in range(k)], np.float64)


def _equal(whole: int, parts: int) -> list[int]:
    return [whole // parts + (i < whole % parts) for i in range(parts)]


def _honest(server: Server, colluding: int) -> int:
    """Return the least number of honest clients in a sum; raise RangeError if it is 0."""
    fewest = max(2, server.policy.min_clients)
    honest = fewest - check_integer("colluding", colluding, 0)
    if honest < 1:
        raise RangeError(f"colluding={colluding}: no client of a sum may be honest; raise RoundPolicy(min_clients=)")
    return honest


def _weights(settings: Settings) -> Weights:
    """Return the weights of a method, from its weights of two clients; raise RangeError if masks hide what it reads."""
    method, pair = settings.algorithm, np.array([2.0, 3.0])
    if not method.needs_square_of_sum and (not method.sets_gamma or isinstance(method, FedNova)):
        found = method.weigh(Claims(pair, pair + 5, np.ones(2), clients=(0, 1)))
        if np.array_equal(found, np.ones(2)):
            return "uniform"
        is_plain = settings.averages_models or settings.server_lr is not None or method.sets_gamma
        if np.array_equal(found, pair + 5) and is_plain:
            return "examples"
    raise RangeError(
        f"algorithm: {method} reads norms, steps or rates of single clients, which masks hide; use a method whose "
        "weights are 1 or the numbers of examples, such as FedAvg, or FedNova without momentum"
    )
