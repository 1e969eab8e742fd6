"""Nothing looks ahead, and `find_leak` finds what does."""

import math

import pytest
import torch
from torch import nn

from memories import DIM, OPTIONS, make_marks, make_memory, make_state, make_tokens
from tensor_memory import (
    LeakReport,
    MemoryConfig,
    MemoryResidual,
    PlaceMemory,
    TensorMemory,
    find_leak,
)

WIDTH, IDS, LENGTH = 8, 11, 13
CONFIG = MemoryConfig(channels=4, grid=(3, 3), chunk_size=2)


class Stack(nn.Module):
    """Causal attention and a memory per layer; `threaded` is the published model's mistake."""

    def __init__(self, layers: int = 2, *, threaded: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.threaded = threaded
        self.embedding = nn.Embedding(IDS, WIDTH)
        self.attention = nn.ModuleList(
            [nn.MultiheadAttention(WIDTH, 2, dropout, batch_first=True) for _ in range(layers)]
        )
        shared = TensorMemory(WIDTH, CONFIG)
        self.memories = nn.ModuleList(
            [MemoryResidual(shared, dropout=dropout) for _ in range(layers)]
        )
        self.head = nn.Linear(WIDTH, IDS)

    def forward(self, ids):
        x, state = self.embedding(ids), None
        future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)
        for attention, memory in zip(self.attention, self.memories, strict=True):
            x = x + attention(x, x, x, attn_mask=future, need_weights=False)[0]
            x, end = memory(x, state if self.threaded else None, flush=self.threaded)
            state = end
        return self.head(x)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, IDS, (2, LENGTH))


@pytest.mark.whole_cross
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_option_is_causal_bit_for_bit(option, dtype):
    memory = make_memory(OPTIONS[option], dtype=dtype)
    x, other = (make_tokens(2, LENGTH, DIM, seed=seed, dtype=dtype) for seed in (0, 1))
    m, _ = memory(x)
    for cut in range(1, LENGTH):
        changed, _ = memory(torch.cat([x[:, :cut], other[:, cut:]], dim=1))
        assert torch.equal(changed[:, :cut], m[:, :cut])


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_causal_with_masks_documents_and_flushes(option):
    memory, state = make_memory(OPTIONS[option]), make_state(OPTIONS[option], 2)
    marks = {
        name: make_marks(2, LENGTH, share, seed)
        for seed, (name, share) in enumerate({"mask": 0.8, "reset": 0.2, "flush": 0.2}.items())
    }
    x, other = make_tokens(2, LENGTH, DIM), make_tokens(2, LENGTH, DIM, seed=1)
    m, _ = memory(x, state, **marks)
    for cut in range(1, LENGTH):
        changed, _ = memory(torch.cat([x[:, :cut], other[:, cut:]], dim=1), state, **marks)
        assert torch.equal(changed[:, :cut], m[:, :cut])


@pytest.mark.parametrize("option", ["paper", "token reads, heads"])
def test_no_option_leaks(option):
    report = find_leak(make_memory(OPTIONS[option]), make_tokens(2, LENGTH, DIM))
    assert not report
    assert report.noise == 0
    assert all(cut.gradient == 0 and cut.change == 0 for cut in report.cuts)
    assert report.cuts[0].later > 0


def test_an_honest_stack_passes(ids):
    report = find_leak(Stack(), ids)
    assert isinstance(report, LeakReport)
    assert not report
    assert report.precision == "in float64 on a copy"
    assert report.gradient == "with respect to the embedded ids"
    assert all(cut.later > 0 for cut in report.cuts)
    assert str(report).splitlines()[-1] == "no leak at 6 cuts"


def test_one_state_threaded_through_depth_is_found(ids):
    report = find_leak(Stack(threaded=True), ids)
    assert report
    for cut in report.cuts:
        assert (cut.moved, cut.earliest) == (cut.cut, 0)
        assert cut.change > 0
        assert cut.gradient > 0
    assert (
        "LEAK: changing inputs from position 12 on moved 12 earlier outputs, the first at posit"
        in (str(report))
    )


def test_one_threaded_layer_has_nothing_to_leak_into(ids):
    assert not find_leak(Stack(1, threaded=True), ids)


@pytest.mark.parametrize("cut", [1, 5, 6, 12])
def test_a_leak_is_placed_where_it_is(cut):
    def peek(x):
        return x + 0.1 * x.roll(-2, dims=1)

    (found,) = find_leak(peek, make_tokens(2, LENGTH, WIDTH), cuts=[cut]).cuts
    expected = [t for t in range(cut) if (t + 2) % LENGTH >= cut]
    assert (found.earliest, found.moved) == (expected[0], len(expected))


