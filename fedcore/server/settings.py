"""The settings of a server, which stay the same over its rounds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np

from fedcore import devices
from fedcore.aggregation.sum import Precision
from fedcore.algorithms import Algorithm, check_table
from fedcore.algorithms.algorithm import NOTHING, Direction, H
from fedcore.algorithms.descriptions import check_rate, describe, next_rate, revive
from fedcore.algorithms.fedavg import WeightedMean
from fedcore.arguments import whole
from fedcore.errors import CheckpointError, RangeError, UnknownNameError
from fedcore.layout import Layout
from fedcore.optimizers import Optimizer
from fedcore.rates import Constant, Rate, as_rate
from fedcore.server.limits import LIMITS, LimitOptions, Limits

FOLD, FOLD_BYTES = 8, 1 << 20
"""Updates that are folded in one pass: so many, or as many as weigh so much."""
LARGEST = float(np.finfo(np.float32).max)
RATES = ("lr", "server_lr")


class Changes(LimitOptions, total=False):
    """The arguments of ``Server`` that ``Server.change`` takes."""

    lr: float | Rate
    server_lr: float | Rate | None


@dataclass(frozen=True)
class Settings:
    """``Server``'s arguments, checked."""

    algorithm: Algorithm
    layout: Layout
    lr: Rate
    server_lr: Rate | None
    optimizer: Optimizer | None
    fold: int
    accumulate: Precision
    late_rounds: int
    history_rounds: int
    diagnostics: bool
    limits: Limits
    device: str
    nonnegative: tuple[str, ...] = ()
    """The float buffers that a reply may not make negative."""
    audit: bool = False
    """Whether each round leaves a document."""
    own_weights: bool = False
    """Whether ``Server(weights=)`` weighs the clients."""

    @cached_property
    def asked(self) -> Limits:
        """The limits, but that a client may claim no more steps than the method has it do."""
        most = self.algorithm.most_steps
        return self.limits if most is None else replace(self.limits, steps=min(most, self.limits.steps))

    @cached_property
    def counts_steps(self) -> bool:
        """Tell whether it matters how many steps a client says that it did."""
        return not self.averages_models or self.algorithm.needs_shares

    @cached_property
    def takes_squares(self) -> bool:
        """Tell whether a step is made of the updates' squares: an optimiser's, or one whose length the method says."""
        return self.optimizer is not None or self.algorithm.says_gamma

    @cached_property
    def is_exact(self) -> bool:
        """Tell whether sums are exact, and so is the running total."""
        return self.accumulate == "exact"

    @cached_property
    def steps_by_mean(self) -> bool:
        """Tell whether a round steps along the weighted mean of h alone and changes nothing but x: FedAvg's default.

        For a round that ``may_be_whole``. No update then has buffers, counters, a row or a second vector.
        """
        algorithm, layout, kind = self.algorithm, self.layout, type(self.algorithm)
        members = ("step", "weigh", "weighs_claims", "moves", "sums", "hides_mean")  # a user's method may have its own
        return (
            issubclass(kind, WeightedMean)
            and all(getattr(kind, name) is getattr(WeightedMean, name) for name in members)
            and (algorithm.row, algorithm.adds) == (NOTHING, H)
            and algorithm.direction == replace(Direction(), mu=algorithm.direction.mu)
            and not (algorithm.keeps_total or algorithm.sums_changes or algorithm.needs_shares)
            and not (layout.narrow or layout.n > layout.n_parameters)
            and self.optimizer is None
            and not self.late_rounds
            and (self.averages_models or self.server_lr is not None)
        )

    @cached_property
    def averages_models(self) -> bool:
        """Tell whether h is x - y and gamma 1, so that the step is the plain average of the clients' models."""
        return self.server_lr is None and self.algorithm.averages

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        layout: Layout,
        *,
        lr: float | Rate,
        server_lr: float | Rate | None,
        optimizer: Optimizer | None,
        late_rounds: int,
        history_rounds: int,
        fold: int | None,
        accumulate: Precision,
        diagnostics: bool,
        limits: Limits,
        device: str = "cpu",
    ) -> "Settings":
        """The settings of a new server; the arguments are ``Server``'s.

        Raises:
            UnknownNameError, RangeError: an argument is not what is said there.
            AlgorithmError: the method's table contradicts itself.
        """
        check_table(algorithm)
        _check_counts(1 if fold is None else fold, late_rounds, history_rounds)
        _check_precision(accumulate, algorithm, device)
        settings = cls(
            algorithm=algorithm,
            layout=layout,
            lr=as_rate(lr),
            server_lr=None if server_lr is None else as_rate(server_lr),
            optimizer=optimizer,
            late_rounds=int(late_rounds),
            history_rounds=int(history_rounds),
            fold=max(FOLD, FOLD_BYTES // (4 * layout.n)) if fold is None else int(fold),
            accumulate=accumulate,
            diagnostics=bool(diagnostics),
            limits=limits,
            device=device,
        )
        settings._require_fitting()
        return settings

    def changed(self, options: Mapping[str, Any]) -> "Settings":
        """The settings with other rates and limits: see ``Server.change``.

        Raises:
            UnknownNameError, RangeError: as ``Server.change``.
        """
        rates: dict[str, Any] = {name: options[name] for name in RATES if name in options}
        limits = {name: value for name, value in options.items() if name not in rates}
        for name in limits:
            if name not in LIMITS:
                raise UnknownNameError.of("option", name, (*RATES, *LIMITS))
        for name, rate in rates.items():
            rates[name] = None if rate is None and name == "server_lr" else as_rate(rate)
        changed = replace(self, limits=self.limits.changed(limits), **rates)
        if changed.averages_models != self.averages_models:
            due = "None, since this server averages models" if self.averages_models else "a rate, since it has one"
            got = changed.shown(["server_lr"])["server_lr"]
            raise RangeError(f"server_lr: expected {due}, got {got!r}: make a new server from its tensors()")
        changed._require_fitting()
        return changed

    def shown(self, names: Iterable[str]) -> dict[str, Any]:
        """Some rates and limits as a report shows them, and as JSON holds them: other rates by their repr."""
        values = {
            name: getattr(self, name) if name in RATES else getattr(self.limits, name.removeprefix("max_"))
            for name in names
        }
        values = {name: value.value if isinstance(value, Constant) else value for name, value in values.items()}
        return {name: repr(value)[:200] if callable(value) else value for name, value in values.items()}

    def _require_fitting(self) -> None:
        """Refuse rates and limits that do not fit the method, or float32.

        Raises:
            RangeError: they do not.
        """
        if self.server_lr is not None and not self.algorithm.takes_server_rate:
            raise RangeError(
                f"server_lr: expected None, since {self.algorithm} has no server rate, got one: leave it out"
            )
        if isinstance(self.lr, Constant) and self.lr.value > LARGEST:
            raise RangeError(f"lr: expected a rate that float32 holds, in (0, {LARGEST:.3g}], got {self.lr.value!r}")
        if self.limits.norm is not None and self.algorithm.second_vector is not None and self.averages_models:
            raise RangeError(
                "max_norm: expected None, since models are averaged and second vectors are none, got "
                f"{self.limits.norm:g}: give a server_lr, or max_norm_ratio, which measures each by its own kind"
            )

    def to_state(self, round: int = 0) -> dict[str, Any]:
        """The settings as JSON can hold them; what is the caller's own code is only named, and told by its options.

        Args:
            round: the one to come.
        """
        rates = {"lr": self.lr, "server_lr": self.server_lr}
        return {
            "algorithm": describe("algorithm", self.algorithm),
            "layout": self.layout.to_state(),
            "lr": describe("lr", self.lr),
            "server_lr": describe("server_lr", self.server_lr),
            "optimizer": describe("optimizer", self.optimizer),
            "next_rates": {"round": round} | {what: next_rate(what, rate, round) for what, rate in rates.items()},
            "fold": self.fold,
            "accumulate": self.accumulate,
            "late_rounds": self.late_rounds,
            "history_rounds": self.history_rounds,
            "diagnostics": self.diagnostics,
            "limits": self.limits.to_state(),
            "nonnegative": list(self.nonnegative),
            "own_weights": self.own_weights,
            "audit": self.audit,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], given: Mapping[str, Any], device: str = "cpu") -> "Settings":
        """The settings that ``to_state`` described.

        Args:
            given: what the caller says again: "algorithm", "lr", "server_lr" and "optimizer", each None or itself. A
                rate counts only where the saved one is the caller's own code: ``changes_of`` finds other ones.
            device: where the server goes on, wherever it was.

        Raises:
            CheckpointError: one is needed and missing, or is not what was saved.
            AlgorithmError: the table of a method that is given contradicts itself.
        """
        own: dict[str, Any] = {
            what: _saved_rate(what, state, given[what]) if what in RATES else revive(what, state[what], given[what])
            for what in given
        }
        check_table(own["algorithm"])
        _check_counts(state["fold"], state["late_rounds"], state["history_rounds"])
        _check_precision(state["accumulate"], own["algorithm"], device)
        return cls(
            layout=Layout.from_state(state["layout"]),
            fold=state["fold"],
            accumulate=state["accumulate"],
            late_rounds=state["late_rounds"],
            history_rounds=state["history_rounds"],
            # Older folders have it under another name, or not at all.
            diagnostics=state.get("diagnostics", state.get("correction_norms", False)),
            limits=Limits.saved(state["limits"]),
            nonnegative=tuple(state.get("nonnegative", ())),
            own_weights=state.get("own_weights", False) is True,
            audit=state.get("audit", False) is True,
            device=device,
            **own,
        )


