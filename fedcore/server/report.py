"""The report of a round: the accepted and rejected clients, and measurements of the step."""

import json
import math
import os
import platform
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging import Logger
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore import kernels
from fedcore.arrays import F32, F64, Floats, core, zeros
from fedcore.errors import CorruptionError, MissingDependencyError
from fedcore.files import replacing
from fedcore.kernels import Linear
from fedcore.model.safetensors import StoredFile
from fedcore.options import KEYS, ROUNDING, RoundPolicy, Settings
from fedcore.profiling import span
from fedcore.runtime import __version__
from fedcore.server.aggregation import Reducer, UpdateBatch, combined_square
from fedcore.server.step import PreparedStep
from fedcore.server.update import digest_of_text
from fedcore.server.validation import CappedClaim
from fedcore.store import ClientStore
from fedcore.store.registry import ClientId
from fedcore.validation import Represented, frozen, short_id, short_repr, shorten

MOST_LISTED, MOST_OF_CLIENT = 1000, 16
"""The number of rejections that a round lists, without the first one of each registered client; and of one client."""
Rejections: TypeAlias = "Rejected | Sequence[tuple[ClientId, str]]"

KINDS_LISTED = 5
"""The number of kinds of rejections, or of clients, in a message; clients can cause any number of them."""


@dataclass(frozen=True, repr=False, eq=False)
class Report(Represented):
    """The outcome of one round. Each object equals only itself, as its columns are arrays.

    Attributes:
        round: its number, counted from 0.
        accepted: the clients whose updates count, in the order of ``add``; with exact sums and robust rules in that
            of the ids, except for robust rules in a buffer.
        rejected: (client, reason) of rejected updates: the first one of each registered client, and up to 1,000 others.
        steps: the sum of the accepted clients' local steps.
        norms: float64[len(accepted)], factor_i |h_i|, the norms of the clients' mean gradients times ``factors``, with
            h_i = x - y_i where models are averaged.
        weights: float64[len(accepted)], w_i, the method's weights, not divided by their sum.
        factors: float64[len(accepted)], the factors by which rules and ``RoundPolicy(discount=)`` scaled the updates; 1
            if unscaled.
        ages: int64[len(accepted)], the rounds between the model from which each client started and this round.
        diversity: sum q_i |h_i|^2 / |sum q_i h_i|^2 with q_i = w_i / W, and h_i = x - y_i where models are averaged:
            the weighted gradient diversity (Haddadpour and Mahdavi 2019, eq. 7). None for an empty cohort or a zero
            mean. Methods that sum h_i - r_i (MIFA, MimiC) do not compute the mean: None unless
            ``Compute(diagnostics=True)``.
        staleness: the mean age in rounds of the accepted clients' rows; None if no accepted client had a row.
        correction_norm: the norm of the method's correction of the cohort's plain mean. It is |v - mean h_i| if the
            server corrects (MIFA, MimiC), and the norm of the cohort's mean offset if the clients do (SCAFFOLD and the
            momentum methods; gradients at x_{t-1} not counted). None for an empty cohort, for methods without a
            correction, and where clients keep the rows. Except for FedAvg-M and FedAvg-M-VR, None unless
            ``Compute(diagnostics=True)``.
        gamma: the length of the server's step along v; 0 if x is unchanged.
        waiting_for: the number of clients without an update for which x waits (MIFA).
        seconds: the server's time, without the clients' time.
        bytes: the size of the clients' updates, and of partial sums.
        changed: the options that ``Server.change`` or ``Server.load`` changed before the round, and as "x" how often
            ``Server.replace_x`` replaced x. Default: none.
        closed: the reason of ``Round.may_close`` when the round was finished; None if it was finished earlier.
        missing: the asked clients without an update, neither accepted nor rejected; see ``RoundPolicy``.
        privacy: with ``PrivateMean``, the private rounds so far and in the budget (``rounds``, ``of``), their ``rate``
            and ``noise``, the ``clip`` of the next round, and a ``warning`` if the noise is reproducible. The report
            then has no ``norms``, ``weights``, ``factors`` and ``diversity``. Default: None.
        groups: with partial updates (``Model.partial``), the report of each group, whose ``accepted`` are the clients
            that sent it and whose ``norms`` are those of its tensors. The report of the round then has the norms of
            whole updates, the greatest ``gamma``, and no ``diversity``, ``staleness`` and ``correction_norm``. It has
            no ``weights`` if they depend on shares or appearances, since those belong to a group.
        audited: with ``Storage(audit=True)``, the digest of the round's document. Publish it: a reader who
            knows it can check the audit log up to this round.
    """

    round: int
    accepted: tuple[ClientId, ...] = ()
    rejected: tuple[tuple[ClientId, str], ...] = ()
    steps: int = 0
    norms: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    weights: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    factors: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    ages: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    diversity: float | None = None
    staleness: float | None = None
    correction_norm: float | None = None
    gamma: float = 0.0
    waiting_for: int = 0
    seconds: float = 0.0
    bytes: int = 0
    changed: Mapping[str, Any] | None = None
    closed: str | None = None
    missing: tuple[ClientId, ...] = ()
    privacy: Mapping[str, Any] | None = None
    groups: Mapping[str, "Report"] | None = None
    audited: str | None = None

    @property
    def replaced(self) -> bool:
        """Whether ``Server.replace_x`` replaced x before the round."""
        return "x" in (self.changed or {})


