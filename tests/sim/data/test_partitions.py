"""Partitions and laws of sizes."""

import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedcore.errors import DtypeError, MissingDependencyError, RangeError, ShapeError, UnknownNameError
from fedcore.sim.data import dirichlet, divide, from_flower, iid, iid_pareto, load, one_label, partitions, shards
from fedcore.sim.data.partitions import _repair, label_k, lognormal, natural, pareto


def mixed(sizes, seed=0):
    """Mixed labels with these class sizes; the labels are multiples of 3."""
    return np.random.default_rng(seed).permutation(np.repeat(3 * np.arange(len(sizes)), sizes))


def check(deal, labels, clients):
    """Check the contract of a partition; return the parts, and how often each example was dealt."""
    kept = labels.copy()
    parts, again = deal(), deal()
    np.testing.assert_array_equal(labels, kept)  # The labels are read-only.
    assert len(parts) == clients
    for part, other in zip(parts, again, strict=True):
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
        np.testing.assert_array_equal(part, other)
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
def test_sizes_are_bounded_and_depend_on_the_seed(law, clients, more, seed, smallest, spread):
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


def test_sizes_above_the_cap_become_the_cap():
    free = pareto(1000, seed=1, smallest=10, largest=10**6)
    capped = pareto(1000, seed=1, smallest=10, largest=90)
    np.testing.assert_array_equal(capped, np.minimum(free, 90))
    assert (capped == 90).mean() == pytest.approx(1 / 3, abs=0.05)
    assert pareto(200, seed=0, smallest=1, largest=7, index=1e-300).max() == 7


def test_the_lognormal_law():
    logs = np.log(lognormal(100_000, seed=0, smallest=1, largest=10**12, mean=12.0) - 1 + 0.5)
    assert logs.mean() == pytest.approx(12, abs=0.03)
    assert logs.std() == pytest.approx(2, abs=0.03)


@pytest.mark.parametrize(
    ("law", "arguments"),
    [
        (pareto, {"clients": 0}),
        (pareto, {"smallest": 0}),
        (pareto, {"largest": 4}),
        (pareto, {"largest": 2**53}),
        (pareto, {"index": 0.0}),
        (pareto, {"index": float("nan")}),
        (lognormal, {"deviation": -1.0}),
        (lognormal, {"mean": float("inf")}),
    ],
)
def test_numbers_out_of_range_are_rejected(law, arguments):
    with pytest.raises(RangeError, match=rf"^{next(iter(arguments))}\b"):
        law(**{"clients": 3, "seed": 0, "smallest": 5, "largest": 9} | arguments)


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
        expected = partitions.REGISTRY[name](dataset.train_y, 10, seed=3, **OPTIONS.get(name, {}))
        assert all(np.array_equal(part, other) for part, other in zip(parts, expected, strict=True))
        other = divide(dataset, name, 10, seed=4, **OPTIONS.get(name, {}))
        assert any(not np.array_equal(part, other) for part, other in zip(parts, other, strict=True))


WRONG = [([[4], [5]], RangeError), ([np.ones(9, bool)] * 3, DtypeError), ([[4]] * 3, RangeError), (None, RangeError)]


@pytest.mark.parametrize(("parts", "error"), WRONG)
def test_the_parts_of_a_user_s_partition_are_checked(dataset, parts, error, monkeypatch):
    monkeypatch.setitem(partitions.REGISTRY, "own", lambda labels, clients, *, seed: parts)
    with pytest.raises(error, match=r"^partition 'own'"):
        divide(dataset, "own", 3, seed=0)
    parts = [[0], (2, 1), np.int16([3])]
    assert [part.dtype for part in divide(dataset, "own", 3, seed=0)] == [np.int64] * 3


def test_an_unknown_name_gets_a_suggestion(dataset):
    with pytest.raises(UnknownNameError, match=r"^partition: .* did you mean 'dirichlet'"):
        divide(dataset, "dirichle", 3, seed=0)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=7),
    clients=st.integers(1, 30),
    alpha=st.floats(1e-9, 1e9),
    least=st.integers(0, 4),
    seed=st.integers(0, 2**32),
)
def test_dirichlet_deals_every_example_once_and_the_least_to_each_client(sizes, clients, alpha, least, seed):
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


def test_alpha_goes_from_whole_classes_to_equal_clients():
    y = np.repeat(np.arange(10), 100)
    alike = np.array([np.bincount(y[part], minlength=10) for part in dirichlet(y, 10, 1e6, seed=0)])
    assert np.abs(alike - 10).max() <= 1
    apart = np.array([np.bincount(y[part], minlength=10) for part in dirichlet(y, 10, 1e-6, seed=0, least=0)])
    assert (apart.max(axis=0) == 100).all()


