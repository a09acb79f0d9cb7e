"""The cryptography of masked sums: key agreement, encrypted shares, Shamir's scheme, and masks."""

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedcore.errors import ArrayError, MissingDependencyError
from fedcore.runtime import threads

try:
    from cryptography.exceptions import InvalidSignature, InvalidTag
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.ciphers.algorithms import AES256
    from cryptography.hazmat.primitives.ciphers.modes import CTR
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise MissingDependencyError.of("fedcore.secure", f"cryptography ({error})", extra="secure") from error

U64: TypeAlias = npt.NDArray[np.uint64]

PRIME = 2**256 + 297
"""The modulus of Shamir's scheme: the smallest prime above 2^256, so that each secret of 32 bytes is an element."""
SECRET, SHARE, KEY, HASH, SIGNATURE = 32, 33, 32, 32, 64
"""The bytes of a secret, a share, a public key, a SHA-256 digest and a signature."""
SEALED = 2 * SHARE + 16
"""The bytes of two encrypted shares with their tag."""
BLOCK = 1 << 16
"""The bytes of a block of masks, which stays in a core's cache."""
SERIAL = 1 << 17
"""The fewest words for which a thread is started."""


def new_secret() -> bytes:
    """Return 32 bytes from the operating system's generator. They are also an X25519 private key."""
    return secrets.token_bytes(SECRET)


def public_key(secret: bytes) -> bytes:
    """Return the X25519 public key of a private key."""
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def agree(secret: bytes, public: bytes, context: bytes, purpose: bytes) -> bytes:
    """Return 32 bytes that only the holders of the two private keys can compute: X25519, then HKDF-SHA256.

    Raises:
        ArrayError: the public key has a low order, so the agreed value would not be secret.
    """
    try:
        agreed = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ArrayError("key: not a valid X25519 public key") from None
    return _derived(agreed, context, purpose)


def _derived(secret: bytes, context: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt=context, info=b"fedcore secure 2: " + purpose).derive(secret)


def identity_of(secret: bytes) -> bytes:
    """Return the public key of a client's Ed25519 key, 32 bytes each: how other clients and the server know it."""
    try:
        return Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
    except (ValueError, TypeError):
        raise ArrayError("identity: must be the 32 bytes of an Ed25519 private key") from None


def public_identity(name: str, key: Any) -> bytes:
    """Return a client's public key; raise ArrayError if it is not one of ``identity_of``."""
    try:
        return Ed25519PublicKey.from_public_bytes(key).public_bytes_raw()
    except (ValueError, TypeError):
        raise ArrayError(f"{name}: must be an Ed25519 public key, 32 bytes; see identity_of") from None


def sign(secret: bytes, purpose: bytes, context: bytes, data: bytes) -> bytes:
    """Return the Ed25519 signature of data that belong to a context and a purpose."""
    return Ed25519PrivateKey.from_private_bytes(secret).sign(_signed(purpose, context, data))


def is_signed(identity: bytes, signature: bytes, purpose: bytes, context: bytes, data: bytes) -> bool:
    """Whether a signature is that of ``sign`` by the owner of an identity."""
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, _signed(purpose, context, data))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed(purpose: bytes, context: bytes, data: bytes) -> bytes:
    return b"fedcore secure 2: " + purpose + context + data


def seal(key: bytes, shares: bytes, context: bytes) -> bytes:
    """Encrypt two shares with ChaCha20-Poly1305. A key encrypts a single message, so the nonce is constant."""
    return ChaCha20Poly1305(key).encrypt(bytes(12), shares, context)


def unseal(key: bytes, sealed: bytes, context: bytes) -> bytes | None:
    """Return the decrypted shares, or None if the bytes were not encrypted with this key and context."""
    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), sealed, context)
    except InvalidTag:
        return None


def digest(data: bytes, context: bytes) -> bytes:
    """Return the SHA-256 digest of data in a context; for a secret or share, of 256 random bits, a commitment."""
    return hashlib.sha256(context + data).digest()


def digest_of(value: Any) -> str:
    """Return the SHA-256 digest of text, a number, bytes, an array, None, or a list or mapping of these, as text.

    The order of a mapping does not count.

    Raises:
        ArrayError: the value contains another type.
    """
    parts: Iterable[Any]
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        parts = f"array {value.dtype.str} {value.shape} ".encode(), np.ascontiguousarray(value).reshape(-1).view("u1")
    elif isinstance(value, Mapping):
        items = sorted((digest_of(name), digest_of(one)) for name, one in value.items())
        parts = b"mapping ", *(digest.encode() for item in items for digest in item)
    elif isinstance(value, list | tuple):
        parts = b"list ", *(digest_of(one).encode() for one in value)
    elif isinstance(value, bytes):
        parts = b"bytes ", value
    elif value is None or isinstance(value, str | int | float):
        parts = (repr(value).encode(),)
    else:
        raise ArrayError(f"work: cannot contain {type(value).__name__}; use numbers, text, arrays, lists and mappings")
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


