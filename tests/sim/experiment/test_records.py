"""Records: reading returns the written values, and damage is reported."""

import json
from dataclasses import asdict

import pytest

from fedcore.errors import MissingDataError
from fedcore.sim.experiment.results import Header, RoundRecord, Writer, read, read_folder

HEADER = Header("p", "P", "FedAvg", 0, 3, rounds=2, version="0")


def line(round: int) -> RoundRecord:
    return RoundRecord(round, [0], 1, 0, 0.5, None, 0.1, 0.1, 5, 1, 1.0, 8, {"train": 0.1})


@pytest.fixture
def record(tmp_path):
    (tmp_path / "records").mkdir()
    path = tmp_path / "records" / "a.jsonl"
    with Writer(path, HEADER) as writer:
        writer.add(line(0))
        assert read(path).rounds == [line(0)]  # flushed
        writer.add(line(1))
    return path


def test_written_record_is_read_and_never_overwritten(record):
    assert (read(record).header, read(record).rounds, read(record).torn) == (HEADER, [line(0), line(1)], False)
    with pytest.raises(FileExistsError):
        Writer(record, HEADER)


@pytest.mark.parametrize("cut", [1, 2, 50])
def test_torn_last_line_is_skipped(record, cut):
    record.write_bytes(record.read_bytes()[:-cut])
    assert (read(record).rounds, read(record).torn) == ([line(0)], True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda header, first, second, third: [header, first[:20] + "\n", second], "line 2 is damaged"),
        (lambda header, first, second, third: [header, second, third], "line 2: expected round 0, got round 1"),
        (lambda header, first, second, third: [header, first, third], "line 3: expected round 1, got round 2"),
        (lambda header, *lines: [header.replace('"format": 1', '"format": 2'), *lines], "format 2 is not supported"),
        *((lambda *_, text=text: [text], r"a\.jsonl") for text in ("", "{}\n", '{"round": 0}\n', "[]\n")),
    ],
)
def test_damaged_record_is_rejected(record, damage, message):
    lines = [*record.read_text().splitlines(keepends=True), json.dumps(asdict(line(2))) + "\n"]
    record.write_text("".join(damage(*lines)))
    with pytest.raises(MissingDataError, match=message):
        read(record)


def test_folder_skips_records_without_a_header(record, tmp_path):
    (record.parent / "b.jsonl").write_text('{"preset"')
    assert [found.header for found in read_folder(tmp_path)] == [HEADER]
    record.unlink()
    with pytest.raises(MissingDataError, match="no records found"):
        read_folder(tmp_path)
