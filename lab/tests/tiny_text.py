"""Texts of a few words, for tests of language models."""

from torch import Tensor, nn

from tensor_memory_lab.tasks.language import LanguageTask, LanguageTaskConfig
from tensor_memory_lab.tasks.text import Corpus, Vocabulary

SPLITS = ("train", "valid", "test")


def write_text(folder):
    """A folder with the same lines in every split."""
    folder.mkdir(exist_ok=True)
    for split in SPLITS:
        (folder / f"{split}.txt").write_text(" the cat sat on the mat . \n" * 60)
    return folder


def text_task(tokens: Tensor, words: int, *, seed=0, **options):
    """The task of a text that is the same in every split; words are numbers."""
    vocabulary = Vocabulary(("<eos>", "<unk>", *map(str, range(2, words))))
    config = LanguageTaskConfig(corpus="any", **options)
    return LanguageTask(config, Corpus(vocabulary, dict.fromkeys(SPLITS, tokens)), seed)


def loud(model: nn.Module, std=0.5):
    """The model with weights large enough for a wrong past to be noticed."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "memory" not in name:
            nn.init.normal_(parameter, std=std)
    return model