def test_a_leak_too_small_to_change_a_bit_is_found_by_its_gradient():
    report = find_leak(lambda x: x + 1e-40 * x.mean(1, keepdim=True), make_tokens(2, 8, 4))
    assert report
    assert all(cut.moved == 0 and cut.change == 0 and cut.gradient > 0 for cut in report.cuts)
    assert "LEAK: outputs before position" in str(report)


class LongConvolution(torch.nn.Module):
    """Causal, by way of all positions: later ones cancel but for rounding."""

    def __init__(self, peek: float) -> None:
        super().__init__()
        self.kernel, self.peek = torch.nn.Parameter(torch.randn(8, 4)), peek

    def forward(self, x):
        spectra = (torch.fft.rfft(values, 16, dim=-2) for values in (x, self.kernel))
        made = torch.fft.irfft(math.prod(spectra), 16, dim=-2)[:, :8]
        return made + self.peek * x.roll(-1, 1)


@pytest.mark.parametrize(("peek", "rounded"), [(0.0, True), (1e-9, False)])
def test_what_only_rounding_carries_back_is_said_to_be_no_more(peek, rounded):
    report = find_leak(LongConvolution(peek), torch.randn(2, 8, 4))
    assert report
    assert "LEAK: changing inputs" in str(report)
    assert ("no more than rounding, as where a step mixes all positions" in str(report)) == rounded


@pytest.mark.parametrize("leaks", [False, True])
def test_a_model_that_cuts_its_inputs_off_has_a_gradient_of_zero(leaks):
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            x = x.detach() * self.weight
            return x.flip(1) if leaks else x

    report = find_leak(Cut(), make_tokens(2, 8, 4))
    assert bool(report) == leaks
    assert all(cut.gradient == 0 for cut in report.cuts)
    assert "compared bit for bit" in str(report)


def test_a_leak_without_a_gradient_is_found_by_its_changes():
    report = find_leak(lambda x: x + x.detach().mean(1, keepdim=True), make_tokens(2, 8, 4))
    assert report
    assert all(cut.moved == cut.cut and cut.gradient == 0 for cut in report.cuts)
    ranked = find_leak(lambda x: x.argsort(1), make_tokens(2, 8, 4))
    assert ranked
    assert ranked.gradient == "not taken: the output carries none"


def test_a_leak_of_one_row_in_many_is_found():
    def peek(x):
        return torch.cat([x[:-1], x[-1:].flip(1)])

    assert find_leak(peek, make_tokens(5, 9, 2))


def test_a_model_that_is_not_deterministic_is_judged_beyond_its_noise(ids):
    generator = torch.Generator().manual_seed(0)
    honest = Stack().eval()

    def noisy(scale):
        return lambda ids: honest(ids) + scale * torch.randn(2, LENGTH, IDS, generator=generator)

    report = find_leak(noisy(0.1), ids)
    assert not report
    assert 0.1 < report.noise < 1
    assert "not deterministic: the same input run again differs by" in str(report)
    large = find_leak(lambda ids: noisy(1e-6)(ids) + ids.sum(1)[:, None, None], ids)
    assert large
    assert large.noise > 0


def test_a_model_that_draws_random_numbers_draws_the_same_each_time():
    x = make_tokens(2, 8, 4)
    report = find_leak(lambda x: x + torch.randn_like(x), x)
    assert not report
    assert report.noise == 0
    assert find_leak(lambda x: x + torch.randn_like(x) + 1e-9 * x.mean(1, keepdim=True), x)


def test_a_model_that_keeps_a_state_between_calls_is_judged_from_one_state():
    class Agent(nn.Module):
        def __init__(self, ahead):
            super().__init__()
            self.memory, self.state, self.ahead = MemoryResidual(PlaceMemory(8)), None, ahead

        def forward(self, x):
            m, self.state = self.memory(x, self.state)
            return m + 1e-3 * self.ahead * x.flip(1).cumsum(1).flip(1)

    x = make_tokens(1, 16, 8)
    assert not find_leak(Agent(0), x)
    assert find_leak(Agent(1), x)


def test_dropout_is_off_and_every_mode_and_random_state_is_given_back(ids):
    model = Stack(dropout=0.5)
    model.attention[0].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    report = find_leak(model, ids)
    assert torch.equal(torch.rand(1), expected)
    assert report.noise == 0
    assert [module.training for module in model.modules()] == modes
    assert all(weights[name].equal(value) for name, value in model.state_dict().items())
    assert next(model.parameters()).dtype == torch.float32
    assert not any(module._forward_hooks for module in model.modules())


class OnlyFloat32(Stack):
    """Refuses float64, as fused kernels do."""

    error: type[Exception] = TypeError

    def forward(self, ids):
        if self.head.weight.dtype != torch.float32:
            raise self.error("expected float32 weights\nand a second line")
        return super().forward(ids)


