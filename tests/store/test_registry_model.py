"""The registry against a plain dict, over any history."""

import copy
import hashlib
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fedcore import _core, errors
from fedcore.store.registry import Registry
from tests.store.peaks import peak_of

IDS = st.one_of(
    st.integers(0, 9),
    st.integers(0, 2**64 - 1),
    st.sampled_from(["", "0", "7", "a", "b", "ab", "\0", "é", "\ue000", "\uffff", "😀", "x" * 300]),
    st.text(max_size=3),
)


class Histories(RuleBasedStateMachine):
    @initialize(clients=st.one_of(st.integers(0, 6), st.lists(IDS, max_size=30, unique=True)))
    def start(self, clients):
        self.registry = Registry(clients)
        self.counted = clients if isinstance(clients, int) else 0
        self.model = dict(enumerate(range(clients) if isinstance(clients, int) else clients))  # by number

    def due(self, client):
        """The number that a client that arrives must get."""
        if type(client) is int and client < self.counted:
            return client
        return next(number for number in count(self.counted) if number not in self.model)

    def number(self, client):
        return next((number for number, known in self.model.items() if known == client), None)

    @rule(client=IDS)
    def arrive(self, client):
        if self.number(client) is None:
            number = self.registry.add(client)
            assert number == self.due(client)
            self.model[number] = client
        else:
            with pytest.raises(errors.RangeError):
                self.registry.add(client)

    @rule(client=IDS)
    def leave(self, client):
        number = self.number(client)
        if number is None:
            with pytest.raises(errors.UnknownClientError):
                self.registry.remove(client)
        else:
            assert self.registry.remove(client) == number
            del self.model[number]

    @rule(data=st.data())
    def one_that_is_here_leaves(self, data):
        if self.model:
            self.leave(data.draw(st.sampled_from(list(self.model.values()))))

    @rule(clients=st.lists(IDS, max_size=20), as_array=st.booleans())
    def many_arrive(self, clients, as_array):
        if as_array:
            clients = np.array([client for client in clients if type(client) is int], np.uint64)
        listed, before = list(clients), dict(self.model)
        if as_array:
            listed = clients.tolist()
        numbers = []
        for client in listed:
            if self.number(client) is not None:
                break
            numbers.append(self.due(client))
            self.model[numbers[-1]] = client
        if len(numbers) == len(listed):
            assert self.registry.add_all(clients).tolist() == numbers
        else:
            self.model = before
            with pytest.raises(errors.RangeError):
                self.registry.add_all(clients)

    @rule(data=st.data())
    def some_leave_and_are_put_back(self, data):
        gone = data.draw(st.lists(st.sampled_from(list(self.model.values())), unique=True)) if self.model else []
        numbers = [(self.registry.remove(client), client) for client in gone]
        for number, client in data.draw(st.permutations(numbers)):
            self.registry.put_back(number, client)
            self.registry.put_back(number, client)  # twice is as once

    @rule(data=st.data())
    def numbers_are_reassigned(self, data):
        listed = list(range(self.counted, self.registry.capacity + 3))
        whose = dict.fromkeys(data.draw(st.sets(st.sampled_from(listed))))
        clients = [self.model.pop(number) for number in whose if number in self.model]
        numbers = data.draw(st.permutations(list(whose)))
        whose |= dict(zip(numbers, clients[: data.draw(st.integers(0, len(clients)))], strict=False))
        before, entries = self.registry.holders(whose), self.registry.explicit()
        self.registry.reassign(whose)
        self.registry.reassign(before)
        assert self.registry.explicit() == entries
        self.registry.reassign(whose)
        self.model |= {number: client for number, client in whose.items() if client is not None}

    @rule(flip=st.booleans())
    def restart(self, flip):
        counted, listed = self.registry.explicit()
        assert counted == self.counted
        gone = [(client, None) for client in range(counted) if client not in self.model]
        assert listed == gone + sorted((n, client) for n, client in self.model.items() if n >= counted)
        restored = Registry.restore(counted, listed[:: -1 if flip else 1])
        assert restored == self.registry
        assert copy.copy(restored) == self.registry
        self.registry = restored

    @invariant()
    def agrees(self):
        numbers = sorted(self.model)
        ids = [self.model[number] for number in numbers]
        assert len(self.registry) == len(self.model)
        assert self.registry.capacity == max([self.counted, *(number + 1 for number in numbers)])
        assert list(self.registry) == ids
        assert self.registry.numbers(ids).tolist() == numbers
        assert [self.registry.number(client) for client in ids] == numbers
        assert [self.registry.check(client) for client in ids] == ids
        assert [self.registry.id_of(number) for number in numbers] == ids
        assert all(client in self.registry for client in ids)
        assert ("no such client" in self.registry) == ("no such client" in ids)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=40, stateful_step_count=30)


def test_a_word_stands_for_each_stored_id():
    texts = ["x" * length for length in range(300)] + ["é" * 64, "\0", "\uffff"]
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    assert _core.id_words(texts).tobytes() == b"".join(digests)
    assert _core.id_words([7, None, -(2**63)]).tolist() == [7, 0, -(2**63)]


def test_undoing_a_removal_allocates_no_more_among_many_clients():
    def peak(clients):
        registry = Registry([f"client {i}" for i in range(clients)])
        return peak_of(lambda: registry.put_back(registry.remove("client 7"), "client 7"))

    assert peak(20_000) < peak(20) + 10_000
