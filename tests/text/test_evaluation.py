"""Scores against one-token-at-a-time arithmetic, and statistics that stay where they belong."""

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

import normrnn
from normrnn.text.config import EvaluationConfig, LanguageConfig, TrainConfig
from normrnn.text.corpus import Corpus, Vocabulary
from normrnn.text.task import LanguageModel, LanguageTask, Reader, stream_windows
from tests.helpers import buffers


def task_on(ids: torch.Tensor, batch: int, steps: int, **options) -> LanguageTask:
    """A task whose three texts are these ids."""
    config = LanguageConfig(
        recipe="ptb-small",
        norm="frame" if batch > 1 else "none",
        train=TrainConfig(batch=batch, steps=steps),
        evaluation=EvaluationConfig(train_tokens=0, recalibrate_windows=3),
        **options,
    )
    return LanguageTask(config, Corpus(ids, ids, ids, Vocabulary(("<eos>", *"abcdefgh"))))


@pytest.fixture
def model() -> Iterator[LanguageModel]:
    """Normalised, with statistics of its own."""
    model = LanguageModel(9, 6, 2, norm="frame", dropout=0.3, init=0.8)
    for _ in range(5):
        model(torch.randint(0, 9, (7, 4)))
    yield model
    assert model.training  # every evaluation leaves the mode alone


def _stepwise(model: LanguageModel, ids: torch.Tensor) -> list[float]:
    """-log p of each token after the first, one step at a time."""
    model.eval()
    nats, state = [], None
    with torch.no_grad():
        for here, there in pairwise(ids):
            logits, state = model(here.view(1, 1), state)
            nats.append(-math.log(torch.softmax(logits[0, 0].double(), 0)[there]))
    model.train()
    return nats


@pytest.mark.parametrize(("batch", "steps"), [(1, 4), (1, 100), (4, 3), (5, 7)])
def test_running_statistics_score_every_token_of_every_stream(
    model: LanguageModel, batch: int, steps: int
) -> None:
    ids = torch.randint(0, 9, (40,))
    result = task_on(ids, batch, steps).score(model, "valid")
    assert result["count"] == 39
    length, extra = divmod(39, batch)
    expected, at = 0.0, 0
    for b in range(batch):
        n = length + (b < extra)
        expected += sum(_stepwise(model, ids[at : at + n + 1]))
        at += n
    assert result["loss"] * 39 == pytest.approx(expected, rel=1e-5)


def test_batch_perplexity_is_the_mean_over_full_windows(model: LanguageModel) -> None:
    ids = torch.randint(0, 9, (4 * 11 + 3,))  # 46 positions: 4 streams of 11, two of them of 12
    result = task_on(ids, 4, 5).score(model, "valid", "batch")
    model.eval()
    state, ppls, nats = None, [], 0.0
    windows = [window.read(ids) for window in stream_windows(47, 4, 5)]
    assert [inputs.shape for inputs, _ in windows] == [(5, 4), (5, 4), (1, 4), (1, 2)]
    with torch.no_grad(), normrnn.batch_statistics(model):
        for inputs, targets in windows:
            if state is not None:
                state = tuple(s[:, : inputs.shape[1]].contiguous() for s in state)
            logits, state = model(inputs, state)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
            nats += loss
            ppls.append(math.exp(loss / targets.numel()))
    model.train()
    assert result["batch_ppl"] == pytest.approx(sum(ppls[:2]) / 2)
    assert result["loss"] * 46 == pytest.approx(nats)
    assert result["count"] == 46


def test_evaluation_changes_neither_statistics_nor_modes_nor_the_random_state(
    model: LanguageModel,
) -> None:
    """Also normalisers that were frozen, and also when it is stopped in the middle."""
    model.rnn.norm_l0.eval()
    modes = {name: module.training for name, module in model.named_modules()}
    before, random = buffers(model), torch.get_rng_state()
    task = task_on(torch.arange(100) % 9, 4, 5)
    for kind in ("running", "batch"):
        task.score(model, "valid", kind)
        with pytest.raises(AttributeError):
            task.score(model, "valid", kind, [*task.batches("valid"), 0])
    recalibrated = buffers(task.population(model)["recalibrated"])["rnn.norm_l0.running_mean"]
    assert not torch.equal(recalibrated, before["rnn.norm_l0.running_mean"])
    torch.testing.assert_close(buffers(model), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    Reader(model).nats([1, 2, 3])
    Reader(model).draw([1], 3, torch.Generator().manual_seed(0))
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_population_statistics_are_those_of_the_first_windows_without_dropout(
    model: LanguageModel,
) -> None:
    ids = torch.randint(0, 9, (100,))
    population = buffers(task_on(ids, 4, 5).population(model)["recalibrated"])
    # First layer: column statistics of W_x x over the first 15 steps of every stream.
    inputs, _ = stream_windows(100, 4, 15)[0].read(ids)
    pre = model.embedding(inputs).flatten(0, 1) @ model.rnn.weight_ih_l0.T
    torch.testing.assert_close(population["rnn.norm_l0.running_mean"], pre.mean(0))
    torch.testing.assert_close(population["rnn.norm_l0.running_var"], pre.var(0))


def test_samples_follow_the_model(model: LanguageModel) -> None:
    with torch.no_grad():
        model.decoder.weight.zero_()
        model.decoder.bias.copy_(torch.tensor([0.0, 3.0, *[-50.0] * 7]))
    drawn = Reader(model).draw([2, 5], 400, torch.Generator().manual_seed(3))
    assert len(drawn) == 400
    assert set(drawn) == {0, 1}
    expected = 1 / (1 + math.exp(-3))
    assert sum(drawn) / 400 == pytest.approx(expected, abs=0.05)
    again = Reader(model).draw([2, 5], 400, torch.Generator().manual_seed(3))
    assert again == drawn
    for temperature in (0.01, 1e-60):
        cold = Reader(model).draw([2], 50, torch.Generator().manual_seed(3), temperature)
        assert cold == [1] * 50
    model.train()
