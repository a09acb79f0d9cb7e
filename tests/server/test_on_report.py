"""Callbacks get the report of every committed round, and cannot roll one back."""

import copy
import logging

import numpy as np
import pytest

from fedcore import EdgeAggregator, Server, Storage, Update
from fedcore.errors import RoundError


def made(**options):
    return Server(np.zeros(6, np.float32), "MimiC", 3, lr=0.1, **options)


def play(server, count=1):
    return [server.round([Update(i, server.x + i + 1, 1) for i in range(2)]) for _ in range(count)]


def test_a_callback_gets_each_round_once_after_its_commit():
    seen = []
    server = made(callbacks=[lambda report: seen.append((report, server.round_number, server.x.tobytes()))])
    reports, after = [], []
    for _ in range(2):
        reports += play(server)
        after.append(server.x.tobytes())
    with server.open_round() as round:
        round.add(2, server.x + 5, steps=1)
    reports.append(round.report)
    after.append(server.x.tobytes())
    assert [report for report, _, _ in seen] == reports != [copy.copy(report) for report in reports]
    assert [number for _, number, _ in seen] == [1, 2, 3]
    assert [x for _, _, x in seen] == after


def test_a_callback_gets_no_aborted_round():
    seen = []
    server = made(callbacks=[seen.append])
    server.open_round().abort()
    with pytest.raises(ZeroDivisionError), server.open_round() as round:
        round.add(0, server.x + 1, steps=1)
        raise ZeroDivisionError
    with pytest.raises(RoundError):
        round.finish()
    assert seen == []


def test_an_error_of_a_callback_is_logged_and_the_round_stays(caplog, tmp_path):
    def fail(report):
        raise OSError("the disk of the monitor is full")

    plain = made()
    play(plain, 3)
    with caplog.at_level(logging.ERROR, "fedcore"), made(callbacks=[fail], storage=tmp_path / "state") as server:
        reports = play(server, 3)
        assert server.x.tobytes() == plain.x.tobytes()
    assert [report.round for report in reports] == [0, 1, 2]
    assert [record.name for record in caplog.records] == ["fedcore.server"] * 3
    assert "round 2: a callback failed" in caplog.text
    assert "the disk of the monitor is full" in caplog.text
    with Server.load(tmp_path / "state") as loaded:
        assert loaded.round_number == 3


def test_an_interrupt_in_a_callback_passes_and_the_round_stays():
    def interrupt(report):
        raise KeyboardInterrupt

    server = made(callbacks=[interrupt])
    with pytest.raises(KeyboardInterrupt):
        play(server)
    assert server.round_number == 1
    server.callbacks = ()
    play(server)
    assert server.round_number == 2


def test_a_callback_may_save_and_open_rounds(tmp_path):
    def listen(report):
        server.save(tmp_path / f"round{report.round}")
        if report.round == 0:
            play(server)

    server = made(callbacks=[listen])
    play(server)
    assert server.round_number == 2
    assert Server.load(tmp_path / "round0", storage=Storage(medium="ram")).round_number == 1


def test_a_loaded_server_has_the_callbacks_of_load(tmp_path):
    seen = []
    server = made(callbacks=[seen.append])
    server.save(tmp_path / "state")
    assert Server.load(tmp_path / "state", storage=Storage(medium="ram")).callbacks == ()
    play(Server.load(tmp_path / "state", callbacks=[seen.append], storage=Storage(medium="ram")), 2)
    assert [report.round for report in seen] == [0, 1]


def test_an_edge_has_no_callbacks():
    with pytest.raises(TypeError, match=r"\bcallbacks\b"):
        EdgeAggregator(np.zeros(2, np.float32), "FedAvg", [0], lr=0.1, callbacks=[print])


def test_every_logger_is_below_fedcore():
    """So that the configuration of ``fedcore`` applies to all."""
    import ast
    from pathlib import Path

    import fedcore

    names = []
    for file in Path(fedcore.errors.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger"):
                names.append(ast.literal_eval(node.args[0]))
    assert {"fedcore.server", "fedcore.sim.network", "fedcore.store"} <= set(names)
    assert [name for name in names if not name.startswith("fedcore.")] == []