def said_again(
    algorithm: Algorithm | None, lr: float | Rate | None, server_lr: float | Rate | None, optimizer: Optimizer | None
) -> dict[str, Any]:
    """The arguments that the caller of ``Server.load`` says again, checked before the folder is looked at.

    Raises:
        AlgorithmError, UnknownNameError, RangeError: it is not what ``Server`` takes.
    """
    if algorithm is not None:
        check_table(algorithm)
    return {
        "algorithm": algorithm,
        "lr": None if lr is None else as_rate(lr),
        "server_lr": None if server_lr is None else as_rate(server_lr),
        "optimizer": optimizer,
    }


def _saved_rate(what: str, state: Mapping[str, Any], given: Rate | None) -> Rate | None:
    """The rate that was saved, or the one that is given where nobody can make the saved one again."""
    try:
        rate: Rate | None = revive(what, state[what], None)
    except CheckpointError:
        if given is None:
            raise
        return given
    if given is None:
        next_rates = state.get("next_rates", {})
        check_rate(what, rate, next_rates.get(what), next_rates.get("round", 0))
    return rate


def _check_counts(fold: object, late_rounds: object, history_rounds: object) -> None:
    for name, value, low, bits in (
        ("fold", fold, 1, 53),
        ("late_rounds", late_rounds, 0, 31),
        ("history_rounds", history_rounds, 1, 31),
    ):
        whole(name, value, low, 2**bits)


def _check_precision(accumulate: str, algorithm: Algorithm, device: str) -> None:
    if accumulate not in get_args(Precision):
        raise UnknownNameError.of("accumulate", accumulate, get_args(Precision))
    if accumulate == "exact" and device != devices.CPU:
        raise RangeError(
            f'device: expected "cpu", since exact sums are folded on the CPU alone (CUDA later), got {device!r}: leave '
            'device or accumulate="exact" out'
        )
    if accumulate == "exact" and algorithm.keeps_total and not algorithm.total_is_whole:
        raise RangeError(
            f'accumulate: expected "float32" or "float64", since the total of {algorithm} is no sum with whole '
            'coefficients, got "exact"'
        )
