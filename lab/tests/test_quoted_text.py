"""Numbers that README and docs quote of runs on text are those of their committed records."""

import functools
import math
from itertools import chain

from quoted import ROOT, records_of, words_of
from tensor_memory_lab.recipes.language import language
from tensor_memory_lab.records.gap import gap_rows
from tensor_memory_lab.records.intervals import estimate
from tensor_memory_lab.records.language_rows import table_rows, timed
from tensor_memory_lab.records.paper import published
from tensor_memory_lab.records.rows import grouped


@functools.cache
def text_runs(folder, recipe):
    """Runs of a recipe by method, each method's by seed."""
    records = records_of("language", folder)
    found = grouped([record for record in records if record["recipe"] == recipe])
    return {method: sorted(runs, key=lambda run: run["seed"]) for method, runs in found}


def told(values):
    """Mean ± half width."""
    shown = estimate(values)
    return f"{shown.mean:.2f} ± {shown.half_width:.2f}"


def in_nats(values):
    """The like for losses, which differ by less."""
    shown = estimate(values)
    return f"{shown.mean:.3f} ± {shown.half_width:.3f}"


def less(values, others):
    """Differences, seed by seed."""
    return [a - b for a, b in zip(values, others, strict=True)]


def shares(back, lost):
    """What is given back of what was lost, seed by seed."""
    first, second, third = (f"{100 * b / a:.0f}" for a, b in zip(lost, back, strict=True))
    return f"{first}, {second} and {third} %"


def emptied(runs):
    """What runs score more with nothing carried."""
    scores = [run["test"] for run in runs]
    return [score["test@fresh"]["perplexity"] - score["test"]["perplexity"] for score in scores]


def step_ratios(folder):
    """Step times over that of local attention, by the label of a row."""
    runs, costs = records_of("language", folder), records_of("language", "cost")
    rows = table_rows([run for run in timed(runs, costs) if run["recipe"] == "language-carried"])
    return {row.label: row.step_ratio for row in gap_rows([(row.label, row.runs) for row in rows])}


def perplexities(folder, recipe):
    """Test perplexities of a recipe's runs by method, each method's by seed."""
    return {
        method: [run["test"]["test"]["perplexity"] for run in runs]
        for method, runs in text_runs(folder, recipe).items()
    }


def carried(label):
    """Test perplexities of the runs of a row whose state is carried, by seed."""
    return perplexities("carried", "language-carried")[label]


def searched(label):
    """Validation, test, and test with nothing carried, of a row of the search."""
    (run,) = text_runs("search", "language-carried")[label]
    scores = run["valid"], run["test"]["test"], run["test"]["test@fresh"]
    return [score["perplexity"] for score in scores]


def test_the_rate_of_the_language_recipes_is_the_best_on_valid():
    tried = records_of("language", "rate")
    for recipe, rates in (("language-paper", 3), ("language-carried", 4)):
        runs = [run for run in tried if run["recipe"] == recipe]
        assert len(runs) == rates
        best = min(runs, key=lambda run: run["valid"]["perplexity"])
        assert best["config"]["optimizer"]["lr"] == language().optimizer.lr
    page = (ROOT / "docs" / "language.md").read_text(encoding="utf-8")
    assert "AdamW, 1e-3 after 200 steps" in page
    assert language().optimizer.lr == 1e-3