class Rejected:
    """The rejections of a round: the first one of each registered client, and others up to ``MOST_LISTED`` in all.

    Args:
        warn: called once, for the first one that is not listed. Default: nothing.

    Attributes:
        last: the last client and reason, also if they are not listed.
        listed: the listed clients and reasons.
    """

    def __init__(self, warn: Callable[[], object] = lambda: None) -> None:
        self._warn, self._total = warn, 0
        self.last: tuple[Any, str] = None, ""
        self.listed: list[tuple[Any, str]] = []
        self._counts: dict[Any, int] = {}  # of listed ones, by client

    def __len__(self) -> int:
        """The number of all rejections, with those that are not listed."""
        return self._total

    def __iter__(self) -> Iterator[tuple[Any, str]]:
        return iter(self.listed)

    def since(self, count: int) -> dict[Any, str]:
        """Return the reasons by client of the rejections after the first ``count``, as far as they are listed."""
        new = max(0, len(self.listed) - (self._total - count))
        return {**dict(self.listed[new:]), self.last[0]: self.last[1]}

    def __iadd__(self, rejected: Iterable[tuple[Any, str]]) -> Self:
        for one in rejected:
            self.append(one)
        return self

    def append(self, rejected: tuple[Any, str], *, is_known: bool = True) -> None:
        """List a client and the reason; ``is_known``: whether it is registered."""
        client, reason = self.last = rejected
        if not is_known:
            is_plain = isinstance(client, int | np.integer) and -(2**63) <= client < 2**64
            client = client if is_plain else short_id(client)
        self._total += 1
        count = self._counts.get(client, 0)
        if (count or not is_known) and (count >= MOST_OF_CLIENT or len(self.listed) >= MOST_LISTED):
            warn, self._warn = self._warn, lambda: None
            warn()
        else:
            self._counts[client] = count + 1
            self.listed.append((client, shorten(reason)))


