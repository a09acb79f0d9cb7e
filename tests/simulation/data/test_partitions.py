"""Partitions."""

import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedcore.errors import DtypeError, MissingDependencyError, RangeError, ShapeError, UnknownNameError
from fedcore.simulation.data import (
    dirichlet,
    divide,
    from_flower,
    iid,
    iid_pareto,
    label_k,
    load,
    natural,
    one_label,
    partitions,
    shards,
)
from fedcore.simulation.data.partitions import _repair, lognormal, pareto


def mixed(sizes, seed=0):
    """Labels with these class sizes, mixed, and not counted from 0."""
    return np.random.default_rng(seed).permutation(np.repeat(3 * np.arange(len(sizes)), sizes))


def check(deal, labels, clients):
    """Check what every partition promises; return the parts, and how often each example was dealt."""
    kept = labels.copy()
    parts, again = deal(), deal()
    np.testing.assert_array_equal(labels, kept)  # read-only
    assert len(parts) == clients
    for part, twin in zip(parts, again, strict=True):
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
        np.testing.assert_array_equal(part, twin)
    dealt = np.bincount(np.concatenate(parts), minlength=len(labels))
    assert dealt.max(initial=0) <= 1
    assert len(dealt) == len(labels)
    return parts, dealt


@pytest.mark.parametrize("law", [pareto, lognormal])
@given(
    clients=st.integers(1, 50),
    more=st.integers(0, 50),
    seed=st.integers(0, 2**32),
    smallest=st.integers(1, 100),
    spread=st.integers(0, 10_000),
)
def test_sizes_keep_their_bounds_and_come_from_the_seed(law, clients, more, seed, smallest, spread):
    sizes = law(clients, seed=seed, smallest=smallest, largest=smallest + spread)
    assert sizes.dtype == np.int64
    assert sizes.shape == (clients,)
    assert smallest <= sizes.min() <= sizes.max() <= smallest + spread
    longer = law(clients + more, seed=seed, smallest=smallest, largest=smallest + spread)
    np.testing.assert_array_equal(longer[:clients], sizes)


def test_the_pareto_law():
    sizes = pareto(100_000, seed=3, smallest=100, largest=10**9)
    for factor in (2, 4, 25, 100):
        assert (sizes >= 100 * factor).mean() == pytest.approx(factor**-0.5, abs=0.005)
    steep = pareto(100_000, seed=3, smallest=100, largest=10**9, index=2.0)
    assert (steep >= 200).mean() == pytest.approx(0.25, abs=0.005)


def test_what_is_above_the_cap_becomes_the_cap():
    free = pareto(1000, seed=1, smallest=10, largest=10**6)
    capped = pareto(1000, seed=1, smallest=10, largest=90)
    np.testing.assert_array_equal(capped, np.minimum(free, 90))
    assert (capped == 90).mean() == pytest.approx(1 / 3, abs=0.05)


def test_an_index_near_zero_does_not_overflow():
    assert pareto(200, seed=0, smallest=1, largest=7, index=1e-300).max() == 7


def test_the_lognormal_law():
    logs = np.log(lognormal(100_000, seed=0, smallest=1, largest=10**12, mean=12.0) - 1 + 0.5)
    assert logs.mean() == pytest.approx(12, abs=0.03)
    assert logs.std() == pytest.approx(2, abs=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 0}, "clients: expected an integer in 1..*got 0"),
        ({"smallest": 0}, "smallest: expected an integer in 1.*got 0"),
        ({"largest": 4}, "largest: expected an integer in 5.*got 4"),
        ({"largest": 2**53}, "largest: expected an integer in 5.."),
        ({"index": 0.0}, "index: expected a finite number > 0, got 0.0"),
        ({"index": float("nan")}, "index: expected a finite number > 0, got nan"),
    ],
)
def test_numbers_out_of_range(arguments, message):
    given = {"clients": 3, "smallest": 5, "largest": 9} | arguments
    with pytest.raises(RangeError, match=message):
        pareto(given.pop("clients"), seed=0, **given)