@pytest.mark.parametrize("error", [TypeError, RuntimeError, AssertionError])
def test_a_model_that_refuses_float64_runs_as_given_and_the_report_says_so(ids, error):
    model = OnlyFloat32(1, dropout=0.5)
    model.error = error
    report = find_leak(model, ids)
    assert not report
    refused = f"no float64 copy: {error.__name__}: expected float32 weights"
    assert report.precision == f"as given ({refused})"
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_a_leak_of_a_model_that_refuses_float64_is_found(ids):
    assert find_leak(OnlyFloat32(threaded=True), ids)


def test_modes_are_given_back_when_the_model_raises(ids):
    model = OnlyFloat32().double()
    with pytest.raises(TypeError, match="expected float32 weights"):
        find_leak(model, ids)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_taken_under_no_grad_and_inference_mode(ids, mode):
    model = Stack(threaded=True)
    with mode():
        assert find_leak(model, ids, cuts=[6]).cuts[0].gradient > 0


def test_where_no_gradient_can_be_taken_the_report_says_why(ids):
    model = Stack().eval()
    with_function = find_leak(lambda ids: model(ids), ids)
    assert with_function.gradient == "not taken: no embedding module was called with these ids"
    assert with_function.precision == "as given (a plain callable)"
    frozen = find_leak(torch.no_grad()(lambda x: x.cumsum(1)), make_tokens(2, 8, 4))
    assert frozen.gradient == "not taken: the output carries none"
    assert all(cut.gradient is None for cut in frozen.cuts)
    undefined = find_leak(lambda x: (x - x).sqrt() + x, make_tokens(2, 8, 4))
    assert undefined.gradient == "not taken: it is NaN"


class Output:
    def __init__(self, **fields) -> None:
        self.__dict__.update(fields)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: (y, None),
        lambda y: [torch.zeros(()), y],
        lambda y: (y[:, :-1], y),
        lambda y: Output(logits=y, loss=None),
        lambda y: Output(last_hidden_state=y, logits=None),
        lambda y: y.argmax(-1),
    ],
)
@pytest.mark.parametrize("leaks", [False, True])
def test_outputs_are_found_in_what_a_model_returns(wrap, leaks):
    report = find_leak(lambda x: wrap(x.flip(1) if leaks else x), make_tokens(2, 8, 4))
    assert bool(report) == leaks


def test_models_of_transformers_are_understood(ids):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    layers = {"vocab_size": IDS, "num_hidden_layers": 2}
    decoder = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **layers))
    encoder = transformers.BertModel(transformers.BertConfig(**sizes, **layers))
    assert not find_leak(decoder, ids)
    report = find_leak(encoder, ids)
    assert report
    assert report.gradient == "with respect to the embedded ids"


def test_models_may_change_their_input_and_reuse_their_output():
    buffer = torch.zeros(2, 8, 4, dtype=torch.float64)

    def careless(x):
        x.mul_(2)
        return buffer.copy_(x.cumsum(1)) if not x.requires_grad else x.cumsum(1)

    x = make_tokens(2, 8, 4)
    kept = x.clone()
    assert not find_leak(careless, x)
    assert torch.equal(x, kept)
    assert find_leak(lambda x: buffer.copy_(x.detach().flip(1)), x)


def test_models_may_scale_their_embeddings_in_place(ids):
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(IDS, WIDTH)

        def forward(self, ids):
            return self.embedding(ids).mul_(2).cumsum(1)

    report = find_leak(InPlace(), ids)
    assert not report
    assert report.gradient == "with respect to the embedded ids"


@pytest.mark.parametrize("embedded", ["positions alone", "in a tuple"])
def test_an_embedding_that_does_more_than_look_ids_up_accuses_nobody(ids, embedded):
    class Embedding(nn.Embedding):
        def forward(self, input):
            if embedded == "positions alone":
                return super().forward(torch.arange(input.shape[1]))  # (N, d)
            return (super().forward(input),)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.other = nn.Embedding(IDS, WIDTH), Embedding(LENGTH, WIDTH)

        def forward(self, ids):
            other = self.other(ids)
            return (self.tokens(ids) + (other[0] if isinstance(other, tuple) else other)).cumsum(1)

    report = find_leak(Model(), ids[:, :6])
    assert not report
    assert report.gradient == "with respect to the embedded ids"


def test_a_model_that_ignores_its_input_is_not_praised():
    report = find_leak(lambda x: torch.zeros_like(x), make_tokens(2, 8, 4))
    assert not report
    assert "NOTHING SHOWN: no output moved at all" in str(report)


def test_what_cannot_be_called_is_refused():
    message = r"^model: expected a module or a function of the example, got str; call find_leak\("
    with pytest.raises(TypeError, match=message):
        find_leak("gpt2", torch.randn(1, 4, DIM))