class Attendance:
    """The asked clients of a round, and when its policy lets it close.

    ``accepted`` are the accepted clients so far, ``rejected`` the rejections so far. Several threads may not call it at
    once.
    """

    __slots__ = ("_asked", "_is_final", "_opened", "_reached", "full", "policy")

    def __init__(self, policy: RoundPolicy, asked: Iterable[ClientId] | None = None, *, is_final: bool = False) -> None:
        self.policy, self._opened, self._is_final = policy, monotonic(), is_final
        self._asked = None if asked is None or policy.buffer is not None else dict.fromkeys(asked)
        self._reached: tuple[float, int] | None = None  # when the share was reached, and the rejections before
        self.full = policy.buffer  # K, the number of updates that close an asynchronous round

    def ask(self, clients: Iterable[ClientId]) -> None:
        """Replace the asked clients, unless the caller of ``open_round`` named them."""
        if not self._is_final and self.policy.buffer is None:
            self._asked, self._reached = dict.fromkeys(clients), None

    def note(self, accepted: Collection[ClientId], rejected: Rejections) -> None:
        """Record the time at which ``min_share`` and ``min_clients`` are reached; a rejection may undo it."""
        if self._reached is None or self._reached[1] != len(rejected):
            time = monotonic() if self._reached is None else self._reached[0]
            self._reached = (time, len(rejected)) if self._has_share(accepted) else None

    def reason(self, accepted: Collection[ClientId], rejected: Rejections) -> str | None:
        """Return why the round may close, or None; see ``Round.may_close``."""
        if self.full is not None and len(accepted) >= self.full:
            return "buffer"
        if self._asked is None and self.policy.deadline is None and self.policy.min_share:
            return None  # the usual case, in which a small round must not take longer
        if len(accepted) < self.policy.min_clients:
            return None
        may_be_all = self._asked is not None and len(accepted) + len(rejected) >= len(self._asked)
        if may_be_all and not self.missing(accepted, rejected):
            return "all clients"
        self.note(accepted, rejected)
        return next((reason for reason, due in self._due() if due <= monotonic()), None)

    def wait(self, accepted: Collection[ClientId], rejected: Rejections) -> float | None:
        """Return the seconds until the round may close, or None; see ``Round.wait``."""
        if self.reason(accepted, rejected) is not None:
            return 0.0
        if len(accepted) < self.policy.min_clients:
            return None
        return min((max(0.0, due - monotonic()) for _, due in self._due()), default=None)

    def missing(self, accepted: Iterable[ClientId], rejected: Rejections) -> tuple[ClientId, ...]:
        """Return the asked clients without an update, in the order in which they were asked."""
        if self._asked is None:
            return ()
        refused = (client for client, _ in rejected if isinstance(client, int | str | np.integer))
        missing = self._asked.keys() - {*accepted, *refused}
        return tuple(client for client in self._asked if client in missing) if missing else ()

    def _has_share(self, accepted: Collection[ClientId]) -> bool:
        needed = 0 if self._asked is None else math.ceil(self.policy.min_share * len(self._asked) - ROUNDING)
        if (self._asked is None and self.policy.min_share) or len(accepted) < max(needed, self.policy.min_clients):
            return False
        return not needed or len((self._asked or {}).keys() & accepted) >= needed

    def _due(self) -> Iterator[tuple[str, float]]:
        if self._reached is not None:
            yield "min_share", self._reached[0] + self.policy.grace
        if self.policy.deadline is not None:
            yield "deadline", self._opened + self.policy.deadline


def rejection_summary(rejected: Iterable[tuple[ClientId, str]]) -> str:
    """Return the reasons of ``Report.rejected`` in one line, each kind with its count, the most frequent first.

    Reasons that differ only in numbers or in the sent value are one kind; the line shows the first.

    >>> reasons = ["steps=None: must be an integer", "steps=0: must be an integer", "update: a number is NaN"]
    >>> rejection_summary(enumerate(reasons))
    '2 x steps=None: must be an integer (or the like); 1 x update: a number is NaN'
    """
    kinds: dict[str, list[str]] = {}
    for _, reason in rejected:
        rule = re.sub(r"^([\w.]+)=.*?: ", r"\1: ", reason.rpartition(", got ")[0] or reason)
        kinds.setdefault(re.sub(r"\d[\d.e+-]*", "0", rule), []).append(reason)
    reasons = sorted(kinds.values(), key=len, reverse=True)
    listed = [f"{len(k)} x {k[0]}{' (or the like)' if len(set(k)) > 1 else ''}" for k in reasons[:KINDS_LISTED]]
    others = sum(map(len, reasons[KINDS_LISTED:]))
    return "; ".join([*listed, f"{others} x other reasons"] if others else listed)


def warn_if_capped(round: int, lowered: Sequence[CappedClaim], most_steps: int | None, logger: Logger) -> None:
    """Log a warning if reported steps or examples were capped."""
    if most_steps is not None:
        logger.warning("round %d: gamma counts at most %d steps per client (CapSteps)", round, most_steps)
    if lowered:
        listed = ", ".join(f"{most} of {said} from client {one!r}" for one, said, most in lowered[:KINDS_LISTED])
        more = f", and {len(lowered) - KINDS_LISTED} more" if len(lowered) > KINDS_LISTED else ""
        logger.warning(
            "round %d counted fewer examples than clients reported: %s%s; the cap is n_k, that of CapExamples, or that "
            "of your own rule",
            *(round, listed, more),
        )


