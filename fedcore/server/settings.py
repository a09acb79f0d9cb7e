"""What stays the same over a server's rounds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedcore.algorithms import Algorithm
from fedcore.algorithms.optimizers import Optimizer
from fedcore.algorithms.rates import Rate
from fedcore.layout import Layout
from fedcore.server.description import describe, revive
from fedcore.server.sums import Precision
from fedcore.server.update import Limits


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

    @property
    def averages_models(self) -> bool:
        """Whether h is x - y and gamma 1, so that the step is the plain average of the clients' models."""
        return self.server_lr is None and self.algorithm.averages_models

    def to_state(self) -> dict[str, Any]:
        """The settings as JSON can hold them; what is the caller's own code is only named."""
        return {
            "algorithm": describe("algorithm", self.algorithm),
            "layout": self.layout.to_state(),
            "lr": describe("lr", self.lr),
            "server_lr": describe("server_lr", self.server_lr),
            "optimizer": describe("optimizer", self.optimizer),
            "fold": self.fold,
            "accumulate": self.accumulate,
            "late_rounds": self.late_rounds,
            "history_rounds": self.history_rounds,
            "diagnostics": self.diagnostics,
            "limits": asdict(self.limits),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], given: Mapping[str, Any]) -> "Settings":
        """The settings that ``to_state`` described.

        Args:
            given: what the caller says again: "algorithm", "lr", "server_lr" and "optimizer", each None or itself.

        Raises:
            CheckpointError: one is needed and missing, or is not what was saved.
        """
        return cls(
            layout=Layout.from_state(state["layout"]),
            fold=state["fold"],
            accumulate=state["accumulate"],
            late_rounds=state["late_rounds"],
            history_rounds=state["history_rounds"],
            # Older folders have it under another name, or not at all.
            diagnostics=state.get("diagnostics", state.get("correction_norms", False)),
            limits=Limits(**state["limits"]),
            **{what: revive(what, state[what], given[what]) for what in given},
        )
