"""Numbers that documents quote of benchmarks are those of the committed records."""

import json
from pathlib import Path

import pytest

from tensor_memory_lab import bench

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results" / "bench"
HOSTS = ("base", "memory")
SCAN, STEP, FASTER_HOST, DECODE = ON_DEVICE = tuple(
    f"{name}-nvidia-h200.json" for name in ("scan", "train-step", "train-step-cf19c3b", "decode")
)


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
    others = ("scan-cpu.json", "scan-sweeps-nvidia-h200.json")
    rows = printed(capsys, *ON_DEVICE, *others)
    quoted = [line for line in page if line.startswith("|")]
    assert len(quoted) > 50
    assert [line for line in quoted if line not in rows] == []


@pytest.mark.parametrize("name", [*ON_DEVICE, "scan-cpu.json"])
def test_a_record_agreed_with_the_reference_and_names_no_machines_path(name):
    text = (RECORDS / name).read_text()
    assert '"passed": true' in text
    assert '"passed": false' not in text
    assert not any(place in text for place in ('"/', "/root", "/home", "/tmp"))


def test_all_that_is_needed_is_reached_but_for_launches_on_a_slow_host():
    judged = {name: result(name)["aims"] for name in ON_DEVICE}
    assert [len(aims) for aims in judged.values()] == [8, 7, 7, 0]
    assert not any(aim["meets_aim"] for aims in judged.values() for aim in aims)
    missed = {
        name: [(aim["work"], aim["how"]) for aim in aims if not aim["meets_needed"]]
        for name, aims in judged.items()
    }
    work = ("language step, time added by the memory", "language step, ratio over base")
    waiting = [(what, way) for what in work for way in ("eager", "one thread")]
    assert missed == {SCAN: [], STEP: waiting, FASTER_HOST: [], DECODE: []}


def test_the_language_step_is_quoted_from_both_hosts():
    slow, fast = (result(name)["models"]["language"] for name in (STEP, FASTER_HOST))
    page = " ".join(section("docs/benchmarks.md", "## Results").split())
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    added = f"{slow['added_ms']:.1f} ms to the language step where 12"
    assert f"{added} are needed, on the faster one (cf19c3b) {fast['added_ms']:.1f}" in page
    alone = [step["one_thread"]["added_ms"] for step in (slow, fast)]
    assert f"on the thread that calls it {alone[0]:.2f} and {alone[1]:.2f}." in page
    graph = {f"{step['graph']['added_ms']:.2f}" for step in (slow, fast)}
    assert f"where it can, it adds {graph.pop()} on both." in page
    assert not graph
    assert f"add {added} were allowed ({slow['graph']['added_ms']:.1f} as a CUDA graph)" in readme
    assert f"they added {fast['added_ms']:.1f}, {fast['ratio']:.2f} times" in readme
    assert "Of the project's further aims none is reached" in readme


def test_the_rest_of_what_is_quoted_of_steps_and_scans_was_measured():
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    binding = result(SCAN)["shapes"]["binding"]["ms"]["forward_backward"]
    assert f"with its backward takes {binding['graph']['median']:.2f} ms where" in readme
    video = result(STEP)["models"]["video"]["graph"]["ratio"]
    assert f"takes {video:.1f} times the one without" in readme
    vision = " ".join((ROOT / "docs" / "vision.md").read_text(encoding="utf-8").split())
    commit = json.loads((RECORDS / STEP).read_text())["commit"][:7]
    assert f"(benchmarks.md#results) of `{commit}` has it at {video:.2f} times." in vision


def test_what_one_thread_saves_is_quoted_as_it_was_measured():
    step = result(FASTER_HOST)["models"]["language"]
    both, one = (timed["ms"]["memory"]["median"] for timed in (step, step["one_thread"]))
    assert f"went from {both:.1f} to {one:.1f} ms" in (ROOT / "docs" / "howto.md").read_text()
    assert 0.15 < 1 - one / both < 0.25  # "a fifth" in docs/training.md and in train/steps.py
    slow = result(STEP)["models"]["language"]
    both, one = (timed["ms"]["memory"]["median"] for timed in (slow, slow["one_thread"]))
    assert 0.25 < 1 - one / both < 0.3  # "and more"


def test_the_compiled_loop_is_quoted_as_it_was_measured():
    loop = result(SCAN)["shapes"]["language"]["compiled_plain_loop"]
    ratio = f"{loop['ratio']['forward_backward']:.0f} times"
    log = " ".join(section("docs/kernel-log.md", "## What is left").split())
    assert f"takes {loop['ms']['forward_backward']['median']:.1f} ms" in log
    assert f"with its backward, {ratio} ours" in log
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"compiled plain loop takes {ratio} as long as the scan with its backward" in readme


