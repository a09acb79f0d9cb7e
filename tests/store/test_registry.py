"""The registry of clients: ids, numbers, copies, and errors."""

import copy
import enum
import os
import pickle

import numpy as np
import pytest

from fedcore import ClientStore, _core, errors
from fedcore.store.registry import Registry
from tests.kit import python

MILLION = 1_000_000
IDS = [0, 7, 2**64 - 1, "", "7", "client", "zürich", "\0", "\ue000", "x" * 5000]


class Loud(str):
    def __str__(self):
        return "something else"


class Code(enum.IntEnum):
    seven = 7


class Unshowable:
    def __repr__(self):
        raise RuntimeError("no")


def test_an_empty_registry_fills_up():
    for empty in (Registry(), Registry(0), Registry([]), Registry(np.zeros(0, np.uint64)), Registry(iter(()))):
        assert (len(empty), empty.capacity, list(empty)) == (0, 0, [])
        assert 0 not in empty
        with pytest.raises(errors.UnknownClientError, match=r"^client=0: .*0 clients"):
            empty.number(0)
        assert [empty.add("a"), empty.add(0)] == [0, 1]


def test_add_at_leaves_the_numbers_between_free():
    index = _core.ClientIndex(bytes(16), 0)
    index.add_all(["a", "b", "c", "d"], str)
    for client in ("c", "d", "b"):
        index.remove(client)
    assert index.add_at(["x", "y", "y"], np.array([3, 6, 7])) == 2
    assert [index.add(client) for client in "ijklm"] == [1, 2, 4, 5, 7]
    assert index.ids(0, index.capacity) == ["a", "i", "j", "x", "k", "l", "y", "m"]


@pytest.mark.parametrize(
    "clients",
    [
        np.array([3, 5, 2**63 - 1]),
        np.array([3, 5, 255], np.uint8),
        np.array([3, 5, 2**64 - 1], np.uint64),
        np.arange(20, dtype=np.int16)[3::7],
        np.array([3, 5], ">i8"),
        np.array(["a", "bc", ""]),
        np.array([3, "a", 2**70 - 2**70], object),
        (np.int64(3), "a"),
        {"a": 1, 3: 2},
        range(5, 9),
    ],
)
def test_ids_come_in_arrays_and_iterables(clients):
    due = [client if isinstance(client, str) else int(client) for client in clients]
    registry = Registry(clients)
    assert list(registry) == due
    assert {type(client) for client in registry} <= {int, str}
    np.testing.assert_array_equal(registry.numbers(clients), np.arange(len(due)))
    assert list(Registry(client for client in clients)) == due
    with pytest.raises(errors.RangeError, match="listed twice"):
        Registry([*clients, due[-1]])


NO_IDS = [-1, 2**64, True, False, np.True_, 1.0, np.float32(1), None, b"7", (7,), [7], {7}, 10**5000, -(10**5000)]
NO_IDS += [np.array(7), np.int64(-1), np.datetime64(7, "s"), Unshowable(), object]
NO_IDS += ["\ud800", "site-\udcff", "\ud83d\ude00", Loud("\udfff")]  # lone surrogates


@pytest.mark.parametrize("client", NO_IDS, ids=range(len(NO_IDS)))  # some have no name that could be printed
def test_other_objects_are_not_ids(client):
    registry = Registry([1, 7, 2**64 - 1])
    for call in (registry.check, registry.number, registry.add, registry.remove, lambda it: registry.numbers([7, it])):
        with pytest.raises(errors.UnknownClientError, match=r"^client="):
            call(client)
    assert client not in registry
    with pytest.raises(errors.UnknownClientError):
        registry.add_all([8, "new", client])
    assert list(registry) == [1, 7, 2**64 - 1]


@pytest.mark.parametrize("character", "x9\u0669")  # the last one is a digit too, and Python reads 4,300 digits
def test_a_message_is_short(character):
    with pytest.raises(errors.UnknownClientError, match=f"^client='{character * 3}") as caught:
        Registry(5).number(character * 10**6)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("client", [Loud("client"), np.str_("client"), "client", Code.seven, np.uint16(7)])
def test_check_gives_the_plain_id(client):
    registry = Registry(["client", 7])
    known = registry.check(client)
    assert known in ("client", 7)
    assert type(known) in (str, int)
    assert registry.id_of(registry.number(client)) == known
    with pytest.raises(errors.RangeError, match=r"^client=.*already"):
        registry.add(client)
    registry.remove(client)
    registry.add_all([client])
    assert registry.check(known) is known


def test_a_number_and_its_text_and_its_bytes_are_different_clients():
    ids = [0x3837363534333231, "12345678", str(0x3837363534333231)]  # the number's bytes are the text's
    registry = Registry(ids)
    assert registry.numbers(ids).tolist() == [0, 1, 2]
    registry.remove(ids[0])
    assert ids[0] not in registry
    assert ids[1] in registry


