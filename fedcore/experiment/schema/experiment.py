"""The schema of an experiment: every choice that its figures depend on, checked when it is read."""

import json
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import PurePosixPath
from typing import Any, Literal, Self

import numpy as np
from pydantic import (
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fedcore import algorithms, data, participation
from fedcore.algorithms import Algorithm, check_table
from fedcore.data import partitions
from fedcore.errors import FedcoreError, RangeError, ShapeError, UnknownNameError
from fedcore.experiment.schema.changes import Change
from fedcore.experiment.schema.fields import Count, Device, Line, Seed, Threads, Together
from fedcore.experiment.schema.network import NetworkOfNodes
from fedcore.experiment.schema.objective import Objective
from fedcore.experiment.schema.pictures import Pictures
from fedcore.experiment.schema.rates import LARGEST_STEP, Rate
from fedcore.experiment.schema.section import FromRegistry, Section, option_problems, problems, short
from fedcore.registries import Registry
from fedcore.representation import html_table, shown

NO_LABELS = np.empty(0, np.int64)


class Method(FromRegistry):
    """One entry of the comparison: an algorithm, its options, and the name it has in tables and curves.

    Its ``objective``, if it has one, takes the place of the experiment's. With ``warm_start`` its rows and momentum
    start from the clients' gradients at the first model (``Server.warm_start``) instead of zero: means over so many
    minibatches (the papers' B), or, if it is true, over as many as a round has local steps.
    """

    label: Line = ""
    objective: Objective | None = None
    warm_start: bool | Count = False

    @classmethod
    def registry(cls) -> Registry[Any]:
        """The algorithms."""
        return algorithms.REGISTRY

    def make(self) -> Algorithm:
        """The algorithm itself."""
        made: Algorithm = self.maker()(**self.options)
        return made

    def _try(self) -> None:
        from fedcore.engines import check_method  # here, because it imports torch, and not every reader has it

        made = self.make()
        check_table(made)
        check_method(made)
        if self.warm_start and not made.takes_warm_start:
            raise RangeError(
                f"warm_start: expected false, since {self.name} keeps nothing that gradients could start, got "
                f"{self.warm_start}"
            )

    @model_validator(mode="after")
    def _label(self) -> Self:
        if not self.label:
            options = [f"{key}={value}" for key, value in self.options.items()]
            if self.warm_start:
                options.append("warm start" if self.warm_start is True else f"warm start, B={self.warm_start}")
            name = self.name.rpartition(":")[2]  # one's own is called by its class, wherever it stands
            object.__setattr__(self, "label", f"{name} ({', '.join(options)})" if options else name)
        return self


class Data(FromRegistry):
    """The data set, by name, and its options."""

    FILLED_IN = data.FILLED_IN

    @classmethod
    def registry(cls) -> Registry[Any]:
        """The data sets."""
        return data.REGISTRY

    @property
    def source(self) -> data.Source:
        """The data set's row."""
        return data.REGISTRY.find(self.name)

    def maker(self) -> Callable[..., Any]:
        """The function that loads it."""
        return self.source.load

    def _try(self) -> None:
        if self.source.generated:  # then it costs nothing to see whether it can be
            data.load(self.name, clients=1, seed=0, **self.options)


class Partition(FromRegistry):
    """The partition of the examples: the number of clients, how the examples are dealt to them, and its options."""

    FILLED_IN = partitions.FILLED_IN

    clients: Count

    @classmethod
    def registry(cls) -> Registry[Any]:
        """The ways to deal."""
        return partitions.REGISTRY

    def _try(self) -> None:
        if self.name == "natural":
            return
        try:
            self.maker()(NO_LABELS, self.clients, seed=0, **self.options)
        except FedcoreError as error:
            # The numbers are checked first; that there are no labels is not the file's mistake.
            if not str(error).startswith("labels:"):
                raise


class Model(FromRegistry):
    """The network, by name, and its options."""

    @classmethod
    def registry(cls) -> Registry[Any]:
        """The networks."""
        from fedcore.local import nets  # here, because it imports torch, and not every reader of this file has it

        return nets.REGISTRY


class Local(Section):
    """A client's work: minibatch SGD over ``epochs`` passes, or ``steps`` steps; see ``local.LocalOptions``."""

    batch: Count
    epochs: Count | None = None
    steps: Count | None = None
    weight_decay: float = Field(default=0.0, ge=0, le=LARGEST_STEP)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    clip: float | None = Field(default=None, gt=0, le=LARGEST_STEP)

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.epochs is None) == (self.steps is None):
            came = "neither" if self.epochs is None else "both"
            raise problems({"": f"expected exactly one of 'epochs' and 'steps', got {came}"})
        return self


