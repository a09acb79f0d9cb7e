"""``fedcore store`` on a cluster's manifest."""

import contextlib
import io
import json
import shutil

import numpy as np
import pytest

from fedcore.cli import store
from fedcore.cluster.ranges import BLOCK
from tests.cluster.pairs import made, n, one_round

X0 = np.zeros(n, np.float32)


def printed(act, *arguments):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        act(*arguments)
    return text.getvalue()


def said(command, path):
    return printed(command, path, False)


def as_json(command, path):
    return json.loads(printed(command, path, True))


def test_info_and_verify(tmp_path):
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server:
        one_round(server)
        shutil.copytree(tmp_path / "run" / "shard-1", tmp_path / "before")
        one_round(server)
    told = said(store.info, tmp_path / "run" / "cluster.json")
    assert "shard 1" in told
    assert "transaction 2" in told
    shards = as_json(store.info, tmp_path / "run")["shards"]
    assert [(one["range"]["start"], one["transactions"]["last"]) for one in shards] == [(0, 2), (4 * BLOCK, 2)]
    assert "sound: 2 shards at transaction 2" in said(store.verify, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "shard-1")
    shutil.copytree(tmp_path / "before", tmp_path / "run" / "shard-1")
    assert "; 1 more than that" in said(store.verify, tmp_path / "run")
    found = as_json(store.verify, tmp_path / "run")
    assert (found["sound"], found["transaction"], found["shards"]) == (True, 1, [2, 1])


def test_damage_is_told(tmp_path):
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server:
        one_round(server)
    rows = max((tmp_path / "run" / "shard-0").glob("rows*"), key=lambda file: file.stat().st_size)
    content = bytearray(rows.read_bytes())
    content[len(content) // 2] ^= 1
    rows.write_bytes(content)
    with pytest.raises(SystemExit):
        said(store.verify, tmp_path / "run")
