"""The fused scan on a real device at real shapes: programs that meet, tensor cores, graphs."""

import pytest
import torch
from scans import Case, as_double, assert_agree, floats, near_the_start, run

from tensor_memory import MemoryConfig, MemoryResidual, TensorMemory, memory_scan
from tensor_memory.ops.scan.inputs import ScanInputs

pytestmark = pytest.mark.gpu

LANGUAGE = Case(B=32, S=32, Q=1, M=1, C=32, grid=(8, 8, 8), writes=False, resets=False)
VIDEO = Case(B=32, S=25, Q=1, M=1, C=64, grid=(8, 8, 8), writes=False, resets=False)
BINDING = Case(B=128, S=104, Q=1, M=1, C=16, grid=(6, 6, 6), writes=False, resets=False)
MASKED = Case(B=5, S=9, Q=3, M=2, C=32, grid=(7, 9, 8))
FLAT = Case(B=4, S=6, Q=2, M=1, C=48, grid=(13, 31))
LINE = Case(B=2, S=5, Q=1, M=2, C=16, grid=(128,), resets=False)
WIDE = Case(B=3, S=4, Q=1, M=1, C=128, grid=(4, 5, 6))
MANY = Case(B=160, S=4, Q=1, M=1, C=64, grid=(8, 8, 8), writes=False, resets=False)  # 8 tiles
LARGE = Case(B=2, S=3, Q=1, M=1, C=32, grid=(16, 16, 16), nearest=True)


def run_in(products: torch.dtype, request: ScanInputs) -> dict[str, torch.Tensor]:
    with torch.autocast("cuda", torch.bfloat16, enabled=products == torch.bfloat16):
        return run(request, "triton")


@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case", [LANGUAGE, VIDEO, BINDING, MASKED, FLAT, LINE, WIDE, LARGE, MANY], ids=str
)
def test_real_shapes_agree_with_the_reference(case, products):
    request = near_the_start(case)
    expected = run(as_double(request), "reference")
    assert_agree(run_in(products, request), expected, products)


@pytest.mark.parametrize("case", [LANGUAGE, MASKED], ids=str)
def test_every_run_gives_the_same_bits(case):
    request = near_the_start(case)
    first, second = (run_in(torch.bfloat16, request) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_inference_gives_what_training_gives():
    request = near_the_start(MASKED)
    expected = run(as_double(request), "reference")
    with torch.no_grad():
        reads, hidden, cell = memory_scan(
            *floats(request), writes=request.writes, resets=request.resets, backend="triton"
        )
    got = {"hidden": hidden, "cell": cell, "reads": reads}
    assert_agree(got, {name: expected[name] for name in got}, torch.float32)


def test_a_new_length_compiles_nothing():
    from tensor_memory.ops.scan.triton import forward_scan

    def compiled() -> int:
        caches = forward_scan.forward_kernel.device_caches.values()
        return sum(len(cache[0]) for cache in caches)

    run_in(torch.bfloat16, near_the_start(Case(B=2, S=5, C=16, Q=1, M=1)))
    before = compiled()
    for S in (3, 16, 33, 48):
        run_in(torch.bfloat16, near_the_start(Case(B=2, S=S, C=16, Q=1, M=1)))
    assert compiled() == before


def test_this_triton_takes_addresses():
    """Slow and right without: every launch would be an ordinary one."""
    from tensor_memory.ops import launch

    run_in(torch.bfloat16, near_the_start(Case(B=2, S=5, C=16, Q=1, M=1)))
    variants = [v for bound in launch._bound.values() for v in bound.variants.values()]
    assert len(variants) > 5
    assert None not in variants


def memory_and_tokens() -> tuple[TensorMemory, torch.Tensor]:
    config = MemoryConfig(channels=16, grid=(4, 4, 4), chunk_size=4, backend="triton")
    return TensorMemory(32, config).cuda(), torch.randn(2, 24, 32, device="cuda")


@pytest.mark.parametrize("flush", [False, 6])
@pytest.mark.parametrize("layer", [lambda memory: memory, MemoryResidual])
def test_a_captured_graph_replays_the_scan(flush, layer):
    memory, x = memory_and_tokens()
    memory = layer(memory).cuda()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            memory(x, flush=flush)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            m, _ = memory(x, flush=flush)
        x.copy_(torch.randn_like(x))
        graph.replay()
        expected, _ = memory(x, flush=flush)
    assert torch.equal(m, expected)


def test_a_layer_of_real_size_is_the_plain_one(monkeypatch):
    config = MemoryConfig(backend="triton")
    layer = MemoryResidual(TensorMemory(384, config)).cuda()
    x = torch.randn(4, 512, 384, device="cuda")

    def gradients() -> list[torch.Tensor]:
        layer.zero_grad()
        given = x.clone().requires_grad_()
        out, _ = layer(given)
        out.square().mean().backward()
        return [out.detach(), given.grad, *(p.grad for p in layer.parameters())]

    fused = gradients()
    monkeypatch.setattr("tensor_memory.residual.fused_layer", lambda *_, **__: None)
    for got, expected in zip(fused, gradients(), strict=True):
        error = (got - expected).double().square().mean().sqrt()
        assert error <= 1e-4 * expected.double().square().mean().sqrt()


# Both are inductor's own: what it imports, and that products stay in float32 as they should here.
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores for float32:UserWarning")
def test_a_compiled_module_gives_what_an_eager_one_gives():
    memory, x = memory_and_tokens()
    compiled = torch.compile(memory, fullgraph=True)
    (got, _), (expected, _) = compiled(x), memory(x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    grads = [torch.autograd.grad(m.square().sum(), memory.taps)[0] for m in (got, expected)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
