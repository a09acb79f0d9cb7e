"""The table of phases names what there is, and while no trace is open nothing of it is there."""

import importlib
import inspect
import re
import threading

import numpy as np
import pytest

import fedcore
from fedcore.errors import RangeError
from fedcore.tracing.functions import FUNCTIONS
from fedcore.tracing.phases import FOLLOWING, IN_PLACE, KERNELS, PHASES
from fedcore.tracing.totals import ELSEWHERE
from tests.tracing.rounds import a_network, a_server, as_they_are, calls, is_plain, updates


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.place)
def test_each_function_of_the_table_exists(function):
    if "flower" in function.module:
        pytest.importorskip("flwr")
    importlib.import_module(function.module)
    owner = function.owner()
    assert function.name in vars(owner), f"{function.place} is gone: fedcore/tracing/phases.py names the phases"
    assert inspect.isfunction(vars(owner)[function.name])


def test_no_function_has_two_phases():
    places = [function.place for function in FUNCTIONS]
    assert len(set(places)) == len(places)
    assert {*FOLLOWING, KERNELS} <= PHASES.keys()
    assert set(places) >= IN_PLACE
    assert ELSEWHERE not in PHASES


def test_every_kernel_that_fedcore_calls_is_measured():
    """Except the clients' own local step, whose bytes are not the server's."""
    named = {function.name for function in FUNCTIONS if function.is_measured}
    there = {name for name in fedcore.kernels.__all__ if inspect.isfunction(getattr(fedcore.kernels, name))}
    assert there - named == {"direction_step"}


def test_the_docstring_explains_every_phase():
    table = " ".join(fedcore.trace.__doc__.partition("====")[2].rpartition("====")[0].split())
    assert [phase for phase in PHASES if not re.search(rf"\b{phase}\b", table)] == []


def test_an_open_trace_wraps_and_a_closed_one_leaves_everything_as_it_was():
    before = as_they_are()
    assert all(is_plain(function) for function in before.values())
    with fedcore.trace():
        now = as_they_are()
        assert before.keys() <= now.keys()
        assert not any(is_plain(function) for function in now.values())
    after = as_they_are()
    assert all(after[place] is before[place] for place in before)


def test_also_when_the_block_is_left_by_an_exception():
    before = as_they_are()
    with pytest.raises(KeyError), fedcore.trace() as trace:
        a_server().round([])
        raise KeyError
    assert as_they_are() == before
    assert calls(trace)["open"] == 1


def test_what_somebody_else_put_in_place_meanwhile_stays(monkeypatch):
    def other(*args):
        return kept(*args)

    with fedcore.trace() as trace:
        kept = fedcore.kernels.squared_norms
        monkeypatch.setattr(fedcore.kernels, "squared_norms", other)
    assert fedcore.kernels.squared_norms is other
    np.testing.assert_array_equal(other([np.float32([3, 4])]), [25])  # what it wraps does as the kernel does
    assert calls(trace) == {}


def test_the_last_of_several_traces_unwraps():
    before = as_they_are()
    one, two = fedcore.trace(), fedcore.trace()
    with one:
        two.__enter__()
    assert not is_plain(fedcore.kernels.mix)
    two.__exit__(None, None, None)
    assert as_they_are() == before


def test_traces_may_open_and_close_in_other_threads_while_rounds_run():
    server, over, errors = a_server(), threading.Event(), []

    def rounds():
        try:
            while not over.is_set():
                server.round(updates(server))
        except BaseException as error:
            errors.append(error)

    before, worker = as_they_are(), threading.Thread(target=rounds)
    worker.start()
    for _ in range(50):
        with fedcore.trace() as trace, fedcore.trace():
            a_network().output()
        assert sum(one.seconds for one in trace.phases if one.calls) <= 2 * trace.seconds
    over.set()
    worker.join()
    assert errors == []
    assert as_they_are() == before


def test_a_name_that_is_gone_fails_and_leaves_everything_as_it_was(monkeypatch):
    before = as_they_are()
    monkeypatch.delattr(fedcore.kernels, "weighted_sum_segments")
    with pytest.raises(KeyError, match="weighted_sum_segments"):
        fedcore.trace().__enter__()
    monkeypatch.undo()
    assert as_they_are() == before


def test_a_timeline_is_a_number():
    with pytest.raises(RangeError, match="timeline"):
        fedcore.trace(timeline=-1)