def test_streams_were_still_learning_at_the_end_where_windows_had_stopped():
    def last_fall(folder, recipe, row="base"):  # on valid, from the last evaluation but one
        curves = [run["curve"][-2:] for run in text_runs(folder, recipe)[row]]
        assert {(before["step"], after["step"]) for before, after in curves} == {(2000, 2400)}
        return [
            1 - after["valid"]["perplexity"] / before["valid"]["perplexity"]
            for before, after in curves
        ]

    page = words_of("docs/language.md")
    assert "`base` still falls by 6 to 7 % on the validation text" in page
    assert all(0.055 < fall < 0.075 for fall in last_fall("carried", "language-carried"))
    assert "windows drawn from everywhere have stopped (less than 1 %)" in page
    assert all(abs(fall) < 0.01 for fall in last_fall("fresh", "language-paper"))
    assert "over the last 400 steps they fall by 3 to 5 % on the validation text" in page
    turned = [m for m in text_runs("carried", "language-carried") if "rotary" in m]
    falls = [f for m in turned for f in last_fall("carried", "language-carried", m)]
    assert all(0.025 < fall < 0.055 for fall in falls)


def test_what_is_said_of_text_was_measured():
    readme, page = words_of("README.md"), words_of("docs/language.md")
    runs = text_runs("fresh", "language-paper")
    cost = {
        run["method"]: f"{run['step_ms']:.1f} ms"
        for run in records_of("language", "cost")
        if run["recipe"] == "language-paper"
    }
    test = perplexities("fresh", "language-paper")
    for method in ("base", "local", "tensor", "tensor-local"):
        assert told(test[method]) in readme
        assert cost[method] in readme
    lost, back = less(test["local"], test["base"]), less(test["local"], test["tensor-local"])
    assert f"loses {estimate(lost).mean:.2f} to attention over the whole window" in page
    assert f"{shares(back, lost)} of the gap" in page
    assert f"the memory is worth {told(less(test['base'], test['tensor']))}" in page
    off = [
        run["memory"]["test_without_memory"]["test"]["perplexity"] for run in runs["tensor-local"]
    ]
    assert f"switched off at test, they score {estimate(off).mean:.2f}" in page
    use = [100 * layer["use"] for layer in runs["tensor-local"][0]["memory"]["layers"]]
    assert f"has {use[0]:.0f}, {use[1]:.0f} and {use[2]:.0f} % of the norm" in page
    assert max(use[3:]) < 2
    assert f"takes {cost['base']}" in page
    wide = test["wide-local"]
    ahead, more = (less(wide, test["tensor-local"][:2]), less(test["local"][:2], wide))
    assert f"the memory leads `wide-local` by {ahead[0]:.2f} and {ahead[1]:.2f}, which" in page
    assert f"which leads `local` by {more[0]:.2f} and {more[1]:.2f} (two seeds" in page
    assert f"in the MLP (`wide`) {told(less(test['base'], test['wide']))}" in page
    assert f"attention adds costs {told(less(test['base-sln'], test['base']))}" in page
    assert f"linear attention {told(less(test['linear'], test['base']))}," in page
    assert {run["best_step"] for run in runs["xl"]} == {1600}  # "in all three seeds"
    more = runs["xl"][0]["parameters"] / runs["base"][0]["parameters"] - 1
    assert f"and their projections, {100 * more:.0f} % more weights." in page
    lead = told(less(test["base"], test["xl"]))
    paper = {m: published(runs[m][0], "test", "perplexity").value for m in ("base", "xl")}
    behind = f"{paper['xl'] - paper['base']:.2f}"
    assert f"`xl`, {behind} behind `base` in the paper, leads it by {lead}." in page
    assert f"scores {lead} below full attention with learned positions, at {cost['xl']}" in readme
    assert f"in the paper {behind} above" in readme


def test_what_is_said_of_text_with_the_standard_words_was_measured():
    readme, page = words_of("README.md"), words_of("docs/language.md")
    test = perplexities("fresh", "language")
    base, local, memory = (told(test[method]) for method in ("base", "local", "tensor-local"))
    assert f"{memory} between {local} for the narrow window and {base} for full" in readme
    lost, back = less(test["local"], test["base"]), less(test["local"], test["tensor-local"])
    assert f"{told(back)} of the {estimate(lost).mean:.2f} that the narrow window loses" in page
    assert f"{shares(back, lost)} of the gap" in page
    assert f"whole window it is worth {told(less(test['base'], test['tensor']))}" in page


