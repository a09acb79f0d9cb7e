import math

import numpy as np
import pytest
import torch

pytest.importorskip("pfl")

from pfl.data.user_state import DiskUserStateStorage, InMemoryUserStateStorage
from pfl.exception import UserNotFoundError
from pfl.internal.ops import pytorch_ops
from pfl.internal.ops.selector import set_framework_module
from pfl.stats import MappedVectorStatistics

from fedcore import ClientStore, errors
from fedcore.adapters.pfl import ClientStoreUserState

set_framework_module(pytorch_ops)


def state(seed, weight=1.0):
    generator = torch.Generator().manual_seed(seed)
    tensors = {"w": torch.randn(5, 70, generator=generator), "b": torch.randn(3, generator=generator)}
    return MappedVectorStatistics(tensors, weight=weight)


def require_same(found, due, **tolerance):
    assert isinstance(found, MappedVectorStatistics)
    assert found.weight == due.weight
    assert list(found.keys()) == list(due.keys())
    for name in due:
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], due[name], **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.fixture(params=["ram", "mmap"])
def storage(request, tmp_path):
    made = ClientStoreUserState(None if request.param == "ram" else tmp_path)
    yield made
    made.close()


def test_states_are_those_of_pfl_s_own_storages(storage, tmp_path):
    others = [InMemoryUserStateStorage(), DiskUserStateStorage(str(tmp_path / "theirs"))]
    for seed, (user, key) in enumerate([("0", None), ("1", None), ("0", "c"), ("1", "a/b"), ("0", None)]):
        for each in (storage, *others):
            each.save_state(state(seed, weight=seed + 1.0), user, key)
    # Since torch 2.6 pfl's storage on disk cannot read back what it wrote, unless torch allows the class.
    with torch.serialization.safe_globals([MappedVectorStatistics]):
        for user, key in [("0", None), ("1", None), ("0", "c"), ("1", "a/b")]:
            for other in others:
                require_same(storage.load_state(user, key), other.load_state(user, key))


def test_it_copies_both_ways(storage):
    given = state(0)
    storage.save_state(given, "0")
    given["w"].zero_()
    storage.load_state("0")["w"].zero_()
    require_same(storage.load_state("0"), state(0))


def test_a_user_without_a_saved_state_is_not_found(storage):
    for key in (None, "c"):
        with pytest.raises(UserNotFoundError):
            storage.load_state("0", key)
    storage.save_state(state(0), "1")
    with pytest.raises(UserNotFoundError):
        storage.load_state("0")
    storage.clear_states()
    with pytest.raises(UserNotFoundError):
        storage.load_state("1")
    storage.save_state(state(2), "1")
    require_same(storage.load_state("1"), state(2))


@pytest.mark.parametrize(("codec", "error"), [("bf16", 2**-8), ("int8", 2**-7 * 4)])
def test_codecs(codec, error):
    storage = ClientStoreUserState(codec=codec)
    storage.save_state(state(0), "0")
    found = storage.load_state("0")
    require_same(found, state(0), rtol=error, atol=error)
    assert not torch.equal(found["w"], state(0)["w"])  # the codec applies in memory too


def test_states_outlive_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path.parent)
    with_states = ClientStoreUserState(tmp_path.name)
    monkeypatch.chdir("/")
    with_states.save_state(state(1), "u", "c")
    with_states.checkpoint()
    with_states.close()
    again = ClientStoreUserState(f"~/{tmp_path.name}")
    require_same(again.load_state("u", "c"), state(1))
    again.save_state(state(2), "v", "c")
    again.close()


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"w": torch.zeros(5, 70)}, errors.ArrayError),
        ({"w": torch.zeros(70, 5), "b": torch.zeros(3)}, errors.ShapeError),
        ({"w": torch.zeros(5, 70), "b": torch.zeros(3, dtype=torch.float64)}, errors.DtypeError),
    ],
)
def test_a_state_of_other_tensors_is_an_error_and_changes_nothing(storage, bad, error):
    storage.save_state(state(0), "0")
    with pytest.raises(error):
        storage.save_state(MappedVectorStatistics(bad), "0")
    require_same(storage.load_state("0"), state(0))


@pytest.mark.parametrize("dtype", [np.int64, np.float16, np.float64])
def test_states_of_other_kinds_are_refused(storage, dtype):
    with pytest.raises(errors.DtypeError, match=r"^n\b"):
        storage.save_state({"n": np.array([1], dtype)}, "0")


@pytest.mark.parametrize("weight", [1e39, -1e39, math.nan, torch.tensor(math.inf)])
def test_weights_that_a_row_cannot_hold_are_refused(storage, weight):
    storage.save_state(state(0), "0")
    with pytest.raises(errors.RangeError, match=r"^weight="):
        storage.save_state(MappedVectorStatistics(dict(state(1).items()), weight=weight), "0")
    require_same(storage.load_state("0"), state(0))


def test_another_store_s_folder_is_an_error_and_closes_the_others(tmp_path):
    storage = ClientStoreUserState(tmp_path)
    storage.save_state(state(1), "u", "c")
    storage.save_state(state(1), "u", "e")
    storage.close()
    ClientStore(1, 2, medium="mmap", path=tmp_path / "key-d").close()
    with pytest.raises(errors.CheckpointError, match="store"):
        ClientStoreUserState(tmp_path)
    for key in "ce":
        ClientStore.open(tmp_path / f"key-{key}").close()


def test_states_of_another_codec_are_refused_and_stay(tmp_path):
    storage = ClientStoreUserState(tmp_path)
    storage.save_state(state(1), "u")
    storage.close()
    with pytest.raises(errors.CheckpointError, match="codec") as rejected:  # its frames keep the stores alive
        ClientStoreUserState(tmp_path, codec="int8")
    assert "codec" in str(rejected.value)
    again = ClientStoreUserState(tmp_path)
    require_same(again.load_state("u"), state(1))
    again.close()


def test_clearing_keeps_other_files(tmp_path):
    for name in ("keys", "keyboard/layouts", "key-a.draft-2024", "key-a/notes", "key-b.draft-0123456789ab"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "thesis.tex").write_text("years of work")
    (tmp_path / "key.txt").write_text("years of work")
    (tmp_path / "key-a" / "notes").rename(tmp_path / "notes")
    (tmp_path / "key-a").rmdir()
    (tmp_path / "key-a.draft-2024").rename(tmp_path / "key a")
    before = set(tmp_path.rglob("*"))
    storage = ClientStoreUserState(tmp_path)
    storage.save_state(state(1), "u", "a")
    storage.save_state(state(1), "u")
    (tmp_path / "key-a" / "thesis.tex").write_text("years of work")
    storage.clear_states()
    assert set(tmp_path.rglob("*")) == before | {tmp_path / "key-a", tmp_path / "key-a" / "thesis.tex"}


@pytest.mark.parametrize("layout", [None, 7, [], {}, {"n": 1}, {"pieces": 3}])
def test_states_of_a_forged_layout_are_an_error_and_closed(tmp_path, layout):
    storage = ClientStoreUserState(tmp_path)
    storage.save_state(state(1), "u")
    storage.close()
    with ClientStore.open(tmp_path / "key") as store:
        store.commit(0, state=store.state | {"layout": layout})
    for _ in range(2):
        with pytest.raises(errors.CheckpointError, match=r"/key\b"):
            ClientStoreUserState(tmp_path)
