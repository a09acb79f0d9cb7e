import json
from dataclasses import asdict

import pytest

from fedcore.errors import MissingDataError
from fedcore.experiment.results import Header, RoundRecord, Writer, read, read_folder

HEADER = Header("p", "P", "FedAvg", 0, 3, rounds=2, version="0")


def line(round: int) -> RoundRecord:
    return RoundRecord(round, [0], 1, 0, 0.5, None, 0.1, 0.1, 5, 1, 1.0, 8, {"train": 0.1})


@pytest.fixture
def record(tmp_path):
    (tmp_path / "records").mkdir()
    path = tmp_path / "records" / "a.jsonl"
    with Writer(path, HEADER) as writer:
        writer.add(line(0))
        writer.add(line(1))
    return path


def test_what_is_written_is_read(record):
    assert read(record).header == HEADER
    assert read(record).rounds == [line(0), line(1)]
    assert not read(record).torn


def test_every_line_is_on_disk_at_once(tmp_path):
    with Writer(tmp_path / "a.jsonl", HEADER) as writer:
        writer.add(line(0))
        assert read(tmp_path / "a.jsonl").rounds == [line(0)]


@pytest.mark.parametrize("cut", [1, 2, 50])
def test_a_torn_last_line_is_left_out_and_told(record, cut):
    record.write_bytes(record.read_bytes()[:-cut])
    assert read(record).rounds == [line(0)]
    assert read(record).torn


def test_damage_before_the_last_line_is_an_error(record):
    lines = record.read_text().splitlines(keepends=True)
    record.write_text(lines[0] + lines[1][:20] + "\n" + lines[2])
    with pytest.raises(MissingDataError, match="line 2 is damaged"):
        read(record)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_round_that_is_missing_is_an_error(record, lost):
    with record.open("a") as file:
        file.write(json.dumps(asdict(line(2))) + "\n")
    lines = record.read_text().splitlines(keepends=True)
    record.write_text("".join(lines[:lost] + lines[lost + 1 :]))
    with pytest.raises(MissingDataError, match=f"line {lost + 1}: expected round {lost - 1}, got round {lost}"):
        read(record)


@pytest.mark.parametrize("text", ["", "{}\n", '{"round": 0}\n', "[]\n"])
def test_a_file_that_is_no_record(record, text):
    record.write_text(text)
    with pytest.raises(MissingDataError, match=r"a\.jsonl"):
        read(record)


def test_another_format_is_refused(record):
    record.write_text(record.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(MissingDataError, match="expected a record of format 1, got format 2"):
        read(record)


def test_a_record_is_never_overwritten(record):
    with pytest.raises(FileExistsError):
        Writer(record, HEADER)


def test_a_folder_leaves_out_what_has_not_started(record):
    (record.parent / "b.jsonl").write_text('{"preset"')
    assert [found.header for found in read_folder(record.parent.parent)] == [HEADER]


def test_a_folder_without_records(tmp_path):
    with pytest.raises(MissingDataError, match="expected records"):
        read_folder(tmp_path)