@pytest.mark.parametrize(
    ("clients", "error", "message"),
    [
        (-1, errors.RangeError, r"clients=-1: must be an integer in 0\.\.2\*\*62"),
        (2**62 + 1, errors.RangeError, r"clients=.*: must be an integer in 0\.\.2\*\*62"),
        pytest.param(10**5000, errors.RangeError, "clients=(an unprintable |<)int", id="unprintable"),
        (True, errors.RangeError, "^clients=True: "),
        (2.0, errors.RangeError, "^clients=2.0: "),
        (None, errors.RangeError, "^clients=None: "),
        ("abc", errors.RangeError, "^clients='abc': "),
        (b"abc", errors.RangeError, "^clients=b'abc': "),
        (np.zeros((2, 2), int), errors.ShapeError, r"^clients: .*, not int64\[2, 2\]"),
        (np.array(3), errors.ShapeError, r"^clients: .*, not int64\[\]"),
        (np.array([1.0]), errors.UnknownClientError, "^client="),
        (np.array([True]), errors.UnknownClientError, "^client="),
        (np.array([0], "M8[ns]"), errors.UnknownClientError, "^client="),
        (np.array([3, -2]), errors.UnknownClientError, r"^client=.*-2"),
    ],
)
def test_constructor_errors(clients, error, message):
    with pytest.raises(error, match=message):
        Registry(clients)


def test_id_of_an_unused_number():
    registry = Registry(3)
    registry.add("a")
    registry.remove(1)
    for number in (1, 4, -1, 2**63, True, 1.5, "a", None):
        with pytest.raises(errors.RangeError, match=r"number=.*below 4"):
            registry.id_of(number)


def raising():
    yield "new"
    raise OSError("the source broke")


@pytest.mark.parametrize(
    ("clients", "error"),
    [
        (["new", "x", "newer"], errors.RangeError),
        (["new", "new"], errors.RangeError),
        ([1, 3, 1], errors.RangeError),  # 1 returns, and then comes twice
        (np.array([9, 1, 11, 9]), errors.RangeError),
        (["new", 1, 2.5], errors.UnknownClientError),
        (raising(), OSError),
    ],
)
def test_add_all_is_atomic(clients, error):
    registry = Registry(3)
    for client in ("w", "x", "y", "z"):
        registry.add(client)
    for client in (1, "y"):
        registry.remove(client)
    before = copy.copy(registry)
    with pytest.raises(error):
        registry.add_all(clients)
    assert registry == before
    assert registry.add_all([1, "a", 99, "b"]).tolist() == [1, 5, 7, 8]


def test_an_iterable_may_change_the_registry_while_it_is_read():
    registry = Registry(["a"])

    def meddling():
        yield "b"
        registry.remove("b")
        yield "c"
        registry.add("d")
        yield "a"  # a duplicate: the others are removed, if they are registered

    with pytest.raises(errors.RangeError):
        registry.add_all(meddling())
    assert list(registry) == ["a", "d"]


def test_an_iteration_survives_changes():
    registry = Registry(10_000)
    seen = 0
    for client in registry:
        seen += 1
        if seen % 2:
            registry.remove(client)
    assert seen >= 5_000
    assert len(registry) == 10_000 - (seen + 1) // 2


def test_numbers_of_many_name_the_first_that_is_unknown():
    registry = Registry(5)
    registry.remove(2)
    assert registry.numbers(iter([4, np.int8(0)])).tolist() == [4, 0]
    assert registry.numbers([]).dtype == np.int64
    for clients in ([4, 2, 9], np.array([4, 2, 9]), (4, 2, 9)):
        with pytest.raises(errors.UnknownClientError, match=r"^client=.*2.*: .*4 clients"):
            registry.numbers(clients)
    with pytest.raises(errors.UnknownClientError, match=r"^client=.*-3"):
        registry.numbers(np.array([4, -3]))


def test_explicit_lists_the_differences_from_the_count():
    registry = Registry(4)
    registry.add_all(["a", 9])
    for client in (3, 1, "a"):
        registry.remove(client)
    assert registry.explicit() == (4, [(1, None), (3, None), (5, 9)])
    # in any order; 2 was removed and added again
    assert Registry.restore(4, [(5, 9), (3, None), (2, 2), (1, None)]) == registry
    assert Registry.restore(np.int64(4), {np.int8(1): None, np.uint64(5): np.uint8(9), 3: None}.items()) == registry
    assert Registry.restore(0, []) == Registry()


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ((3, [(1, None), (1, None)]), errors.RangeError, "listed: number 1 appears twice"),
        ((3, [(1, None), (1, 1)]), errors.RangeError, "listed: number 1 appears twice"),
        ((3, [(4, "a"), (3, "b"), (4, "c")]), errors.RangeError, "listed: number 4 appears twice"),
        ((3, [(2, "a")]), errors.RangeError, "listed: .*client 2, not 'a'"),
        ((3, [(4, "a"), (3, "a")]), errors.RangeError, "listed: client 'a' with number 4"),
        ((3, [(1, None), (3, 1)]), errors.RangeError, "listed: client 1 with number 3"),
        ((3, [(2**63, "a")]), errors.RangeError, "listed=9223372036854775808: "),
        ((3, [(-1, "a")]), errors.RangeError, "listed=-1: "),
        ((3, [(4.0, "a")]), errors.RangeError, "listed=4.0: "),
        ((3, [("a", 4), (4, "a")]), errors.RangeError, "listed='a': "),
        ((3, [(3, -1)]), errors.UnknownClientError, "^client="),
        ((3, [(3, None)]), errors.UnknownClientError, "^client="),
        ((-1, []), errors.RangeError, "clients=.*: must be an integer in"),
    ],
)
def test_an_inconsistent_state_is_rejected(state, error, message):
    with pytest.raises(error, match=message):
        Registry.restore(*state)