def test_a_lognormal_law_needs_finite_numbers():
    with pytest.raises(RangeError, match=r"(mean|deviation): expected a"):
        lognormal(3, seed=0, smallest=1, largest=9, deviation=-1.0)


OPTIONS = {
    "shards": {"shards_per_client": 2},
    "label-k": {"classes_per_client": 2},
    "dirichlet": {"alpha": 0.5},
    "one-label": {"smallest": 3},
}


@pytest.fixture(scope="module")
def dataset():
    return load("synthetic-iid", clients=10, seed=0, smallest=200, largest=200)


@pytest.mark.parametrize("name", partitions.REGISTRY)
def test_every_partition_by_its_name(dataset, name):
    parts = divide(dataset, name, 10, seed=3, **OPTIONS.get(name, {}))
    assert len(parts) == 10
    held = np.concatenate(parts)
    assert len(np.unique(held)) == len(held)
    if name != "natural":
        due = partitions.REGISTRY[name](dataset.train_y, 10, seed=3, **OPTIONS.get(name, {}))
        assert all(np.array_equal(part, twin) for part, twin in zip(parts, due, strict=True))
        other = divide(dataset, name, 10, seed=4, **OPTIONS.get(name, {}))
        assert any(not np.array_equal(part, twin) for part, twin in zip(parts, other, strict=True))


def test_an_unknown_name(dataset):
    with pytest.raises(UnknownNameError, match="partition: 'dirichle' is unknown; did you mean 'dirichlet'"):
        divide(dataset, "dirichle", 3, seed=0)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    clients=st.integers(1, 30),
    alpha=st.floats(1e-9, 1e9),
    least=st.integers(0, 4),
    seed=st.integers(0, 2**32),
)
def test_every_example_is_dealt_once_and_nobody_has_too_few(sizes, clients, alpha, least, seed):
    y = mixed(sizes)
    assume(len(y) >= clients * least)
    parts, dealt = check(lambda: dirichlet(y, clients, alpha, seed=seed, least=least), y, clients)
    assert dealt.min() == 1
    assert min(len(part) for part in parts) >= least


def test_the_shares_of_a_class_have_the_dirichlet_law():
    """Share p_i ~ Beta(alpha, (N - 1) alpha): mean 1/N, variance (N - 1) / (N^2 (N alpha + 1))."""
    y = np.repeat(np.arange(400), 500)
    parts = dirichlet(y, 5, 0.4, seed=0, least=0)
    shares = np.array([np.bincount(y[part], minlength=400) / 500 for part in parts])
    assert shares.mean(axis=1) == pytest.approx([0.2] * 5, abs=0.05)
    assert shares.var(axis=1).mean() == pytest.approx(4 / (25 * 3), rel=0.1)


def test_a_large_alpha_makes_clients_alike_and_a_small_one_gives_classes_away_whole():
    y = np.repeat(np.arange(10), 100)
    alike = np.array([np.bincount(y[part], minlength=10) for part in dirichlet(y, 10, 1e6, seed=0)])
    assert np.abs(alike - 10).max() <= 1
    apart = np.array([np.bincount(y[part], minlength=10) for part in dirichlet(y, 10, 1e-6, seed=0, least=0)])
    assert (apart.max(axis=0) == 100).all()


def test_the_empty_handed_get_what_they_miss_from_the_richest():
    y = np.zeros(100, int)
    free = dirichlet(y, 4, 1e-6, seed=0, least=0)
    sizes = [len(part) for part in free]
    assert sorted(sizes) == [0, 0, 0, 100]
    kept = dirichlet(y, 4, 1e-6, seed=0, least=3)
    assert sorted(len(part) for part in kept) == [3, 3, 3, 91]
    assert len(kept[sizes.index(100)]) == 91


def test_what_the_richest_gives_is_drawn_from_all_it_has():
    y = np.repeat([0, 1], 50)
    seed = next(
        seed for seed in range(20) if {len(part) for part in dirichlet(y, 2, 1e-6, seed=seed, least=0)} == {0, 100}
    )
    given = min(dirichlet(y, 2, 1e-6, seed=seed, least=20), key=len)
    assert 5 <= np.count_nonzero(y[given]) <= 15


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=7)


