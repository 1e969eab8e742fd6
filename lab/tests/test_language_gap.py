"""The share of the gap between local and full attention, and step times beside it."""

import pytest

from language_records import record
from tensor_memory_lab.commands.run import summary
from tensor_memory_lab.commands.sweep import _line
from tensor_memory_lab.commands.workers import Job, Outcome
from tensor_memory_lab.records.comparison import compare
from tensor_memory_lab.records.gap import gap_rows, gap_table, step_ms
from tensor_memory_lab.records.report import write_report


def table():
    return [
        record("base", 100.0, step_ms=18.0),
        record("local", 120.0, step_ms=20.0),
        record("tensor-local", 110.0, seed=0, step_ms=24.0),
        record("tensor-local", 112.0, seed=1, step_ms=28.0),
        record("tensor-local", 90.0, step_ms=99.0, shared=True, placement="after_attention"),
        record("local", 110.0, window=128),
        record("tensor-local", 111.0, window=128),
    ]


def test_shares_are_measured_against_local_of_the_same_window():
    (comparison,) = compare(table())
    found = {row["method"]: row for row in gap_table(comparison)}
    assert found["base"]["gap closed"] == "100 %"
    assert found["local"]["gap closed"] == "0 %"
    assert found["tensor-local"]["gap closed"] == "50 %"  # (120 - 110) / (120 - 100), of seed 0
    assert found["tensor-local"]["step time of local"] == "1.30×"
    assert found["tensor-local (window=128)"]["gap closed"] == "-10 %"
    assert found["tensor-local (placement=after_attention)"]["step time of local"] == "–"
    assert found["tensor-local (placement=after_attention)"]["gap closed"] == "150 %"


def test_both_ends_of_the_gap_have_the_rows_positions():
    runs = [
        ("base", record("base", 100.0)),
        ("local", record("local", 120.0)),
        ("base rotary", record("base", 80.0, positions="rotary")),
        ("local rotary", record("local", 90.0, positions="rotary")),
        ("tensor-local rotary", record("tensor-local", 85.0, positions="rotary")),
        ("tensor-local", record("tensor-local", 115.0)),
    ]
    del runs[0][1]["config"]["model"]["positions"]  # as recorded before there was a choice
    rows = gap_rows([(label, [run]) for label, run in runs])
    assert [row.share for row in rows] == [1.0, 0.0, 1.0, 0.0, 0.5, 0.25]


def test_the_first_of_several_locals_of_a_window_is_the_end_of_the_gap():
    runs = {"base": 100.0, "local": 120.0, "local (blocks 4)": 140.0, "tensor-local": 110.0}
    groups = [(label, [record(label.split()[0], value)]) for label, value in runs.items()]
    assert [row.share for row in gap_rows(groups)] == [1.0, 0.0, -1.0, 0.5]


def test_shares_are_of_the_seeds_that_the_row_and_both_ends_have():
    def runs(method, **values):
        return method, [record(method, v, seed=int(name[1:])) for name, v in values.items()]

    groups = [runs("base", s0=100.0, s1=102.0), runs("local", s0=120.0, s1=122.0, s2=200.0)]
    memory = runs("tensor-local", s1=112.0, s2=190.0)
    assert [row.share for row in gap_rows([*groups, memory])] == [1.0, 0.0, 0.5]
    (*_, row) = gap_rows([*groups, runs("tensor-local", s2=190.0)])
    assert (row.share, row.valid_share) == (None, None)


def test_a_missing_end_of_the_gap_leaves_the_share_out():
    rows = gap_rows([("tensor-local", [record("tensor-local", 110.0)])])
    assert (rows[0].share, rows[0].step_ratio) == (None, None)
    (comparison,) = compare(table()[1:])
    assert gap_table(comparison) == []


@pytest.mark.parametrize("local", [100.0, 99.0])
def test_where_full_attention_is_no_better_there_is_no_gap_to_close(local):
    rows = gap_rows(
        [
            ("base", [record("base", 100.0)]),
            ("local", [record("local", local, step_ms=20.0)]),
            ("tensor-local", [record("tensor-local", 95.0, step_ms=30.0)]),
        ]
    )
    assert [(row.share, row.valid_share) for row in rows] == 3 * [(None, None)]
    assert rows[2].step_ratio == 1.5


def test_runs_too_short_to_be_timed_have_no_step_time():
    short = record("local", 120.0) | {"step_ms": None}
    assert step_ms([short]) is None
    assert step_ms([short, record("local", 120.0, step_ms=30.0)]) == 30.0


def test_a_report_shows_the_gap_where_both_ends_were_run(tmp_path):
    text = write_report(table(), tmp_path)
    assert "What is closed of the gap between local and full attention" in text
    assert "50 %" in text
    assert "gap" not in write_report(table()[1:2], tmp_path)


@pytest.mark.parametrize("non_causal", [True, False])
def test_what_sees_the_future_is_named_so_in_every_table(tmp_path, non_causal):
    future = record("tensor-depth", 30.0, labels={"non_causal": True}, non_causal=True)
    text = write_report([future] if non_causal else table()[:1], tmp_path)
    assert ("tensor-depth (sees the future)" in text) == non_causal


def test_the_protocol_stands_with_the_numbers(tmp_path):
    labels = {"context": "64 per layer within window 512"}
    run = record("local", 120.0, labels=labels) | {
        "facts": {"evaluation": "windows of 512, each from an empty state"},
        "best_step": 2400,
    }
    told = summary(run)
    assert "windows of 512, each from an empty state; context: 64 per layer within window" in told
    done = Outcome(Job("a-run", lambda _: run, tmp_path), run, None, 1.0)
    assert "(windows of 512, each from an empty state; context: 64 per layer" in _line(done)
    text = write_report([run], tmp_path)
    assert "Evaluation: windows of 512, each from an empty state" in text
    assert "context: 64 per layer within window 512" in text
