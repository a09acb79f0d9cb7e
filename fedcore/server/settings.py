"""The settings of a server, which stay the same over its rounds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, get_args

from fedcore import devices
from fedcore.aggregation.sum import Precision
from fedcore.algorithms import Algorithm, check_table
from fedcore.algorithms.descriptions import check_rate, describe, next_rate, revive
from fedcore.arguments import whole
from fedcore.errors import RangeError, UnknownNameError
from fedcore.layout import Layout
from fedcore.optimizers import Optimizer
from fedcore.rates import Rate, as_rate
from fedcore.server.limits import Limits

FOLD, FOLD_BYTES = 8, 1 << 20
"""Updates that are folded in one pass: so many, or as many as weigh so much."""


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
        if server_lr is not None and not algorithm.takes_server_rate:
            raise RangeError(f"server_lr: expected None, since {algorithm} has no server rate, got one: leave it out")
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
        if limits.norm is not None and algorithm.second_vector is not None and settings.averages_models:
            raise RangeError(
                "max_norm: expected None, since models are averaged and second vectors are none, got "
                f"{limits.norm:g}: give a server_lr, or max_norm_ratio, which measures each by its own kind"
            )
        return settings

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
            "limits": asdict(self.limits),
            "nonnegative": list(self.nonnegative),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], given: Mapping[str, Any], device: str = "cpu") -> "Settings":
        """The settings that ``to_state`` described.

        Args:
            given: what the caller says again: "algorithm", "lr", "server_lr" and "optimizer", each None or itself.

            device: where the server goes on, wherever it was.

        Raises:
            CheckpointError: one is needed and missing, or is not what was saved.
            AlgorithmError: the table of a method that is given contradicts itself.
        """
        own = {what: revive(what, state[what], given[what]) for what in given}
        check_table(own["algorithm"])
        _check_counts(state["fold"], state["late_rounds"], state["history_rounds"])
        _check_precision(state["accumulate"], own["algorithm"], device)
        next_rates = state.get("next_rates", {})
        for what in ("lr", "server_lr"):
            check_rate(what, own[what], next_rates.get(what), next_rates.get("round", 0))
        return cls(
            layout=Layout.from_state(state["layout"]),
            fold=state["fold"],
            accumulate=state["accumulate"],
            late_rounds=state["late_rounds"],
            history_rounds=state["history_rounds"],
            # Older folders have it under another name, or not at all.
            diagnostics=state.get("diagnostics", state.get("correction_norms", False)),
            # Every folder has these; the others came later.
            limits=Limits(**{name: state["limits"][name] for name in ("steps", "examples", "lr")} | state["limits"]),
            nonnegative=tuple(state.get("nonnegative", ())),
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
