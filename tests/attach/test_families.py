"""One behaviour suite over the host families of transformers; `host_table.py` writes its table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import BOTH, FAMILIES, Family, build, inputs
from host_table import expected_table, guide_table, main
from hosts import SMALL, VOCABULARY, read
from torch import Tensor

from tensor_memory import Attachment, attach, detach, load_memory, save_memory
from tolerances import assert_same

SAMPLE = ("Llama", "Qwen3-Next", "Mamba", "T5", "BERT", "SEW", "DeepSeek-V4", "XLNet")
"""A decoder, a mixed row, a row without attention, an encoder and decoder, an encoder, a host that
shortens its tokens, and two that are refused."""

NEW = 6


class Case:
    """A host of a family, bare again after the test."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.model: Any = build(family)
        torch.manual_seed(1)
        self.given = inputs(family)

    def attach(self, **options: Any) -> Attachment:
        defaults = dict(gate_init=3.0) | dict(self.family.attach)
        torch.manual_seed(2)
        return attach(self.model, SMALL, **defaults | options)

    def outputs(self, **changed: Tensor) -> Tensor:
        with torch.no_grad():
            return read(self.model(**self.given | changed, **self._uncached))

    @property
    def _uncached(self) -> dict[str, Any]:
        return {} if self.family.kind not in ("decoder", BOTH) else dict(use_cache=False)

    def generate(self, tokens: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
        torch.manual_seed(3)
        # Some decoders count positions by what is not padding.
        decoder: dict[str, Any] = dict(decoder_start_token_id=1, suppress_tokens=[0])
        start = decoder if self.family.kind == BOTH else {}
        defaults: dict[str, Any] = start | dict(
            attention_mask=torch.ones_like(tokens) if mask is None else mask,
            max_new_tokens=NEW,
            num_beams=1,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return self.model.generate(tokens, **defaults | options)

    def assert_recomputed(self, *tokens: Tensor, **options: Any) -> None:
        """Generation with a cache chooses and computes what it does without one."""
        cached = self.generate(*tokens, **options)
        whole = self.generate(*tokens, **options, use_cache=False)
        assert torch.equal(cached.sequences, whole.sequences)
        assert_same(torch.stack(cached.logits), torch.stack(whole.logits))


def found(case: Case, folder: Path) -> None:
    if case.family.asks:
        with pytest.raises(ValueError, match=case.family.asks):
            attach(case.model, SMALL)
    assert case.attach().paths == case.family.paths


def zero(case: Case, folder: Path) -> None:
    before = case.outputs()
    case.attach(zero_init=True)
    assert torch.equal(case.outputs(), before)


def detached(case: Case, folder: Path) -> None:
    before, keys = case.outputs(), list(case.model.state_dict())
    case.attach()
    assert not torch.equal(case.outputs(), before)
    detach(case.model)
    assert torch.equal(case.outputs(), before)
    assert list(case.model.state_dict()) == keys
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in case.model.modules())


def saved(case: Case, folder: Path) -> None:
    case.attach()
    before = case.outputs()
    save_memory(case.model, folder)
    detach(case.model)
    case.attach(gate_init=0.0)
    assert not torch.equal(case.outputs(), before)
    load_memory(case.model, folder)
    assert torch.equal(case.outputs(), before)


def causal(case: Case, folder: Path) -> None:
    """Bit for bit where the host by itself is: experts multiply as many rows as they are given."""
    name = "decoder_input_ids" if case.family.kind == BOTH else "input_ids"
    changed = {name: case.given[name].clone()}
    changed[name][:, 6:] = case.given[name][:, 6:] % (VOCABULARY - 1) + 1
    exact = torch.equal(case.outputs()[:, :6], case.outputs(**changed)[:, :6])
    case.attach()
    one, other = case.outputs(), case.outputs(**changed)
    assert not torch.equal(one[:, 6:], other[:, 6:])
    if exact:
        assert torch.equal(one[:, :6], other[:, :6])
    assert_same(one[:, :6], other[:, :6])


def prompts(padding: slice = slice(0, 3)) -> tuple[Tensor, Tensor]:
    """Two rows of 7 ids and their mask; the second row is padded."""
    tokens = torch.randint(2, VOCABULARY, (2, 7))
    mask = torch.ones_like(tokens)
    mask[1, padding] = 0
    return tokens, mask


def greedy(case: Case, folder: Path) -> None:
    tokens, _ = prompts()
    bare = case.generate(tokens).logits
    case.attach()
    case.assert_recomputed(tokens)
    assert not torch.allclose(case.generate(tokens).logits[-1], bare[-1])


def padded(case: Case, folder: Path) -> None:
    """The source of an encoder and decoder is padded on its right, as it counts from the left."""
    both = case.family.kind == BOTH
    tokens, mask = prompts(slice(4, 7) if both else slice(0, 3))
    case.attach()
    case.assert_recomputed(tokens, mask)
    together = case.generate(tokens, mask)
    alone = case.generate(tokens[1:, :4] if both else tokens[1:, 3:])
    assert_same(torch.stack(together.logits)[:, 1:], torch.stack(alone.logits))


def beams(case: Case, folder: Path) -> None:
    case.attach()
    case.assert_recomputed(*prompts(), num_beams=3, num_return_sequences=2)


def sampled(case: Case, folder: Path) -> None:
    case.attach()
    case.assert_recomputed(*prompts(), do_sample=True)


def continued(case: Case, folder: Path) -> None:
    """A second call goes on from the cache that the first returned.

    generate() of Mamba takes no cache, and that of an encoder and decoder gives its whole target.
    """
    tokens, _ = prompts()
    case.attach()
    whole = case.generate(tokens, max_new_tokens=NEW + 4, use_cache=False)
    first = case.generate(tokens)
    made, cache = first.sequences, {case.family.cache: first.past_key_values}
    if case.family.kind == BOTH or case.family.cache == "cache_params":
        last = made[:, -1:]
        given = (
            dict(input_ids=tokens, decoder_input_ids=last)
            if case.family.kind == BOTH
            else dict(input_ids=last)
        )
        with torch.no_grad():
            logits = case.model(**given, **cache).logits[:, -1]
        assert_same(logits.float(), whole.logits[NEW])
        return
    again = case.generate(made, max_new_tokens=4, **cache)
    assert torch.equal(again.sequences, whole.sequences)
    assert_same(torch.stack(again.logits), torch.stack(whole.logits[NEW:]))


RUN = {
    run.__name__: run
    for run in (found, zero, detached, saved, causal, greedy, padded, beams, sampled, continued)
}


@pytest.fixture
def case(family: Family) -> Iterator[Case]:
    case = Case(family)
    yield case
    if hasattr(case.model, "tensor_memory"):
        detach(case.model)


def every_check() -> Iterator[Any]:
    """All of the first sample is checked by default, of the others what differs most."""
    for family in FAMILIES.values():
        for check in family.checks:
            usual = family.name == SAMPLE[0] or check in ("found", "zero", "causal", "greedy")
            marks = () if family.name in SAMPLE and usual else pytest.mark.exhaustive
            yield pytest.param(family, check, id=f"{family.name}-{check}", marks=marks)


@pytest.mark.parametrize(("family", "check"), list(every_check()))
def test_family(case: Case, check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if check in case.family.own_fault:
        monkeypatch.setattr(case, "attach", lambda: None)
        with pytest.raises((AssertionError, RuntimeError)):
            RUN[check](case, tmp_path)
    elif check in case.family.refused:
        with pytest.raises(ValueError, match=case.family.refused[check]):
            RUN[check](case, tmp_path)
    else:
        RUN[check](case, tmp_path)


def test_the_guide_s_table_is_the_suite_s() -> None:
    assert guide_table() == expected_table()


@pytest.mark.parametrize(("option", "status"), [("--help", 0), ("--chekc", 2), ("check", 2)])
def test_the_table_is_written_for_no_other_arguments(
    option: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytest, "main", lambda *_, **__: pytest.fail("the suite was started"))
    with pytest.raises(SystemExit) as stopped:
        main([option])
    assert stopped.value.code == status