def test_missing_examples_come_from_the_largest_client():
    y = np.zeros(100, int)
    free = dirichlet(y, 4, 1e-6, seed=0, least=0)
    sizes = [len(part) for part in free]
    assert sorted(sizes) == [0, 0, 0, 100]
    kept = dirichlet(y, 4, 1e-6, seed=0, least=3)
    assert sorted(len(part) for part in kept) == [3, 3, 3, 91]
    assert len(kept[sizes.index(100)]) == 91


def test_moved_examples_are_drawn_from_the_whole_part():
    y = np.repeat([0, 1], 50)
    seed = next(
        seed for seed in range(20) if {len(part) for part in dirichlet(y, 2, 1e-6, seed=seed, least=0)} == {0, 100}
    )
    given = min(dirichlet(y, 2, 1e-6, seed=seed, least=20), key=len)
    assert 5 <= np.count_nonzero(y[given]) <= 15


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=7)


@given(sizes=SIZES, clients=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_iid_deals_every_example_once_in_equal_sizes(sizes, clients, seed):
    y = mixed(sizes)
    assume(len(y) >= clients)
    parts, dealt = check(lambda: iid(y, clients, seed=seed), y, clients)
    assert dealt.min() == 1
    held = [len(part) for part in parts]
    assert max(held) - min(held) <= 1


def test_iid_clients_have_all_classes():
    y = np.repeat(np.arange(10), 600)
    counts = [np.bincount(y[part], minlength=10) for part in iid(y, 10, seed=0)]
    assert np.abs(np.array(counts) - 60).max() < 5 * np.sqrt(60)
    assert np.std(counts) > 1  # The deal is not stratified.


@given(
    sizes=SIZES,
    clients=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    smallest=st.integers(1, 3),
    index=st.floats(0.1, 5),
)
def test_pareto_sizes_with_the_default_cap_always_fit(sizes, clients, seed, smallest, index):
    y = mixed(sizes)
    cap = len(y) // clients
    assume(cap >= smallest)
    parts, _ = check(lambda: iid_pareto(y, clients, seed=seed, smallest=smallest, index=index), y, clients)
    assert all(smallest <= len(part) <= cap for part in parts)


def test_iid_pareto_has_the_sizes_of_one_label():
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
def test_label_k_gives_k_classes_split_evenly(classes, k, clients, seed, most):
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


def test_label_k_draws_the_other_classes_uniformly():
    y = np.repeat(np.arange(5), 3000)
    parts = label_k(y, 1000, 3, seed=0)
    pairs = np.zeros((5, 5))
    for client, part in enumerate(parts):
        pairs[client % 5, np.unique(y[part])] += 1
    others = pairs[~np.eye(5, dtype=bool)]
    assert pairs.diagonal().tolist() == [200] * 5
    assert others.mean() == 100  # Each client has 2 of the other 4 classes.
    assert np.abs(others - 100).max() < 5 * np.sqrt(200 * 0.25)


def test_label_k_in_the_setting_of_the_mimic_code():
    parts = label_k(np.repeat(np.arange(10), 6000), 30, 2, seed=0, most_per_class=1000)
    assert all(len(part) <= 2000 for part in parts)
    assert max(len(part) for part in parts) == 2000


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=7),
    clients=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    smallest=st.integers(1, 3),
)
def test_balanced_one_label_gives_one_label_to_each_client(sizes, clients, seed, smallest):
    y = mixed(sizes)
    turns = [len(range(turn, clients, len(sizes))) for turn in range(len(sizes))]
    cap = min(size // turn for size, turn in zip(sizes, turns, strict=True) if turn)
    assume(cap >= smallest)
    parts, _ = check(lambda: one_label(y, clients, seed=seed, smallest=smallest, balanced=True), y, clients)
    for client, part in enumerate(parts):
        assert set(y[part]) == {3 * (client % len(sizes))}
        assert smallest <= len(part) <= cap


def test_natural_is_the_data_set_s_own_partition():
    dataset = load("synthetic-iid", clients=3, seed=0, largest=60)
    assert all(part is own for part, own in zip(natural(dataset, 3), dataset.parts, strict=True))
    with pytest.raises(RangeError, match=r"^clients\b"):
        natural(dataset, 4)
    with pytest.raises(RangeError, match=r"^partition: 'digits'"):
        natural(load("digits"), 3)


MNIST = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])


