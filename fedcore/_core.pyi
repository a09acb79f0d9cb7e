"""
fedcore's native code; call it through fedcore.kernels, fedcore.sampling and fedcore.store.
"""

from __future__ import annotations

import collections.abc
import typing

import numpy
import numpy.typing
import typing_extensions

class ClientIndex:
    def __init__(self, key: bytes, count: typing.SupportsInt | typing.SupportsIndex) -> None: ...
    def __len__(self) -> int: ...
    def add(self, client: typing.Any) -> int: ...
    def add_all(
        self, clients: typing.Any, canonical: typing.Any
    ) -> tuple[numpy.typing.NDArray[numpy.int64] | None, int | str | None]: ...
    def add_at(self, clients: typing.Any, numbers: typing.Any) -> int: ...
    def id_of(self, number: typing.SupportsInt | typing.SupportsIndex) -> int | str | None: ...
    def ids(
        self, start: typing.SupportsInt | typing.SupportsIndex, stop: typing.SupportsInt | typing.SupportsIndex
    ) -> list[int | str]: ...
    def left(self) -> numpy.typing.NDArray[numpy.int64]: ...
    def listed(self) -> tuple[numpy.typing.NDArray[numpy.int64], list[int | str]]: ...
    def number(self, client: typing.Any) -> int: ...
    def numbers(self, clients: typing.Any) -> numpy.typing.NDArray[numpy.int64]: ...
    def remove(self, client: typing.Any) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def whole(self) -> int: ...