def announce(report: Report, callbacks: Iterable[Callable[[Report], object]], logger: Logger) -> None:
    """Warn if a finished round rejected all updates; then call the callbacks, and log their exceptions."""
    if report.rejected and not report.accepted:
        summary = rejection_summary(report.rejected)
        logger.warning("round %d accepted no update and rejected %d: %s", report.round, len(report.rejected), summary)
    for callback in callbacks:
        try:
            callback(report)
        except Exception:
            logger.exception("round %d: a callback failed; the round is kept", report.round)


# The diagnostics of a round: the norm of the correction, and the cohort's mean if the method does not compute it.


Combination: TypeAlias = Sequence[tuple[Floats, float]]
"""A linear combination: vectors and their coefficients."""

AT_ONCE = 8
"""The number of rows that are decoded and summed in one pass."""


class Diagnostics(NamedTuple):
    """The measurements of a step before its commit; see ``Report``."""

    correction_norm: float | None = None
    mean_square: float | None = None
    """|sum_i (w_i / W) h_i|^2, if known."""


class Diagnosis(NamedTuple):
    """Measures a step before its commit, while the store still has the old rows.

    ``batch`` is the cohort. ``offset`` is from_mean c + from_momentum g as sent, float32[n_parameters], or None for
    zero.
    """

    settings: Settings
    store: ClientStore
    prepared: PreparedStep
    batch: UpdateBatch
    offset: F32 | None
    reducer: Reducer

    def measure(self) -> Diagnostics:
        """Return the diagnostics.

        Cost: nothing for methods without a correction; one pass over a vector if all clients share the correction.
            Otherwise the cohort's rows are read and decoded: 12 n S bytes. 30 clients of 44,426 parameters add 1 to 3
            ms to a round of 2 ms.
        """
        if self.prepared.step is None or self.settings.rules.private is not None:
            return Diagnostics()
        with span("diagnose"):
            correction, mean = self._corrections()
            square = self._mean_square()
            if square is None and mean is not None:
                square = self._length(mean) ** 2
            return Diagnostics(None if correction is None else self._length(correction), square)

    def _corrections(self) -> tuple[Combination | None, Combination | None]:
        """Return the correction, and the cohort's mean if it was computed from rows."""
        algorithm, direction = self.settings.algorithm, self.settings.algorithm.direction
        if not len(self.batch) or (direction.from_row and not algorithm.keeps_rows):
            return None, None
        shared: list[tuple[Floats, float]] = [] if self.offset is None else [(self.offset, 1.0)]
        if shared and not direction.from_row:
            return shared, None
        if not algorithm.keeps_rows or not self.settings.diagnostics or not self.prepared.result.W > 0:
            return None, None
        if direction.from_row:
            return [(self._mean_row(), direction.from_row), *shared], None
        mean = self._mean(read_rows=True)
        return (None, None) if mean is None else ([*mean, (self.prepared.after.momentum, -1.0)], mean)

    def _mean_square(self) -> float | None:
        """Return |sum_i (w_i / W) h_i|^2 if the sums determine it, without reading rows.

        Cost: nothing if v is a multiple of that mean, as in most methods; else a pass over A.
        """
        step, W, form = self.prepared.step, self.prepared.result.W, self.settings.algorithm.sums
        assert step is not None
        if not W > 0 or self.settings.algorithm.hides_mean:
            return None
        # Does v equal share (A / W - form.q offset) / form.h, with the offset computed from T and g?
        d, N, times = self.settings.algorithm.direction, self.prepared.cohort.N, step.v.A * W * form.h
        share = times * form.q / form.h
        multiple = Linear(step.v.A, 0.0, -share * d.from_mean / N, -share * d.from_momentum)
        near = (math.isclose(a, b, rel_tol=1e-12) for a, b in zip(step.v, multiple, strict=True))
        is_mean = step.v == multiple or all(near)
        if times and is_mean and self.prepared.result.plain is None:
            return self.prepared.v_square / times**2
        mean = self._mean(read_rows=False)
        return None if mean is None else self._length(mean) ** 2

    def _mean(self, *, read_rows: bool) -> Combination | None:
        """Return sum_i (w_i / W) h_i from A, the offset and, with ``read_rows``, the old rows; None if unknown."""
        form, result, hidden = self.settings.algorithm.sums, self.prepared.result, self.settings.algorithm.hides_mean
        if not form.h or (hidden and not read_rows):
            return None
        A, times = (result.A, result.times) if result.plain is None else (result.plain, 1.0)
        mean: list[tuple[Floats, float]] = [(A, times / (result.W * form.h))]
        if not hidden:
            return [*mean, (self.offset, -form.q / form.h)] if form.q and self.offset is not None else mean
        if form.r:
            mean.append((self._mean_row(), -form.r / form.h))
        return [*mean, *((v, -form.q / form.h * share) for v, share in self._mean_anchor())] if form.q else mean

    def _mean_anchor(self) -> Combination:
        """Return sum_i (w_i / W) v[t_i] over the clients whose row refers to a round, with one vector per round."""
        weights: dict[int, float] = {}
        for round, weight in zip(self.prepared.rounds, self.batch.weights.tolist(), strict=True):
            if round is not None:
                weights[round] = weights.get(round, 0.0) + weight
        history, W = self.prepared.before.history, self.prepared.result.W
        return [(v, weight / W) for round, weight in weights.items() if (v := history.get(round)) is not None]

    def _mean_row(self) -> F64:
        """Return sum_i (w_i / W) r_i, float64[n_parameters]."""
        mean: F64 = zeros(self.settings.layout.n_parameters, np.float64, device=self.settings.device)
        clients = self.batch.clients
        shares = self.batch.weights / self.prepared.result.W
        for start in range(0, len(clients), AT_ONCE):
            rows = [self.store.read(client) for client in clients[start : start + AT_ONCE]]
            k = len(rows)
            kernels.accumulate(mean, [None] * k, rows, -np.ones(k), shares[start : start + k], out=mean)
        return mean

    def _length(self, terms: Combination) -> float:
        return math.sqrt(combined_square(self.reducer, [vector for vector, _ in terms], [c for _, c in terms]))


