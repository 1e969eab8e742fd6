"""One tiny host of every family that the guide's table names, random, built from its config."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from hosts import SIZES, VOCABULARY, WIDTH, host_of
from torch import Tensor, nn

DECODER, ENCODER, BOTH = "decoder", "encoder", "encoder and decoder"
IMAGE, VIDEO, SPEECH = "image", "video", "speech"

CHECKS = {
    "found": "finds all layers",
    "zero": "`zero_init`",
    "detached": "detach",
    "saved": "save, load",
    "causal": "causal",
    "greedy": "greedy",
    "padded": "left-padded",
    "beams": "beams",
    "sampled": "sampled",
    "continued": "continued",
}
"""What is checked on every family, and what the table calls it."""

GENERATION = ("causal", "greedy", "padded", "beams", "sampled", "continued")


@dataclass(frozen=True)
class Family:
    """How to build a host of one family, and what its memory must do or refuse."""

    name: str
    model: str
    """Class of transformers."""

    row: str = "model.layers"
    """Where its blocks are."""

    kind: str = DECODER
    config: Mapping[str, Any] = field(default_factory=dict)
    blocks: int = 2
    part: str = ""
    """The part of each block that carries the memory, with its dot; none: the block itself."""

    attach: Mapping[str, Any] = field(default_factory=dict)
    """Options of `attach` that this family needs."""

    asks: str = ""
    """The sentence with which `attach` refuses without them."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """By check, the sentence with which it is refused."""

    own_fault: tuple[str, ...] = ()
    """Checks that the bare host fails too: its cache does not give what recomputation gives."""

    cache: str = "past_key_values"
    """The argument that takes a cache."""

    dtype: torch.dtype = torch.float64
    """float32 for hosts whose scores overflow in float64."""

    @property
    def checks(self) -> tuple[str, ...]:
        """The checks that apply to a host of this kind."""
        return tuple(
            check for check in CHECKS if self.kind in (DECODER, BOTH) or check not in GENERATION
        )

    @property
    def paths(self) -> list[str]:
        """The blocks that must be found."""
        return [f"{self.row}.{i}{self.part}" for i in range(self.blocks)]


def build(family: Family) -> nn.Module:
    """The host, the same at every call."""
    return _build(family.name)


@functools.cache
def _build(name: str) -> nn.Module:
    family = FAMILIES[name]
    torch.manual_seed(0)
    return host_of(family.model, **family.config).to(family.dtype).eval()


EAGER = dict(experts_implementation="eager")  # the grouped product knows no float64
MIXED = ["linear_attention", "full_attention"]
LOW_RANK = dict(num_key_value_heads=2)
WAVE: dict[str, Any] = dict(
    conv_dim=(8, 8),
    conv_stride=(2, 2),
    conv_kernel=(4, 2),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
)

AXES: dict[str, Any] = {
    name: SIZES[name]
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
    )
} | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]))
TOWER: dict[str, Any] = dict(
    depth=1,
    hidden_size=WIDTH,
    embed_dim=WIDTH,
    out_hidden_size=WIDTH,
    num_heads=2,
    intermediate_size=24,
)
STREAMS: dict[str, Any] = dict(
    part=".mlp", attach=dict(layers="model.layers.*.mlp"), asks="with one residual stream"
)
GENERATED = ("greedy", "padded", "beams", "sampled", "continued")


def rows(row: str) -> dict[str, Any]:
    """Of a host with several rows of blocks, the one that carries the memory."""
    return dict(row=row, attach=dict(layers=f"{row}.*"), asks="has several rows")


_FAMILIES = [
    Family("Llama", "LlamaForCausalLM"),
    Family("Mistral", "MistralForCausalLM"),
    Family("Mixtral", "MixtralForCausalLM", config=EAGER),
    Family("Qwen2", "Qwen2ForCausalLM"),
    Family("Qwen2-MoE", "Qwen2MoeForCausalLM", config=EAGER),
    Family("Qwen3", "Qwen3ForCausalLM"),
    Family("Qwen3-MoE", "Qwen3MoeForCausalLM", config=EAGER),
    Family("Qwen3-Next", "Qwen3NextForCausalLM", config=EAGER | dict(layer_types=MIXED)),
    Family("Qwen3.5", "Qwen3_5ForCausalLM", config=dict(layer_types=MIXED)),
    Family("Gemma", "GemmaForCausalLM"),
    Family("Gemma 2", "Gemma2ForCausalLM", dtype=torch.float32),
    Family("Gemma 3", "Gemma3ForCausalLM"),
    Family(
        "Gemma 3n",
        "Gemma3nForCausalLM",
        config=dict(
            layer_types=["sliding_attention", "full_attention"],
            num_kv_shared_layers=0,
            hidden_size_per_layer_input=4,
            vocab_size_per_layer_input=VOCABULARY,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0, 0.0],
        ),
        **STREAMS,
    ),
    Family("Phi", "PhiForCausalLM"),
    Family("Phi-3", "Phi3ForCausalLM"),
    Family("GPT-2", "GPT2LMHeadModel", "transformer.h"),
    Family(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        "transformer.h",
        config=dict(
            num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], window_size=6
        ),
    ),
    Family("GPT-NeoX", "GPTNeoXForCausalLM", "gpt_neox.layers"),
    Family("GPT-J", "GPTJForCausalLM", "transformer.h", config=dict(rotary_dim=8)),
    Family("GPTBigCode", "GPTBigCodeForCausalLM", "transformer.h"),
    Family("CodeGen", "CodeGenForCausalLM", "transformer.h", config=dict(rotary_dim=4, n_head=4)),
    Family(
        "OPT",
        "OPTForCausalLM",
        "model.decoder.layers",
        config=dict(ffn_dim=24, word_embed_proj_dim=WIDTH),
    ),
    Family("BLOOM", "BloomForCausalLM", "transformer.h", dtype=torch.float32),
    Family("Falcon", "FalconForCausalLM", "transformer.h"),
    Family(
        "MPT",
        "MptForCausalLM",
        "transformer.blocks",
        config=dict(n_heads=2, n_layers=2, max_seq_len=128),
        dtype=torch.float32,
    ),
    Family("StableLM", "StableLmForCausalLM"),
    Family("StarCoder2", "Starcoder2ForCausalLM"),
    Family("OLMo", "OlmoForCausalLM"),
    Family("OLMo 2", "Olmo2ForCausalLM"),
    Family("OLMoE", "OlmoeForCausalLM", config=EAGER),
    Family("OLMo Hybrid", "OlmoHybridForCausalLM", config=dict(layer_types=MIXED)),
    Family("Cohere", "CohereForCausalLM"),
    Family("Cohere 2", "Cohere2ForCausalLM"),
    Family("Granite", "GraniteForCausalLM"),
    Family("GraniteMoE", "GraniteMoeForCausalLM", config=EAGER),
    Family(
        "GraniteMoE Hybrid",
        "GraniteMoeHybridForCausalLM",
        config=EAGER | dict(layer_types=["mamba", "attention"]),
    ),
    Family("DeepSeek-V2", "DeepseekV2ForCausalLM", config=EAGER | LOW_RANK),
    Family("DeepSeek-V3", "DeepseekV3ForCausalLM", config=EAGER | LOW_RANK),
    Family("DeepSeek-V4", "DeepseekV4ForCausalLM", config=EAGER, **STREAMS),
    Family("GLM", "GlmForCausalLM"),
    Family("GLM-4", "Glm4ForCausalLM"),
    Family("Llama 4", "Llama4ForCausalLM"),
    Family("gpt-oss", "GptOssForCausalLM", config=EAGER),
    Family("SmolLM3", "SmolLM3ForCausalLM"),
    Family("Nemotron", "NemotronForCausalLM"),
    Family(
        "NemotronH",
        "NemotronHForCausalLM",
        config=EAGER
        | dict(num_hidden_layers=4, layers_block_type=["mamba", "moe", "attention", "mlp"]),
        blocks=4,
    ),
    Family(
        "Jamba", "JambaForCausalLM", config=EAGER | dict(attn_layer_period=2, attn_layer_offset=1)
    ),
    Family("Bamba", "BambaForCausalLM", config=dict(attn_layer_indices=[1])),
    Family(
        "Zamba2",
        "Zamba2ForCausalLM",
        config=dict(
            layers_block_type=["mamba", "hybrid"],
            num_key_value_heads=2,
            adapter_rank=4,
            n_mamba_heads=2,
        ),
    ),
    Family(
        "RecurrentGemma",
        "RecurrentGemmaForCausalLM",
        config=dict(num_hidden_layers=3, attention_window_size=64),
        blocks=3,
        own_fault=("padded", "beams"),
    ),
    Family("Mamba", "MambaForCausalLM", "backbone.layers", cache="cache_params"),
    Family(
        "Mamba-2",
        "Mamba2ForCausalLM",
        "backbone.layers",
        config=dict(num_heads=2, head_dim=16),
        cache="cache_params",
    ),
    Family("Falcon Mamba", "FalconMambaForCausalLM", "backbone.layers", cache="cache_params"),
    Family("Falcon-H1", "FalconH1ForCausalLM", config=dict(mamba_d_ssm=32)),
    Family("LFM2", "Lfm2ForCausalLM", config=dict(layer_types=["conv", "full_attention"])),
    Family(
        "MiniMax",
        "MiniMaxForCausalLM",
        config=EAGER | dict(layer_types=MIXED, block_size=4),
        own_fault=GENERATED,
    ),
    Family(
        "Kimi Linear",
        "KimiLinearForCausalLM",
        config=EAGER | LOW_RANK | dict(layer_types=MIXED, linear_head_dim=8, linear_num_heads=2),
    ),
    Family(
        "RWKV",
        "RwkvForCausalLM",
        "rwkv.blocks",
        refused=dict.fromkeys(GENERATED, "state: expected a cache of transformers")
        | dict(beams="cannot use beam search with a cache"),
    ),
    Family(
        "XGLM",
        "XGLMForCausalLM",
        config=dict(ffn_dim=24, num_layers=2, attention_heads=2),
        dtype=torch.float32,
    ),
    Family(
        "Qwen2-VL",
        "Qwen2VLForConditionalGeneration",
        config=dict(text_config=AXES, vision_config=TOWER),
        **rows("model.language_model.layers"),
    ),
    Family(
        "Qwen3-VL",
        "Qwen3VLForConditionalGeneration",
        config=dict(text_config=AXES, vision_config=TOWER | dict(deepstack_visual_indexes=[0])),
        **rows("model.language_model.layers"),
    ),
    Family("BioGPT", "BioGptForCausalLM", "biogpt.layers"),
    Family("Persimmon", "PersimmonForCausalLM"),
    Family("Helium", "HeliumForCausalLM"),
    Family("Arcee", "ArceeForCausalLM"),
    Family("ERNIE 4.5", "Ernie4_5ForCausalLM"),
    Family("EXAONE 4", "Exaone4ForCausalLM"),
    Family("Hunyuan", "HunYuanDenseV1ForCausalLM"),
    Family("Apertus", "ApertusForCausalLM"),
    Family("BitNet", "BitNetForCausalLM"),
    Family("DiffLlama", "DiffLlamaForCausalLM", config=LOW_RANK),
    Family(
        "T5",
        "T5ForConditionalGeneration",
        kind=BOTH,
        config=dict(num_layers=2, num_heads=2, d_kv=8, d_ff=24),
        **rows("decoder.block"),
    ),
    Family(
        "BART",
        "BartForConditionalGeneration",
        kind=BOTH,
        config=dict(forced_eos_token_id=None),
        **rows("model.decoder.layers"),
    ),
    Family(
        "Pegasus",
        "PegasusForConditionalGeneration",
        kind=BOTH,
        config=dict(forced_eos_token_id=None),
        **rows("model.decoder.layers"),
    ),
    Family(
        "M2M-100",
        "M2M100ForConditionalGeneration",
        kind=BOTH,
        config=dict(pad_token_id=0),
        **rows("model.decoder.layers"),
    ),
    Family(
        "Marian",
        "MarianMTModel",
        kind=BOTH,
        config=dict(forced_eos_token_id=None),
        **rows("model.decoder.layers"),
    ),
    Family("BERT", "BertModel", "encoder.layer", ENCODER),
    Family("RoBERTa", "RobertaModel", "encoder.layer", ENCODER, dict(pad_token_id=0)),
    Family(
        "DistilBERT",
        "DistilBertModel",
        "transformer.layer",
        ENCODER,
        dict(dim=WIDTH, n_layers=2, n_heads=2, hidden_dim=24),
    ),
    Family("ELECTRA", "ElectraModel", "encoder.layer", ENCODER),
    Family("DeBERTa-v2", "DebertaV2Model", "encoder.layer", ENCODER),
    Family("MPNet", "MPNetModel", "encoder.layer", ENCODER),
    Family("ModernBERT", "ModernBertModel", "layers", ENCODER),
    Family(
        "XLNet",
        "XLNetModel",
        "layer",
        ENCODER,
        dict(d_inner=24),
        attach=dict(batch_first=False),
        asks="puts tokens first",
    ),
    Family("ViT", "ViTModel", "layers", IMAGE),
    Family("DeiT", "DeiTModel", "layers", IMAGE),
    Family("DINOv2", "Dinov2Model", "encoder.layer", IMAGE),
    Family("BEiT", "BeitModel", "layers", IMAGE),
    Family("CLIP vision", "CLIPVisionModel", "encoder.layers", IMAGE),
    Family("SigLIP vision", "SiglipVisionModel", "encoder.layers", IMAGE),
    Family("VideoMAE", "VideoMAEModel", "encoder.layer", VIDEO, dict(num_frames=4, tubelet_size=2)),
    Family("Wav2Vec2", "Wav2Vec2Model", "encoder.layers", SPEECH, WAVE),
    Family("HuBERT", "HubertModel", "encoder.layers", SPEECH, WAVE),
    Family("SEW", "SEWModel", "encoder.layers", SPEECH, WAVE | dict(squeeze_factor=2)),
]

FAMILIES = {family.name: family for family in _FAMILIES}


def inputs(family: Family) -> dict[str, Tensor]:
    """Arguments of a call of the host without padding."""
    if family.kind == IMAGE:
        return dict(pixel_values=torch.randn(2, 3, 8, 8, dtype=torch.float64))
    if family.kind == VIDEO:
        return dict(pixel_values=torch.randn(2, 4, 3, 8, 8, dtype=torch.float64))
    if family.kind == SPEECH:
        return dict(input_values=torch.randn(2, 66, dtype=torch.float64))
    tokens = torch.randint(1, VOCABULARY, (2, 11))
    if family.kind == BOTH:
        return dict(input_ids=tokens, decoder_input_ids=torch.randint(1, VOCABULARY, (2, 9)))
    return dict(input_ids=tokens)
