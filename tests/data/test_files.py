import hashlib
import io
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from fedcore.data import files
from fedcore.errors import MissingDataError, MissingDependencyError

CONTENT = {"in/a.bin": b"first", "in/b.bin": b"second"}


def archive(path: Path) -> str:
    """Write CONTENT as a zip or a tar.gz, and return its MD5."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as made:
            for name, content in CONTENT.items():
                made.writestr(name, content)
    else:
        with tarfile.open(path, "w:gz") as packed:
            for name, content in CONTENT.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                packed.addfile(entry, io.BytesIO(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_files_in_a_directory_are_found_and_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    (tmp_path / "set" / "in").mkdir(parents=True)
    for name in CONTENT:
        (tmp_path / "set" / name).touch()
    assert files.find("set", ["in/b.bin", "in/a.bin"], "http://nowhere.invalid/") == [
        tmp_path / "set" / "in" / "b.bin",
        tmp_path / "set" / "in" / "a.bin",
    ]


@pytest.mark.parametrize(("md5", "how"), [(None, "put the files there, from"), ("0" * 32, "unpack there")])
def test_every_file_that_is_missing_is_named_with_where_to_get_it(tmp_path, monkeypatch, md5, how):
    monkeypatch.setenv("FEDCORE_DATA_DIR", str(tmp_path))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "b").touch()
    with pytest.raises(MissingDataError) as caught:
        files.find("set", ["a", "b", "c"], "http://nowhere.invalid/x.zip", md5=md5)
    assert str(caught.value) == (
        f"set: expected a, c in {tmp_path / 'set'}; {how} http://nowhere.invalid/x.zip, "
        "or unset FEDCORE_DATA_DIR to have it downloaded"
    )


def test_single_files_are_downloaded_once(publisher):
    (publisher.folder / "a").write_bytes(b"a")
    for _ in range(2):
        (path,) = files.find("set", ["a"], publisher.address)
        assert path.read_bytes() == b"a"
        assert path.parent == publisher.cache / "set"
    assert publisher.asked == ["/a"]


@pytest.mark.parametrize("name", ["all.zip", "all.tar.gz"])
def test_an_archive_is_downloaded_once_and_gives_the_files_that_are_asked_for(publisher, name):
    md5 = archive(publisher.folder / name)
    (first,) = files.find("set", ["in/a.bin"], publisher.address + name, md5=md5)
    assert first.read_bytes() == b"first"
    assert [path.name for path in first.parent.iterdir()] == ["a.bin"]  # no torn or temporary file
    first.write_bytes(b"unpacked already")
    both = files.find("set", ["in/b.bin", "in/a.bin"], publisher.address + name, md5=md5)
    assert [path.read_bytes() for path in both] == [b"second", b"unpacked already"]
    assert publisher.asked == [f"/{name}"]


def test_another_archive_than_the_published_one_is_refused(publisher):
    archive(publisher.folder / "all.zip")
    with pytest.raises(MissingDataError, match=r"in/a\.bin could not be downloaded.*hash.*FEDCORE_DATA_DIR"):
        files.find("set", ["in/a.bin"], publisher.address + "all.zip", md5="0" * 32)
    assert not list(publisher.cache.rglob("a.bin"))


@pytest.mark.parametrize("md5", [None, "0" * 32])
def test_a_download_that_fails_names_the_files_and_the_address(publisher, md5):
    with pytest.raises(MissingDataError, match=f"set: a could not be downloaded from {publisher.address}"):
        files.find("set", ["a"], publisher.address + ("all.zip" if md5 else ""), md5=md5)


def test_without_pooch_it_says_what_to_install(monkeypatch):
    monkeypatch.delenv("FEDCORE_DATA_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(MissingDependencyError, match=r"need pooch.*fedcore-fl\[sim\].*FEDCORE_DATA_DIR"):
        files.find("set", ["a"], "http://nowhere.invalid/")