def staleness(prepared: PreparedStep) -> float | None:
    """Return the mean age in rounds of the accepted clients' rows; None without rows."""
    ages = [prepared.before.round_number - t for t in prepared.rounds if t is not None]
    return sum(ages) / len(ages) if ages else None


def diversity_of(weights: F64, squares: F64, mean_square: float | None) -> float | None:
    """Return the weighted gradient diversity of updates with |h_i|^2 = squares; see ``Report``."""
    if not mean_square:
        return None
    mean: float = core.column_sum(0.0, weights, squares) / core.column_sum(0.0, weights, None)
    return mean / mean_square


def report_of(
    settings: Settings, prepared: PreparedStep, batch: UpdateBatch, found: Diagnostics, **of_round: Any
) -> Report:
    """Return the report of a committed round with the cohort ``batch``; a group has no facts ``of_round``."""
    norms, claims, ledger, before = np.sqrt(batch.squares), batch.claims, prepared.after.ledger, prepared.before
    fields: dict[str, Any] = {
        "round": before.round_number,
        "accepted": tuple(batch.clients),
        "steps": int(core.column_sum(0.0, claims.steps, claims.counts)),
        "norms": norms / batch.eta_steps if settings.averages_models else norms,  # |h_i| as a gradient
        "weights": batch.weights if _has_weights(settings, prepared) else np.zeros(0),
        "factors": batch.factors,
        "ages": before.round_number - batch.starts,
        "staleness": staleness(prepared) if prepared.rounds else None,
        "correction_norm": found.correction_norm,
        "gamma": prepared.gamma,
        "waiting_for": prepared.waiting_for,
        "changed": dict(before.changed) or None,
        "groups": prepared.groups,
        "audited": prepared.after.audited,
        **of_round,
    }
    if (private := settings.rules.private and settings.rules.at(ledger).private) is None:
        fields["diversity"] = diversity_of(batch.weights, batch.squares, found.mean_square)
    else:
        fields |= dict.fromkeys(("norms", "weights", "factors"), np.zeros(0)) | {"privacy": private.shown(ledger)}
    return frozen(Report, fields)


def _has_weights(settings: Settings, prepared: PreparedStep) -> bool:
    """Whether an update has one weight, and not one in each group, by the clients or the rounds of the group."""
    return not prepared.groups or not (settings.algorithm.needs_shares or settings.algorithm.counts_appearances)


# The audit log: a document of each change, with the digest of the document before it and perhaps a signature.


Document = dict[str, Any]

