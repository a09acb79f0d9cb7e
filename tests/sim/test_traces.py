"""Laws of shares and their files."""

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcore.errors import FedcoreError, MissingDataError, RangeError
from fedcore.sim.participation import Generated, Recorded, Trace, read_traces

MEAN = [1, 0.85, 0.75, 0.65, 0.55, 0.40, 0.55, 0.70]
"""This project's own; all committed results with traces depend on them."""
STDEV = [0, 0.148, 0.113, 0.117, 0.148, 0.233, 0.223, 0.183]


def test_the_packaged_traces_have_the_papers_standard_deviations():
    traces = read_traces("flexible")
    assert [trace.stdev for trace in traces] == STDEV
    assert [trace.mean for trace in traces] == MEAN
    assert [trace.least > 0 for trace in traces] == [True] * 5 + [False] * 3


def test_the_packaged_file_marks_its_means_as_stand_ins():
    from importlib import resources

    text = (resources.files("fedcore.sim") / "flexible_traces.csv").read_text()
    assert "THIS PROJECT'S OWN stand-in" in text


@pytest.mark.parametrize("number", range(8))
def test_shares_have_the_mean_and_standard_deviation_of_the_file(number):
    trace = read_traces("flexible")[number]
    shares = trace.draw(np.random.default_rng(number), 100_000)
    assert shares.min() >= trace.least
    assert shares.max() <= 1
    assert abs(shares.mean() - trace.mean) <= 4.5 * trace.stdev / np.sqrt(100_000)
    assert abs(shares.std() - trace.stdev) < 0.003


NORMALS = np.array([NormalDist().inv_cdf((i + 0.5) / 4000) for i in range(4000)])


class Quantiles:
    """Equally spaced quantiles instead of random numbers: the moments are then nearly exact."""

    def standard_normal(self, count):
        assert count == len(NORMALS)
        return NORMALS


@pytest.mark.parametrize(
    ("mean", "stdev", "least"),
    [
        (0.5, 0.1, 0.0),
        (0.5, 0.3, 0.2),
        (0.9, 0.2, 0.0),
        (0.3, 0.35, 0.0),
        (0.6, 0.35, 0.1),
        (0.75, 0.2, 0.5),
        (0.5, 1e-4, 0.0),
        (0.3, 0.45, 0.0),
    ],
)
def test_moments_survive_clipping_at_either_end_and_at_both(mean, stdev, least):
    shares = Generated("x", mean, stdev, least).draw(Quantiles(), len(NORMALS))
    assert abs(shares.mean() - mean) < 1e-4
    assert abs(shares.std() - stdev) < 1e-3


def test_without_a_standard_deviation_every_share_is_the_mean():
    assert set(Generated("x", 0.9, 0).draw(np.random.default_rng(0), 50).tolist()) == {0.9}


@given(st.floats(0.01, 0.99), st.floats(0.0, 0.9), st.floats(0.0, 0.5))
def test_all_possible_moments_are_met(mean, part, least):
    mean = least + (1 - least) * mean
    stdev = part * np.sqrt((mean - least) * (1 - mean))
    shares = Generated("x", mean, stdev, least).draw(Quantiles(), len(NORMALS))
    assert abs(shares.mean() - mean) < 2e-3
    assert abs(shares.std() - stdev) < 4e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Generated("a", 1.5, 0), "mean"),
        (lambda: Generated("a", 0.1, 0, least=0.2), "mean"),
        (lambda: Generated("a", 0.5, 0.5), r"stdev=0.5: .*\[0, 0\.5\)"),
        (lambda: Generated("a", 0.5, 0.4, least=0.2), r"stdev=0.4: .*\[0, 0\.3873\)"),
        (lambda: Generated("a", 0.5, -0.1), "stdev"),
        (lambda: Generated("a", 1.0, 0.1), "stdev"),
        (lambda: Generated("a", 0.5, float("nan")), "stdev"),
        (lambda: Generated("a", 0.5, 0.1, least=-1), "least"),
        (lambda: Recorded("a", ()), "needs at least one share"),
        (lambda: Recorded("a", (0.5, 1.5)), "share 1"),
    ],
)
def test_impossible_traces_are_rejected(call, message):
    with pytest.raises(RangeError, match=rf"^trace 'a': {message}"):
        call()