def test_one_label_draws_labels_uniformly():
    """The counts of 200 deals to 100 clients are multinomial, as in the Flexible paper."""
    drawn = np.zeros((200, 10), int)
    for seed in range(200):
        parts = one_label(MNIST, 100, seed=seed)
        labels = [np.unique(MNIST[part]) for part in parts]
        assert all(len(label) == 1 for label in labels)
        held = np.concatenate(parts)
        assert len(np.unique(held)) == len(held)
        drawn[seed] = np.bincount(np.ravel(labels), minlength=10)
    # For one deal, sum (count - 10)^2 / 10 follows a chi-square law with 9 degrees of freedom.
    squares = (np.square(drawn - 10) / 10).sum(axis=1)
    assert squares.mean() == pytest.approx(9, abs=4 * np.sqrt(18 / 200))
    assert squares.var() == pytest.approx(18, rel=0.5)
    total = drawn.sum(axis=0)
    assert (np.square(total - 2000) / 2000).sum() < 30


def test_the_default_cap_of_one_label_fits_the_smallest_class():
    parts = one_label(MNIST, 100, seed=0)
    clients = np.bincount([MNIST[part[0]] for part in parts], minlength=10)
    cap = min(held // count for held, count in zip(np.bincount(MNIST), clients, strict=True) if count)
    np.testing.assert_array_equal([len(part) for part in parts], pareto(100, seed=0, smallest=20, largest=cap))
    balanced = [len(part) for part in one_label(MNIST, 100, seed=0, balanced=True)]
    np.testing.assert_array_equal(balanced, pareto(100, seed=0, smallest=20, largest=542))


def test_a_custom_cap_may_exceed_an_even_share():
    y = np.repeat([0, 1], 1000)
    sizes = [len(part) for part in one_label(y, 8, seed=4, smallest=10, largest=700)]
    assert max(sizes) > 250
    equal = one_label(np.repeat(np.arange(10), 600), 10, seed=0, smallest=500, largest=500, balanced=True)
    assert [len(part) for part in equal] == [500] * 10


def test_one_label_draws_examples_at_random():
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
def test_shards_are_a_partition(sizes, clients, per_client, seed, distinct):
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
def test_the_repair_ends_for_any_deal(clients, per_client, data):
    classes = data.draw(st.integers(per_client, clients * per_client))
    cards = [i % classes for i in range(clients * per_client)]
    dealt = data.draw(st.permutations(cards))
    hands = [dealt[i * per_client : (i + 1) * per_client] for i in range(clients)]
    _repair(hands)
    assert sorted(label for hand in hands for label in hand) == sorted(cards)
    assert all(len(set(hand)) == per_client for hand in hands)


def test_the_worst_deal_is_repaired():
    hands = [[label] * 4 for label in range(4)]
    _repair(hands)
    assert [sorted(hand) for hand in hands] == [[0, 1, 2, 3]] * 4


def test_shards_in_the_setting_of_the_mimic_paper():
    labels = np.repeat(np.arange(10), 6000)
    parts = shards(labels, 30, 2, seed=0)
    assert [len(part) for part in parts] == [2000] * 30
    pairs = [tuple(np.unique(labels[part], return_counts=True)[1].tolist()) for part in parts]
    assert set(pairs) <= {(1000, 1000), (2000,)}
    parts = shards(labels, 30, 2, seed=0, distinct_classes=True)
    assert all(np.unique(labels[part], return_counts=True)[1].tolist() == [1000, 1000] for part in parts)


def test_left_over_shards_go_to_the_largest_classes():
    labels = np.repeat([0, 1, 2], [10, 30, 20])
    parts = shards(labels, 5, 1, seed=0)
    assert np.bincount([labels[part[0]] for part in parts]).tolist() == [1, 2, 2]
    assert sorted(len(part) for part in parts) == [10, 10, 10, 15, 15]


def test_examples_and_shards_are_dealt_at_random():
    labels = np.repeat(np.arange(4), 50)
    first, second = (shards(labels, 4, 2, seed=seed) for seed in (0, 1))
    assert any(not np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    inside = first[0][labels[first[0]] == labels[first[0][0]]]
    assert (np.diff(inside) > 1).any()  # A shard is no contiguous block.


LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), 40))