ROUND, UNDO, TOTALS = "a round of a fedcore server", "an undo", "fedcore totals"
"""``what`` of three kinds of documents; that of totals is also the ``what`` of their folder's state."""
SIGNED = b"fedcore audit 1: "
"""The first bytes of every signed message, so that a signature for another purpose is not valid here."""
LONGEST = 1 << 26
"""The most bytes of a document in a file, for some 300,000 updates."""
INTERNAL = {"layout", "limits", "rules", "policy", "next_rates", "nonnegative", "own_weights", "history_rounds"}
"""Keys of saved settings that are not options, or that documents have in the form of a report."""


def round_facts(
    settings: Settings,
    prepared: PreparedStep,
    batch: UpdateBatch,
    rejected: Sequence[tuple[ClientId, str]],
    joined: Sequence[ClientId],
) -> Document:
    """Return the facts of a round for its document, before its commit."""
    columns = {
        "client": batch.clients,
        "digest": batch.digests,
        "weight": batch.weights.tolist(),
        "factor": batch.factors.tolist(),
        "steps": batch.claims.steps.tolist(),
        "start": batch.starts.tolist(),
    }
    if not _has_weights(settings, prepared):
        del columns["weight"]
    if settings.rules.private is not None:
        columns = {name: columns[name] for name in ("client", "start")}
    saved = settings.to_state(prepared.before.round_number)
    options = {KEYS.get(name, name): value for name, value in saved.items() if name not in INTERNAL}
    groups: Document = {
        name: {"gamma": one.gamma, "clients": one.accepted, "weights": one.weights.tolist()}
        for name, one in (prepared.groups or {}).items()
    }
    return {
        "what": ROUND,
        "versions": {"fedcore": __version__, "python": platform.python_version(), "numpy": np.__version__},
        "options": options | settings.shown(("limits", "aggregation", "policy")),
        "changed": dict(prepared.before.changed),
        "gamma": prepared.gamma,
        "joined": list(joined),
        "updates": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
        "rejected": [{"client": client, "reason": reason} for client, reason in rejected],
    } | ({"groups": groups} if groups else {})


def document_of(
    facts: Mapping[str, Any], *, round: int, previous: str | None, x: tuple[str, str], key: bytes | None
) -> str:
    """Return the document of a change as text. ``x`` are the digests before and after, ``key`` signs it."""
    document = {
        "round": round,
        "previous": previous,
        "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "x_before": x[0],
        "x_after": x[1],
        **facts,
    }
    if key is not None:
        private = _keys().Ed25519PrivateKey.from_private_bytes(key)
        document["signer"] = private.public_key().public_bytes_raw().hex()
        document["signature"] = private.sign(SIGNED + _text(document).encode()).hex()
    return _text(document)


def undo_document(undone: Sequence[str], kept: int) -> str:
    """Return the document of an undo of the changes whose documents are ``undone``, after the first ``kept``.

    It depends on nothing else, so the undo's own transaction determines it; the next change stores it. It has no
    signature: that of the next document covers it.
    """
    first, last = _parsed(undone[0]), _parsed(undone[-1])
    facts = {"what": UNDO, "round": first["round"], "kept": kept, "previous": digest_of_text(undone[-1])}
    return _text(facts | {"x_before": last["x_after"], "x_after": first["x_before"]})


@contextmanager
def audit_errors(where: object) -> Iterator[None]:
    """Let the errors of an audit log name its store."""
    try:
        yield
    except CorruptionError as error:
        raise CorruptionError(f"{where}: {error}; load a backup") from error


def log_of(documents: Sequence[tuple[int, str]], count: int, last: str | None) -> list[str]:
    """Return the documents of a folder, with that of an undo which no change has followed yet.

    Args:
        documents: the stored documents with their numbers. Those after the first ``count`` were undone.
        count: the number of documents in the state of the server.
        last: the digest of the last of these.

    Raises:
        CorruptionError: a document is missing, or the last one was changed.
    """
    texts = [text for _, text in documents]
    if len(texts) < count or (digest_of_text(texts[count - 1]) if count else None) != last:
        raise CorruptionError("audit: a document was changed, or is missing")
    return [*texts, undo_document(texts[count:], count)] if len(texts) > count else texts


