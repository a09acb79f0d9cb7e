"""The integers that are summed: weighted updates on a fixed grid, with the totals of examples and steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from fedcore.algorithms import Claims, FedNova
from fedcore.algorithms.rates import rate_at, rate_of_steps
from fedcore.arrays import F32
from fedcore.errors import ArrayError, RangeError
from fedcore.options import Settings
from fedcore.rules import Mean
from fedcore.secure.primitives import U64
from fedcore.server import PartialSum, Server
from fedcore.server.partial import COLUMNS, GRID, NEAR, fingerprint, require_partial_sums
from fedcore.server.state import State
from fedcore.store.registry import ClientId
from fedcore.validation import check_integer, check_number

Weights = Literal["uniform", "examples"]

BITS = 62
"""The sum of all clients' integers is below 2^62, so that it cannot overflow."""
FINEST, COARSEST = -GRID[1], -GRID[0]
"""The greatest and the smallest exponent of the grid."""
SPAN = 1 << 15
"""Elements per block; their temporaries stay in a core's cache."""
UNKNOWN = "an update in the sum is malformed; masks hide its sender"


@dataclass(frozen=True)
class Encoding:
    """The form of the integers that clients mask: round(2^exponent w_i h_i), then w_i, then w_i K_i.

    The server sends it to the clients. h_i = x - y_i where models are averaged, else (x - y_i) / (eta K_i); float
    buffers are x - y_i.

    Attributes:
        clients: the greatest number of clients in the sum.
        n, parameters: the elements of the vector, and those of its parameters; the others are float buffers.
        weights: "examples" for w_i = n_i, or "uniform" for w_i = 1.
        eta: the rate of the clients' steps, or None where models are averaged.
        max_norm, max_examples, max_steps: the server's limits, which each client checks for itself. The grid is fine
            enough for sums at these limits.
    """

    clients: int
    n: int
    parameters: int
    weights: Weights
    eta: float | None
    max_norm: float
    max_examples: int
    max_steps: int

    @classmethod
    def of(cls, server: Server, *, clients: int) -> "Encoding":
        """Return the encoding of the server's next round.

        Args:
            server: with ``Compute(accumulator="exact")`` and ``Limits(max_norm=, max_examples=)``.
            clients: the greatest number of clients in the sum.

        Raises:
            RangeError: masked sums do not support the server's method or options, or the limits are too wide for 64
                bits.
        """
        settings, state = server._settings, server._backend
        require_partial_sums(settings)
        if not isinstance(state, State):
            raise RangeError("server: masked sums do not support shards or groups; use a plain server")
        limits, weights = settings.asked, _weights(settings)
        if any(type(rule) is not Mean for rule in settings.rules) or settings.rules.weights is not None:
            raise RangeError("aggregation: rules need each client's update, which masks hide; leave aggregation out")
        if weights == "examples" and state.population.is_sized:
            raise RangeError("clients: masks hide n_k, so known sizes cannot be checked; register ids without sizes")
        if limits.max_norm is None:
            raise RangeError("max_norm: masked sums need a limit, since it sets the grid; pass Limits(max_norm=...)")
        eta = None if settings.averages_models else rate_at(settings.lr, server.round_number)
        if eta is not None and rate_of_steps(settings.lr, server.round_number) is not None:
            raise RangeError("lr: masked sums of mean gradients need a rate that is constant within a round")
        if eta is not None and limits.max_client_lr is not None:
            raise RangeError("max_client_lr: masks hide the rates that clients choose; leave it out")
        layout = settings.layout
        examples = limits.max_examples if weights == "examples" else 1
        numbers = limits.max_norm, examples, limits.max_steps
        return cls(clients, layout.n, layout.n_parameters, weights, eta, *numbers)

    def __post_init__(self) -> None:
        check_integer("clients", self.clients, 2, 2**31)
        check_integer("n", self.n, 1, 2**53)
        check_integer("parameters", self.parameters, 0, self.n)
        check_integer("max_examples", self.max_examples, 1, 2**53)
        check_integer("max_steps", self.max_steps, 1, 2**53)
        check_number("max_norm", self.max_norm, "(0, 1e30]")
        if self.eta is not None:
            check_number("eta", self.eta, "(0, inf)")
        if self.weights not in get_args(Weights) or (self.weights == "uniform" and self.max_examples != 1):
            raise RangeError(f"weights={self.weights!r}: must be 'examples', or 'uniform' with max_examples=1")
        if self.exponent < COARSEST or self.clients * self.max_examples * self.max_steps >= 1 << BITS:
            raise RangeError(
                f"max_examples={self.max_examples}, max_norm={self.max_norm:g}, max_steps={self.max_steps}: too wide "
                f"for the 64-bit sum of {self.clients} clients; set lower limits"
            )

    @property
    def exponent(self) -> int:
        """The grid is 2^-exponent: the finest on which the clients' sum stays below 2^62, and at most 2^-60 fine."""
        greatest = math.frexp(self.clients * self.max_examples * self.max_norm)[1]
        return min(FINEST, BITS - greatest)

    @property
    def words(self) -> int:
        """The number of integers that a client sends."""
        return self.n + 2

    def to_state(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> "Encoding":
        """Return the encoding of a message; raise ArrayError or RangeError if it is malformed."""
        try:
            return cls(**state)
        except TypeError:
            raise ArrayError("encoding: a field is missing or unknown") from None

    def encode(self, x: F32, y: F32, *, steps: int, examples: int = 1) -> U64:
        """Return the client's integers, uint64[words], for ``SecureClient.answer``.

        Args:
            x: the model that the client received, float32[n].
            y: the model after its steps, float32[n].
            steps: K_i.
            examples: n_i; not used by uniform weights.

        Raises:
            ArrayError: x or y is not float32[n].
            RangeError: a number exceeds the server's limits, or is not finite. The client must not send this update.

        Determinism: each element is rounded once, to the nearest even integer.
        Cost: reads 16 n bytes and writes 8 n.
        """
        for name, vector in (("x", x), ("y", y)):
            if not isinstance(vector, np.ndarray) or vector.dtype != np.float32 or vector.shape != (self.n,):
                raise ArrayError(f"{name}: expected float32[{self.n}]; use Layout.flatten")
        steps = check_integer("steps", steps, 1, self.max_steps)
        weight = check_integer("examples", examples, 1, self.max_examples) if self.weights == "examples" else 1
        distance, out, square = 1.0 if self.eta is None else self.eta * steps, np.empty(self.words, np.int64), 0.0
        ends = sorted({*range(0, self.n, SPAN), self.parameters, self.n})
        with np.errstate(over="ignore", invalid="ignore"):
            for start, end in pairwise(ends):
                part = x[start:end].astype(np.float64) - y[start:end]
                if start < self.parameters:
                    part /= distance
                    square += float(part @ part)
                elif not np.abs(part).max() <= self.max_norm:  # a NaN too
                    raise RangeError(f"y: a float buffer changed by more than max_norm={self.max_norm:g}")
                part *= weight * 2.0**self.exponent
                out[start:end] = np.rint(part, out=part)
        if not math.sqrt(square) <= self.max_norm:
            raise RangeError(f"y: the norm of the update is {math.sqrt(square):g}, but max_norm={self.max_norm:g}")
        out[self.n :] = weight, weight * steps
        return out.view(np.uint64)

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
        if Encoding.of(server, clients=self.clients) != self:
            raise RangeError("encoding: it belongs to another round or server; open the sum for the next round")
        k, weight, steps = len(clients), int(total[self.n]), int(total[self.n + 1])
        if not (k <= weight <= k * self.max_examples and weight <= steps <= weight * self.max_steps):
            raise RangeError(f"sum: {weight} examples and {steps} steps x examples of {k} clients; {UNKNOWN}")
        square, unit = 0.0, 2.0**-self.exponent
        for start in range(0, self.parameters, SPAN):
            part = total[start : min(start + SPAN, self.parameters)].astype(np.float64)
            square += float(part @ part)
        norm = math.sqrt(square) * unit / weight
        rounding = math.sqrt(self.n) * unit * k / weight
        if norm > NEAR * self.max_norm + rounding:
            raise RangeError(f"sum: the norm of the mean is {norm:g}, but max_norm={self.max_norm:g}; {UNKNOWN}")
        examples, own_steps = equal_parts(weight, steps, k)
        columns = dict.fromkeys(COLUMNS, np.ones(k)) | {
            "steps": own_steps,
            "examples": examples if self.weights == "examples" else np.zeros(k),
            "eta_steps": own_steps * rate_at(server._settings.lr, server.round_number),
            "weights": examples,
            "squares": np.full(k, min(norm, self.max_norm) ** 2),
            "has_buffers": np.full(k, float(self.n > self.parameters)),
        }
        below, words = self.exponent - COARSEST, total[: self.n]
        high, low = words >> below, (words & ((1 << below) - 1)) << (FINEST - self.exponent)
        made_under = fingerprint(server._settings, server._backend.snapshot)
        return PartialSum(server.round_number, made_under, high, low, tuple(clients), **columns, rejected=rejected)


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
