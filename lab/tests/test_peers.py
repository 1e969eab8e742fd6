"""Every peer against flash-linear-attention's naive recurrences, and against itself in parts."""

import math
import sys
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tensor_memory import PlaceConfig, find_leak
from tensor_memory_lab.bench import places
from tensor_memory_lab.bench.place_shapes import PlaceShape, addresses
from tensor_memory_lab.bench.timing import QUICK
from tensor_memory_lab.models import peers
from tensor_memory_lab.models.gated_rule import LEAST_DECAY, gated_rule
from tensor_memory_lab.models.peers import PEERS, PeerConfig, dplr_rule, unit
from tolerances import assert_same, assert_same_rms

B, H, K, V = 2, 3, 5, 4
"""Rows, heads and widths of the recurrences; none is a multiple of another."""


def drawn(N, forgets):
    """Inputs of a recurrence (B, N, H, ...) and a state, with decays of `forgets` on average."""
    torch.manual_seed(N)
    made = {
        "q": torch.randn(B, N, H, K),
        "k": unit(torch.randn(B, N, H, K)),
        "v": torch.randn(B, N, H, V),
        "decay": -forgets * torch.rand(B, N, H, K),
        "rate": torch.rand(B, N, H),
        "state": torch.randn(B, H, K, V),
    }
    return {name: x.requires_grad_() for name, x in made.items()}


LOOPS = {
    "gla": ("gla", "naive_recurrent_gla"),
    "simple": ("simple_gla", "naive_recurrent_simple_gla"),
    "deltanet": ("delta_rule", "delta_rule_recurrence"),
    "gated-deltanet": ("gated_delta_rule", "naive_recurrent_gated_delta_rule"),
    "kda": ("kda", "naive_recurrent_kda"),
    "rwkv7": ("generalized_delta_rule/dplr", "dplr_recurrence"),
}
"""Folder and name of each loop in flash-linear-attention."""


