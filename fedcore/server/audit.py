"""The audit log: a document of each change, with the digest of the document before it and perhaps a signature."""

import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedcore.errors import CorruptionError, MissingDependencyError
from fedcore.files import replacing
from fedcore.model.safetensors import StoredFile
from fedcore.options import KEYS, Settings
from fedcore.runtime import __version__
from fedcore.server.aggregation import UpdateBatch
from fedcore.server.step import PreparedStep
from fedcore.server.update import digest_of_text
from fedcore.store.registry import ClientId
from fedcore.validation import short_repr

Document = dict[str, Any]

ROUND, UNDO = "a round of a fedcore server", "an undo"
"""``what`` of two kinds of documents."""
SIGNED = b"fedcore audit 1: "
"""The first bytes of every signed message, so that a signature for another purpose is not valid here."""
LONGEST = 1 << 26
"""The most bytes of a document in a file, for some 300,000 updates."""
INTERNAL = {"layout", "limits", "rules", "policy", "next_rates", "nonnegative", "own_weights", "history_rounds"}
"""Keys of saved settings that are not options, or that documents have in the form of a report."""


def round_facts(
    settings: Settings,
    prepared: PreparedStep,
    batch: UpdateBatch,
    rejected: Sequence[tuple[ClientId, str]],
    joined: Sequence[ClientId],
) -> Document:
    """Return the facts of a round for its document, before its commit."""
    columns = {
        "client": batch.clients,
        "digest": batch.digests,
        "weight": batch.weights.tolist(),
        "factor": batch.factors.tolist(),
        "steps": batch.claims.steps.tolist(),
        "start": batch.starts.tolist(),
    }
    if settings.rules.private is not None:
        columns = {name: columns[name] for name in ("client", "start")}
    saved = settings.to_state(prepared.before.round_number)
    options = {KEYS.get(name, name): value for name, value in saved.items() if name not in INTERNAL}
    return {
        "what": ROUND,
        "versions": {"fedcore": __version__, "python": platform.python_version(), "numpy": np.__version__},
        "options": options | settings.shown(("limits", "aggregation", "policy")),
        "changed": dict(prepared.before.changed),
        "gamma": prepared.gamma,
        "joined": list(joined),
        "updates": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
        "rejected": [{"client": client, "reason": reason} for client, reason in rejected],
    }


def document_of(
    facts: Mapping[str, Any], *, round: int, previous: str | None, x: tuple[str, str], key: bytes | None
) -> str:
    """Return the document of a change as text. ``x`` are the digests before and after, ``key`` signs it."""
    document = {
        "round": round,
        "previous": previous,
        "finished": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "x_before": x[0],
        "x_after": x[1],
        **facts,
    }
    if key is not None:
        private = _keys().Ed25519PrivateKey.from_private_bytes(key)
        document["signer"] = private.public_key().public_bytes_raw().hex()
        document["signature"] = private.sign(SIGNED + _text(document).encode()).hex()
    return _text(document)


def undo_document(undone: Sequence[str], kept: int) -> str:
    """Return the document of an undo of the changes whose documents are ``undone``, after the first ``kept``.

    It depends on nothing else, so the undo's own transaction determines it; the next change stores it. It has no
    signature: that of the next document covers it.
    """
    first, last = _parsed(undone[0]), _parsed(undone[-1])
    facts = {"what": UNDO, "round": first["round"], "kept": kept, "previous": digest_of_text(undone[-1])}
    return _text(facts | {"x_before": last["x_after"], "x_after": first["x_before"]})


def log_of(documents: Sequence[tuple[int, str]], count: int, last: str | None) -> list[str]:
    """Return the documents of a folder, with that of an undo which no change has followed yet.

    Args:
        documents: the stored documents with their numbers. Those after the first ``count`` were undone.
        count: the number of documents in the state of the server.
        last: the digest of the last of these.

    Raises:
        CorruptionError: a document is missing, or the last one was changed.
    """
    texts = [text for _, text in documents]
    if len(texts) < count or (digest_of_text(texts[count - 1]) if count else None) != last:
        raise CorruptionError("audit: a document was changed, or is missing")
    return [*texts, undo_document(texts[count:], count)] if len(texts) > count else texts


