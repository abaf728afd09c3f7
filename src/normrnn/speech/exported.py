"""An exported acoustic model scored on the development set of its run."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from normrnn.deploy.session import Session
from normrnn.engine.task import never
from normrnn.errors import UserError
from normrnn.runs.store import RunDirectory
from normrnn.speech.config import SpeechConfig
from normrnn.speech.corpus import read_speech
from normrnn.speech.evaluation import SpeechEvaluator


class _Exported(nn.Module):
    """As much of an `AcousticModel` as scoring needs."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def loss(self, utterances: PackedSequence, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Summed cross entropy in nats, and the number of wrong frames."""
        # Rows are longest first already; how they were before is not asked for.
        rows = PackedSequence(utterances.data, utterances.batch_sizes)
        features, lengths = pad_packed_sequence(rows)
        given = {"features": features.numpy(), "lengths": lengths.numpy()}
        padded = torch.from_numpy(self.session.run(None, given)[0])
        found = pack_padded_sequence(padded, lengths).data
        nats = F.nll_loss(found, targets, reduction="sum")
        return nats, (found.argmax(1) != targets).sum()


def exported_loss(run: RunDirectory, data: str, session: Session) -> float:
    """Nats per frame of the development set."""
    config = run.config(SpeechConfig)
    corpus = read_speech(data or config.data)
    if config.data_sha256 not in (corpus.sha256, corpus.labels_sha256):
        raise UserError(f"{data or config.data} is not what the run was trained on")
    evaluator = SpeechEvaluator(config, corpus, torch.device("cpu"))
    score = evaluator.dev(_Exported(session), never)  # type: ignore[arg-type]
    return score.nats / score.count
