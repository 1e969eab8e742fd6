"""Numbers that documents quote of benchmarks are those of the committed records."""

import json
from pathlib import Path

import pytest

from tensor_memory import bench

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results" / "bench"
ON_DEVICE = tuple(f"{name}-nvidia-h200.json" for name in ("scan", "train-step", "decode"))


def result(name):
    return json.loads((RECORDS / name).read_text())["result"]


def section(document, title):
    text = (ROOT / document).read_text(encoding="utf-8")
    return text.partition(f"{title}\n")[2]


def printed(capsys, *names):
    assert bench.main(["table", *(str(RECORDS / name) for name in names)]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if line]


def test_the_devices_records_stand_in_the_page_whole(capsys):
    page = section("docs/benchmarks.md", "## Results").splitlines()
    missing = [line for line in printed(capsys, *ON_DEVICE) if line not in page]
    assert missing == []


def test_no_row_of_the_page_is_without_a_record(capsys):
    page = section("docs/benchmarks.md", "## Results").splitlines()
    others = ("scan-cpu.json", "scan-compiled-nvidia-h200.json", "scan-sweeps-nvidia-h200.json")
    rows = printed(capsys, *ON_DEVICE, *others)
    quoted = [line for line in page if line.startswith("|")]
    assert len(quoted) > 50
    assert [line for line in quoted if line not in rows] == []


@pytest.mark.parametrize("name", [*ON_DEVICE, "scan-cpu.json", "scan-compiled-nvidia-h200.json"])
def test_a_record_agreed_with_the_reference_and_names_no_machines_path(name):
    text = (RECORDS / name).read_text()
    assert '"passed": true' in text
    assert '"passed": false' not in text
    assert not any(place in text for place in ('"/', "/root", "/home", "/tmp"))


def test_what_is_said_to_be_unreached_is_what_the_records_miss():
    judged = [aim for name in ON_DEVICE for aim in result(name)["aims"]]
    assert len(judged) == 13
    missed = [(aim["work"], aim["how"]) for aim in judged if not aim["meets_needed"]]
    assert missed == [
        ("language step, time added by the memory", "eager"),
        ("language step, ratio over base", "eager"),
    ]
    assert not any(aim["meets_aim"] for aim in judged)
    step = result("train-step-nvidia-h200.json")["models"]["language"]
    eager, graph = step["added_ms"], step["graph"]["added_ms"]
    few, most = (step["ms"]["memory"][share] for share in ("p10", "p90"))
    launched, replayed = step["ms"]["base"]["median"], step["graph"]["ms"]["base"]["median"]
    page = " ".join(section("docs/benchmarks.md", "## Results").split())
    assert "all is reached but what Python's launches cost" in page
    assert "No aim is reached" in page
    assert f"adds {eager:.1f} ms to a language step, 12 needed" in page
    assert f"the step takes {step['ratio']:.2f} times the one without, 1.8 needed" in page
    assert f"where it can, {graph:.2f} and {step['graph']['ratio']:.2f}." in page
    assert f"So {eager - graph:.1f} of the {eager:.1f} are Python's" in page
    assert f"without memory {launched:.1f} ms where its graph takes {replayed:.1f}" in page
    assert f"less than {few:.1f} ms, a tenth more than {most:.1f}" in page
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"add {eager:.1f} ms to that step where 12 were needed ({graph:.1f} as" in readme
    assert "Of the project's further aims none is reached" in readme
    binding = result("scan-nvidia-h200.json")["shapes"]["binding"]["ms"]["forward_backward"]
    assert f"with its backward takes {binding['graph']['median']:.2f} ms where" in readme
    video = result("train-step-nvidia-h200.json")["models"]["video"]
    assert f"takes {video['graph']['ratio']:.1f} times the one without" in readme
    vision = " ".join((ROOT / "docs" / "vision.md").read_text(encoding="utf-8").split())
    ratio = f"{video['graph']['ratio']:.2f} times"
    assert f"[the benchmark](benchmarks.md#results), which has it at {ratio}." in vision


def test_the_compiled_loop_is_quoted_as_it_was_measured():
    loop = result("scan-compiled-nvidia-h200.json")["shapes"]["language"]["compiled_plain_loop"]
    ratio = f"{loop['ratio']['forward_backward']:.0f} times"
    log = section("docs/kernel-log.md", "## What is left")
    assert f"takes {loop['ms']['forward_backward']['median']:.1f} ms" in log
    commit = json.loads((RECORDS / "scan-compiled-nvidia-h200.json").read_text())["commit"][:7]
    assert f"({commit}), {ratio} ours at that commit" in " ".join(log.split())
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"compiled plain loop takes {ratio} as long as the scan of commit `{commit}`" in readme


def test_the_older_sweeps_are_set_beside_todays_scan():
    now = result("scan-nvidia-h200.json")["shapes"]["language"]
    (then,) = (
        row
        for row in result("scan-sweeps-nvidia-h200.json")["sweeps"]["batch"]
        if row["label"] == now["label"]
    )
    took, takes = (row["ms"]["forward_backward"]["graph"]["median"] for row in (then, now))
    page = " ".join(section("docs/benchmarks.md", "## Results").split())
    assert f"took {took:.2f} ms on the device then and takes {takes:.2f} now" in page


