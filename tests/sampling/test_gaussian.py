"""ChaCha20 and the discrete Gaussian: RFC 8439's vectors, the bits of the oracle, and the law."""

import numpy as np
import pytest
from scipy import stats

from fedcore import kernels
from fedcore.arrays import core
from fedcore.errors import RangeError
from tests import oracle

KEY = bytes(range(32))
RFC = [  # Sec. 2.3.2, and Appendix A.1, vectors 1, 2 and 4
    (
        *(KEY, 1, "000000090000004a00000000"),
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        *(bytes(32), 0, "000000000000000000000000"),
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        *(bytes(32), 1, "000000000000000000000000"),
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
]


def noise(n, sigma, key=KEY):
    out = np.zeros(n)
    kernels.add_discrete_gaussian(out, 1.0, sigma, key, out=out)
    return out


@pytest.mark.parametrize(("key", "counter", "nonce", "due"), RFC)
def test_vectors_of_the_rfc(key, counter, nonce, due):
    words = core.chacha20(key, counter, bytes.fromhex(nonce), 1).reshape(16, 16)  # by word and block
    assert words[:, 0].astype("<u4").tobytes().hex() == due


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_the_words_of_the_oracle(groups):
    arguments = KEY, 2**32 - 5, bytes(range(12)), groups  # the counter passes 2^32
    np.testing.assert_array_equal(core.chacha20(*arguments), oracle.chacha20(*arguments))


@pytest.mark.parametrize("sigma", [1, 3, 31, 32, 1000, 2**24 + 1, 2**26])
def test_the_bits_of_the_oracle(sigma):
    sums = np.random.default_rng(0).normal(scale=1e3, size=16384 + 300)
    out, due = np.empty_like(sums), np.empty_like(sums)
    kernels.add_discrete_gaussian(sums, 0.25, sigma, KEY, out=out)
    oracle.add_discrete_gaussian(sums, 0.25, sigma, KEY, out=due)
    np.testing.assert_array_equal(out, due)


@pytest.mark.parametrize("sigma", [1, 3, 40])
def test_the_exact_law_of_a_narrow_noise(sigma):
    """Each integer's probability, by a chi-square test on cells of at least ten expected draws."""
    y = noise(1_000_000, sigma)
    values = np.arange(-12 * sigma, 12 * sigma + 1)
    p = np.exp(-(values**2) / (2 * sigma**2))
    due = len(y) * p / p.sum()
    found = np.histogram(y, np.append(values, values[-1] + 1))[0]
    cells = due >= 10
    assert found.sum() == len(y)
    observed, expected = np.append(found[cells], found[~cells].sum()), np.append(due[cells], due[~cells].sum())
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_the_law_of_a_wide_noise():
    """Against the normal law, from which the discrete one differs by less than 10^-1000 here; moments and tails."""
    sigma, n = 2**24 + 12345, 1_000_000
    y = noise(n, sigma) / sigma
    assert stats.kstest(y, "norm").pvalue > 1e-3
    assert abs(y.mean()) < 4 / n**0.5
    assert abs(y.var() - 1) < 4 * (2 / n) ** 0.5
    for tail in (2, 3, 4, 4.5):
        due = 2 * n * stats.norm.sf(tail)
        assert abs((abs(y) > tail).sum() - due) < 4 * due**0.5
    assert abs(np.corrcoef(y[1:], y[:-1])[0, 1]) < 4 / n**0.5


def test_keys_and_blocks_do_not_share_noise():
    one, other = noise(40_000, 2**20), noise(40_000, 2**20, bytes(32))
    assert len(np.unique(np.concatenate([one, other]))) > 70_000


@pytest.mark.parametrize(
    "wrong", [{"grid": 0.3}, {"grid": 0.0}, {"grid": np.nan}, {"sigma": 0}, {"sigma": 2**26 + 1}, {"key": bytes(31)}]
)
def test_wrong_arguments(wrong):
    arguments = {"grid": 1.0, "sigma": 5, "key": KEY} | wrong
    out = np.full(3, 7.0)
    with pytest.raises(RangeError, match=f"^{next(iter(wrong))}\\b"):
        kernels.add_discrete_gaussian(np.zeros(3), out=out, **arguments)
    assert (out == 7).all()
