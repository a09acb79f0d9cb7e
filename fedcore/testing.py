"""The promises that fedcore's own algorithms keep, for one's own: ``check_algorithm(Mine())`` in a test."""

import pickle
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedcore.algorithms import Algorithm, Claims, check_table
from fedcore.algorithms.rates import Exponential
from fedcore.arrays import F64
from fedcore.errors import AlgorithmError
from fedcore.options import Compute, describe
from fedcore.server import Server, Update
from fedcore.server.instructions import Instructions as Assignment

N, n, ROUNDS, STEPS = 6, 70, 6, 3


def check_algorithm(algorithm: Algorithm) -> None:
    """Refuse an algorithm that does not keep a promise which every one of fedcore's own keeps.

    It is run on a small server, with replies that are made up: nothing is trained, and whether the method is right is
    for tests against its paper to say. The promises:

    * its table does not contradict itself, and it is known again by its options and as a pickle;
    * its ``weigh`` and ``step`` depend on their arguments and the options alone;
    * the same bits come of replies one by one, some at a time, and all at once;
    * a round that is aborted, and a reply that is not finite, change nothing; rounds may be empty;
    * a server that is saved and loaded goes on as one that was not, and so does one on a disk;
    * T follows the rows, also when a client departs, where the table says that it is their sum;
    * the gradient diversity of a report is right, or None;
    * what clients are asked to do crosses a wire unchanged.

    Raises:
        AlgorithmError: it breaks one; the message says which, and what was due.

    Cost: some 50 rounds of 6 clients and 70 parameters: a tenth of a second.

    >>> from fedcore.algorithms import MIFA
    >>> check_algorithm(MIFA())
    """
    check_table(algorithm)
    with tempfile.TemporaryDirectory(prefix="fedcore-check-") as folder:
        for number, promise in enumerate(PROMISES):
            promise(Checked(algorithm, Path(folder) / str(number)))


class Checked:
    """An algorithm that is checked, and a place for its servers."""

    def __init__(self, algorithm: Algorithm, folder: Path) -> None:
        self.algorithm, self.folder = algorithm, folder

    def server(self, **options: Any) -> Server:
        """A new server of it, of N clients."""
        x0, rate = np.linspace(-1, 1, n, dtype=np.float32), Exponential(0.1, 0.9)
        return Server(x0, self.algorithm, {i: 1 + i for i in range(N)}, lr=rate, **options)

    def expect(self, right: bool, due: str, got: str) -> None:
        """Refuse the algorithm unless it is right."""
        if not right:
            raise AlgorithmError(f"{self.algorithm!r}: expected {due}, got {got}")


def cohort_of(t: int) -> list[int]:
    """The clients that are heard in round t: nobody, everybody, and some."""
    return [[], list(range(N)), [4], [0, 2, 3], [1, 3, 5], [0, 1, 2, 4]][t % 6]


def replies(server: Server, cohort: Iterable[int]) -> list[Update]:
    """The answers of clients: a function of what they are sent, and of the round."""
    sent, updates = server.broadcast(list(cohort)), []
    for i in sent.ids:
        rng = np.random.default_rng([server.round_number, int(i)])
        y = sent.x * np.float32(0.9) + rng.normal(size=n).astype(np.float32) - sent.offset(i)
        control = rng.normal(size=n).astype(np.float32) if sent.second else None
        steps = min(1 + int(i) % STEPS, server.algorithm.most_steps or STEPS)
        updates.append(Update(i, y, steps=steps, examples=1 + int(i), control=control))
    return updates


def go_on(server: Server, rounds: int = ROUNDS) -> Server:
    """The server, some rounds later."""
    for _ in range(rounds):
        server.round(replies(server, cohort_of(server.round_number)))
    return server


def seen(server: Server) -> tuple[bytes, ...]:
    """The state that a method makes, as bytes."""
    total = server._backend.snapshot.total
    rows = [server.store.read(i).tobytes() for i in server.clients]
    return server.x.tobytes(), server.v.tobytes(), b"" if total is None else total.tobytes(), *rows


def _is_known_again(checked: Checked) -> None:
    try:
        again = pickle.loads(pickle.dumps(checked.algorithm))
    except Exception as error:
        checked.expect(False, "an algorithm that can be pickled, for workers", str(error))
    one, other = describe("algorithm", checked.algorithm), describe("algorithm", again)
    checked.expect(one == other, f"a pickle of the same options, {one}", str(other))