def test_the_log_ends_with_what_was_measured():
    shapes = result("scan-nvidia-h200.json")["shapes"]
    step = result("train-step-nvidia-h200.json")["models"]
    language, video = step["language"], step["video"]

    def median(name, kind="forward_backward", how="graph"):
        return shapes[name]["ms"][kind][how]["median"]

    left = " ".join(section("docs/kernel-log.md", "## What is left").split())
    for quoted in (
        f"language {median('language', 'forward'):.2f} ms forward",
        f"forward and {median('language'):.2f} ms with backward as a graph",
        f"graph, {median('language', how='eager'):.2f} with launches",
        f"video {median('video'):.2f} and {median('video', how='eager'):.2f}",
        f"binding {median('binding'):.2f}",
        f"a language step of {language['graph']['added_ms']:.2f} ms more",
        f"{language['graph']['ratio']:.2f} times the base as a graph",
        f"{language['ratio']:.2f} times with launches",
        f"extra peak memory {language['extra_peak_gib']:.2f} GiB",
        f"with Python's launches, {language['added_ms']:.1f} ms more (12 needed)",
        f"take less than {language['ms']['memory']['p10']:.1f} ms",
        f"the device needs {language['graph']['ms']['memory']['median']:.1f}.",
        f"A step of the scan stands at {median('language', 'forward') / 32 * 1e3:.1f} µs",
        f"make {video['graph']['ratio']:.2f} times the step without memory",
    ):
        assert quoted in left
    floor = " ".join((ROOT / "src/tensor_memory/ops/README.md").read_text().split())
    ceilings = result("scan-nvidia-h200.json")["ceilings"]
    matrix, copy = ceilings["matmul_bfloat16_tflops"], ceilings["copy_gbytes_per_s"] / 1e3
    assert f"({matrix:.0f} TFLOP/s and {copy:.2f} TB/s measured in the same run)" in floor
    step_us = median("language", "forward") / 32 * 1e3
    assert f"Measured {median('language', 'forward'):.2f} ms, {step_us:.1f} µs a step" in floor
    assert f"0.05 ms), measured {median('language'):.2f}." in floor


def test_the_log_sets_predictions_beside_what_the_records_hold():
    scan, steps = (
        json.loads((RECORDS / name).read_text())
        for name in ("scan-nvidia-h200.json", "train-step-nvidia-h200.json")
    )
    language, video = (steps["result"]["models"][name] for name in ("language", "video"))
    shapes = scan["result"]["shapes"]
    log = section("docs/kernel-log.md", "## 21. What came of 19 and 20")
    came = " ".join(log.partition("## What is left")[0].split())

    def median(name, kind="forward_backward"):
        return shapes[name]["ms"][kind]["graph"]["median"]

    mib = [
        f"{shapes[name]['peak_bytes']['forward_backward'] / 2**20:.0f}"
        for name in ("language", "video", "binding")
    ]
    assert scan["commit"] == steps["commit"]
    for quoted in (
        f"`tensor-memory bench` at {scan['commit'][:7]},",
        f"| 0.770 | {median('language'):.3f}:",
        f"| 1.62 | {median('video'):.2f}:",
        f"binding 5.17 → {median('binding'):.2f}: **wrong, slower**",
        f"{video['graph']['ms']['memory']['median']:.1f}, {video['graph']['ratio']:.2f} times |",
        f"{language['graph']['added_ms']:.2f} added, {language['graph']['ratio']:.2f} times:",
        f"16.9 | {language['added_ms']:.1f}: **wrong**",
        f"{', '.join(mib)} MiB (language, video, binding)",
        f"0.221 → {median('language', 'forward'):.3f} (language)",
        f"0.439 → {median('video', 'forward'):.3f} (video)",
        f"1.21 → {median('binding', 'forward'):.2f} (binding)",
        f"stays at {language['extra_peak_gib']:.2f} GiB",
        f"from 10.3 to {video['extra_peak_gib']:.2f}.",
        f"went from 1.28 to {median('binding', 'forward_kept'):.2f},",
        f"language 2.62 → {median('language-float32'):.2f} with 0.531 →",
        f"→ {median('language-float32', 'forward_kept'):.3f}.",
        f"graph takes {language['graph']['ms']['base']['median']:.2f} as before (16.27)",
        f"took {language['ms']['base']['median']:.2f} launched one by one",
        f"({language['ms']['memory']['median']:.2f} against 35.89)",
        f"{language['ratio']:.2f} against 1.89",
    ):
        assert quoted in came


def test_the_video_runs_the_log_quotes_are_committed():
    folder = ROOT / "results" / "vision" / "cost-published"
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    steps = {f"{run['step_ms']:.2f}": run for run in runs}
    with_memory, without = steps["78.77"], steps["17.94"]
    assert (with_memory["method"], without["method"]) == ("spatial", "frames")
    log = " ".join(section("docs/kernel-log.md", "## 21. What came of 19 and 20").split())
    ratio = with_memory["step_ms"] / without["step_ms"]
    assert f"78.77 against 17.94, {ratio:.2f} times `frames`" in log
