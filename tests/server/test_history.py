import numpy as np

from fedcore.server.step import History


def test_a_direction_stays_while_a_row_refers_to_it():
    v = np.float32([1, 2])
    history = History().after(3, v, 2, [None, None])
    assert history.get(3) is v
    assert history.get(None) is None
    later = history.after(4, v, 1, [3])
    assert (list(later), dict(later.references)) == ([3, 4], {3: 1, 4: 1})
    gone = later.without([3])
    assert list(gone) == [4]
    assert gone.get(3) is None
    assert len(history) == 1  # a history is never changed


def test_a_round_that_nobody_refers_to_leaves_no_direction():
    assert len(History().after(0, np.zeros(1, np.float32), 0, [])) == 0


def test_a_client_heard_again_moves_its_reference():
    history = History().after(0, np.zeros(1, np.float32), 1, [None]).after(1, np.ones(1, np.float32), 1, [0])
    assert list(history) == [1]