def _is_a_function(checked: Checked) -> None:
    one, other = go_on(checked.server()), go_on(checked.server())
    checked.expect(seen(one) == seen(other), "the same bits of the same replies", "others in a second run")


def _delivers_alike(checked: Checked) -> None:
    together, apart, some = (checked.server(compute=Compute(batch_size=size)) for size in (None, 1, 2))
    for t in range(ROUNDS):
        updates = replies(together, cohort_of(t))
        together.round(updates)
        for server in (apart, some):
            with server.open_round() as opened:
                for update in updates:
                    opened.add_batch([update])
        right = seen(together) == seen(apart) == seen(some)
        checked.expect(right, "the same bits of replies one by one and all at once", f"others in round {t}")


def _changes_nothing_unasked(checked: Checked) -> None:
    server, other = go_on(checked.server(), 3), go_on(checked.server(), 3)
    before, updates = seen(server), replies(server, range(N))
    with server.open_round() as opened:
        for update in updates:
            opened.add_batch([update])
        opened.abort()
    checked.expect(seen(server) == before, "everything as before a round that was aborted", "something else")
    old = updates[1]
    broken = Update(old.client, np.full(n, np.nan, np.float32), old.steps, examples=old.examples, control=old.control)
    report = server.round([updates[0], broken, *updates[2:]])
    other.round([updates[0], *updates[2:]])
    checked.expect([i for i, _ in report.rejected] == [1], "client 1's NaN to be refused", str(report.rejected))
    checked.expect(seen(server) == seen(other), "the bits of a round without the refused reply", "others")


def _goes_on(checked: Checked) -> None:
    straight = go_on(checked.server())
    for way in ("saved", "opened"):
        path = checked.folder / way
        server = go_on(checked.server(storage=None if way == "saved" else path), 3)
        if way == "saved":
            path.parent.mkdir(exist_ok=True)
            server.save(path)
        server.close()
        with Server.load(path, algorithm=checked.algorithm) as loaded:
            right = seen(go_on(loaded, ROUNDS - 3)) == seen(straight)
            checked.expect(right, "the bits of a straight run", f"others after the server was {way} again")


def _total_follows_rows(checked: Checked) -> None:
    if not checked.algorithm.total_sums_rows:
        return
    for server in (go_on(checked.server()), go_on(checked.server())):
        server.remove_client(2)
        part = server.correction if checked.algorithm.keeps_history else server.store.read
        due = np.sum([part(i) for i in server.clients], axis=0, dtype=np.float64)
        total = server._backend.snapshot.total
        assert total is not None
        error = float(np.abs(total - due).max())
        checked.expect(error <= 1e-6 * (1 + np.abs(due).max()), "T to be the sum of the rows", f"{error:g} off")


def _measures_diversity(checked: Checked) -> None:
    server = checked.server(compute=Compute(diagnostics=True))
    for t in range(ROUNDS):
        sent, updates = server.broadcast(cohort_of(t)), replies(server, cohort_of(t))
        report = server.round(updates)
        if report.diversity is not None:
            due = _diversity(checked.algorithm, server, sent.x.astype(np.float64), sent.lr, updates)
            right = bool(np.isclose(report.diversity, due, rtol=1e-3))
            checked.expect(right, f"a diversity of {due:g} in round {t}, or None", f"{report.diversity:g}")


def _diversity(algorithm: Algorithm, server: Server, x: F64, lr: float, updates: list[Update]) -> float:
    steps, examples = np.array([u.steps for u in updates], float), np.array([u.examples for u in updates], float)
    shares, clients = examples / (N * (N + 1) / 2), [u.client for u in updates]
    w = algorithm.weigh(Claims(steps, examples, np.ones(len(updates)), shares, None, clients))
    unit = np.ones(len(updates)) if server.averages_models else lr * steps
    h = np.array([x - u.value for u in updates]) / unit[:, None]
    return float(w @ np.sum(h * h, axis=1) * w.sum() / np.sum((w @ h) ** 2))


def _crosses_wires(checked: Checked) -> None:
    server = go_on(checked.server(), 3)
    for i in range(N):
        asked = server.broadcast([i]).of(i)
        told = Assignment.read(asked.numbers(), asked.vectors())
        checked.expect(told == asked, f"{asked} at client {i}", f"{told}")


PROMISES: list[Callable[[Checked], None]] = [
    _is_known_again,
    _is_a_function,
    _delivers_alike,
    _changes_nothing_unasked,
    _goes_on,
    _total_follows_rows,
    _measures_diversity,
    _crosses_wires,
]
