"""The engine that ``fedcore run`` and ``sweep`` are asked for: who does the clients' work, or runs the trials."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from fedcore.arguments import absolute
from fedcore.errors import ConfigError
from fedcore.ray_session import Session
from fedcore.registries import ADDED

if TYPE_CHECKING:  # they import torch: where the trials' own processes work, this one does not wait for it
    from fedcore.engines import Engine
    from fedcore.experiment.ray_trials import RayTrials

WORKERS = 2
"""Workers on Ray, unless it is said how many."""


@dataclass(frozen=True)
class EngineOptions:
    """The options of a command line that say who works; None where they are not given.

    Raises:
        ConfigError: an option is given that belongs to the other engine.
    """

    engine: Literal["process", "ray"]
    workers: int | None
    gpus: float | None
    address: str | None
    jobs: int | None

    def __post_init__(self) -> None:
        of_ray = {"--workers": self.workers, "--gpus": self.gpus, "--address": self.address}
        beside = [option for option, value in of_ray.items() if value is not None]
        if self.engine != "ray" and beside:
            raise ConfigError(f"{beside[0]}: expected --engine ray beside it, got --engine {self.engine}")
        if self.engine == "ray" and self.jobs is not None:
            raise ConfigError(
                f"--jobs: expected no such option beside --engine ray, whose --workers it is, got {self.jobs}"
            )

    @contextmanager
    def clients(self, imports: Sequence[str]) -> Iterator["Callable[..., Engine] | None"]:
        """The maker of the trials' engines, over one connection to Ray; None where each trial's process does the work.

        Raises:
            MissingDependencyError, ClusterError: Ray, or the cluster, is not there.
        """
        if self.engine != "ray":
            yield None
            return
        from fedcore.engines import Ray

        count = WORKERS if self.workers is None else self.workers
        with Session(self.address, cpus=count):
            yield partial(
                Ray, workers=count, gpus=self.gpus or 0.0, address=self.address, imports=found_anywhere(imports)
            )

    def trials(self) -> "RayTrials | None":
        """The runner of a sweep's trials; None for processes of this machine."""
        if self.engine != "ray":
            return None
        from fedcore.experiment.ray_trials import RayTrials

        return RayTrials(WORKERS if self.workers is None else self.workers, self.gpus or 0.0, self.address)


def found_anywhere(imports: Sequence[str]) -> list[str]:
    """The imports and the folders of modules, with whole paths: a worker's folder is another one."""
    folders = [f"{folder}/" for folder in ADDED]
    return folders + [
        str(absolute(name).resolve()) if name.endswith(".py") else name for name in imports if not name.endswith("/")
    ]
