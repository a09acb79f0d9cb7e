"""``remove_client(erase=True)``: no file of the server's folder contains the client's bytes."""

import itertools
import os

import numpy as np
import pytest

from fedcore import ClientStore, Compute, Limits, Model, RoundPolicy, Server, Storage, Update, algorithms
from fedcore.cli import main
from fedcore.errors import RangeError, StoreError
from fedcore.kernels import Codes
from fedcore.store.files.disk import data_spans

NAMES = [f"hospital-{i}" for i in range(6)]
GONE = NAMES[4]
N = 3_000


def files_with(folder, content):
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and content in written(path))


def written(path):
    """The bytes of a file without its holes; a file of slots is long and sparse."""
    with path.open("rb") as file:
        return b"".join(os.pread(file.fileno(), end - start, start) for start, end in data_spans(file.fileno()))


def content_of(row):
    """Bytes that only this row has."""
    return (row.codes if isinstance(row, Codes) else np.asarray(row)).tobytes()[1_000:1_040]


def run(folder, codec="f32", **options):
    """A server after three rounds and an interrupted one, and byte strings of the client to erase."""
    storage = Storage(folder, codec=codec, journal=True, **options)
    server = Server(np.zeros(N, np.float32), "MimiC", NAMES, lr=0.1, storage=storage, limits=Limits())
    rng, secrets = np.random.default_rng(0), [GONE.encode()]
    for _ in range(3):
        updates = {name: rng.normal(size=N).astype(np.float32) for name in NAMES}
        server.round([Update(name, y, steps=2) for name, y in updates.items()])
        secrets += [updates[GONE].tobytes()[1_000:1_040], content_of(server.store.row(GONE))]
    round = server.open_round()
    secrets.append(bytes(last := rng.normal(size=N).astype(np.float32))[1_000:1_040])
    round.add_batch([Update(name, last + (name != GONE), steps=2) for name in NAMES[3:]])
    round.abort(keep=True)
    return server, secrets


@pytest.mark.parametrize(
    "options",
    [{}, {"codec": "bf16"}, {"codec": "int8"}, {"keep_previous": True}, {"durability": "checkpoint"}],
    ids=lambda options: "-".join(map(str, options.values())) or "f32",
)
def test_an_erased_client_is_in_no_file(options, tmp_path):
    server, secrets = run(tmp_path / "s", **options)
    server.checkpoint()
    there = [bool(files_with(tmp_path / "s", secret)) for secret in secrets]
    assert there[0] + there[-1] + there[-2] == 3, "the test looks for the wrong bytes"
    rows = {name: server.store.read(name) for name in NAMES}
    server.remove_client(GONE, erase=True)
    assert [files_with(tmp_path / "s", secret) for secret in secrets] == [[]] * len(secrets)
    assert server.verify() == []
    for name in server.clients:
        np.testing.assert_array_equal(server.store.read(name), rows[name])
    with server.open_round() as round:
        assert set(round.clients) == set(NAMES[3:]) - {GONE}
    server.close()
    with Server.load(tmp_path / "s") as again:
        assert GONE not in again.clients
        assert again.round_number == 4


def test_without_erase_the_bytes_stay_and_the_command_erases_them(tmp_path, capsys):
    server, secrets = run(tmp_path / "s")
    server.remove_client(GONE)
    server.close()
    assert files_with(tmp_path / "s", secrets[-1])
    main(["store", "compact", str(tmp_path / "s"), "--erase"])
    update = files_with(tmp_path / "s", secrets[-1])
    assert update == ["rows.slots"], "an interrupted round keeps its updates"
    main(["store", "remove-client", str(tmp_path / "s"), NAMES[3], "--erase"])
    assert files_with(tmp_path / "s", NAMES[3].encode()) == []
    capsys.readouterr()


@pytest.mark.parametrize("audit", [False, True])
def test_the_command_states_what_stays(tmp_path, capsys, audit):
    run(tmp_path / "s", audit=audit)[0].close()
    main(["store", "remove-client", str(tmp_path / "s"), GONE])
    assert "`fedcore store compact --erase` erases them" in capsys.readouterr().out
    main(["store", "remove-client", str(tmp_path / "s"), NAMES[3], "--erase"])
    assert bool(files_with(tmp_path / "s", NAMES[3].encode())) == audit
    output = capsys.readouterr().out
    assert "kept: the model" in output
    assert ("the audit log" in output) == audit


def test_a_reader_keeps_the_bytes_and_is_an_error(tmp_path):
    server, secrets = run(tmp_path / "s")
    with ClientStore.open(tmp_path / "s", readonly=True) as reader:
        before = reader.read(GONE)
        with pytest.raises(StoreError, match=r"readers"):
            server.remove_client(GONE, erase=True)
        np.testing.assert_array_equal(reader.read(GONE), before)
    assert GONE not in server.clients
    server.compact(erase=True)
    assert [files_with(tmp_path / "s", secret) for secret in secrets] == [[]] * len(secrets)


def half(folder):
    return Storage(folder, resident=1 << 20)