@given(sizes=SIZES, clients=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_every_example_is_dealt_once_in_equal_sizes(sizes, clients, seed):
    y = mixed(sizes)
    assume(len(y) >= clients)
    parts, dealt = check(lambda: iid(y, clients, seed=seed), y, clients)
    assert dealt.min() == 1
    held = [len(part) for part in parts]
    assert max(held) - min(held) <= 1


def test_every_client_has_the_whole_in_small():
    y = np.repeat(np.arange(10), 600)
    counts = [np.bincount(y[part], minlength=10) for part in iid(y, 10, seed=0)]
    assert np.abs(np.array(counts) - 60).max() < 5 * np.sqrt(60)
    assert np.std(counts) > 1  # drawn, not stratified


@given(
    sizes=SIZES,
    clients=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    smallest=st.integers(1, 3),
    index=st.floats(0.1, 5),
)
def test_pareto_sizes_without_a_cap_of_ones_own_always_fit(sizes, clients, seed, smallest, index):
    y = mixed(sizes)
    cap = len(y) // clients
    assume(cap >= smallest)
    parts, _ = check(lambda: iid_pareto(y, clients, seed=seed, smallest=smallest, index=index), y, clients)
    assert all(smallest <= len(part) <= cap for part in parts)


def test_the_twin_of_one_label_has_its_sizes():
    y = np.repeat(np.arange(10), 600)
    numbers = {"seed": 5, "smallest": 10, "largest": 60}
    sizes = [[len(part) for part in deal(y, 100, **numbers)] for deal in (iid_pareto, one_label)]
    assert sizes[0] == sizes[1]


@given(
    classes=st.integers(1, 7),
    k=st.integers(1, 7),
    clients=st.integers(1, 20),
    seed=st.integers(0, 2**32),
    most=st.none() | st.integers(1, 5),
)
def test_k_classes_each_split_evenly(classes, k, clients, seed, most):
    assume(k <= classes)
    y = mixed([20 + 3 * label for label in range(classes)])
    parts, dealt = check(lambda: label_k(y, clients, k, seed=seed, most_per_class=most), y, clients)
    holders = np.zeros(classes, int)
    for client, part in enumerate(parts):
        held = np.unique(y[part]) // 3
        assert len(held) == k
        assert client % classes in held
        holders[held] += 1
    for label in range(classes):
        sizes = [np.count_nonzero(y[part] == 3 * label) for part in parts]
        sizes = [size for size in sizes if size]
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
        everything = dealt[y == 3 * label].all()
        if most is None:
            assert everything == (holders[label] > 0)
        else:
            assert max(sizes, default=0) <= most


def test_the_other_classes_are_drawn_uniformly():
    y = np.repeat(np.arange(5), 3000)
    parts = label_k(y, 1000, 3, seed=0)
    pairs = np.zeros((5, 5))
    for client, part in enumerate(parts):
        pairs[client % 5, np.unique(y[part])] += 1
    others = pairs[~np.eye(5, dtype=bool)]
    assert pairs.diagonal().tolist() == [200] * 5
    assert others.mean() == 100  # 2 of the other 4
    assert np.abs(others - 100).max() < 5 * np.sqrt(200 * 0.25)


def test_with_all_classes_it_is_stratified():
    y = np.repeat(np.arange(10), 60)
    for part in label_k(y, 6, 10, seed=0):
        assert np.bincount(y[part]).tolist() == [10] * 10


def test_the_mimic_codes_setting():
    parts = label_k(np.repeat(np.arange(10), 6000), 30, 2, seed=0, most_per_class=1000)
    assert all(len(part) <= 2000 for part in parts)
    assert max(len(part) for part in parts) == 2000


def test_it_is_what_the_data_set_says():
    dataset = load("synthetic-iid", clients=3, seed=0, largest=60)
    assert all(part is due for part, due in zip(natural(dataset, 3), dataset.parts, strict=True))


def test_another_number_of_clients_is_refused():
    with pytest.raises(RangeError, match="clients: expected the 3 of 'synthetic-iid', got 4"):
        natural(load("synthetic-iid", clients=3, seed=0), 4)


def test_a_data_set_that_says_nothing_is_refused():
    with pytest.raises(
        RangeError, match="partition: expected a data set with a client for each example, got 'digits' without"
    ):
        natural(load("digits"), 3)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=7),
    clients=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    smallest=st.integers(1, 3),
)
def test_balanced_each_client_holds_one_label_and_everything_fits(sizes, clients, seed, smallest):
    y = mixed(sizes)
    turns = [len(range(turn, clients, len(sizes))) for turn in range(len(sizes))]
    cap = min(size // turn for size, turn in zip(sizes, turns, strict=True) if turn)
    assume(cap >= smallest)
    parts, _ = check(lambda: one_label(y, clients, seed=seed, smallest=smallest, balanced=True), y, clients)
    for client, part in enumerate(parts):
        assert set(y[part]) == {3 * (client % len(sizes))}
        assert smallest <= len(part) <= cap


MNIST = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])


