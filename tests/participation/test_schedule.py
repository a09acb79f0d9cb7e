import numpy as np
import pytest

from fedcore.participation import Schedule


def test_by_hand():
    pattern = Schedule(4, arrivals={1: 2, 2: 3}, departures={0: 1, 2: 5})
    due = [[0, 3], [3], [1, 3], [1, 2, 3], [1, 2, 3], [1, 3], [1, 3]]
    assert [pattern.active(t).clients.tolist() for t in range(7)] == due
    assert [pattern.present(t).tolist() for t in range(7)] == due
    assert pattern.active(10**12).clients.tolist() == [1, 3]


def test_clients_may_be_named_as_files_name_them():
    written, given = (
        Schedule(3, arrivals={"2": 4}, departures={"0": 1}),
        Schedule(3, arrivals={2: 4}, departures={0: 1}),
    )
    assert (written.arrivals, written.departures) == (given.arrivals, given.departures) == ({2: 4}, {0: 1})
    for t in range(6):
        np.testing.assert_array_equal(written.active(t).clients, given.active(t).clients)


@pytest.mark.parametrize("key", ["-1", "1.0", " 1", "²", "", 1.0, None])
def test_what_is_no_number_of_a_client(key):
    with pytest.raises(ValueError, match=r"arrivals: client: expected an integer in 0\.\.2"):
        Schedule(3, arrivals={key: 4})


def test_arriving_in_round_0_is_being_there_from_the_start():
    assert Schedule(2, arrivals={0: 0}).active(0).clients.tolist() == [0, 1]


def test_everybody_may_be_away():
    pattern = Schedule(2, arrivals={0: 3, 1: 4})
    assert [len(pattern.active(t)) for t in range(5)] == [0, 0, 0, 1, 2]