class Participation(FromRegistry):
    """The participation: a pattern and its options; ``first_round = "all"`` overrules it once.

    ``among`` names the pattern that it chooses among, as a table of the same kind.
    """

    FILLED_IN = ("clients", "seed", "first_round")

    first_round: Literal["all"] | None = None

    @classmethod
    def registry(cls) -> Registry[Any]:
        """The patterns."""
        return participation.REGISTRY

    def _problems(self) -> Mapping[str, str]:
        return pattern_problems(self.name, self.options, other_keys=("name", "first_round", "among"))


class Evaluate(Section):
    """Accuracy and loss on the test set are taken every ``every`` rounds, and after the last one.

    With ``keep`` the model is written every so many rounds, and after the last, into the run's ``models``.
    """

    every: Count = 1
    keep: Count | None = None

    def keeps(self, round: int, rounds: int) -> bool:
        """Tell whether the model of a round, of so many, is written."""
        return self.keep is not None and ((round + 1) % self.keep == 0 or round + 1 == rounds)


class Experiment(Section):
    """A comparison of algorithms on one problem, with the same clients active in the same rounds.

    ``grid`` is what a sweep tries (``fedcore.experiment.presets.grid``); a run has the values of the other keys.
    ``threads`` are those of each process, for fedcore's kernels and for clients that are trained together. ``together``
    says whether they are, where the model can be (``engines.InProcess``), or that torch batches them ("vmap"); without
    it the perceptrons are, and for other networks a run measures what is faster and writes it into its configuration.
    ``device`` is where clients are trained and models judged, the CPU or a GPU: participants, examples and minibatches
    are the same on each, and figures differ in rounding between the two. ``server_device`` is where the server's
    vectors lie, in host memory or a GPU's: all figures are the same there.
    With ``network`` there is no server: the clients are nodes that mix their models with their neighbours'.
    ``changes`` is what it has otherwise than the preset whose title it bears (``load_preset`` fills it in).
    """

    name: Line = ""
    title: Line
    description: str
    source: str
    rounds: Count
    seeds: tuple[Seed, ...] = Field(strict=False)
    algorithms: tuple[Method, ...] = Field(strict=False)
    threads: Threads = 1
    together: Together | None = None
    device: Device | None = None
    server_device: Device | None = None
    data: Data
    partition: Partition
    model: Model
    local: Local
    rate: Rate
    participation: Participation
    objective: Objective | None = None
    network: NetworkOfNodes | None = None
    evaluate: Evaluate = Evaluate()
    pictures: Pictures = Pictures()
    grid: Mapping[str, list[Any]] = Field(default_factory=dict)
    changes: tuple[Change, ...] = Field(default=(), strict=False)

    def __repr__(self) -> str:
        methods = ", ".join(method.label for method in self.algorithms)
        return f"Experiment({self.name!r}: {methods}; {self.rounds} rounds, {len(self.seeds)} seeds)"

    def _repr_html_(self) -> str:
        """A table for notebooks: a row for each key, the methods by their labels."""
        told = {key: value for key, value in self.tables().items() if value not in ({}, [], "")}
        told["algorithms"] = [method.label for method in self.algorithms]
        return html_table(f"Experiment {self.name}", ((key, shown(value)) for key, value in told.items()))

    def tables(self) -> dict[str, Any]:
        """The experiment as ``config.json`` has it."""
        tables: dict[str, Any] = json.loads(self.model_dump_json(exclude_none=True))
        return tables

    @field_validator("name")
    @classmethod
    def _name_stays_inside(cls, name: str) -> str:
        """A run's folder has this name, within the folder that was given."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name or (name and not path.parts):
            raise problems({"": f"expected a name, or a path that stays below the folder of the run, got {name!r}"})
        return name

    @field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds) or not seeds:
            raise problems({"": f"expected at least one seed, each once, got {list(seeds)}"})
        return seeds

    @field_validator("algorithms")
    @classmethod
    def _labels_differ(cls, methods: tuple[Method, ...]) -> tuple[Method, ...]:
        labels = [method.label for method in methods]
        if len(set(labels)) < len(labels) or not labels:
            raise problems({"": f"expected at least one, each label once, got {labels} (label = '...' sets it)"})
        return methods

    @field_validator("local")
    @classmethod
    def _steps_are_plain(cls, local: Local, info: ValidationInfo) -> Local:
        if local.momentum or local.clip is not None:
            for method in info.data.get("algorithms", ()):
                if method.make().needs_plain_steps:
                    raise problems(
                        {
                            "momentum"
                            if local.momentum
                            else "clip": f"expected none beside {method.label}: its controls "
                            'follow from y only where the steps are plain; control = "sent" lets clients send them'
                        }
                    )
        return local

    @field_validator("partition")
    @classmethod
    def _data_says_who_holds_what(cls, partition: Partition, info: ValidationInfo) -> Partition:
        """The data of one's own is asked when it is loaded."""
        named = info.data.get("data")
        if partition.name == "natural" and named and named.name in data.REGISTRY.own and not named.source.generated:
            own = data.REGISTRY.own
            generated = ", ".join(name for name, one in data.REGISTRY.items() if one.generated and name in own)
            raise problems(
                {
                    "name": f"expected data with a client for each example ({generated}, or your own with clients), "
                    f"got {named.name!r}"
                }
            )
        return partition

    @field_validator("model")
    @classmethod
    def _model_fits(cls, model: Model, info: ValidationInfo) -> Model:
        if "data" not in info.data:
            return model
        name, source = info.data["data"].name, info.data["data"].source
        try:
            came = _scores(model.model_dump_json(), source.shape)
        except ShapeError as error:
            raise problems({"": f"{error}, the examples of {name!r}"}) from None
        except FedcoreError as error:
            raise problems({"": str(error)}) from None
        if came != source.classes:
            raise problems({"": f"expected {source.classes} scores, one for each class of {name!r}, got {came}"})
        return model

    @field_validator("participation")
    @classmethod
    def _pattern_fits(cls, pattern: Participation, info: ValidationInfo) -> Participation:
        if "partition" in info.data:  # else it has problems of its own, which are reported
            try:
                participation.named(pattern.name, info.data["partition"].clients, **pattern.options)
            except FedcoreError as error:
                raise problems({"": str(error)}) from None
        return pattern

    @field_validator("evaluate")
    @classmethod
    def _there_is_a_model(cls, evaluate: Evaluate, info: ValidationInfo) -> Evaluate:
        if evaluate.keep is not None and info.data.get("network") is not None:
            raise problems({"keep": f"expected none, since nodes have a model each, got {evaluate.keep}: leave it out"})
        return evaluate

    @field_validator("network")
    @classmethod
    def _network_fits(cls, network: NetworkOfNodes | None, info: ValidationInfo) -> NetworkOfNodes | None:
        if network is None or not {"algorithms", "partition", "rate"} <= info.data.keys():
            return network
        rate: Rate = info.data["rate"]
        serving = [rate.server_lr and "rate.server_lr", rate.optimizer and "rate.optimizer"]
        serving += [info.data.get("objective") and "objective"]
        for method in info.data["algorithms"]:
            if not isinstance(method.make(), algorithms.LocalDescent):
                raise problems(
                    {"": f"expected LocalDescent as the method of nodes without a server, got {method.label}"}
                )
            serving += [method.objective and f"the objective of {method.label}"]
        if there := [what for what in serving if what]:
            raise problems({"": f"expected no {there[0]}, which is a server's, got one: leave it out"})
        if problem := network.problem(info.data["partition"].clients):
            raise problems({"": problem})
        return network


