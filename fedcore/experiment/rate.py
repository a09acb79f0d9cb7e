"""The rates of an experiment, and the server's optimiser: one table of the configuration."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import field_validator, model_validator

from fedcore.algorithms import optimizers, rates
from fedcore.errors import FedcoreError
from fedcore.experiment.fields import Section, option_problems
from fedcore.experiment.named import Named, known, problems

LARGEST_STEP = 100.0
"""What a server lets a client claim as its rate, unless it is told otherwise."""


class LearningRate(Named):
    """A learning rate: a number, or one of ``fedcore.algorithms.rates`` by name, with its options."""

    @model_validator(mode="before")
    @classmethod
    def _number_is_constant(cls, value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not 0 < value <= LARGEST_STEP:
                raise problems({"": f"expected a number in (0, {LARGEST_STEP:g}], got {value!r}"})
            return {"name": "Constant", "options": {"value": value}}
        if not isinstance(value, Mapping | LearningRate):
            raise problems({"": f"expected a number or a table, got {value!r}"})
        return value

    @field_validator("name")
    @classmethod
    def _exists(cls, name: str) -> str:
        return known("rate", name, rates.REGISTRY)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if wrong := option_problems(rates.REGISTRY[self.name], self.options, beside=("name",)):
            raise problems(wrong)
        try:
            rate = self.make()
        except FedcoreError as error:
            raise problems({"": str(error)}) from None
        first = rate(0, 1) if self.per_cohort else rate(0)
        if not 0 < first <= LARGEST_STEP:
            raise problems({"": f"expected a number in (0, {LARGEST_STEP:g}] in round 0, got {first!r}"})
        return self

    @property
    def per_cohort(self) -> bool:
        """Whether it is a rule of the round and of the number of clients heard."""
        return rates.REGISTRY[self.name] is rates.PerCohort

    def make(self) -> Any:
        """The rate itself."""
        return rates.REGISTRY[self.name](**self.options)


class ServerOptimizer(Named):
    """One of ``fedcore.algorithms.optimizers`` by name, with its options."""

    @field_validator("name")
    @classmethod
    def _exists(cls, name: str) -> str:
        return known("optimizer", name, optimizers.REGISTRY)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if wrong := option_problems(optimizers.REGISTRY[self.name], self.options, beside=("name",)):
            raise problems(wrong)
        try:
            self.make()
        except FedcoreError as error:
            raise problems({"": str(error)}) from None
        return self

    def make(self) -> optimizers.Optimizer:
        """The optimiser itself."""
        return optimizers.named(self.name, **self.options)


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
