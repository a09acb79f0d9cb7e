"""Rows are let out of memory in the order of their last use, whoever uses them."""

from threading import Thread

from fedcore.store.files.residency import Residency


class Slots:
    """Notes what is let go; while it does, another thread uses rows."""

    stride = 4096

    def __init__(self):
        self.gone = []
        self.meanwhile = lambda: None

    def let_go(self, slots):
        self.gone += slots
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        other = Thread(target=meanwhile)
        other.start()
        other.join(10)
        assert not other.is_alive()


def test_the_rows_that_were_not_used_for_longest_go():
    slots = Slots()
    residency = Residency(slots, 3)
    for slot in (1, 2, 3, 4, 1, 5):
        residency.use(slot)
    residency.trim()
    assert slots.gone == [2, 3]
    residency.trim()
    assert slots.gone == [2, 3]


def test_threads_that_use_rows_while_others_go_do_not_meet():
    slots = Slots()
    residency = Residency(slots, 2)
    slots.meanwhile = lambda: [residency.use(slot) for slot in (1, 6, 7, 8)] and residency.trim()
    for slot in (1, 2, 3, 4, 5):
        residency.use(slot)
    residency.trim()
    assert list(residency._used) == [7, 8]
