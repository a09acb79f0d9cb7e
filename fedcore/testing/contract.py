"""The base of the contracts, and comparisons that say what differs."""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any
from unittest import SkipTest

import numpy as np

from fedcore.arrays import to_host
from fedcore.validation import short_repr


class Contract:
    """Tests of your own object. Derive a class ``TestMine``, and override the methods that make the object.

    pytest runs its tests; ``check(TestMine)`` runs them without pytest. The docstring of a test is the promise that it
    checks, and the page of the promise. A failed test has both as a note. If your class refuses a feature, set its test
    to None: ``test_undo = None``. A test's argument such as ``algorithm`` takes the values of the attribute
    ``algorithms``, a mapping from names.
    """

    def __init_subclass__(cls) -> None:
        for name, test in list(vars(cls).items()):
            if name.startswith("test_") and test is not None and test.__doc__:
                setattr(cls, name, _with_promise(test))

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Let pytest run a test once for each of its cases."""
        for name in metafunc.fixturenames:
            if cases := getattr(self, f"{name}s", None):
                metafunc.parametrize(name, list(cases.values()), ids=list(cases))


def check(contract: type[Contract]) -> None:
    """Run the tests of a contract without pytest; raise the first error. Tests that skip themselves are left out.

    >>> from fedcore.testing import AlgorithmContract
    >>> check(AlgorithmContract)
    """
    for name in dict.fromkeys(name for kind in reversed(contract.__mro__) for name in vars(kind)):
        if name.startswith("test_") and getattr(contract, name) is not None:
            names = [argument for argument in signature(getattr(contract, name)).parameters if argument != "self"]
            cases = [getattr(contract, f"{argument}s", {"": None}).values() for argument in names]
            for values in product(*cases):
                with tempfile.TemporaryDirectory(prefix="fedcore-check-") as folder, suppress(SkipTest):
                    more = {"tmp_path": Path(folder)} if "tmp_path" in names else {}
                    getattr(contract(), name)(**dict(zip(names, values, strict=True)) | more)


def _with_promise(test: Callable[..., None]) -> Callable[..., None]:
    @wraps(test)
    def run(self: Contract, *args: Any, **kwargs: Any) -> None:
        try:
            test(self, *args, **kwargs)
        except Exception as error:
            if not isinstance(error, SkipTest):
                error.add_note(f"{type(self).__name__} breaks this promise: {' '.join((test.__doc__ or '').split())}")
            raise

    return run


@contextmanager
def raises(kind: type[Exception], pattern: str = "") -> Iterator[None]:
    """Require that the block raises an error of this class, whose message has the pattern."""
    try:
        yield
    except kind as error:
        require(re.search(pattern, str(error)) is not None, f"a {kind.__name__} with {pattern!r}", error)
    else:
        require(False, f"a {kind.__name__}", "none")


def require(holds: object, due: str, got: object) -> None:
    """Raise an AssertionError unless a condition holds."""
    if not holds:
        raise AssertionError(f"expected {due}, got {got if isinstance(got, str | Exception) else short_repr(got)}")


def same(got: Any, due: Any, what: str = "result") -> None:
    """Require that two values are equal: arrays bit by bit, mappings by their keys, other values by ``==``."""
    if isinstance(due, Mapping):
        require(got.keys() == due.keys(), f"{what} with {sorted(map(str, due))}", str(sorted(map(str, got))))
        for name, value in due.items():
            same(got[name], value, f"{name} of {what}")
    elif isinstance(due, np.ndarray):
        here = to_host(got)
        equal = (here.dtype, here.shape) == (due.dtype, due.shape)
        require(equal, f"{what}: {due.dtype}{list(due.shape)}", f"{here.dtype}{list(here.shape)}")
        if here.tobytes() != due.tobytes():
            bits = [np.ascontiguousarray(one).view(np.uint8).reshape(due.size, -1) for one in (here, due)]
            k, *more = np.flatnonzero((bits[0] != bits[1]).any(axis=1)).tolist()
            require(False, f"{what}[{k}]: {due.flat[k]!r}", f"{here.flat[k]!r}; {1 + len(more)} elements differ")
    else:
        require(got == due, f"{what}: {short_repr(due)}", got)
