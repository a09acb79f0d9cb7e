from dataclasses import replace

from fedcore.reports.statistics import cost_table


def cells(records, algorithm):
    return cost_table(records).set_index("algorithm").loc[algorithm].to_dict()


def test_traffic_seconds_and_medians(record):
    seconds = {"broadcast": 0.5, "local": 2.0}
    first, second = (
        replace(
            made,
            rounds=[
                replace(
                    line,
                    seconds=seconds,
                    bytes=3_000_000,
                    bytes_down=500_000,
                    uploadings=2 * (line.round + 1),
                    diversity=float(line.round),
                    correction_norm=None,
                )
                for line in made.rounds
            ],
        )
        for made in (record("A", 0, seed, [0.5] * 3) for seed in (0, 1))
    )
    assert cells([first, second], "A") == {
        "vectors up": "2",
        "MB up": "9.0",
        "MB down": "1.5",
        "broadcast s": "1.5",
        "local s": "6.0",
        "diversity": "1",
        "correction_norm": "–",
        "staleness": "–",
    }


def test_records_of_older_versions_and_trials_without_rounds(record):
    records = [record("A", 0, 0, [0.5, 0.6]), record("B", 1, 0, [], rounds=2)]
    row = cells(records, "A")
    assert (row["vectors up"], row["MB down"], row["train s"]) == ("–", "–", "1.0")
    assert list(cost_table(records)["algorithm"]) == ["A"]
