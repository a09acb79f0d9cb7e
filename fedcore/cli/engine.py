"""The engine that ``fedcore run`` is asked for: who does the clients' work."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from fedcore.engines import Engine, Ray
from fedcore.engines.ray import Session
from fedcore.errors import ConfigError

WORKERS = 2
"""Workers on Ray, unless it is said how many."""


@contextmanager
def on_ray(
    engine: Literal["process", "ray"],
    workers: int | None,
    gpus: float | None,
    address: str | None,
    jobs: int | None,
    imports: Sequence[str],
) -> Iterator[Callable[..., Engine] | None]:
    """The maker of the trials' engines, over one connection to Ray; None where each trial's process does the work.

    Raises:
        ConfigError: an option is given that belongs to the other engine.
        MissingDependencyError, ClusterError: Ray, or the cluster, is not there.
    """
    of_ray = {"--workers": workers, "--gpus": gpus, "--address": address}
    if engine != "ray":
        if beside := [option for option, value in of_ray.items() if value is not None]:
            raise ConfigError(f"{beside[0]}: expected --engine ray beside it, got --engine {engine}")
        yield None
        return
    if jobs is not None:
        raise ConfigError(f"--jobs: expected no such option beside --engine ray, whose --workers it is, got {jobs}")
    count = WORKERS if workers is None else workers
    places = [str(Path(name).resolve()) if name.endswith(".py") else name for name in imports]
    with Session(address, cpus=count):
        yield partial(Ray, workers=count, gpus=gpus or 0.0, address=address, imports=places)