def test_replacements_are_other_valid_ids():
    seen = []

    def spy(ids):
        seen.append(ids.clone())
        return ids

    example = torch.tensor([[3, 9, 3, 9, 9]])
    find_leak(spy, example, cuts=[2])
    assert set(seen[-1][0, 2:].tolist()) <= {3, 9}
    assert torch.equal(seen[-1][:, :2], example[:, :2])
    assert (seen[-1][:, 2:] != example[:, 2:]).all()
    find_leak(spy, example, cuts=[2], vocab_size=100)
    assert (seen[-1][:, 2:] != example[:, 2:]).all()
    assert not set(seen[-1][0, 2:].tolist()) <= {3, 9}
    assert seen[-1].max() < 100


def test_the_size_of_the_input_embedding_bounds_the_ids():
    class Declared(Stack):
        def get_input_embeddings(self):
            return self.embedding

    only_one = torch.full((1, LENGTH), 4)
    report = find_leak(Declared(), only_one)
    assert not report
    assert report.cuts[0].later > 0
    with pytest.raises(ValueError, match=r"expected ids from 0 to 10, got 4 to 11; pass valid ids"):
        find_leak(Declared(), torch.tensor([[4, 11]]))

    class Undeclared(Stack):
        def get_input_embeddings(self):
            raise NotImplementedError

    with pytest.raises(ValueError, match=r"two different ids to exchange, got only 4; pass vocab_"):
        find_leak(Undeclared(), only_one)


def test_the_seed_decides_the_replacements():
    x = make_tokens(2, 8, 4)
    three, again, four = (find_leak(lambda x: x.flip(1), x, seed=seed) for seed in (3, 3, 4))
    assert three == again != four


def test_default_cuts_hold_the_ends_and_the_middle():
    cuts = [cut.cut for cut in find_leak(lambda x: x, make_tokens(1, 16, 2)).cuts]
    assert cuts == [1, 4, 8, 9, 12, 15]
    assert [cut.cut for cut in find_leak(lambda x: x, make_tokens(1, 2, 2)).cuts] == [1]


@pytest.mark.parametrize(
    ("example", "error", "message"),
    [
        (torch.zeros(4, dtype=torch.long), ValueError, r"expected ids \(B, N\) .*, got \(4,\)"),
        (torch.zeros(2, 4, 3, dtype=torch.int32), ValueError, r"expected ids \(B, N\) .*int32"),
        (torch.zeros(2, 4), ValueError, r"expected embeddings \(B, N, d\) .*, got \(2, 4\); ids"),
        (torch.zeros(2, 4, dtype=torch.bool), TypeError, r"got torch.bool; convert it with \.long"),
        (torch.zeros(2, 4, 3, dtype=torch.complex64), TypeError, "got torch.complex64; convert"),
        ([[1, 2]], TypeError, "expected a tensor of integer ids .*, got list; .*lambda x: model"),
        (torch.zeros(2, 1, 3), ValueError, r"two positions, got \(2, 1, 3\); with fewer"),
        (torch.zeros(0, 4, 3), ValueError, r"at least one row .*, got \(0, 4, 3\)"),
    ],
)
def test_examples_that_cannot_show_anything_are_refused(example, error, message):
    with pytest.raises(error, match=rf"^example: .*{message}"):
        find_leak(lambda x: x, example)


@pytest.mark.parametrize("cuts", [[0], [8], [-1, 3], []])
def test_cuts_outside_the_example_are_refused(cuts):
    outside = [cut for cut in cuts if not 1 <= cut < 8] or "none"
    message = r"^cuts: expected positions from 1 to 7 for an example of length 8, got "
    with pytest.raises(ValueError, match=message) as caught:
        find_leak(lambda x: x, make_tokens(1, 8, 2), cuts=cuts)
    assert f"got {outside}; something must lie on both sides" in str(caught.value)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda x: x[:, :-1], ValueError, r"\(B, N, \.\.\.\) = \(2, 8, \.\.\.\), got \(2, 7, 4\)"),
        (lambda x: x.sum(), ValueError, r"got \(\); wrap the model in a function"),
        (lambda x: {"logit": x}, TypeError, "expected a tensor, .*, got dict; wrap the model"),
        (lambda x: (None, 3), TypeError, "got tuple; wrap the model"),
        (lambda x: x / 0 - x / 0, ValueError, "got NaN, which cannot be seen to move; give an"),
    ],
)
def test_outputs_that_cannot_be_judged_are_refused(model, error, message):
    with pytest.raises(error, match=rf"^model: .*{message}"):
        find_leak(model, make_tokens(2, 8, 4))


def test_a_vocabulary_of_one_is_refused(ids):
    with pytest.raises(ValueError, match=r"^vocab_size: expected at least 2, .*, got 1"):
        find_leak(Stack(), ids, vocab_size=1)
