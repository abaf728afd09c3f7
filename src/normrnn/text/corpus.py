"""The three texts as ids, with the vocabulary of the training text."""

from dataclasses import asdict, dataclass
from hashlib import sha256

import torch
from torch import Tensor

from normrnn.errors import UserError
from normrnn.files import expanded
from normrnn.text.config import TextConfig
from normrnn.text.files import BUILTIN, Texts, read_texts
from normrnn.text.large import LargeTexts, ids_of, large
from normrnn.text.vocabulary import EOS, UNKNOWN, StrangeError, SymbolText, Vocabulary


@dataclass(frozen=True)
class Corpus:
    """Ids (N,) of each text, int64, or int32 and on disk."""

    train: Tensor
    valid: Tensor
    test: Tensor
    vocabulary: Vocabulary


def open_texts(data: str) -> Texts | LargeTexts:
    """The texts of `data`, in memory unless they are large."""
    path = expanded(data) if data and data != BUILTIN else None
    found = large(path) if path is not None and path.exists() else None
    return read_texts(data) if found is None else found


def encode_texts(
    texts: Texts | LargeTexts, vocabulary: Vocabulary, config: TextConfig | None = None
) -> Corpus:
    """The texts in the ids of `vocabulary`; `config` are the settings that it was made with, if it
    was made of these texts."""
    if isinstance(texts, Texts):
        train = SymbolText.read(texts.train, vocabulary.level)
        return _encoded(texts, vocabulary, train)
    if config is not None:
        # Training has left them behind.
        corpus = build_corpus(texts, config)
        if corpus.vocabulary == vocabulary:
            return corpus
    key = texts.key(sha256(vocabulary.to_json().encode()).hexdigest())
    ids, _ = ids_of(texts, vocabulary.level, lambda _: vocabulary, key)
    return Corpus(**ids, vocabulary=vocabulary)


def build_corpus(texts: Texts | LargeTexts, config: TextConfig) -> Corpus:
    """The texts in the ids of their own training vocabulary."""
    try:
        if isinstance(texts, Texts):
            train = SymbolText.read(texts.train, config.level)
            return _encoded(texts, _vocabulary(train.counts(), texts.source, config), train)
        ids, vocabulary = ids_of(
            texts,
            config.level,
            lambda counts: _vocabulary(counts, texts.source, config),
            texts.key(asdict(config)),
        )
        return Corpus(**ids, vocabulary=vocabulary)
    except StrangeError as error:
        raise UserError(f"{error}: --text.unknown keeps a class for what is unknown") from None


def _vocabulary(counts: dict[str, int], source: str, config: TextConfig) -> Vocabulary:
    vocabulary = Vocabulary.ranked(counts, config.level, config.max_vocab, config.unknown)
    words = set(vocabulary.symbols) - {EOS, UNKNOWN}
    if len(words) < 2:
        kept = "" if not config.max_vocab else f" within text.max_vocab {config.max_vocab}"
        raise UserError(
            f"the training text of {source} has nothing to predict: its only"
            f" {'word' if config.level == 'word' else 'character'}{kept} is"
            f" {next(iter(words), EOS)!r}"
        )
    return vocabulary


def _encoded(texts: Texts, vocabulary: Vocabulary, train: SymbolText) -> Corpus:
    return Corpus(
        torch.from_numpy(vocabulary.encode_text(train)),
        torch.from_numpy(vocabulary.encode(texts.valid)),
        torch.from_numpy(vocabulary.encode(texts.test)),
        vocabulary,
    )