def test_the_flexible_papers_setting():
    """Each device's label is drawn uniformly: the counts of 200 deals to 100 clients are multinomial."""
    drawn = np.zeros((200, 10), int)
    for seed in range(200):
        parts = one_label(MNIST, 100, seed=seed)
        labels = [np.unique(MNIST[part]) for part in parts]
        assert all(len(label) == 1 for label in labels)
        held = np.concatenate(parts)
        assert len(np.unique(held)) == len(held)
        drawn[seed] = np.bincount(np.ravel(labels), minlength=10)
    # Of one deal, the counts' squared distance from 10 over 10 is chi-square's with 9 degrees of freedom.
    squares = (np.square(drawn - 10) / 10).sum(axis=1)
    assert squares.mean() == pytest.approx(9, abs=4 * np.sqrt(18 / 200))
    assert squares.var() == pytest.approx(18, rel=0.5)
    total = drawn.sum(axis=0)
    assert (np.square(total - 2000) / 2000).sum() < 30


def test_the_cap_is_what_the_scarcest_class_can_give():
    parts = one_label(MNIST, 100, seed=0)
    clients = np.bincount([MNIST[part[0]] for part in parts], minlength=10)
    cap = min(held // count for held, count in zip(np.bincount(MNIST), clients, strict=True) if count)
    np.testing.assert_array_equal([len(part) for part in parts], pareto(100, seed=0, smallest=20, largest=cap))
    balanced = [len(part) for part in one_label(MNIST, 100, seed=0, balanced=True)]
    np.testing.assert_array_equal(balanced, pareto(100, seed=0, smallest=20, largest=542))


def test_a_cap_of_ones_own_may_be_above_an_even_share():
    y = np.repeat([0, 1], 1000)
    sizes = [len(part) for part in one_label(y, 8, seed=4, smallest=10, largest=700)]
    assert max(sizes) > 250


def test_equal_sizes():
    parts = one_label(np.repeat(np.arange(10), 600), 10, seed=0, smallest=500, largest=500, balanced=True)
    assert [len(part) for part in parts] == [500] * 10


def test_examples_are_drawn_at_random():
    y = np.zeros(1000, int)
    first, second = (one_label(y, 1, seed=seed, smallest=50, largest=50)[0] for seed in (0, 1))
    assert not np.array_equal(first, second)
    assert first.max() > 500


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    clients=st.integers(1, 9),
    per_client=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    distinct=st.booleans(),
)
def test_every_deal_is_a_partition(sizes: list[int], clients: int, per_client: int, seed: int, distinct: bool) -> None:
    classes, total = len(sizes), clients * per_client
    assume(total >= classes and min(sizes) >= -(-total // classes))
    assume(not distinct or per_client <= classes)
    labels = mixed(sizes)

    deal = partial(shards, labels, clients, per_client, seed=seed, distinct_classes=distinct)
    parts, dealt = check(deal, labels, clients)
    assert dealt.min() == 1
    for part in parts:
        held = len(np.unique(labels[part]))
        assert held == per_client if distinct else 1 <= held <= per_client


@given(clients=st.integers(2, 9), per_client=st.integers(1, 6), data=st.data())
def test_the_repair_ends_from_any_deal(clients: int, per_client: int, data: st.DataObject) -> None:
    classes = data.draw(st.integers(per_client, clients * per_client))
    cards = [i % classes for i in range(clients * per_client)]
    dealt = data.draw(st.permutations(cards))
    hands = [dealt[i * per_client : (i + 1) * per_client] for i in range(clients)]
    _repair(hands)
    assert sorted(label for hand in hands for label in hand) == sorted(cards)
    assert all(len(set(hand)) == per_client for hand in hands)


def test_the_worst_deal_is_repaired() -> None:
    hands = [[label] * 4 for label in range(4)]
    _repair(hands)
    assert [sorted(hand) for hand in hands] == [[0, 1, 2, 3]] * 4


def test_the_mimic_setting() -> None:
    labels = np.repeat(np.arange(10), 6000)
    parts = shards(labels, 30, 2, seed=0)
    assert [len(part) for part in parts] == [2000] * 30
    pairs = [tuple(np.unique(labels[part], return_counts=True)[1].tolist()) for part in parts]
    assert set(pairs) <= {(1000, 1000), (2000,)}
    parts = shards(labels, 30, 2, seed=0, distinct_classes=True)
    assert all(np.unique(labels[part], return_counts=True)[1].tolist() == [1000, 1000] for part in parts)


def test_left_over_shards_go_to_the_largest_classes() -> None:
    labels = np.repeat([0, 1, 2], [10, 30, 20])
    parts = shards(labels, 5, 1, seed=0)
    held = np.bincount([labels[part[0]] for part in parts])
    assert held.tolist() == [1, 2, 2]
    assert sorted(len(part) for part in parts) == [10, 10, 10, 15, 15]


def test_examples_and_shards_are_dealt_at_random() -> None:
    labels = np.repeat(np.arange(4), 50)
    first, second = (shards(labels, 4, 2, seed=seed) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    inside = first[0][labels[first[0]] == labels[first[0][0]]]
    assert (np.diff(inside) > 1).any()  # a block of the file would be no random shard


LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), 40))


