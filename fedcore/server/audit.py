"""Records of rounds that can be audited: who sent what, how it counted, and what the model was before and after."""

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

import numpy as np

from fedcore.aggregation import Replies
from fedcore.arguments import shown
from fedcore.clients import ClientId
from fedcore.errors import CorruptionError
from fedcore.memory import to_host
from fedcore.runtime import __version__
from fedcore.server.prepared_step import PreparedStep
from fedcore.server.settings import Settings
from fedcore.server.update import in_float32

Document = dict[str, Any]


def digest_of_numbers(vector: Any) -> str:
    """The BLAKE2b-256 digest of a vector, or of ``Layout.pieces``, as little-endian float32 in the layout's order."""
    digest = blake2b(digest_size=32)
    for part in vector if isinstance(vector, list) else [vector]:
        digest.update(np.ascontiguousarray(to_host(in_float32(part)), "<f4").reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def digest_of_text(text: str) -> str:
    """The BLAKE2b-256 digest of a document."""
    return blake2b(text.encode(), digest_size=32).hexdigest()


def record(settings: Settings, prepared: PreparedStep, heard: Replies, refused: Sequence[tuple[ClientId, str]]) -> str:
    """The document of a round that is about to be committed, as JSON."""
    before, after, claims = prepared.before, prepared.after, heard.claims
    columns = zip(
        heard.clients,
        heard.digests,
        heard.weights.tolist(),
        heard.factors.tolist(),
        claims.steps.tolist(),
        heard.starts.tolist(),
        strict=True,
    )
    names = ("client", "digest", "weight", "factor", "steps", "start")
    options = {name: value for name, value in settings.to_state(before.round_number).items() if name != "layout"}
    document = {
        "what": "a round of a fedcore server",
        "round": before.round_number,
        "previous": before.audited,
        "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "versions": {"fedcore": __version__, "python": platform.python_version(), "numpy": np.__version__},
        "options": options,
        "changed": dict(before.changed),
        "x_before": digest_of_numbers(before.x),
        "x_after": digest_of_numbers(after.x),
        "gamma": prepared.gamma,
        "updates": [dict(zip(names, row, strict=True)) for row in columns],
        "rejected": [{"client": client, "reason": reason} for client, reason in refused],
    }
    return json.dumps(document, sort_keys=True)


def checked(documents: Sequence[tuple[int, str]], last: str | None, round: int) -> list[Document]:
    """The documents of the rounds before ``round``, if each has the digest that the next one names.

    Args:
        last: the digest of the last one.

    Raises:
        CorruptionError: one was changed, or is missing.
    """
    texts = [text for number, text in documents if number < round]
    due, found = last, []
    for text in reversed(texts):
        if digest_of_text(text) != due:
            raise CorruptionError("audit: expected the documents that were written, got a changed one, or one too few")
        try:
            found.append(json.loads(text))
            due = found[-1]["previous"]
        except (ValueError, TypeError, LookupError, RecursionError):
            raise CorruptionError(f"audit: expected the document of a round, got {shown(text)}") from None
    if due is not None:
        raise CorruptionError("audit: expected the documents of all rounds, got too few")
    return found[::-1]