class DeviceArray:
    writeable: bool
    def __array__(self, *args: typing.Any, **kwargs: typing.Any) -> numpy.typing.NDArray[typing.Any]: ...
    def __dlpack__(
        self,
        *,
        stream: typing.SupportsInt | typing.SupportsIndex | None = None,
        max_version: typing.Any = None,
        dl_device: typing.Any = None,
        copy: typing.Any = None,
    ) -> typing_extensions.CapsuleType: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @typing.overload
    def __getitem__(self, part: slice) -> DeviceArray: ...
    @typing.overload
    def __getitem__(self, part: typing.Any) -> DeviceArray: ...
    def __init__(
        self,
        n: typing.SupportsInt | typing.SupportsIndex,
        dtype: typing.Any,
        device: typing.SupportsInt | typing.SupportsIndex = 0,
    ) -> None: ...
    def __len__(self) -> int: ...
    def __repr__(self) -> str: ...
    def copy_from(self, source: typing.Any) -> None: ...
    def copy_to(self, out: typing.Any) -> None: ...
    def fill_with_zeros(self) -> None: ...
    def to_host(self) -> numpy.typing.NDArray[typing.Any]: ...
    def view(self, dtype: typing.Any) -> DeviceArray: ...
    @property
    def address(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def dtype(self) -> numpy.dtype[typing.Any]: ...
    @property
    def holders(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def ndim(self) -> int: ...
    @property
    def shape(self) -> tuple[int]: ...
    @property
    def size(self) -> int: ...

class CopyStream:
    def __init__(
        self,
        device: typing.SupportsInt | typing.SupportsIndex = 0,
        buffer_bytes: typing.SupportsInt | typing.SupportsIndex = 67108864,
    ) -> None: ...
    def download(self, source: DeviceArray, out: typing.Any, pinned: bool = False) -> None: ...
    def join(self) -> None: ...
    def upload(self, source: typing.Any, to: DeviceArray, pinned: bool = False) -> None: ...
    def wait(self) -> None: ...

class PinnedArray:
    def __init__(self, array: typing.Any, device: typing.SupportsInt | typing.SupportsIndex = 0) -> None: ...

class PlainUpdates:
    def __init__(
        self,
        type: typing.Any,
        index: typing.Any,
        n: typing.SupportsInt | typing.SupportsIndex,
        limits: tuple[
            typing.SupportsFloat | typing.SupportsIndex,
            typing.SupportsFloat | typing.SupportsIndex,
            typing.SupportsFloat | typing.SupportsIndex,
            bool,
            typing.SupportsFloat | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            typing.SupportsInt | typing.SupportsIndex,
            bool,
            bool,
            bool,
        ],
        nonnegative: collections.abc.Sequence[
            tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsInt | typing.SupportsIndex]
        ],
        parts: list[typing.Any],
        copied: typing.SupportsInt | typing.SupportsIndex,
        may_hold: bool,
        owns: typing.Any,
    ) -> None: ...
    def __len__(self) -> int: ...
    def add(
        self,
        updates: typing.Any,
        known: set[typing.Any],
        others: set[typing.Any],
        examples: typing.SupportsInt | typing.SupportsIndex,
        first: typing.SupportsInt | typing.SupportsIndex,
    ) -> tuple[list[typing.Any], bool, bool, int] | None: ...
    def take(
        self,
    ) -> tuple[
        list[typing.Any], list[typing.Any], numpy.typing.NDArray[numpy.float64], numpy.typing.NDArray[numpy.int64]
    ]: ...

def accumulate(
    acc: typing.Any,
    bases: typing.Any,
    ys: typing.Any,
    scales: typing.Any,
    weights: typing.Any,
    *,
    out: typing.Any,
    partials: typing.Any = None,
) -> numpy.typing.NDArray[numpy.float64]: ...
def add_discrete_gaussian(
    sum: typing.Any,
    grid: typing.SupportsFloat | typing.SupportsIndex,
    sigma: typing.SupportsInt | typing.SupportsIndex,
    key: typing.Any,
    *,
    out: typing.Any,
) -> None: ...
def add_words(sum: typing.Any, terms: typing.Any) -> None: ...
def are_immutable(arrays: typing.Any) -> bool: ...
def await_arrays(arrays: typing.Any) -> None: ...
def bernoulli(
    population: typing.SupportsInt | typing.SupportsIndex, p: typing.Any, key: typing.Any
) -> numpy.typing.NDArray[numpy.int64] | None: ...
def best_isa() -> str: ...
def chacha20(
    key: typing.Any,
    counter: typing.SupportsInt | typing.SupportsIndex,
    nonce: typing.Any,
    groups: typing.SupportsInt | typing.SupportsIndex,
) -> numpy.typing.NDArray[numpy.uint32]: ...
def checksum(
    buffer: typing.Any, block_bytes: typing.SupportsInt | typing.SupportsIndex
) -> numpy.typing.NDArray[numpy.uint64]: ...
def choose_stream(stream: typing.SupportsInt | typing.SupportsIndex | None) -> int | None: ...
def column_range(column: typing.Any) -> tuple[float, float]: ...
def column_statistic(
    bases: typing.Any,
    ys: typing.Any,
    scales: typing.Any,
    out: typing.Any,
    *,
    mixing: typing.Any,
    rows: typing.SupportsInt | typing.SupportsIndex,
    first: typing.SupportsInt | typing.SupportsIndex,
    last: typing.SupportsInt | typing.SupportsIndex,
    nearest: typing.SupportsInt | typing.SupportsIndex,
) -> None: ...
def column_sum(total: typing.SupportsFloat | typing.SupportsIndex, column: typing.Any, times: typing.Any) -> float: ...
def combine(terms: typing.Any, coefficients: typing.Any, out: typing.Any) -> None: ...
def combine_exact(terms: typing.Any, coefficients: typing.Any, out: typing.Any) -> bool: ...
def combined_square(terms: typing.Any, coefficients: typing.Any, partials: typing.Any) -> float: ...
def count_bytes(bytes: typing.SupportsInt | typing.SupportsIndex) -> None: ...
def cuda_devices() -> list[tuple[str, int, int]]: ...
def cuda_reason() -> str | None: ...
def dequantise(codes: typing.Any, scales: typing.Any, codec: str, out: typing.Any) -> None: ...
def direction_step(
    y: typing.Any,
    grad: typing.Any,
    *,
    lr: typing.SupportsFloat | typing.SupportsIndex,
    a: typing.SupportsFloat | typing.SupportsIndex = 1.0,
    b: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    mu: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    weight_decay: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    grad_prev: typing.Any = None,
    offset: typing.Any = None,
    x: typing.Any = None,
) -> None: ...
def exchange(
    acc: typing.Any,
    bases: typing.Any,
    ys: typing.Any,
    scales: typing.Any,
    weights: typing.Any,
    old_rows: typing.Any,
    anchors: typing.Any,
    new_rows: typing.Any,
    *,
    out: typing.Any,
    row: typing.Annotated[collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex], "FixedSize(4)"] = [
        1.0,
        0.0,
        0.0,
        0.0,
    ],
    adds: typing.Annotated[collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex], "FixedSize(4)"] = [
        0.0,
        -1.0,
        1.0,
        1.0,
    ],
    keys: typing.Any = None,
    sums: typing.Any = None,
    first: typing.SupportsInt | typing.SupportsIndex = 0,
    partials: typing.Any = None,
) -> numpy.typing.NDArray[numpy.float64]: ...
def gram_matrix(
    bases: typing.Any, ys: typing.Any, scales: typing.Any, *, partials: typing.Any = None
) -> numpy.typing.NDArray[numpy.float64]: ...
def has_memory(tensor: typing.Any) -> bool: ...
def id_words(ids: typing.Any) -> numpy.typing.NDArray[numpy.int64]: ...
def in_ieee_mode(
    function: collections.abc.Callable[..., typing.Any], *args: typing.Any, **kwargs: typing.Any
) -> typing.Any: ...
def isa() -> str: ...
def joined_bytes(heads: typing.Any, payloads: typing.Any) -> list[bytes]: ...
def limit_residency(
    bytes: typing.SupportsInt | typing.SupportsIndex, function: collections.abc.Callable[[], typing.Any]
) -> None: ...
def mix(models: typing.Any, starts: typing.Any, columns: typing.Any, weights: typing.Any) -> None: ...
def optimizer_step(
    v: typing.Any,
    m: typing.Any,
    s: typing.Any,
    x: typing.Any,
    *,
    from_m: typing.SupportsFloat | typing.SupportsIndex,
    from_v: typing.SupportsFloat | typing.SupportsIndex,
    from_s: typing.SupportsFloat | typing.SupportsIndex = 1.0,
    from_square: typing.SupportsFloat | typing.SupportsIndex = 1.0,
    yogi: bool = False,
    tau: typing.SupportsFloat | typing.SupportsIndex = 0.0,
    gamma: typing.SupportsFloat | typing.SupportsIndex,
    m_out: typing.Any,
    s_out: typing.Any,
    x_out: typing.Any,
    partials: typing.Any = None,
) -> float: ...
def permutation(
    population: typing.SupportsInt | typing.SupportsIndex,
    start: typing.SupportsInt | typing.SupportsIndex,
    count: typing.SupportsInt | typing.SupportsIndex,
    key: typing.Any,
) -> numpy.typing.NDArray[numpy.int64]: ...
def present(array: numpy.typing.NDArray[typing.Any]) -> numpy.ndarray: ...
def quantise(
    x: typing.Any,
    codec: str,
    codes: typing.Any,
    scales: typing.Any,
    seed: typing.SupportsInt | typing.SupportsIndex | None,
    row: typing.SupportsInt | typing.SupportsIndex,
    first: typing.SupportsInt | typing.SupportsIndex,
) -> None: ...
def random_words(
    key: typing.Any,
    use: typing.Any,
    first: typing.SupportsInt | typing.SupportsIndex,
    blocks: typing.SupportsInt | typing.SupportsIndex,
) -> numpy.typing.NDArray[numpy.uint64]: ...
def read_exact(sum: typing.Any, out: typing.Any) -> None: ...
def read_npy(
    datas: typing.Any, heads: typing.Any, shapes: typing.Any
) -> list[numpy.typing.NDArray[typing.Any]] | None: ...
def read_plain_tensors(
    tensors: typing.Any, shapes: typing.Any, dtypes: typing.Any
) -> list[numpy.typing.NDArray[typing.Any]] | None: ...
def resident_limit() -> int: ...
def server_step(
    sum: typing.Any,
    total: typing.Any,
    x: typing.Any,
    *,
    v_of: typing.Any,
    total_of: typing.Any = (0.0, 0.0, 1.0, 0.0, 0.0),
    gamma: typing.SupportsFloat | typing.SupportsIndex,
    momentum: typing.Any = None,
    control: typing.Any = None,
    v: typing.Any,
    total_out: typing.Any,
    x_out: typing.Any,
    partials: typing.Any = None,
) -> tuple[float, float]: ...
def set_threads(count: typing.SupportsInt | typing.SupportsIndex) -> None: ...
def siphash(key: bytes, data: bytes) -> int: ...
def squared_norms(rows: typing.Any, *, partials: typing.Any = None) -> numpy.typing.NDArray[numpy.float64]: ...
def threads() -> int: ...
def weighted_sum(
    rows: typing.Any, weights: typing.Any, out: typing.Any, *, base: typing.Any, float64: bool, norms: bool
) -> numpy.typing.NDArray[numpy.float64] | None: ...
def weighted_sum_segments(
    models: typing.Any, weights: typing.Any, outs: typing.Any, *, base: typing.Any, float64: bool, norms: bool
) -> numpy.typing.NDArray[numpy.float64] | None: ...
def weighted_without_replacement(
    weights: typing.Any, k: typing.SupportsInt | typing.SupportsIndex, key: typing.Any
) -> numpy.typing.NDArray[numpy.int64] | None: ...
def with_replacement(
    weights: typing.Any, k: typing.SupportsInt | typing.SupportsIndex, key: typing.Any
) -> numpy.typing.NDArray[numpy.int64] | None: ...
def without_replacement(
    population: typing.SupportsInt | typing.SupportsIndex, k: typing.SupportsInt | typing.SupportsIndex, key: typing.Any
) -> numpy.typing.NDArray[numpy.int64]: ...

compiler: str
cuda_missing: str
cuda_targets: str
version: str