def test_what_is_said_of_text_with_the_state_carried_was_measured():
    readme, page = words_of("README.md"), words_of("docs/language.md")
    runs = text_runs("carried", "language-carried")
    base, local, memory = map(carried, ("base", "local", "tensor-local"))
    times = step_ratios("carried")
    assert f"narrow window alone | {told(local)} |" in readme
    assert f"as published | {told(memory)} ({times['tensor-local']:.2f})" in readme
    assert f"512 tokens | {told(base)} ({times['base']:.2f})" in readme
    lost, back = less(local, base), less(local, memory)
    assert f"{told(back)} of {estimate(lost).mean:.2f}" in page
    assert f"gives back {told(back)} of {estimate(lost).mean:.2f} with those" in readme
    assert f"{shares(back, lost)} of the gap" in page
    assert f"the same models score {told(emptied(runs['tensor-local']))} more" in page
    cached = runs["xl (segment 64)"]
    scores = told(carried("xl (segment 64)"))
    assert f"comes to {scores} at {times['xl (segment 64)']:.2f} times the step" in readme
    assert f"emptied before each window it scores {told(emptied(cached))} more" in page


def test_what_is_said_of_the_best_of_the_search_was_measured():
    readme, page = words_of("README.md"), words_of("docs/language.md")
    runs, times = text_runs("carried", "language-carried"), step_ratios("carried")
    four = "tensor-local (K 4, layers 0+1)"
    behind = "tensor-local (layers 0+1, placement after_attention)"
    local, base = carried("local"), carried("base")
    assert f"4 tokens: {told(carried(four))} ({times[four]:.2f})" in readme
    lost = less(local, base)
    back = shares(less(local, carried(four)), lost)
    assert f"{back}, at {times[four]:.2f} times" in page
    assert f"They lose {told(emptied(runs[four]))} with nothing carried" in page
    assert f"cost {times[behind]:.2f} times the step" in page
    back = less(local, carried(behind))
    assert f"give back {told(back)} on the test text, seed by seed {shares(back, lost)}" in page
    assert f"between attention and MLP: {shares(back, lost)} on the test text neither" in page


def test_what_is_said_of_the_best_beside_rotary_positions_was_measured():
    readme, page = words_of("README.md"), words_of("docs/language.md")
    runs, times = text_runs("carried", "language-carried"), step_ratios("carried")
    full, narrow = "base (positions rotary)", "local (positions rotary)"
    every = "tensor-local (positions rotary)"
    chunks = "tensor-local (K 1, layers 0+1, positions rotary)"
    convolution = "conv-local (layers 0+1, positions rotary)"
    alone, one, near = map(carried, (narrow, chunks, convolution))
    assert f"| {told(alone)} |" in readme
    assert f"1 token: {told(one)} ({times[chunks]:.2f})" in readme
    for label in (full, every, convolution):
        assert f"{told(carried(label))} ({times[label]:.2f})" in readme

    assert f"alone comes to {told(alone)}, {told(less(carried('base'), alone))} better" in page
    gap = less(alone, carried(full))
    assert f"rotary ones leads it by {told(gap)}, and the published memory in every" in page
    back = told(less(alone, carried(every)))
    assert f"{times[every]:.2f} times the step, gives back none of it that shows ({back})" in page
    assert f"and {back} of {estimate(gap).mean:.2f} with rotary ones" in readme
    assert f"gains {told(less(alone, one))} on the narrow window" in page
    assert f"on the narrow window, at {times[chunks]:.2f} times the step" in page
    assert f"gains {told(less(alone, near))}, at {times[convolution]:.2f} times" in page
    assert f"and the memory {told(less(near, one))} beyond it" in page
    assert f"before each window the memory loses {told(emptied(runs[chunks]))}, the" in page
    assert f"misses three tokens, {told(emptied(runs[convolution]))}." in page
    cached = carried("xl (segment 64)")
    assert f"{told(less(alone, cached))} below the narrow window with rotary positions" in page
    lead = told(less(carried(full), cached))
    assert f"and {lead} below full attention with them" in page
    assert f"{lead} below full attention with rotary ones" in readme

    nats = [math.log(a / b) for a, b in zip(alone, carried(full), strict=True)]
    assert f"worth {in_nats(nats)} nats to layers that see 64 tokens each" in page
    closed = f"{shares(less(alone, one), gap)} of a gap of {estimate(gap).mean:.2f}"
    assert f"one-token chunks close {closed} (" in page
    valid = {m: [run["valid"]["perplexity"] for run in runs[m]] for m in (full, narrow, chunks)}
    lost = less(valid[narrow], valid[full])
    closed = shares(less(valid[narrow], valid[chunks]), lost)
    assert f"({closed} on the validation text), at {times[chunks]:.2f} times;" in page
    closed = shares(less(alone, near), gap)
    assert f"closes {closed}, at {times[convolution]:.2f} times." in page


