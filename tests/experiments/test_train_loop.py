"""The loop trains, evaluates and writes down what came out."""

import json

from tiny_runs import tiny_run

from tensor_memory.experiments.train import RunOptions, train


def run(folder, config=None, **options):
    return train(config or tiny_run(), RunOptions(folder, device="cpu", quiet=True, **options))


def test_a_run_learns_and_leaves_its_record(tmp_path):
    record = run(tmp_path / "run", tiny_run(budget={"steps": 150, "evaluate_every": 50}))
    assert record["finished"]
    assert [entry["step"] for entry in record["curve"]] == [50, 100, 150]
    assert record["curve"][-1]["loss"] < record["curve"][0]["loss"]
    assert record["test"]["test"]["accuracy"] > 0.8
    assert record["valid"]["accuracy"] == max(e["valid"]["accuracy"] for e in record["curve"])
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written == json.loads(json.dumps(record))
