"""An exported language model scored on the validation text of its run."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normrnn.deploy.session import Session
from normrnn.engine.task import never
from normrnn.errors import UserError
from normrnn.runs.store import RunDirectory
from normrnn.text.config import LanguageConfig
from normrnn.text.corpus import encode_texts, open_texts
from normrnn.text.evaluation import Evaluator
from normrnn.text.model import State
from normrnn.text.vocabulary import Vocabulary


class _Exported(nn.Module):
    """As much of a `LanguageModel` as scoring needs."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.sizes = {put.name: put.shape for put in session.get_inputs() if put.name != "tokens"}

    def loss(
        self, tokens: Tensor, targets: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:
        """Summed cross entropy in nats, and the state after it."""
        if state is None:
            B = tokens.shape[1]
            state = tuple(torch.zeros(layers, B, H) for layers, _, H in self.sizes.values())
        given = {name: s.numpy() for name, s in zip(self.sizes, state, strict=True)}
        found = self.session.run(None, {"tokens": tokens.numpy().astype(np.int64), **given})
        logits, *after = map(torch.from_numpy, found)
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return nats, tuple(after)


def exported_loss(run: RunDirectory, data: str, session: Session) -> float:
    """Nats per token of the validation text, the state carried as in training."""
    config = run.config(LanguageConfig)
    vocabulary = Vocabulary.from_json(session.get_modelmeta().custom_metadata_map["vocabulary"])
    texts = open_texts(data or config.data)
    if texts.sha256 != config.data_sha256:
        raise UserError(f"{texts.source} is not what the run was trained on")
    corpus = encode_texts(texts, vocabulary, config.text)
    evaluator = Evaluator(config, corpus, torch.device("cpu"))
    return evaluator.score(_Exported(session), "valid", never).loss  # type: ignore[arg-type]