def test_a_file_of_moments(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("# mine\ntrace,mean,stdev,least\nslow, 0.25, 0.1, 0\n\n# and\nfast,0.9,0,0.5\n")
    assert read_traces(file) == (Generated("slow", 0.25, 0.1), Generated("fast", 0.9, 0, 0.5))
    assert Trace(4, str(file)).traces == read_traces(str(file))


def test_a_file_of_shares(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("# measured\nphone,tablet\n0.5,1\n0,0.25\n1,1\n")
    assert read_traces(file) == (Recorded("phone", (0.5, 0, 1)), Recorded("tablet", (1, 0.25, 1)))


def active_in(pattern, rounds):
    return [pattern.active(round).clients.tolist() for round in range(rounds)]


def test_a_log_is_replayed_round_by_round(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("round,client\n# of a real system\n0,2\n0,0\n3,1\n1,2\n", encoding="utf-8-sig")  # as Excel writes
    pattern = Trace(4, str(file))  # clients 0 to 3; the last one never takes part
    assert active_in(pattern, 6) == [[0, 2], [2], [], [1], [0, 2], [2]]
    assert pattern.active(0).steps(5).tolist() == [5, 5]
    with pytest.raises(RangeError, match="traces: the log has 3 clients, not 4"):
        Trace(4, read_traces(file))


def test_a_log_with_names_and_shares(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("round,client,share\n0,site-b,0.5\n1,site-a,1\n1,site-b,0.2\n")
    pattern = Trace(2, file)
    assert active_in(pattern, 2) == [[1], [0, 1]]
    assert [pattern.active(round).steps(10).tolist() for round in (0, 1)] == [[5], [10, 2]]
    file.write_text("round,client\n0,101\n1,7\n")  # numbers of all clients are names too
    assert active_in(Trace(2, file), 2) == [[1], [0]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,1\n0,3\n", "the log must name all 3 clients, or number them from 0; it names 2"),
        ("0,a\n", "the log must name all 3 clients"),
        ("0,a\n0,b\n0,c\n0,d\n", "the log must name all 3 clients, .* it names 4"),
        ("0,1\n# later\n0,1\n", "line 4: names client 1 in round 0 a second time"),
        ("1.5,1\n", "line 2: the round must be an integer in 0..999999, got '1.5'"),
        ("-1,1\n", "line 2: the round must be an integer in 0..999999, got '-1'"),
        ("1000000000000,1\n", "line 2: the round must be an integer in 0..999999, got '1000000000000'"),
    ],
)
def test_a_malformed_log_is_rejected_with_its_line(tmp_path, text, message):
    file = tmp_path / "log.csv"
    file.write_text(f"round,client\n{text}")
    with pytest.raises(MissingDataError, match=rf"traces: {file}: {message}"):
        read_traces(file, clients=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a header and at least one row, got 0 lines"),
        ("phone,tablet\n", "expected a header and at least one row, got 1 lines"),
        ("a,b\n0.5,1\n0.5\n", "expected 2 cells in line 3, got 1"),
        ("a,b\n0.5,x\n", "could not convert string to float: 'x'"),
        ("a\n0.5\n1.5\n", "trace 'a': share 1"),
        ("round,name\n1,0\n", "unknown header round,name; a log has round,client or round,client,share"),
        ("a\nnan\n", "trace 'a': share 0"),
        (f"a,b\n1,{'1' * 200_000}\n", "line 2: field larger"),
        ("trace,mean,stdev,least\nslow,0.5,0.9,0\n", "trace 'slow': stdev"),
        ("trace,mean,stdev,least\nslow,0.5,half,0\n", "could not convert string to float: 'half'"),
    ],
)
def test_a_malformed_file_is_rejected_with_its_line(tmp_path, text, message):
    file = tmp_path / "mine.csv"
    file.write_text(text)
    with pytest.raises(MissingDataError, match=rf"traces: {file}: {message}"):
        read_traces(file)


def test_a_log_that_starts_in_round_1_logs_a_warning(tmp_path, caplog):
    for start in (0, 1):
        file = tmp_path / f"{start}.csv"
        file.write_text(f"round,client\n{start},0\n3,1\n")
        Trace(2, file), Trace(2, file)
    (line,) = caplog.messages
    assert f"{tmp_path}/1.csv: the log starts in round 1" in line


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(MissingDataError, match=r"traces: cannot read .*nowhere\.csv"):
        read_traces(tmp_path / "nowhere.csv")
    (tmp_path / "bytes.csv").write_bytes(b"a\n\xff\n")
    with pytest.raises(FedcoreError, match="traces: cannot read"):
        read_traces(tmp_path / "bytes.csv")