@cache
def _scores(model: str, shape: tuple[int, ...]) -> int:
    """The scores that a model, as JSON, gives for an example: asked of every preset, and ResNet-18 is slow to make."""
    from fedcore.local import nets

    options = json.loads(model)
    return nets.scores(options.pop("name"), shape, **options)


def pattern_problems(name: str, options: Mapping[str, Any], *, other_keys: Collection[str]) -> dict[str, str]:
    """The faults in a pattern's options and in the pattern that it chooses among, by dotted key."""
    own = {key: value for key, value in options.items() if key != "among"}
    given = (*Participation.FILLED_IN, "among")
    wrong = option_problems(participation.REGISTRY.find(name), own, filled_in=given, other_keys=other_keys)
    if "among" not in options:
        return wrong
    inner = options["among"]
    if isinstance(inner, str):
        inner = {"name": inner}
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        return wrong | {"among": f"expected a pattern's name, or a table with its name and options, got {inner!r}"}
    try:
        participation.REGISTRY.find(inner["name"])
    except UnknownNameError as error:
        return wrong | {"among.name": short(participation.REGISTRY, error)}
    rest = {key: value for key, value in inner.items() if key != "name"}
    found = pattern_problems(inner["name"], rest, other_keys=("name", "among"))
    return wrong | {f"among.{key}": problem for key, problem in found.items()}
