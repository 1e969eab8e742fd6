"""timm's own VisionTransformer, where timm can be installed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hosts import SMALL

from tensor_memory import attach, detach

pytestmark = pytest.mark.gpu
KEEPS = replace(SMALL, forget_bias=5.0)  # over 65 chunks


@pytest.mark.parametrize("scope", ["layer", "depth"])
def test_a_timm_vit_is_found_trained_and_restored(scope: str) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, depth=3).cuda().eval()
    x = torch.randn(2, 3, 224, 224, device="cuda")
    keys = list(model.state_dict())
    with torch.no_grad():
        bare = model(x)
    attachment = attach(model, KEEPS, scope=scope, causal=False, zero_init=True)
    assert attachment.paths == ["blocks.0", "blocks.1", "blocks.2"]
    assert attachment.dims == [192] * 3
    with torch.no_grad():
        assert torch.equal(model(x), bare)
    detach(model)

    attachment = attach(model, KEEPS, scope=scope, causal=False)
    model.set_grad_checkpointing()
    model.train()
    model(x).square().sum().backward()
    assert all(p.grad is not None for p in attachment.memory.parameters())
    detach(model)
    model.eval()
    assert list(model.state_dict()) == keys
    with torch.no_grad():
        assert torch.equal(model(x), bare)
