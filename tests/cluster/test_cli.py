"""``fedcore store`` on a cluster's manifest."""

import json
import os
import shutil

import numpy as np
import pytest

from fedcore.cluster.manifest import BLOCK, ShardInfo
from tests.cli.command import assert_rejected, invoke
from tests.cluster.pairs import made, n, one_round

X0 = np.zeros(n, np.float32)


def text(command, path):
    done = invoke("store", command, path)
    assert done.status == 0, done
    return done.output


def as_json(command, path):
    return json.loads(invoke("store", command, path, "--json").output)


def test_info_and_verify(tmp_path):
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server:
        one_round(server)
        shutil.copytree(tmp_path / "run" / "shard-1", tmp_path / "before")
        one_round(server)
    result = text("info", tmp_path / "run" / "cluster.json")
    assert "shard 1" in result
    assert "transaction 2" in result
    assert invoke("store", "info", tmp_path / "run", "--max-age", "600").status == 0
    shards = as_json("info", tmp_path / "run")["shards"]
    assert [(one["range"]["start"], one["transactions"]["last"]) for one in shards] == [(0, 2), (4 * BLOCK, 2)]
    assert "sound: 2 shards at transaction 2" in text("verify", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "shard-1")
    shutil.copytree(tmp_path / "before", tmp_path / "run" / "shard-1")
    assert "; 1 ahead of it" in text("verify", tmp_path / "run")
    for seconds in (2**32, 0):  # the shard that committed first counts, and one that is ahead of the clock
        for file in (tmp_path / "run" / "shard-1").glob("index.sqlite*"):
            os.utime(file, (0, seconds))
        assert invoke("store", "info", tmp_path / "run", "--max-age", "600").status == 1
    found = as_json("verify", tmp_path / "run")
    assert (found["sound"], found["transaction"], found["shards"]) == (True, 1, [2, 1])


@pytest.mark.parametrize("text", ["", "hello", "[" * 9999, "[]", "{}"], ids=repr)
def test_another_file_is_no_manifest(tmp_path, text):
    (file := tmp_path / "notes").write_text(text)
    assert_rejected(invoke("store", "info", file), "notes: not the manifest of a server in shards")


def test_verify_while_a_server_writes(tmp_path, monkeypatch):
    """It opens the shards one after another, and the server goes on meanwhile."""
    open_all = ShardInfo.open_all

    def then_rounds(*shard, **options):
        return (open_all(*shard, **options), one_round(server), one_round(server))[0]

    with made("MIFA", X0, shards=2, path=tmp_path) as server:
        monkeypatch.setattr(ShardInfo, "open_all", then_rounds)
        assert "sound: 2 shards at transaction 4" in text("verify", tmp_path)


def test_damage_is_reported(tmp_path):
    with made("MIFA", X0, shards=2, path=tmp_path / "run") as server:
        one_round(server)
    rows = max((tmp_path / "run" / "shard-0").glob("rows*"), key=lambda file: file.stat().st_size)
    content = bytearray(rows.read_bytes())
    content[len(content) // 2] ^= 1
    rows.write_bytes(content)
    done = invoke("store", "verify", tmp_path / "run")
    assert done.status == 1
    assert "shard 0" in done.output