def test_the_older_sweeps_are_set_beside_todays_scan():
    now = result(SCAN)["shapes"]["language"]
    (then,) = (
        row
        for row in result("scan-sweeps-nvidia-h200.json")["sweeps"]["batch"]
        if row["label"] == now["label"]
    )
    took, takes = (row["ms"]["forward_backward"]["graph"]["median"] for row in (then, now))
    page = " ".join(section("docs/benchmarks.md", "## Results").split())
    assert f"took {took:.2f} ms on the device then and takes {takes:.2f} now" in page


def test_the_log_ends_with_what_was_measured():
    shapes = result(SCAN)["shapes"]
    step, before = result(STEP)["models"], result(FASTER_HOST)["models"]["language"]
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
        f"extra peak memory {language['extra_peak_gib']:.2f} GiB",
        f"on the host: {language['added_ms']:.1f} ms more (12 needed) and",
        f"{language['ratio']:.2f} times on this one, {before['added_ms']:.1f} and",
        f"{before['ratio']:.2f} on that of 22.",
        f"take more than {language['ms']['memory']['p90']:.1f} ms",
        f"the device needs {language['graph']['ms']['memory']['median']:.1f};",
        f"A step of the scan stands at {median('language', 'forward') / 32 * 1e3:.1f} µs",
        f"make {video['graph']['ratio']:.2f} times the step without memory",
    ):
        assert quoted in left
    floor = " ".join((ROOT / "src/tensor_memory/ops/README.md").read_text().split())
    ceilings = result(SCAN)["ceilings"]
    matrix, copy = ceilings["matmul_bfloat16_tflops"], ceilings["copy_gbytes_per_s"] / 1e3
    assert f"({matrix:.0f} TFLOP/s and {copy:.2f} TB/s measured in the same run)" in floor
    step_us = median("language", "forward") / 32 * 1e3
    assert f"Measured {median('language', 'forward'):.2f} ms, {step_us:.1f} µs a step" in floor
    assert f"0.05 ms), measured {median('language'):.2f}." in floor


def test_the_log_sets_the_faster_base_beside_the_last_one():
    log = section(
        "docs/kernel-log.md",
        "## 23. A faster language model to stand beside, and what float32 does not gain",
    )
    before, now = (result(name)["models"] for name in (FASTER_HOST, STEP))

    def pairs(model, *way):
        found = []
        for models in (before, now):
            timed = models[model][way[0]] if way else models[model]
            found.append("{:.2f}, {:.2f}".format(*(timed["ms"][m]["median"] for m in HOSTS)))
        return f"| {found[0]} | {found[1]} |"

    for line in (
        pairs("language", "graph"),
        pairs("language"),
        pairs("language", "one_thread"),
        pairs("video", "graph"),
    ):
        assert line in log
    added, ratio = (now["language"]["graph"][name] for name in ("added_ms", "ratio"))
    assert f"adds what it did, {added:.2f}, to less: {ratio:.2f} times" in log


def test_the_log_sets_todays_records_beside_the_last_ones():
    scan, steps = (json.loads((RECORDS / name).read_text()) for name in (SCAN, FASTER_HOST))
    assert scan["commit"] == steps["commit"]
    shapes, models = scan["result"]["shapes"], steps["result"]["models"]
    log = section(
        "docs/kernel-log.md", "## 22. Another host, and the backward on the thread that calls it"
    )
    came = " ".join(log.partition("## What is left")[0].split())

    def median(name, kind="forward_backward"):
        return shapes[name]["ms"][kind]["graph"]["median"]

    def pair(ways):
        return f"{ways['ms']['base']['median']:.2f}, {ways['ms']['memory']['median']:.2f} |"

    language, video = models["language"], models["video"]
    took = {
        row["shape"]["channels"]: row["ms"]["forward_backward"]["graph"]["median"]
        for row in scan["result"]["sweeps"]["channels"]
    }
    for quoted in (
        f"at {scan['commit'][:7]},",
        f"| {median('language', 'forward'):.3f}, {median('language'):.3f} |",
        f"| {median('video'):.2f} |",
        f"| {median('binding'):.2f} |",
        f"| {pair(language['graph'])}",
        f"| {pair(language)}",
        f"| {pair(language['one_thread'])}",
        f"| {pair(video['graph'])}",
        f"launches {language['added_ms']:.1f} are added",
        f"take {took[32] / took[16]:.1f} times as long from 16 to 32,",
        f"{took[64] / took[32]:.1f} from 32 to 64, and {took[128] / took[64]:.1f} from 64 to 128",
        f"at C 128 take {took[128]:.1f},",
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