def test_what_is_said_of_the_search_was_measured():
    readme, page = words_of("README.md"), words_of("docs/language.md")
    base, local = searched("base"), searched("local")

    def closed(label):
        return f"{100 * (local[0] - searched(label)[0]) / (local[0] - base[0]):.0f} %"

    chunks = ("", "K 4, ", "K 2, ", "K 1, ")
    sixteen, four, two, one = (f"tensor-local ({k}layers 0+1)" for k in chunks)
    shorter = f"a chunk of 4 tokens {closed(four)}, of two {closed(two)}, of one {closed(one)}"
    assert f"two memories close {closed(sixteen)} of the gap; {shorter}" in page
    times, near = step_ratios("search"), "conv-local (layers 0+1)"
    assert f"gives too**: {closed(near)} in the same two layers" in page
    tested = f"{searched(near)[1]:.2f}, the window alone {local[1]:.2f} ({times[near]:.2f})"
    assert f"one seed, half of the steps: {tested}" in readme
    assert f"at {times[near]:.2f} times the step of `local`" in page
    assert f"where they cost {times[one]:.2f}." in page
    assert f"among them ({closed(sixteen)}, {times[sixteen]:.2f} times; one seed each)" in page
    gone = [f"{after - test:.2f}" for _, test, after in map(searched, (one, four, sixteen))]
    assert f"K 1 loses {gone[0]} and K 4 {gone[1]} of the test perplexity" in page
    assert max(searched(four)[1], searched(one)[1]) < base[1]  # "ahead of attention that sees all"
    assert f"and the published form {gone[2]}." in page
    bare, cached = "xl (segment 64, cache 0)", "xl (layers 0+1, segment 64)"
    leads = [base[1] - searched(label)[1] for label in (cached, bare)]
    assert f"by {leads[0]:.2f} with a cache of 21 tokens and by {leads[1]:.2f} with none" in page
    assert searched("recurrent-slots (layers 0+1, segment 128)")[0] > local[0]
    beside = searched("tensor-xl (layers 0+1, segment 64)")
    assert f"{searched(bare)[0]:.2f} to {beside[0]:.2f}, where a cache" in page
    assert f"the same bytes comes to {searched(cached)[0]:.2f}" in page
    long = [
        closed(f"tensor-local (reads token, {start}forget_bias 5, feedback 0, gain 4, layers 0+1)")
        for start in ("", "spread_bias -1.5, ")
    ]
    assert f"worse than no memory ({long[0].removesuffix(' %')} and {long[1]})" in page
    slots = closed("recurrent-slots (layers 0+1, slots 32)")
    linear = closed("linear-local (layers 0+1)")
    assert f"`xl` closes {closed(cached)} ({closed(bare)} with no cache)" in page
    assert f"`linear-local` {linear}, slots less than nothing" in page
    assert f"a fifth of them {slots})" in page
    heads = "tensor-local (reads token, read_heads 4, write_heads 4, {}layers 0+1)"
    longer, shorter = (closed(heads.format(bias)) for bias in ("forget_bias 3, ", ""))
    assert f"{longer} to {shorter.removesuffix(' %')}." in page
    behind = closed("tensor-local (layers 0+1, placement after_attention)")
    assert f"the step and closed {behind} of the gap on the validation text in the" in page
    wide = searched("local (window 128)")[0]
    best = searched("tensor-local (window 128, reads token, layers 0+1)")[0]
    assert f"closes more than {100 * (wide - best) / (wide - base[0]):.0f} %." in page
    ends = [carried(method) for method in ("local", "base")]
    spread = (max(ends[0]) - min(ends[0])) / estimate(less(*ends)).mean
    assert 0.3 < spread < 0.37  # "over a third of the gap"
    forms = [m for m in text_runs("search", "language-carried") if m.startswith("tensor")]
    assert f"Of {len(forms)} rows with a memory" in readme


