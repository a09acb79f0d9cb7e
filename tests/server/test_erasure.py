"""``remove_client(erase=True)``: no file of the server's folder contains the client's bytes."""

import numpy as np
import pytest

from fedcore import ClientStore, Limits, Server, Storage, Update
from fedcore.cli import main
from fedcore.errors import StoreError
from fedcore.kernels import Codes

NAMES = [f"hospital-{i}" for i in range(6)]
GONE = NAMES[4]
N = 3_000


def files_with(folder, content):
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and content in path.read_bytes())


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
    said = capsys.readouterr().out
    assert "kept: the model" in said
    assert ("the audit log" in said) == audit


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