def checked(texts: Iterable[str], *, x: str | None = None, signer: str | None = None) -> Iterator[tuple[str, Document]]:
    """Yield each document with its digest, after a check of its place in the chain and its signature.

    Args:
        texts: all documents, oldest first.
        x: the digest of the model after the last one. Default: unknown.
        signer: the public key that signs each document. Default: documents may have no signature; but none without
            follows one with a signature, and all signatures are valid and of one key.

    Raises:
        CorruptionError: a document was changed, is missing, or is not signed.
    """
    previous, starts, after, required, is_undo = None, list[str](), None, signer, False
    for number, text in enumerate(texts):
        document = _parsed(text)

        def require(valid: bool, problem: str, number: int = number) -> None:
            if not valid:
                raise CorruptionError(f"audit: document {number}: {problem}")

        require(document["previous"] == previous, "the document before it was changed, or is missing")
        before, is_undo = document["x_before"], document["what"] == UNDO
        require(after in (None, before), "x changed after the document before it, and no document says how")
        previous, after = digest_of_text(text), document["x_after"]
        if is_undo:
            kept: Any = document.get("kept")
            require(type(kept) is int and 0 <= kept < number, f"kept={short_repr(kept)}: not a document before it")
            require(after == starts[kept], "x is not that before the changes that it undoes")
        starts.append(before)
        by = document.get("signer")
        require(by == _signer(document), "the signature is not valid")
        if not is_undo:
            require(signer in (None, by), "it is not signed by this signer" if by else "it has no signature")
            signer = by
        yield previous, document
    if x is not None and after not in (None, x):
        raise CorruptionError("audit: x changed after the last document, and no document says how")
    if required is not None and is_undo:
        raise CorruptionError(
            "audit: the last document is that of an undo, which has no signature until the server writes the next one"
        )


def write_lines(path: Path, documents: Iterable[Document]) -> None:
    """Replace a file by documents as JSON lines, each with the bytes of its digest."""
    with replacing(path) as file:
        file.writelines(f"{json.dumps(document)}\n" for document in documents)


def read_lines(path: str) -> Iterator[str]:
    """Yield the documents of a file of JSON lines; raise StoreError or CorruptionError if it is none."""
    with os.fdopen(StoredFile.open(path)[1], "rb") as file:
        while line := file.readline(LONGEST):
            try:
                yield line.decode("ascii").removesuffix("\n")
            except UnicodeDecodeError:
                raise CorruptionError(f"{path}: expected JSON lines in ASCII") from None


def signer_of(text: str) -> str | None:
    """Return the public key that signs a document; None without one."""
    signer = _parsed(text).get("signer")
    return signer if isinstance(signer, str) else None


def public_key(key: bytes) -> str:
    """Return the public key, in hexadecimal digits, of a private key, 32 bytes."""
    public: bytes = _keys().Ed25519PrivateKey.from_private_bytes(key).public_key().public_bytes_raw()
    return public.hex()


def _signer(document: Document) -> str | None:
    """Return the signer of a document with a valid signature; None without one."""
    rest = dict(document)
    try:
        signature = bytes.fromhex(rest.pop("signature"))
        public = _keys().Ed25519PublicKey.from_public_bytes(bytes.fromhex(rest["signer"]))
        public.verify(signature, SIGNED + json.dumps(rest).encode())
    except MissingDependencyError:
        raise
    except Exception:  # InvalidSignature, and what wrong types and lengths raise
        return None
    return str(rest["signer"])


def _keys() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingDependencyError.of("audit_key", f"cryptography ({error})", extra="secure") from error
    return ed25519


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, sort_keys=True)


def _parsed(text: str) -> Document:
    """Return a document; raise CorruptionError for a text that is none."""
    document: Document = {}
    try:
        document = json.loads(text)
        valid = json.dumps(document) == text  # so it is one line of ASCII, and has no name twice
        digests = [document["x_before"], document["x_after"], document["previous"] or "0" * 64]
        valid = valid and all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
        valid = valid and isinstance(document["what"], str) and type(document["round"]) is int
    except (ValueError, TypeError, LookupError, RecursionError, MemoryError):
        valid = False
    if not valid:
        raise CorruptionError(f"audit: {short_repr(text[:100])} is not a document of an audit log")
    return document