def test_copies_and_pickles_are_equal_and_independent():
    registry = Registry(2)
    registry.add_all(IDS[2:])
    registry.remove(0)
    registry.remove("7")
    for copied in (copy.copy(registry), copy.deepcopy(registry), pickle.loads(pickle.dumps(registry))):
        assert copied == registry
        assert copied.add("new") == registry.add("new")
        registry.remove("new")
        assert copied != registry
    assert registry != Registry(2)
    assert registry != "a registry"


@pytest.mark.parametrize("clients", ["count", "array", "texts"])
def test_a_million_clients(clients):
    spread = np.random.default_rng(0).permutation(MILLION).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    ids = {
        "count": MILLION,
        "array": spread,  # with some hundred pairs whose 32 bits of hash are equal
        "texts": [f"client-{number:013d}" for number in range(MILLION)],
    }[clients]
    registry = Registry(ids)
    listed = np.arange(MILLION, dtype=np.uint64) if clients == "count" else ids
    assert len(registry) == registry.capacity == MILLION
    np.testing.assert_array_equal(registry.numbers(listed), np.arange(MILLION))
    leavers = listed[::30]
    for client in leavers.tolist() if clients != "texts" else leavers:
        registry.remove(client)
    stayed = np.flatnonzero(np.arange(MILLION) % 30)
    staying = listed[stayed] if clients != "texts" else [listed[i] for i in stayed.tolist()]
    np.testing.assert_array_equal(registry.numbers(staying), stayed)
    with pytest.raises(errors.UnknownClientError):
        registry.number(leavers[0])
    np.testing.assert_array_equal(registry.add_all(leavers), np.arange(0, MILLION, 30))


def test_removed_clients_leave_no_memory():
    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    registry = Registry([f"old-{i}" for i in range(1000)])
    before = resident()
    for i in range(5000):  # 250 MB of text if it were kept
        visitor = f"{i:050000}"
        assert registry.add(visitor) == registry.remove(visitor) == 1000
    for i in range(20_000):  # the table must not grow
        assert registry.add(i) == registry.remove(i) == 1000
    for _ in range(5):  # 105 MB of registries
        Registry(np.arange(1_000_000, dtype=np.uint64))
    assert resident() - before < 60e6
    assert registry.numbers([f"old-{i}" for i in range(1000)]).tolist() == list(range(1000))


def test_numbers_do_not_depend_on_the_process():  # each process hashes with its own key
    code = """from fedcore.store.registry import Registry
r = Registry(['a', 5, 'b', 7])
for i in range(200): r.add(f'c{i}')
for i in range(0, 200, 7): r.remove(f'c{i}')
print(list(r), r.add('new'), r.explicit())"""
    assert len({python("-c", code).stdout for _ in range(2)}) == 1


def test_siphash_known_answers():
    key = bytes(range(16))
    due = [0xABAC0158050FC4DC, 0xC9F49BF37D57CA93, 0xD3927D989BB11140, 0x369095118D299A8E, 0x25A48EB36C063DE4]
    assert [_core.siphash(key, bytes(range(n))) for n in (0, 1, 7, 8, 9)] == due
    assert _core.siphash(key, bytes(range(63))) == 0x9D199062B7BBB3A8


@pytest.mark.parametrize("medium", ["ram", "mmap"])
def test_an_id_with_lone_surrogates_is_rejected(tmp_path, medium):
    where = {"medium": medium} | ({"path": tmp_path / "store"} if medium == "mmap" else {})
    with pytest.raises(errors.UnknownClientError, match=r"^client='site-\\udcff': UTF-8"):
        ClientStore(["site-\udcff"], 4, **where)
    with ClientStore(["a"], 4, durability="checkpoint", **where) as store:
        for round in range(3):
            store.stage("a")[:] = round
            store.commit(round)
        with pytest.raises(errors.UnknownClientError, match="UTF-8"):
            store.add("site-\udcff")
        store.add("site-é")
        store.checkpoint()
        assert list(store.registry) == ["a", "site-é"]
    if medium == "mmap":
        with ClientStore.open(tmp_path / "store") as store:
            assert store.round == 2