def test_what_is_said_of_the_search_with_rotary_positions_was_measured():
    page = words_of("docs/language.md")
    base, local = searched("base (positions rotary)"), searched("local (positions rotary)")
    two, four, one, linear, near = (
        searched(f"{kind}layers 0+1, positions rotary)")
        for kind in ("tensor-local (", "tensor-local (K 4, ", "tensor-local (K 1, ",
                     "linear-local (", "conv-local (")
    )  # fmt: skip
    assert f"`local` has {local[0]:.2f} on the validation text and `base`" in page
    assert f"which sees everything, {base[0]:.2f}: no gap shows" in page
    learned = [
        label
        for label in text_runs("search", "language-carried")
        if label.startswith("tensor") and "xl" not in label and "rotary" not in label
    ]
    best = min(searched(label)[0] for label in learned)
    assert f"No memory beside learned positions comes near ({best:.2f})" in page
    assert f"{two[0]:.2f} with two memories, {local[0]:.2f} without" in page
    assert f"Chunks of 4 have {four[0]:.2f}" in page
    assert f"linear attention of the same bytes {linear[0]:.2f}" in page
    assert f"one-token chunks have {one[0]:.2f}, the convolution {near[0]:.2f}" in page
    above, late = (
        searched(f"tensor-local (K 1, {start}layers 1+2, positions rotary)")
        for start in ("", "spread_bias -1, forget_bias 5, feedback 0, gain 4, ")
    )
    assert f"{above[0]:.2f} on the validation text (`local` {local[0]:.2f}), started for" in page
    assert f"started for long gaps {late[0]:.2f}." in page
    assert f"{above[2]:.2f} on the test text where they had {above[1]:.2f}" in page
    assert f"and {late[2]:.2f} where they had {late[1]:.2f}." in page
    assert f"{four[2]:.2f} on the test text with nothing carried and {four[1]:.2f} with it" in page


def test_what_other_cuts_of_the_text_alone_change_was_measured():
    rows = [text_runs(folder, "language-carried").values() for folder in ("carried", "search")]
    alike = [run for runs in chain(*rows) for run in runs if run["state_bytes"] == 0]
    assert {run["method"] for run in alike} == {"base", "local", "xl"}
    most = max(abs(change) for change in emptied(alike))
    assert f"moves a row by up to {most:.2f}." in words_of("docs/language.md")


def test_what_is_carried_from_the_windows_before_is_worth_what_was_measured():
    runs = text_runs("carried", "language-carried")
    memory, cache = (
        in_nats(
            [run["test"]["test@fresh"]["loss"] - run["test"]["test"]["loss"] for run in runs[m]]
        )
        for m in ("tensor-local", "xl (segment 64)")
    )
    worth = f"{memory} to the published memory beside learned positions and {cache} to `xl`"
    assert worth in words_of("docs/language.md")