@pytest.fixture
def partitioner():
    reason = "Flower Datasets is not installed (pip install flwr-datasets)"
    return pytest.importorskip("flwr_datasets.partitioner", reason=reason)


def check_flower(parts, clients):
    assert len(parts) == clients
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(200))
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()


def test_in_equal_parts(partitioner):
    parts = from_flower(partitioner.IidPartitioner(4), LABELS)
    check_flower(parts, 4)
    assert [len(part) for part in parts] == [50] * 4


def test_by_the_label(partitioner):
    parts = from_flower(
        partitioner.PathologicalPartitioner(5, "label", 1, class_assignment_mode="deterministic"), LABELS
    )
    check_flower(parts, 5)
    assert [len(set(LABELS[part])) for part in parts] == [1] * 5


def test_by_a_dirichlet_law_with_a_seed_of_its_own(partitioner):
    first, again = (
        from_flower(partitioner.DirichletPartitioner(4, "label", 0.5, min_partition_size=1, seed=7), LABELS)
        for _ in range(2)
    )
    check_flower(first, 4)
    assert all(np.array_equal(part, twin) for part, twin in zip(first, again, strict=True))


def test_one_that_has_a_data_set_is_refused(partitioner):
    used = partitioner.IidPartitioner(4)
    from_flower(used, LABELS)
    with pytest.raises(RangeError, match=r"partitioner: .* without a data set"):
        from_flower(used, LABELS)


def test_labels_are_checked(partitioner):
    with pytest.raises(DtypeError, match="labels: expected int"):
        from_flower(partitioner.IidPartitioner(4), LABELS / 2)


def test_where_it_is_not_installed_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match="pip install flwr-datasets"):
        from_flower(object(), LABELS)


FIVE = np.zeros(5, int)
SOME = {
    "shards": partial(shards, shards_per_client=2, seed=0),
    "label-k": partial(label_k, classes_per_client=1, seed=0),
    "dirichlet": partial(dirichlet, alpha=1.0, seed=0),
    "one-label": partial(one_label, seed=0),
    "iid": partial(iid, seed=0),
    "iid-pareto": partial(iid_pareto, seed=0),
}


