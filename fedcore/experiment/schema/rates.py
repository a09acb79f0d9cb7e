"""The rates of an experiment, and the server's optimiser: one table of the configuration."""

from collections.abc import Mapping
from typing import Any

from pydantic import field_validator, model_validator

from fedcore import optimizers, rates
from fedcore.arguments import due_in, inside, is_real
from fedcore.experiment.schema.section import FromRegistry, Section, problems
from fedcore.registries import Registry

LARGEST_STEP = 100.0
"""What a server lets a client claim as its rate, unless it is told otherwise."""
STEPS = f"(0, {LARGEST_STEP!r}]"


class LearningRate(FromRegistry):
    """A learning rate: a number, or one of ``fedcore.rates`` by name, with its options."""

    @model_validator(mode="before")
    @classmethod
    def _number_is_constant(cls, value: Any) -> Any:
        if is_real(value):
            if not inside(value, STEPS):
                raise problems({"": f"expected {due_in(STEPS)}, got {value!r}"})
            return {"name": "Constant", "options": {"value": value}}
        if not isinstance(value, Mapping | LearningRate):
            raise problems({"": f"expected a number or a table, got {value!r}"})
        return value

    @classmethod
    def registry(cls) -> Registry[Any]:
        """The rates."""
        return rates.REGISTRY

    def make(self) -> Any:
        """The rate itself."""
        return self.maker()(**self.options)

    def _try(self) -> None:
        rate = self.make()
        first = rate(0, 1) if self.per_cohort else rate(0)
        if not inside(first, STEPS):
            raise problems({"": f"expected {due_in(STEPS)} in round 0, got {first!r}"})

    @property
    def per_cohort(self) -> bool:
        """Tell whether it is a rule of the round and of the number of clients heard."""
        return self.maker() is rates.PerCohort


class ServerOptimizer(FromRegistry):
    """One of ``fedcore.optimizers`` by name, with its options."""

    @classmethod
    def registry(cls) -> Registry[Any]:
        """The optimisers."""
        return optimizers.REGISTRY

    def make(self) -> optimizers.Optimizer:
        """The optimiser itself."""
        return optimizers.named(self.name, **self.options)

    def _try(self) -> None:
        self.make()


class Rate(Section):
    """The clients' rate eta_t, and the server's step.

    ``server_lr``: none for plain model averaging (gamma = eta_t K, the mean over the cohort); else gamma itself.
    ``optimizer``: what turns the method's direction into the step's; none steps along it.
    """

    lr: LearningRate
    server_lr: LearningRate | None = None
    optimizer: ServerOptimizer | None = None

    @field_validator("lr")
    @classmethod
    def _of_the_round_alone(cls, lr: LearningRate) -> LearningRate:
        if lr.per_cohort:
            raise problems({"name": f"expected a rate of the round alone, got {lr.name!r}, which is for server_lr"})
        return lr