STRUCTURES = {
    "folder": {},
    "shards": {"compute": Compute(shards=2)},
    "groups": {"partial": {"A": "a.*"}},
    "resident": {"storage": half},
}
POLICIES = {"": {}, "late": {"max_staleness": 4}, "buffer": {"buffer": len(NAMES), "max_staleness": 4}}
LONG = 70_000  # two blocks of shards


@pytest.mark.parametrize(
    ("method", "policy", "structure"),
    [(method, "late", "folder") for method in algorithms.REGISTRY]
    + list(itertools.product(["FedAvg", "MimiC", "FedVARP", "FlexibleFedAvg"], POLICIES, STRUCTURES)),
)
@pytest.mark.sample(1, 2)
def test_no_setting_keeps_the_bytes_or_the_id(method, policy, structure, folder_in_memory):
    """Also if the caller still has the last broadcast, round and report."""
    options = dict(STRUCTURES[structure])
    n = LONG if structure == "shards" else 600
    model = {"a.w": np.zeros(n // 2, np.float32), "b.w": np.zeros(n - n // 2, np.float32)}
    partial, storage = options.pop("partial", None), options.pop("storage", Storage)
    try:
        server = Server(
            model if partial is None else Model(model, partial=partial),
            algorithms.named(method, **({"local_steps": 2} if method == "FlexibleFedAvg" else {})),
            dict.fromkeys(NAMES, 9),
            lr=0.1,
            storage=storage(folder_in_memory / "s"),
            policy=RoundPolicy(**POLICIES[policy]),
            **options,
        )
    except RangeError as error:
        pytest.skip(str(error))
    rng, secrets, steps = np.random.default_rng(0), [GONE.encode()], min(2, server.algorithm.most_steps or 2)
    for t in range(4):
        cohort = [name for name in NAMES if rng.random() < 0.7 or name == GONE]
        kept = [server.broadcast(cohort)]
        needs_control = kept[0].second is not None and kept[0].second
        with server.open_buffer() if policy == "buffer" else server.open_round() as round:
            for name in cohort:
                y = {key: rng.normal(size=len(value)).astype(np.float32) for key, value in model.items()}
                control = rng.normal(size=n).astype(np.float32) if needs_control else None
                round.add(name, y, steps=steps, examples=9, loss=1.0, control=control, round=t)
                if name == GONE:
                    secrets.append(y["a.w"].tobytes()[400:440])
            kept += [round, round.finish()]
        if server.algorithm.keeps_rows:
            secrets.append(np.ascontiguousarray(server.row(GONE)).tobytes()[400:440])
        server.add_clients({f"arrived-{t}": 9})
        server.compact()  # it moves vectors
        server.compact(erase=True)
    try:
        server.remove_client(GONE, from_objective=False, erase=True)
    except RangeError as error:
        server.close()
        pytest.skip(str(error))
    assert [files_with(folder_in_memory / "s", secret) for secret in secrets] == [[]] * len(secrets)
    assert server.verify() == []
    server.close()
    with Server.load(folder_in_memory / "s") as again:
        assert GONE not in again.clients
        assert again.transactions == server.transactions


def test_a_newcomer_of_an_interrupted_round_is_erased(tmp_path):
    server = Server(np.zeros(N, np.float32), "MIFA", NAMES[:2], lr=0.1, storage=Storage(tmp_path / "s", journal=True))
    y = np.random.default_rng(0).normal(size=N).astype(np.float32)
    server.open_round(newcomers=NAMES[2:]).add_batch([Update(name, y + i, 1) for i, name in enumerate(NAMES[1:])])
    server.close()
    secrets = [GONE.encode(), (y + np.float32(3)).tobytes()[1_000:1_040]]
    assert all(files_with(tmp_path / "s", secret) for secret in secrets)
    main(["store", "remove-client", str(tmp_path / "s"), GONE, "--erase"])
    assert [files_with(tmp_path / "s", secret) for secret in secrets] == [[], []]
    with Server.load(tmp_path / "s") as server, server.open_round() as round:
        assert set(round.clients) == set(NAMES[1:]) - {GONE}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_share_that_stays_has_no_name_once_it_is_erased(shards, tmp_path):
    options = {"storage": tmp_path / "s", "compute": Compute(shards=shards)}
    server = Server(
        np.zeros(LONG, np.float32), algorithms.FlexibleFedAvg(local_steps=2), dict.fromkeys(NAMES, 5), lr=0.1, **options
    )
    server.remove_client(GONE, from_objective=False)
    server.close()
    assert files_with(tmp_path / "s", GONE.encode())
    main(["store", "compact", str(tmp_path / "s"), "--erase"])
    assert files_with(tmp_path / "s", GONE.encode()) == []
    with Server.load(tmp_path / "s") as server:
        update = Update(NAMES[0], np.ones(LONG, np.float32), 2)
        assert server.round([update]).accepted == (NAMES[0],)
        x = server.x
    straight = Server(
        np.zeros(LONG, np.float32), algorithms.FlexibleFedAvg(local_steps=2), dict.fromkeys(NAMES, 5), lr=0.1
    )
    straight.remove_client(GONE, from_objective=False)
    straight.round([update])
    np.testing.assert_array_equal(x, straight.x)
