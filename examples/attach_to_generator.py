"""Cut the attention of a pretrained text generator to a window; a memory carries what lies beyond.

    python examples/attach_to_generator.py --data-dir stories260K    # two minutes on a CPU core

The host is a model of the llama2.c project, such as stories260K (260,032 weights). It writes
stories with its whole context. Then its attention is cut to 16 tokens, a place memory is attached
to two of its blocks, and the memory alone learns to give back what the window lost. No text is
needed: the host's own stories are the data. The host with its whole context teaches, and no model
scores better on what it wrote. At the end the memory is saved, loaded onto a fresh host, and used
to generate.

DATA_DIR holds the weights and the tokenizer as llama2.c writes them: one tok*.bin and one other
*.bin, for example stories260K.bin and tok512.bin.

Needs: pip install 'tensor-memory[hf]'

Letters: B stories, N tokens, d width, V words.
"""

from __future__ import annotations

import argparse
import re
import struct
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import PlaceConfig, attach, load_memory, memory_disabled, save_memory

BOS, LENGTH, WINDOW = 1, 192, 16
TRAIN_STORIES, TEST_STORIES, BATCH = 320, 64, 16
MEMORY = PlaceConfig.recall(channels=16)
RATE = 1e-2
BLOCKS = ["model.layers.1", "model.layers.3"]


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The sizes and the weights of a llama2.c model, the latter by their names in transformers."""
    data = path.read_bytes()
    if len(data) < 28:
        raise SystemExit(f"{path}: expected a model as llama2.c writes it, got {len(data)} bytes")
    d, hidden, layers, heads, kv_heads, words, context = struct.unpack("7i", data[:28])
    words, tied = abs(words), words > 0  # a negative number says that the head has its own weights
    width = d // heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (words, d),
        "input_layernorm.weight": (layers, d),
        "self_attn.q_proj.weight": (layers, d, d),
        "self_attn.k_proj.weight": (layers, kv_heads * width, d),
        "self_attn.v_proj.weight": (layers, kv_heads * width, d),
        "self_attn.o_proj.weight": (layers, d, d),
        "post_attention_layernorm.weight": (layers, d),
        "mlp.gate_proj.weight": (layers, hidden, d),
        "mlp.down_proj.weight": (layers, d, hidden),
        "mlp.up_proj.weight": (layers, hidden, d),
        "model.norm.weight": (d,),
        "rotary": (2, context, width // 2),  # a table that transformers makes itself
        "lm_head.weight": (0 if tied else words, d),
    }
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    if len(data) != 28 + 4 * sum(sizes):
        raise SystemExit(
            f"{path}: expected a float32 model as llama2.c writes it, by its header "
            f"{28 + 4 * sum(sizes):,} bytes, got {len(data):,}; pass a --data-dir with another file"
        )
    flat = torch.frombuffer(bytearray(data[28:]), dtype=torch.float32).split(sizes)
    weights: dict[str, Tensor] = {}
    for (name, shape), values in zip(shapes.items(), flat, strict=True):
        if name.startswith(("model.", "lm_head")):
            weights[name] = values.view(shape)
        elif name != "rotary":
            for number, layer in enumerate(values.view(shape)):
                if "q_proj" in name or "k_proj" in name:  # neighbours turn together; halves here
                    layer = layer.view(-1, width // 2, 2, d).transpose(1, 2).reshape(layer.shape)
                weights[f"model.layers.{number}.{name}"] = layer
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    config: dict[str, Any] = dict(hidden_size=d, intermediate_size=hidden, num_hidden_layers=layers)
    config |= dict(num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=words)
    return config | dict(max_position_embeddings=context, tie_word_embeddings=tied), weights


def read_host(path: Path, window: int | None) -> Any:
    """The model in a llama2.c file. Mistral is Llama with a window, and takes the same weights."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes, weights = read_weights(path)
    config = MistralConfig(**sizes, sliding_window=window, rms_norm_eps=1e-5, bos_token_id=BOS)
    host = MistralForCausalLM(config)
    host.load_state_dict(weights)
    return host.eval()


def read_words(path: Path) -> list[bytes]:
    """The words of a llama2.c tokenizer, by their numbers."""
    data, at, words = path.read_bytes(), 4, []
    while at < len(data):
        (length,) = struct.unpack_from("i", data, at + 4)  # behind a score, which is for encoding
        words.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return words


