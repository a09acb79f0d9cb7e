"""Every medium with every codec."""

import itertools

import pytest

from fedcore import ClientStore
from fedcore.store.device_store import DeviceStore

MEDIA, CODECS = ("ram", "mmap", "cuda", "cached"), ("f32", "bf16", "int8")


@pytest.fixture(params=itertools.product(MEDIA, CODECS), ids="-".join)
def kind(request):
    """A medium ("cached" is a folder whose rows a device caches, at most two between rounds) and a codec."""
    if request.param[0] in ("cuda", "cached"):
        request.getfixturevalue("cuda_device")
    return request.param


@pytest.fixture
def make(kind, tmp_path):
    """A function that makes a store of this kind: ClientStore's arguments without medium, codec and path."""
    made = []

    def make(clients, n, **options):
        made.append(store_of(kind, tmp_path / f"store{len(made)}", clients, n, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


def store_of(kind, path, clients, n, **options):
    """A store of this kind, in a folder if it needs one."""
    medium, codec = kind
    if medium in ("ram", "cuda"):
        return ClientStore(clients, n, medium=medium, codec=codec, **options)
    return opened(kind, ClientStore(clients, n, medium="mmap", codec=codec, path=path, **options))


def opened(kind, store):
    """A store in a folder, as this kind uses it."""
    return DeviceStore(store, "cuda:0", cached_rows=2) if kind[0] == "cached" else store
