"""The changes to a preset's configuration that a command line gives by options of their own."""

import json

from fedcore.errors import ConfigError

MOST_SEEDS = 1_000_000


def given(changes: list[str], rounds: int | None, seeds: str | None) -> list[str]:
    """The overrides of a preset that the command line gives."""
    overrides = list(changes)
    overrides += [f"rounds={rounds}"] if rounds is not None else []
    return overrides + ([f"seeds={_seeds(seeds)}"] if seeds is not None else [])


def on_device(device: str | None, server_device: str | None) -> list[str]:
    """The overrides that say where clients are trained, and where the server is."""
    named = {"device": device, "server_device": server_device}
    return [f"{key}={json.dumps(name)}" for key, name in named.items() if name is not None]


def _seeds(text: str) -> list[int]:
    """``"3"`` is the first three seeds, ``"0,4"`` these two."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"--seeds: expected a count or numbers with commas between them, got {text!r}") from None
    if "," not in text and (not numbers or numbers[0] < 1):
        raise ConfigError(f"--seeds: expected at least one seed, got {text!r}; the seed 0 alone is 0,")
    if "," not in text and numbers[0] > MOST_SEEDS:
        raise ConfigError(f"--seeds: expected at most {MOST_SEEDS} seeds, got {text!r}; this seed alone is {text},")
    return numbers if "," in text else list(range(numbers[0]))
