"""Every medium with every codec."""

import itertools

import pytest

from fedcore import ClientStore

MEDIA, CODECS = ("ram", "mmap"), ("f32", "bf16", "int8")


@pytest.fixture(params=itertools.product(MEDIA, CODECS), ids="-".join)
def kind(request):
    """A medium and a codec."""
    return request.param


@pytest.fixture
def make(kind, tmp_path):
    """A function that makes a store of this kind: ClientStore's arguments without medium, codec and path."""
    medium, codec = kind
    made = []

    def make(clients, n, **options):
        path = tmp_path / f"store{len(made)}" if medium == "mmap" else None
        made.append(ClientStore(clients, n, medium=medium, codec=codec, path=path, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()