# Shamir, "How to Share a Secret", 1979, over the integers modulo PRIME.


def split(secret: bytes, holders: Iterable[int], threshold: int) -> dict[int, bytes]:
    """Return each holder's share of a secret: any ``threshold`` shares determine it, and fewer reveal nothing.

    Args:
        holders: different integers >= 0; holder i gets the polynomial's value at i + 1.

    Cost: ``threshold`` multiplications for each holder.
    """
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    shares = {}
    for holder in holders:
        value = 0
        for coefficient in coefficients:
            value = (value + coefficient) * (holder + 1) % PRIME
        shares[holder] = ((value + int.from_bytes(secret, "little")) % PRIME).to_bytes(SHARE, "little")
    return shares


def lagrange(holders: Sequence[int]) -> list[int]:
    """Return the coefficients with which the holders' shares add up to the secret. Cost: quadratic in the holders."""
    points, coefficients = [holder + 1 for holder in holders], []
    for own in points:
        above = below = 1
        for other in points:
            if other != own:
                above, below = above * other % PRIME, below * (other - own) % PRIME
        coefficients.append(above * pow(below, -1, PRIME) % PRIME)
    return coefficients


def join(shares: Mapping[int, bytes], coefficients: Sequence[int]) -> bytes | None:
    """Return the secret from ``threshold`` shares and their ``lagrange``, or None if it has more than 256 bits."""
    numbers = (int.from_bytes(share, "little") for share in shares.values())
    secret = sum(number * by for number, by in zip(numbers, coefficients, strict=True)) % PRIME
    return secret.to_bytes(SECRET, "little") if secret < 1 << 256 else None


def add_masks(words: U64, masks: Iterable[tuple[bytes, bool]]) -> None:
    """Add masks to words modulo 2^64, in place, on ``fedcore.threads()`` threads.

    Args:
        words: uint64[n], little-endian.
        masks: (key, negative) of each mask: the AES-256-CTR stream of a key, added or subtracted. A key makes a single
            mask, so the first counter is 0.

    Cost: 8 n bytes of AES for each mask; reads and writes 8 n bytes once for all.
    """
    listed, count = list(masks), threads()
    each = max(SERIAL, -(-len(words) // count) // 2 * 2 + 2)
    starts = range(0, len(words), each)
    if len(starts) < 2:
        _add_stream(words, 0, listed)
        return
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda start: _add_stream(words[start : start + each], start, listed), starts))


def _add_stream(words: U64, first: int, masks: Sequence[tuple[bytes, bool]]) -> None:
    """Add the masks' words from the even number ``first`` on; two words are a block of AES."""
    counter = CTR((first // 2).to_bytes(16, "big"))
    streams = [(Cipher(AES256(key), counter).encryptor(), negative) for key, negative in masks]
    zeros, block = bytes(BLOCK), np.empty(BLOCK // 8, np.uint64)
    into = block.data.cast("B")
    for start in range(0, len(words), len(block)):
        part = words[start : start + len(block)]
        size = 8 * len(part)
        plain, mask = zeros[:size], block[: len(part)]
        for stream, negative in streams:
            stream.update_into(plain, into[:size])
            (np.subtract if negative else np.add)(part, mask, out=part)


def self_mask(secret: bytes, context: bytes) -> bytes:
    """Return the key of a client's own mask."""
    return _derived(secret, context, b"self mask")


def pairwise_mask(secret: bytes, public: bytes, context: bytes, own: int, other: int) -> tuple[bytes, bool]:
    """Return (key, negative) of the mask that client ``own`` adds for ``other``, from either side's private key.

    The lower of the two indices adds the mask, and the higher subtracts it.
    """
    pair = b"pairwise mask" + min(own, other).to_bytes(4, "little") + max(own, other).to_bytes(4, "little")
    return agree(secret, public, context, pair), own > other


def envelope(secret: bytes, public: bytes, context: bytes, sender: int, receiver: int) -> tuple[bytes, bytes]:
    """Return the key and the context in which ``sender`` encrypts shares for ``receiver``, for either of them."""
    path = b"shares" + sender.to_bytes(4, "little") + receiver.to_bytes(4, "little")
    return agree(secret, public, context, path), context + path


def as_words(words: Any, n: int) -> U64:
    """Return words as little-endian uint64[n]; raise ArrayError for other arrays."""
    if not isinstance(words, np.ndarray) or words.dtype != np.uint64 or words.shape != (n,):
        got = f"{words.dtype}{list(words.shape)}" if isinstance(words, np.ndarray) else type(words).__name__
        raise ArrayError(f"words: expected uint64[{n}], got {got}; use Encoding.encode")
    return words.astype("<u8", copy=False)
