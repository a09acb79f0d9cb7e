"""The lists of rooms, and of survivors with a reason, fit the sources."""

import pytest

from tests.mutants import run
from tests.mutants.__main__ import argued
from tests.mutants.rooms import ROOMS, files
from tests.mutants.sites import mutants


@pytest.fixture(scope="module")
def everywhere():
    """The mutants of each room."""
    return {
        room: [mutant for file in files(room) for mutant in mutants(str(file.relative_to(run.ROOT)), file.read_text())]
        for room in ROOMS
    }


def test_mutants_have_unique_names_and_every_room_has_tests(everywhere):
    for room, found in everywhere.items():
        assert len({mutant.name for mutant in found}) == len(found) > 90
        paths = [path.removeprefix("--deselect=").partition("::")[0] for path in ROOMS[room]]
        assert all((run.ROOT / path).exists() for path in paths)


def test_argued_mutants_exist(everywhere):
    """A changed line invalidates its accepted survivors."""
    assert argued().keys() <= {mutant.name for found in everywhere.values() for mutant in found}