@pytest.fixture
def partitioner():
    reason = "Flower Datasets is not installed (pip install flwr-datasets)"
    return pytest.importorskip("flwr_datasets.partitioner", reason=reason)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Iid", {}),
        ("Pathological", dict(num_classes_per_partition=1, class_assignment_mode="deterministic")),
        ("Dirichlet", dict(alpha=0.5, min_partition_size=1, seed=7)),
    ],
)
def test_flower_s_partitioners(partitioner, name, options):
    options = options | {"num_partitions": 5} | ({} if name == "Iid" else {"partition_by": "label"})
    make = partial(getattr(partitioner, f"{name}Partitioner"), **options)
    parts, dealt = check(lambda: from_flower(make(), LABELS), LABELS, 5)
    assert dealt.min() == 1
    if name == "Pathological":
        assert [len(set(LABELS[part])) for part in parts] == [1] * 5


def test_a_partitioner_with_a_data_set_is_rejected(partitioner):
    used = partitioner.IidPartitioner(4)
    from_flower(used, LABELS)
    with pytest.raises(RangeError, match=r"^partitioner\b"):
        from_flower(used, LABELS)


def test_flower_partitions_need_integer_labels(partitioner):
    with pytest.raises(DtypeError, match=r"^labels\b"):
        from_flower(partitioner.IidPartitioner(4), LABELS / 2)


def test_without_flower_datasets_the_error_has_the_command_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingDependencyError, match="pip install flwr-datasets"):
        from_flower(object(), LABELS)


FIVE, NINE = np.zeros(5, int), np.zeros(9, int)
SOME = {
    "shards": partial(shards, shards_per_client=2, seed=0),
    "label-k": partial(label_k, classes_per_client=1, seed=0),
    "dirichlet": partial(dirichlet, alpha=1.0, seed=0),
    "one-label": partial(one_label, seed=0),
    "iid": partial(iid, seed=0),
    "iid-pareto": partial(iid_pareto, seed=0),
}


@pytest.mark.parametrize("name", [name for name in partitions.REGISTRY if name != "natural"])
def test_every_partition_checks_labels_and_clients(name):
    for labels, clients, error, argument in (
        (FIVE, 0, RangeError, "clients"),
        (FIVE[:0], 1, RangeError, "labels"),
        (np.zeros(5), 1, DtypeError, "labels"),
        (FIVE[:, None], 1, ShapeError, "labels"),
    ):
        with pytest.raises(error, match=rf"^{argument}\b"):
            SOME[name](labels, clients)


NUMBERS = [
    *(("dirichlet", 1, {"alpha": value}, "alpha") for value in (0.0, float("nan"), float("inf"))),
    *(("iid-pareto", 3, {name: value}, name) for name, value in (("smallest", 0), ("largest", 3), ("index", 0.0))),
    *(("label-k", 1, {name: 0}, name) for name in ("classes_per_client", "most_per_class")),
    *(("one-label", 1, {name: value}, name) for name, value in (("smallest", 0), ("largest", 4), ("index", -1.0))),
    *(("dirichlet", 1, {"least": -1}, "least"), ("dirichlet", 3, {"least": 2}, "labels: .*6 examples")),
    *(("iid", 6, {}, "labels: .*6 examples.* got 5"), ("shards", 2, {"shards_per_client": 0}, "shards_per_client")),
    ("label-k", 1, {"classes_per_client": 2}, "classes_per_client=2"),
    ("label-k", 6, {}, "labels: .*6 examples of class 0, got 5"),
]
LABELLED = [
    ("iid-pareto", NINE, 3, {"smallest": 4}, "labels: .*4 examples for each client"),
    ("iid-pareto", NINE, 3, {"smallest": 4, "largest": 4}, "labels: .*12 examples .*, got 9"),
    ("one-label", np.zeros(39, int), 2, {}, "labels: .*20 examples for each client, got 19"),
    ("one-label", np.repeat([0, 7], [40, 39]), 4, {"largest": 20}, "labels: .*40 examples of class 7 .* got 39"),
    ("shards", np.arange(5), 2, {}, "labels: .*4 classes"),
    ("shards", np.arange(4), 4, {}, "labels: .*2 examples of class 0"),
    ("shards", np.repeat([0, 1], 9), 2, {"shards_per_client": 3, "distinct_classes": True}, "shards_per_client"),
]
LABELLED += [(name, NINE if name == "iid-pareto" else FIVE, *others) for name, *others in NUMBERS]


@pytest.mark.parametrize(("name", "labels", "clients", "options", "message"), LABELLED)
def test_impossible_partitions_are_rejected(name, labels, clients, options, message):
    with pytest.raises(RangeError, match=rf"^{message}"):
        SOME[name](labels, clients, **options)
