"""The three texts as ids, with the vocabulary of the training text."""

from dataclasses import dataclass

import torch
from torch import Tensor

from normrnn.errors import UserError
from normrnn.text.config import TextConfig
from normrnn.text.files import Texts
from normrnn.text.vocabulary import EOS, UNKNOWN, SymbolText, Vocabulary


@dataclass(frozen=True)
class Corpus:
    """Ids (N,) int64 of each text."""

    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: Vocabulary


def encode_texts(texts: Texts, vocabulary: Vocabulary) -> Corpus:
    """The texts in the ids of `vocabulary`."""
    return _encoded(texts, vocabulary, SymbolText.read(texts.train, vocabulary.level))


def build_corpus(texts: Texts, config: TextConfig) -> Corpus:
    """The texts in the ids of their own training vocabulary."""
    train = SymbolText.read(texts.train, config.level)
    vocabulary = Vocabulary.of(train, config.max_vocab, config.unknown)
    words = set(vocabulary.symbols) - {EOS, UNKNOWN}
    if len(words) < 2:
        kept = "" if not config.max_vocab else f" within text.max_vocab {config.max_vocab}"
        raise UserError(
            f"the training text of {texts.source} has nothing to predict: its only"
            f" {'word' if config.level == 'word' else 'character'}{kept} is"
            f" {next(iter(words), EOS)!r}"
        )
    try:
        return _encoded(texts, vocabulary, train)
    except UserError as error:
        raise UserError(f"{error}: --text.unknown keeps a class for what is unknown") from None


def _encoded(texts: Texts, vocabulary: Vocabulary, train: SymbolText) -> Corpus:
    return Corpus(
        torch.from_numpy(vocabulary.encode_text(train)),
        torch.from_numpy(vocabulary.encode(texts.valid)),
        torch.from_numpy(vocabulary.encode(texts.test)),
        vocabulary,
    )