def as_text(tokens: Tensor, words: list[bytes]) -> str:
    """Tokens as text; words such as <0x0A> stand for one byte."""
    pieces = [words[token] for token in tokens.tolist() if token != BOS]
    coded = [re.fullmatch(rb"<0x([0-9A-F]{2})>", piece) for piece in pieces]
    texts = [bytes([int(c[1], 16)]) if c else p for p, c in zip(pieces, coded, strict=True)]
    return b"".join(texts).decode(errors="replace").strip()


def write_stories(host: Any, count: int) -> Tensor:
    """(B, N) tokens that the host draws, each row a story."""
    start = torch.full((count, 1), BOS)
    options = dict(do_sample=True, top_k=0, max_new_tokens=LENGTH - 1, min_new_tokens=LENGTH - 1)
    return host.generate(start, attention_mask=torch.ones_like(start), pad_token_id=0, **options)


@torch.no_grad()
def mean_loss(host: Any, stories: Tensor) -> float:
    """Nats per token, of those that have more tokens before them than the window holds."""
    logits = host(stories[:, :-1], use_cache=False).logits  # (B, N - 1, V)
    return F.cross_entropy(
        logits[:, WINDOW:].flatten(0, 1), stories[:, WINDOW + 1 :].flatten()
    ).item()


def train(
    host: Any, teacher: Any, parameters: list[nn.Parameter], stories: Tensor, steps: int
) -> None:
    """Let the host expect what the teacher expects, at every token of the stories."""
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.1)
    for step in range(1, steps + 1):
        batch = stories[torch.randint(len(stories), (BATCH,))]
        with torch.no_grad():
            taught = teacher(batch, use_cache=False).logits.softmax(-1)  # (B, N, V)
        found = host(batch, use_cache=False).logits
        loss = F.cross_entropy(found.flatten(0, 1), taught.flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def find_files(folder: Path) -> tuple[Path, Path]:
    """The weights and the tokenizer in a folder."""
    files = sorted(folder.glob("*.bin"))
    tokenizers = [file for file in files if file.name.startswith("tok")]
    models = [file for file in files if file not in tokenizers]
    if len(models) != 1 or len(tokenizers) != 1:
        raise SystemExit(
            f"{folder}: expected one tok*.bin and one other *.bin, as llama2.c writes them, got "
            f"{', '.join(file.name for file in files) or 'none'}; pass --data-dir"
        )
    return models[0], tokenizers[0]


def main(argv: list[str] | None = None) -> int:
    """Cut the window, attach, train, save, load, generate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir", type=Path, default=Path("stories260K"), help="folder of the host"
    )
    parser.add_argument("--steps", type=int, default=150, help="of training (default 150)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and stories (default 0)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/attach-to-generator"),
        help="folder of the memory (default runs/attach-to-generator)",
    )
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps: expected 1 or more, got {options.steps}")
    model, tokenizer = find_files(options.data_dir)
    torch.manual_seed(options.seed)

    whole, host = read_host(model, window=None), read_host(model, window=WINDOW)
    stories = write_stories(whole, TRAIN_STORIES + TEST_STORIES)
    training, test = stories[:TRAIN_STORIES], stories[TRAIN_STORIES:]
    memory: dict[str, Any] = dict(layers=BLOCKS, share_weights=False)
    attachment = attach(host, MEMORY, zero_init=True, freeze_host=True, **memory)
    bare, best = mean_loss(host, test), mean_loss(whole, test)
    train(host, whole, list(attachment.parameters()), training, options.steps)
    found = mean_loss(host, test)
    print(f"loss on stories never seen, whole context:      {best:.3f}")
    print(f"loss, attention over {WINDOW} tokens:                 {bare:.3f}")
    print(f"loss, the same with the memory:                 {found:.3f}")
    print(f"of what the window lost, the memory gives back: {(bare - found) / (bare - best):.0%}")

    save_memory(host, options.output)
    again = read_host(model, window=WINDOW)
    attach(again, MEMORY, **memory)
    load_memory(again, options.output)
    print(f"saved to {options.output}; loaded onto a fresh host: {mean_loss(again, test):.3f}")
    with memory_disabled(again):
        print(f"the same, memory switched off: {mean_loss(again, test):.3f}")
    story = again.generate(torch.tensor([[BOS]]), do_sample=False, max_new_tokens=LENGTH - 1)
    print(f"\n{as_text(story[0], read_words(tokenizer))}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