def checked(texts: Iterable[str], *, x: str | None = None, signer: str | None = None) -> Iterator[tuple[str, Document]]:
    """Yield each document with its digest, after a check of its place in the chain and its signature.

    Args:
        texts: all documents, oldest first.
        x: the digest of the model after the last one. Default: unknown.
        signer: the public key that signs each document. Default: documents may have no signature; but none without
            follows one with a signature, and all signatures are valid and of one key.

    Raises:
        CorruptionError: a document was changed, is missing, or is not signed.
    """
    previous, starts, after, required, is_undo = None, list[str](), None, signer, False
    for number, text in enumerate(texts):
        document = _parsed(text)

        def require(valid: bool, problem: str, number: int = number) -> None:
            if not valid:
                raise CorruptionError(f"audit: document {number}: {problem}")

        require(document["previous"] == previous, "the document before it was changed, or is missing")
        before, is_undo = document["x_before"], document["what"] == UNDO
        require(after in (None, before), "x changed after the document before it, and no document says how")
        previous, after = digest_of_text(text), document["x_after"]
        if is_undo:
            kept: Any = document.get("kept")
            require(type(kept) is int and 0 <= kept < number, f"kept={short_repr(kept)}: not a document before it")
            require(after == starts[kept], "x is not that before the changes that it undoes")
        starts.append(before)
        by = document.get("signer")
        require(by == _signer(document), "the signature is not valid")
        if not is_undo:
            require(signer in (None, by), "it is not signed by this signer" if by else "it has no signature")
            signer = by
        yield previous, document
    if x is not None and after not in (None, x):
        raise CorruptionError("audit: x changed after the last document, and no document says how")
    if required is not None and is_undo:
        raise CorruptionError(
            "audit: the last document is that of an undo, which has no signature until the server writes the next one"
        )


def write_lines(path: Path, documents: Iterable[Document]) -> None:
    """Replace a file by documents as JSON lines, each with the bytes of its digest."""
    with replacing(path) as file:
        file.writelines(f"{json.dumps(document)}\n" for document in documents)


def read_lines(path: str) -> Iterator[str]:
    """Yield the documents of a file of JSON lines; raise StoreError or CorruptionError if it is none."""
    with os.fdopen(StoredFile.open(path)[1], "rb") as file:
        while line := file.readline(LONGEST):
            try:
                yield line.decode("ascii").removesuffix("\n")
            except UnicodeDecodeError:
                raise CorruptionError(f"{path}: expected JSON lines in ASCII") from None


def signer_of(text: str) -> str | None:
    """Return the public key that signs a document; None without one."""
    signer = _parsed(text).get("signer")
    return signer if isinstance(signer, str) else None


def public_key(key: bytes) -> str:
    """Return the public key, in hexadecimal digits, of a private key, 32 bytes."""
    public: bytes = _keys().Ed25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw()
    return public.hex()


def _signer(document: Document) -> str | None:
    """Return the signer of a document with a valid signature; None without one."""
    rest = dict(document)
    try:
        signature = bytes.fromhex(rest.pop("signature"))
        public = _keys().Ed25519PublicKey.from_public_bytes(bytes.fromhex(rest["signer"]))
        public.verify(signature, SIGNED + json.dumps(rest).encode())
    except MissingDependencyError:
        raise
    except Exception:  # InvalidSignature, and what wrong types and lengths raise
        return None
    return str(rest["signer"])


def _keys() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingDependencyError.of("audit_key", f"cryptography ({error})", extra="secure") from error
    return ed25519


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, default=lambda id: id.__index__())  # of NumPy


def _parsed(text: str) -> Document:
    """Return a document; raise CorruptionError for a text that is none."""
    document: Document = {}
    try:
        document = json.loads(text)
        valid = json.dumps(document) == text and sorted(document) == [*document]  # so no name is there twice
        digests = [document["x_before"], document["x_after"], document["previous"] or "0" * 64]
        signature = document.get("signature", "0" * 128)
        digests += [document.get("signer", "0" * 64), signature[:64], signature[64:]]
        valid = valid and all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
        valid = valid and isinstance(document["what"], str) and type(document["round"]) is int
    except (ValueError, TypeError, LookupError, RecursionError, MemoryError):
        valid = False
    if not valid:
        raise CorruptionError(f"audit: {short_repr(text[:100])} is not a document of an audit log")
    return document