@cache
def naive_module(folder):
    """A file of loops alone: its package would import every kernel, and warn without a GPU."""
    package = find_spec("fla")
    if package is None:
        pytest.skip("fla-core is not installed: it is in the lab's extra [test]")
    file = Path(package.submodule_search_locations[0], "ops", folder, "naive.py")
    spec = spec_from_file_location(f"naive_{file.parent.name}", file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ours(kind, q, k, v, decay, rate, state):
    q = q * K**-0.5
    if kind == "gla":
        return gated_rule(q, k, v, decay, None, state)
    if kind == "simple":
        return gated_rule(q, k, v, decay[..., 0], None, state)
    if kind == "rwkv7":
        gone = k.flip(-1)  # of unit length too
        return dplr_rule(q, k, v, decay, gone, gone * rate[..., None], state)
    per_head = {"deltanet": None, "gated-deltanet": decay[..., 0], "kda": decay}
    beta = rate[..., None]
    return gated_rule(q, k, beta * v, per_head[kind], beta * k, state)


def naive(kind, q, k, v, decay, rate, state):
    """What flash-linear-attention's loops give; they scale queries themselves."""
    file, name = LOOPS[kind]
    gone = k.flip(-1)
    inputs = {
        "gla": (q, k, v, decay),
        "simple": (q, k, v, decay[..., 0]),
        "deltanet": (q, k, v, rate),
        "gated-deltanet": (q, k, v, rate, decay[..., 0]),
        "kda": (q, k, v, decay, rate),
        "rwkv7": (q, k, v, -gone, gone * rate[..., None], decay),
    }[kind]
    heads_first = kind in ("deltanet", "rwkv7")
    if heads_first:
        inputs = [x.transpose(1, 2) for x in inputs]
    loop = getattr(naive_module(file), name)
    read, state = loop(*inputs, initial_state=state, output_final_state=True)
    return read.transpose(1, 2) if heads_first else read, state


def with_gradients(function, kind, inputs):
    read, state = function(kind, **inputs)
    torch.manual_seed(0)
    loss = sum((x * torch.randn(x.shape)).sum() for x in (read, state))
    found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    return {"read": read, "after": state} | dict(zip(inputs, found, strict=True))


@pytest.mark.parametrize("rule", places.RULES)
def test_the_benchmark_asks_their_operator_for_what_a_place_scan_computes(rule, monkeypatch):
    name = places.FLA[rule]
    loop = getattr(naive_module(name), f"naive_recurrent_{name}")
    operator = SimpleNamespace(**{f"chunk_{name}": loop})
    monkeypatch.setitem(sys.modules, f"fla.ops.{name}", operator)  # which needs a GPU
    monkeypatch.setattr(places, "captured", lambda call: call)
    config = PlaceConfig(grid=(3, 4), channels=2, heads=2, rule=rule)
    row = {"ms": {"forward": {"eager": {"median": 1.0}}}}
    shape = PlaceShape(2, 5, config, torch.float32)
    places.measure_fla(shape, row, torch.device("cpu"), QUICK, seed=0)
    assert row[name]["rms_ratio"] < 1e-6


@pytest.mark.parametrize("forgets", [0.02, 0.6])
@pytest.mark.parametrize("N", [1, 63, 130])
@pytest.mark.parametrize("kind", LOOPS)
def test_a_recurrence_in_chunks_is_the_naive_loop(kind, N, forgets):
    inputs = drawn(N, forgets)
    expected = with_gradients(naive, kind, inputs)
    for name, found in with_gradients(ours, kind, inputs).items():
        if expected[name] is None:
            assert found is None, name
        else:
            assert_same_rms(f"{kind} {name}", found, expected[name], torch.float32)


@pytest.mark.parametrize(("rule", "kind"), [("linear", "simple"), ("delta", "gated-deltanet")])
@pytest.mark.parametrize("kernel", ["gaussian", "linear"])
def test_a_place_scan_is_the_naive_loop_fed_with_its_addresses(kernel, rule, kind):
    config = PlaceConfig(grid=(3, 4), channels=2, heads=2, kernel=kernel, rule=rule)
    shape = PlaceShape(2, 40, config, torch.float32)
    inputs = shape.draw(torch.device("cpu"), seed=0)
    given, phi = inputs.arguments, addresses(shape, inputs)
    v = given["content"] * (given["rate"][..., None] if rule == "linear" else 1)
    decay, state = given["log_keep"][..., None], given["state"].flatten(2, -2)
    scale = phi.shape[-1] ** 0.5  # which the loops divide queries by
    expected = naive(kind, scale * phi, phi, v, decay, given["rate"], state)
    reads, after = shape.scan("torch")(**given)
    assert_same_rms("reads", reads, expected[0], torch.float32)
    assert_same_rms("state", after.flatten(2, -2), expected[1], torch.float32)


def step_by_step(q, k, v, decay, erase, state):
    """The definition, a token at a time."""
    reads = []
    for t in range(q.shape[1]):
        if decay is not None:
            g = decay[:, t, :, :, None] if decay.ndim == 4 else decay[:, t, :, None, None]
            state = g.exp() * state
        u = v[:, t]
        if erase is not None:
            u = u - torch.einsum("bhk,bhkv->bhv", erase[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        reads.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(reads, 1), state


@pytest.mark.parametrize("forgets", [0.1, -2 * LEAST_DECAY])
@pytest.mark.parametrize("kind", ["gla", "kda"])
def test_features_that_forget_at_once_neither_overflow_nor_leak(kind, forgets):
    """Decays up to e^-10 a token: those below the bound are taken as the bound."""
    inputs = {name: x.detach().double() for name, x in drawn(100, forgets).items()}
    q, k, v, decay, rate, state = inputs.values()
    erase = None if kind == "gla" else rate[..., None] * k
    decay.requires_grad_()
    got = gated_rule(q, k, v, decay, erase, state)
    expected = step_by_step(q, k, v, decay.clamp(min=LEAST_DECAY), erase, state)
    assert_same(got[0], expected[0])
    assert_same(got[1], expected[1])
    for found in torch.autograd.grad(got[0].sum() + got[1].sum(), decay):
        assert found.isfinite().all()
    low = [None if x is None else x.float() for x in (q, k, v, decay, erase, state)]
    assert_same_rms("float32", gated_rule(*low)[0], expected[0], torch.float32)


@pytest.mark.parametrize("decay", ["none", "head", "feature"])
@pytest.mark.parametrize("delta", [False, True])
def test_a_recurrence_goes_on_where_the_call_before_ended(delta, decay):
    inputs = {name: x.detach().double() for name, x in drawn(90, 0.3).items()}
    q, k, v, g, rate, state = inputs.values()
    g = {"none": None, "head": g[..., 0], "feature": g}[decay]
    erase = rate[..., None] * k if delta else None
    expected = step_by_step(q, k, v, g, erase, state)
    reads = []
    for part in torch.arange(90).split([1, 16, 0, 40, 33]):
        cut = [None if x is None else x[:, part] for x in (q, k, v, g, erase)]
        read, state = gated_rule(*cut, state)
        reads.append(read)
    assert_same(torch.cat(reads, 1), expected[0])
    assert_same(state, expected[1])


def test_one_key_written_again_and_again_costs_float32_nothing():
    """Where the powers of what a chunk solves grow to 10^18."""
    q, k, v, _, _, state = (x.detach().double() for x in drawn(130, 1.0).values())
    k = k[:, :1].expand_as(k)
    expected = step_by_step(q, k, v, None, 0.99 * k, state)
    found = gated_rule(*(x.float() for x in (q, k, v)), None, 0.99 * k.float(), state.float())
    for low, high in zip(found, expected, strict=True):
        assert_same_rms("float32", low, high, torch.float32)


DIM = 12
CONFIG = PeerConfig(state_bytes=4 * 160, heads=2)


def built(name):
    torch.manual_seed(1)
    peer = PEERS[name](DIM, CONFIG).double()
    with torch.no_grad():  # what starts at zero would hide what is behind it
        for parameter in peer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return peer


def convolved(x, convolution):
    """A causal convolution by PyTorch's, then SiLU."""
    before = F.pad(x.mT, (len(convolution.taps) - 1, 0))
    mixed = F.conv1d(before, convolution.taps.mT[:, None], convolution.bias, groups=x.shape[-1])
    return F.silu(mixed).mT


def attention_layer(name, peer, x):
    """GLA and the DeltaNets as their authors' layers have them, around the naive loops."""
    mixed = peer.project(x)
    if name != "gla":
        mixed = convolved(mixed, peer.convolution)
    q, k, v, *gate = (part.unflatten(-1, (peer.heads, -1)) for part in mixed.split(peer.split, -1))
    rate, decay = k[..., 0], torch.zeros_like(k)  # where a layer has none, nothing reads it
    if name == "gla":
        decay = F.logsigmoid(peer.decay(x)).unflatten(-1, (peer.heads, -1)) / 16
    else:
        q, k, rate = F.normalize(q, dim=-1), F.normalize(k, dim=-1), peer.rate(x).sigmoid()
    if name in ("gated-deltanet", "kda"):
        step = F.softplus(peer.step(x) + peer.step_bias)
        step = step.unflatten(-1, (peer.heads, -1))  # one of a head, or one of each feature
        decay = (-peer.log_speed.exp()[:, None] * step).clamp(min=LEAST_DECAY).expand_as(k)
    state = x.new_zeros(len(x), peer.heads, peer.key, peer.value)
    read = naive(name, q, k, v, decay, rate, state)[0]
    read = read * (read.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * peer.norm.weight
    if name == "gla":
        read = read * F.silu(gate[0])
    elif name != "deltanet":
        squash = F.silu if name == "gated-deltanet" else torch.sigmoid
        read = read * squash(peer.gate(x)).unflatten(-1, (peer.heads, -1))
    return peer.output(read.flatten(2))


def mamba2_layer(_, peer, x):
    gate, mixed, step = peer.project(x).split(peer.split, -1)
    value, b, c = convolved(mixed, peer.convolution).split(
        (peer.heads * peer.value, peer.key, peer.key), -1
    )
    value = value.unflatten(-1, (peer.heads, -1))
    step = F.softplus(step + peer.step_bias)
    h, reads = 0, []
    for t in range(x.shape[1]):
        kept = (-peer.log_speed.exp() * step[:, t]).exp()[:, :, None, None]
        added = torch.einsum("bk,bhv->bhkv", b[:, t], step[:, t, :, None] * value[:, t])
        h = kept * h + added
        read = torch.einsum("bk,bhkv->bhv", c[:, t], h)
        reads.append(read + peer.skip[:, None] * value[:, t])
    return peer.output(peer.norm(torch.stack(reads, 1).flatten(2) * F.silu(gate)))


def rwkv7_layer(_, peer, x):
    """With S as (V, K): S ← S diag(w) − (S κ)(a ⊙ κ)ᵀ + v kᵀ, read S r."""
    before = F.pad(x, (0, 0, 1, -1))
    r, w, k, v, a, g = (x + (before - x) * mix for mix in peer.shift.view(6, -1))
    w = (-math.exp(-0.5) * peer.decay(w).sigmoid()).exp()
    k, a = peer.keys(k), peer.rate(a).sigmoid()
    erased, k = k * peer.erased, k * (1 + (a - 1) * peer.slowed)
    r, w, k, a, erased, bonus = (
        part.unflatten(-1, (peer.heads, -1)) for part in (peer.read(r), w, k, a, erased, peer.bonus)
    )
    v, erased = peer.values(v).unflatten(-1, (peer.heads, -1)), F.normalize(erased, dim=-1)
    S, reads = x.new_zeros(len(x), peer.heads, peer.value, peer.key), []
    for t in range(x.shape[1]):
        gone = torch.einsum("bhvk,bhk->bhv", S, erased[:, t])[..., None]
        S = S * w[:, t, :, None] - gone * (a * erased)[:, t, :, None]
        S = S + v[:, t, ..., None] * k[:, t, :, None]
        reads.append(torch.einsum("bhvk,bhk->bhv", S, r[:, t]))
    read = torch.stack(reads, 1)
    centred = read - read.mean(-1, keepdim=True)
    normal = centred * (centred.square().mean(-1, keepdim=True) + peer.key * 1e-5).rsqrt()
    read = normal.flatten(2) * peer.norm.weight + peer.norm.bias
    read = read.unflatten(-1, (peer.heads, -1)) + (r * k * bonus).sum(-1, keepdim=True) * v
    return peer.output(read.flatten(2) * peer.gate(g))


LAYERS = {"mamba2": mamba2_layer, "rwkv7": rwkv7_layer}


LOOP_INPUTS = {
    "gla": ("q", "k", "v", "g"),
    "deltanet": ("q", "k", "v", "beta"),
    "gated-deltanet": ("q", "k", "v", "beta", "g"),
    "kda": ("q", "k", "v", "g", "beta"),
    "mamba2": ("q", "k", "v", "g"),
    "rwkv7": ("q", "k", "v", "a", "b", "gk"),
}
"""Of the loops, by the names that the kernels have for them."""


def loop_for(name):
    """The loop of a peer, called as its kernel is."""
    file, loop = LOOPS["simple" if name == "mamba2" else name]
    heads_first = name in ("deltanet", "rwkv7")

    def call(*, scale, initial_state, output_final_state, **given):
        assert given.keys() == set(LOOP_INPUTS[name])
        assert all(x.dtype == torch.bfloat16 for x in (given["q"], given["k"], given["v"]))
        assert initial_state.shape[2] % 2 == 0
        given["q"] = given["q"] * scale * given["q"].shape[-1] ** 0.5  # the loops scale too
        inputs = [given[key].float() for key in LOOP_INPUTS[name]]
        if heads_first:
            inputs = [x.transpose(1, 2) for x in inputs]
        read, state = getattr(naive_module(file), loop)(
            *inputs, initial_state=initial_state, output_final_state=output_final_state
        )
        return read.transpose(1, 2) if heads_first else read, state

    return call


def layer_results(peer, x, state):
    """What a layer returns, and the gradients of it all."""
    m, after = peer(x, state)
    (m.square().sum() + after["state"].square().sum()).backward()
    found = {"m": m, "state": after["state"], "x": x.grad}
    found |= {label: parameter.grad for label, parameter in peer.named_parameters()}
    x.grad = None
    return found


ODD = PeerConfig(state_bytes=4 * 2 * 45 * 45, heads=2)
"""Every peer's keys have an odd number of features."""


def both_backends(name, dim, config, device):
    """A layer on its own chunks and on the kernels: the same weights, the same inputs."""
    torch.manual_seed(1)
    peer = PEERS[name](dim, config)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(2, 130, dim).to(device).requires_grad_()
    state = {key: torch.randn_like(kept).to(device) for key, kept in peer.zeros(2, x).items()}
    found = []
    for backend in ("torch", "fla"):
        other = PEERS[name](dim, replace(config, backend=backend)).to(device)
        other.load_state_dict(peer.state_dict())
        found.append(partial(layer_results, other, x, state))
    return found


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_hands_its_kernel_what_its_own_chunks_get(name, monkeypatch):
    monkeypatch.setattr(peers, "load_kernel", lambda operator: loop_for(name))
    torch_backend, fla_backend = both_backends(name, 64, ODD, "cpu")
    expected = torch_backend()
    for key, found in fla_backend().items():
        assert_same_rms(f"{name} {key}", found, expected[key], torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "config"), [(64, ODD), (192, PeerConfig())])
@pytest.mark.parametrize("name", PEERS)
def test_a_peers_kernel_computes_what_its_own_chunks_do(name, dim, config):
    pytest.importorskip("fla", reason="fla-core is not installed")
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    refuses = IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1
    refuses = refuses and find_spec("tilelang") is None  # which has a backward of its own
    if IS_NVIDIA_HOPPER and name in ("deltanet", "kda"):
        with pytest.raises(ValueError, match="expected torch on Hopper, got fla"):
            both_backends(name, dim, config, "cuda")
        return
    torch_backend, fla_backend = both_backends(name, dim, config, "cuda")
    if refuses and name in ("gated-deltanet", "mamba2"):
        with pytest.raises(RuntimeError, match="incorrect results"):
            fla_backend()
        return
    expected = torch_backend()
    for key, found in fla_backend().items():
        assert_same_rms(f"{name} {key}", found, expected[key], torch.bfloat16)


def test_kernels_are_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"model.peer.backend: expected torch where there is no"):
        PEERS["gla"](DIM, replace(CONFIG, backend="fla"))
    with pytest.raises(ValueError, match=r"model.peer.backend: expected one of torch, fla, got"):
        PeerConfig(backend="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for name in ("deltanet", "kda"):
        with pytest.raises(ValueError, match="expected torch on Hopper, got fla"):
            PEERS[name](DIM, replace(CONFIG, backend="fla"))
    monkeypatch.setitem(sys.modules, "fla.ops.gla", None)
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(__path__=[]))
    with pytest.raises(ValueError, match="fla needs flash-linear-attention"):
        PEERS["gla"](DIM, replace(CONFIG, backend="fla"))


@torch.no_grad()
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_agrees_with_its_authors_formulas(name):
    peer = built(name).float()
    x = torch.randn(2, 70, DIM)
    expected = LAYERS.get(name, attention_layer)(name, peer, x)
    assert_same_rms(name, peer(x)[0], expected, torch.float32)


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_goes_on_where_the_call_before_ended(name):
    peer, state, found = built(name), None, []
    x = torch.randn(2, 75, DIM, dtype=torch.float64)
    expected, after = peer(x)
    for part in x.split([1, 2, 40, 32], dim=1):
        m, state = peer(part, state)
        found.append(m)
    assert_same(torch.cat(found, 1), expected)
    assert state.keys() == after.keys() == peer.zeros(2, x).keys()
    for key, tensor in state.items():
        assert_same(tensor, after[key])
        assert tensor.shape == peer.zeros(2, x)[key].shape


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_causal(name):
    peer = built(name).eval()
    report = find_leak(lambda x: peer(x)[0], torch.randn(2, 70, DIM, dtype=torch.float64))
    assert not report, report
    assert "no leak at" in str(report)


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_keeps_the_bytes_it_states_within_its_budget(name):
    peer = PEERS[name](DIM, CONFIG)
    _, state = peer(torch.randn(3, 20, DIM))
    assert sum(tensor.nbytes for tensor in state.values()) == 3 * peer.state_bytes()
    budget = CONFIG.state_bytes
    assert 0.75 * budget <= state["state"][0].nbytes <= budget


@pytest.mark.parametrize("name", PEERS)
def test_every_weight_of_a_peer_learns(name):
    peer = built(name)
    m, state = peer(torch.randn(2, 70, DIM, dtype=torch.float64))
    (m.square().sum() + state["state"].square().sum()).backward()
    for label, parameter in peer.named_parameters():
        assert parameter.grad is not None, label
        assert parameter.grad.any(), label


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_runs_in_bf16_and_keeps_its_state_in_float32(name):
    torch.manual_seed(1)
    peer = PEERS[name](DIM, CONFIG)
    x = torch.randn(2, 70, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        m, state = peer(x)
    assert m.dtype == torch.bfloat16
    assert state["state"].dtype == torch.float32
    assert_same_rms(name, state["state"], peer(x)[1]["state"], torch.bfloat16)


def test_decays_start_where_the_authors_start_them():
    config = PeerConfig(state_bytes=4 * 64 * 64, heads=64)
    for name, least in (("gated-deltanet", 0.0), ("mamba2", 1.0), ("kda", 1.0)):
        peer = PEERS[name](256, replace(config, state_bytes=4 * 64 * 256))
        speed, step = peer.log_speed.exp(), F.softplus(peer.step_bias)
        assert speed.min() >= least
        assert speed.max() <= 16
        assert step.min() >= 0.001 * (1 - 1e-4)
        assert step.max() <= 0.1 * (1 + 1e-4)
    assert step.log().mean().item() == pytest.approx(math.log(0.01), abs=0.3)  # of many


def test_a_budget_too_small_is_refused():
    with pytest.raises(ValueError, match=r"peer: expected 1 head or more and 4 bytes or more"):
        PeerConfig(state_bytes=8, heads=4)
    with pytest.raises(ValueError, match=r"peer.state_bytes: expected 96 or more for mamba2"):
        PEERS["mamba2"](12, PeerConfig(state_bytes=64, heads=1))
