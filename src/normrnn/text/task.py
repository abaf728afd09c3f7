"""Language modelling as a task for the loop."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from normrnn.engine.ranks import current
from normrnn.engine.statistics import BEST_VALID, both_kinds
from normrnn.engine.task import Experiment, Loss, Poll, StatisticsKind, Tensors, Validation
from normrnn.errors import UserError
from normrnn.files import expanded, is_stream, resolved
from normrnn.runs.names import VOCABULARY
from normrnn.runs.rows import Row, finite_rows
from normrnn.text.config import LanguageConfig
from normrnn.text.corpus import Corpus, build_corpus, open_texts
from normrnn.text.evaluation import Evaluator, evaluate, read_ids
from normrnn.text.exported import exported_loss
from normrnn.text.files import BUILTIN
from normrnn.text.load import build_model, load
from normrnn.text.model import LanguageModel, State
from normrnn.text.sequences import Sequences
from normrnn.text.tables import show
from normrnn.text.vocabulary import UNKNOWN

__all__ = ["LanguageTask", "evaluate", "exported_loss", "load", "open_data", "show"]


def open_data(config: LanguageConfig) -> Experiment:
    """The texts of the config."""
    texts = open_texts(config.data)
    as_given = config.data == BUILTIN or is_stream(config.data)
    where = config.data if as_given else str(resolved(expanded(config.data)))

    def build(device: torch.device) -> LanguageTask:
        return LanguageTask(config, build_corpus(texts, config.text), device)

    return Experiment(where, texts.sha256, texts.sha256, texts.source, build)


class LanguageTask:
    """Cross entropy of the next token, over windows of contiguous streams or fixed sequences."""

    shares_batches = True

    def __init__(self, config: LanguageConfig, corpus: Corpus, device: torch.device) -> None:
        self.config = config
        self.ranks = current()
        self.corpus = corpus
        self.vocabulary = corpus.vocabulary
        self.model = build_model(config, len(corpus.vocabulary)).to(device)
        self.evaluator = Evaluator(config, corpus, device)
        batch = config.train.batch
        self.text = read_ids(config, corpus.train, batch, "training text", self.ranks).to(device)
        self.state: State | None = None
        self.updates(0)  # a text too short for a batch is found now
        self._check_rows()

    def _check_rows(self) -> None:
        """The last window of the text may be a short one."""
        m, steps, text = self.config.model, self.config.train.steps, self.text
        if m.shrinkage or not self.config.normalisation.more_rows_than_features:
            return
        rows = text.window(text.count(steps) - 1, steps).inputs.numel()
        features = max(m.hidden, m.embedding)
        if rows <= features:
            raise UserError(
                f"norm {self.config.norm} needs more tokens in every update than its {features}"
                f" features, and the last one of this text has {rows}: set model.shrinkage above 0,"
                " or another train.steps"
            )

    @property
    def data_summary(self) -> str:
        """Tokens of each text, size of the vocabulary, and the share of <unk>."""
        texts = {name: getattr(self.corpus, name) for name in ("train", "valid", "test")}
        unknown = self.vocabulary.index.get(UNKNOWN)
        sizes = []
        for name, ids in texts.items():
            share = 0.0 if unknown is None else (ids == unknown).float().mean().item()
            sizes.append(f"{name} {len(ids):,} ({share:.1%} {UNKNOWN})")
        return f"tokens: {', '.join(sizes)}; vocabulary {len(self.vocabulary):,}"

    @property
    def files(self) -> Mapping[str, bytes]:
        """The vocabulary."""
        return {VOCABULARY: self.vocabulary.to_json().encode()}

    def updates(self, epoch: int) -> int:  # noqa: ARG002  every epoch is the same text
        """Windows of the training text, or as many as `epoch_tokens` make."""
        config = self.config.train
        windows = self.text.count(config.steps)
        limit = config.epoch_tokens // (config.batch * config.steps)
        return min(windows, max(1, limit)) if config.epoch_tokens else windows

    def reset(self) -> None:
        """Zero state."""
        self.state = None

    def loss(self, epoch: int, index: int) -> Loss:
        """Loss of window `index`; the state of streams flows on, its gradient does not."""
        text, steps = self.text, self.config.train.steps
        if isinstance(text, Sequences):
            window = text.shuffled(self.config.seed, epoch, index, steps)
            nats, _ = self.model.loss(window.inputs, window.targets)
        else:
            window = text.window(index, steps)
            nats, state = self.model.loss(window.inputs, window.targets, self.state)
            self.state = tuple(s.detach() for s in state)
        return Loss(nats, window.tokens, window.streams)

    def validate(self, poll: Poll) -> Validation:
        """Validation with all statistics, and the fixed training tokens with running ones."""
        evaluator, model = self.evaluator, self.model
        kinds = both_kinds(evaluator.population(model, poll))
        rows = list(evaluator.rows(model, "valid", kinds, poll))
        loss = rows[0]["loss"]
        rows = finite_rows(rows)
        if "train_eval" in evaluator.texts:
            rows.append(evaluator.score(model, "train_eval", poll).row("train_eval", "running"))
        return Validation(rows, loss)

    def population(self, model: nn.Module, poll: Poll) -> Tensors:
        """Recalibrated statistics over the first training windows."""
        assert isinstance(model, LanguageModel)
        return self.evaluator.population(model, poll)

    def test(
        self, model: nn.Module, kinds: Mapping[StatisticsKind, Tensors], poll: Poll
    ) -> list[Row]:
        """The selected model on the validation and the test text."""
        assert isinstance(model, LanguageModel)
        rows = list(self.evaluator.rows(model, "valid", kinds, poll))
        rows = [{**row, "split": BEST_VALID} for row in rows]
        return finite_rows([*rows, *self.evaluator.rows(model, "test", kinds, poll)])

    def state_dict(self) -> dict[str, Any]:
        """The carried state, of all streams."""
        if self.state is None or self.ranks.size == 1:
            return {"state": self.state}
        parts = [self.ranks.gathered(s.cpu()) for s in self.state]
        return {"state": tuple(torch.cat(part, 1) for part in parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on from that state."""
        kept = state["state"]
        if kept is not None:
            m = self.config.model
            shape, parts = (m.layers, self.config.train.batch, m.hidden), 1 + (m.cell == "lstm")
            if [s.shape for s in kept] != [shape] * parts:
                raise ValueError("its state has another size")
            own = self.ranks.share(self.config.train.batch)
            kept = tuple(s[:, own].to(self.evaluator.device).contiguous() for s in kept)
        self.state = kept