@pytest.mark.parametrize("name", [name for name in partitions.REGISTRY if name != "natural"])
def test_labels_and_clients_are_checked_by_every_partition(name):
    with pytest.raises(RangeError, match=r"^clients: expected an integer .* got 0"):
        SOME[name](FIVE, 0)
    with pytest.raises(RangeError, match=r"^labels: .* got none"):
        SOME[name](FIVE[:0], 1)
    with pytest.raises(DtypeError, match=r"^labels: expected int.* got float64"):
        SOME[name](np.zeros(5), 1)
    with pytest.raises(ShapeError, match=r"^labels: .* got shape \(5, 1\)"):
        SOME[name](FIVE[:, None], 1)


@pytest.mark.parametrize(
    ("name", "labels", "clients", "options", "message"),
    [
        ("dirichlet", FIVE, 1, {"alpha": 0.0}, "alpha: expected a finite number > 0, got 0.0"),
        ("dirichlet", FIVE, 1, {"alpha": float("nan")}, "alpha: expected a finite number > 0, got nan"),
        ("dirichlet", FIVE, 1, {"alpha": float("inf")}, "alpha: expected a finite number > 0, got inf"),
        ("dirichlet", FIVE, 1, {"least": -1}, "least: expected an integer >= 0, got -1"),
        ("dirichlet", FIVE, 3, {"least": 2}, "labels: expected at least 6 examples, 2 a"),
        ("iid", FIVE, 6, {}, "labels: expected at least 6 examples.* got 5"),
        ("iid-pareto", np.zeros(9, int), 3, {"smallest": 0}, "smallest: expected an integer in 1"),
        ("iid-pareto", np.zeros(9, int), 3, {"largest": 3}, "largest: expected an integer in 20.."),
        ("iid-pareto", np.zeros(9, int), 3, {"index": 0.0}, "index: expected a finite number > 0"),
        ("iid-pareto", np.zeros(9, int), 3, {"smallest": 4}, "labels: expected at least 4 examples for each client"),
        ("iid-pareto", np.zeros(9, int), 3, {"smallest": 4, "largest": 4}, "labels: expected 12 examples .*, got 9"),
        ("label-k", FIVE, 1, {"classes_per_client": 0}, "classes_per_client: expected an integer >= 1, got 0"),
        ("label-k", FIVE, 1, {"most_per_class": 0}, "most_per_class: expected an integer >= 1"),
        ("label-k", FIVE, 1, {"classes_per_client": 2}, "labels: expected at least 2 classes, .* got 1"),
        ("label-k", FIVE, 6, {}, "labels: expected at least 6 examples of class 0, got 5"),
        ("one-label", FIVE, 1, {"smallest": 0}, "smallest: expected an integer in 1.* got 0"),
        ("one-label", FIVE, 1, {"largest": 4}, "largest: expected an integer in 20.*got 4"),
        ("one-label", FIVE, 1, {"index": -1.0}, "index: expected a finite number > 0"),
        ("one-label", np.zeros(39, int), 2, {}, "labels: expected at least 20 examples for each client, got 19"),
        (
            "one-label",
            np.repeat([0, 7], [40, 39]),
            4,
            {"largest": 20},
            "labels: expected 40 examples of class 7 for its clients, got 39",
        ),
        ("shards", FIVE, 2, {"shards_per_client": 0}, "shards_per_client: expected an integer >= 1"),
        ("shards", np.arange(5), 2, {}, "labels: expected 1 .. 4 classes"),
        ("shards", np.arange(4), 4, {}, "labels: expected at least 2 examples of class 0"),
        (
            "shards",
            np.repeat([0, 1], 9),
            2,
            {"shards_per_client": 3, "distinct_classes": True},
            "shards_per_client: expected at most the 2 classes, got 3",
        ),
    ],
)
def test_impossible_partitions_are_refused(name, labels, clients, options, message):
    with pytest.raises(RangeError, match=f"^{message}"):
        SOME[name](labels, clients, **options)
