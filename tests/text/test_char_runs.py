"""The appendix in the small: sequences from zero state, norm hidden, bits per character."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from normrnn.cli import main
from normrnn.engine.loop import Interrupted
from normrnn.errors import UserError
from normrnn.experiments.training import load
from normrnn.recipes import ptb_char
from normrnn.runs.store import RunDirectory
from normrnn.text.config import EvaluationConfig, LanguageConfig
from normrnn.text.corpus import Vocabulary
from normrnn.text.task import LanguageModel, LanguageTask, Reader
from tests.tiny_runs import rows_of, run_tiny, vocabulary_of


@pytest.fixture
def tiny_char(text_dir: Path) -> LanguageConfig:
    """28 sequences of 20 characters in an update, 2 epochs of 13 updates."""
    config = ptb_char()
    return replace(
        config,
        data=str(text_dir),
        epochs=2,
        model=replace(config.model, hidden=12, embedding=10, time_steps=20),
        optimizer=replace(config.optimizer, lr=0.05),
        train=replace(config.train, batch=28, steps=20, log_every=5, checkpoint_every=4),
        evaluation=EvaluationConfig(train_tokens=300, recalibrate_windows=3),
    )


def _ids(path: Path, symbols: list[str]) -> torch.Tensor:
    index = {s: i for i, s in enumerate(symbols)}
    lines = path.read_text().splitlines()
    return torch.tensor([index[s] for line in lines for s in [*line.strip(), "<eos>"]])


@pytest.mark.parametrize("norm", ["none", "hidden"])
def test_a_run_is_the_hand_written_loop(tiny_char: LanguageConfig, tmp_path: Path, norm) -> None:
    """Every update: a batch of whole sequences from zero state, mean loss, momentum."""
    config, out = replace(tiny_char, norm=norm), tmp_path / "run"
    torch.set_default_dtype(torch.float64)
    try:
        run_tiny(config, out)
        symbols = [*vocabulary_of(out).symbols]
        ids = _ids(Path(config.data) / "train.txt", symbols)
        torch.manual_seed(config.seed)
        model = LanguageTask.network(config, vocabulary=Vocabulary(tuple(symbols), "char"))
        velocity = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        losses = []
        whole = (len(ids) - 1) // 20
        for epoch in range(2):
            generator = torch.Generator().manual_seed(1_000_003 + epoch)
            order = torch.randperm(whole, generator=generator)
            for some in order.split(28)[: whole // 28]:
                inputs = torch.stack([ids[20 * s : 20 * s + 20] for s in some], 1)
                targets = torch.stack([ids[20 * s + 1 : 20 * s + 21] for s in some], 1)
                logits, _ = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                model.zero_grad()
                loss.backward()
                losses.append(loss.item())
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        if p.grad is not None:
                            velocity[name] = 0.95 * velocity[name] + p.grad
                            p -= 0.05 * velocity[name]
    finally:
        torch.set_default_dtype(torch.float32)
    rows = rows_of(out)
    train = [row for row in rows if row["split"] == "train"]
    epoch = whole // 28
    assert [row["updates"] for row in train] == [5, 10, epoch, epoch + 5, epoch + 10, 2 * epoch]
    assert train[0]["loss"] == pytest.approx(sum(losses[:5]) / 5, rel=1e-9)
    assert train[-1]["loss"] == pytest.approx(sum(losses[epoch + 10 :]) / (epoch - 10), rel=1e-8)
    for row in rows:
        assert row["bpc"] == pytest.approx(row["loss"] / math.log(2))
    checkpoint = torch.load(out / "checkpoint.pt", weights_only=True)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(checkpoint["model"][name], value, rtol=1e-7, atol=1e-9, msg=name)
    # Every validation symbol but the first, each sequence from zero state.
    valid = [row for row in rows if row["split"] == "valid" and row["statistics"] == "running"][-1]
    ids = _ids(Path(config.data) / "valid.txt", symbols)
    assert valid["count"] == len(ids) - 1
    model.eval()
    with torch.no_grad():
        nats = sum(
            F.cross_entropy(
                model(ids[at : at + 20][: len(ids) - 1 - at, None])[0][:, 0],
                ids[at + 1 : at + 21],
                reduction="sum",
            ).item()
            for at in range(0, len(ids) - 1, 20)
        )
    assert valid["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-7)
    kinds = {row.get("statistics") for row in rows} - {None}
    assert kinds == ({"running"} if norm == "none" else {"running", "recalibrated", "batch"})


def test_stopped_and_resumed(tiny_char: LanguageConfig, tmp_path: Path) -> None:
    config = replace(tiny_char, norm="hidden")
    run_tiny(config, tmp_path / "whole")
    for stop_at in (3, 8, 17):
        with pytest.raises(Interrupted):
            run_tiny(config, tmp_path / "stopped", stop_at)
    run_tiny(config, tmp_path / "stopped")
    assert rows_of(tmp_path / "stopped") == rows_of(tmp_path / "whole")


def test_budgets_in_tokens(tiny_char: LanguageConfig, tmp_path: Path) -> None:
    """3,000 characters are 5 updates of 28 × 20; 150 of each text are scored."""
    config = replace(
        tiny_char,
        train=replace(tiny_char.train, epoch_tokens=3000),
        evaluation=replace(tiny_char.evaluation, tokens=150),
    )
    run_tiny(config, tmp_path / "run")
    rows = rows_of(tmp_path / "run")
    assert rows[-1]["updates"] == 2 * 5
    assert sum(row["count"] for row in rows if row["split"] == "train") == 2 * 5 * 560
    assert {row["count"] for row in rows if row["split"] in ("valid", "test")} == {150}


def test_too_short_a_text_is_found_before_training(tiny_char: LanguageConfig, tmp_path) -> None:
    with pytest.raises(UserError, match="5000"):
        run_tiny(replace(tiny_char, train=replace(tiny_char.train, batch=5000)), tmp_path / "run")


@pytest.mark.parametrize("norm", ["none", "hidden"])
def test_evaluate_score_and_sample(
    tiny_char: LanguageConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], norm
) -> None:
    out, text = tmp_path / "run", tmp_path / "new.txt"
    run_tiny(replace(tiny_char, norm=norm, epochs=1), out)

    def cli(*arguments: object) -> str:
        with pytest.raises(SystemExit) as exited:
            main([str(a) for a in arguments])
        assert exited.value.code == 0
        return capsys.readouterr().out

    assert " bpc " in cli("evaluate", out)
    result = json.loads((out / "evaluation.json").read_text())
    saved = RunDirectory(out).model_metadata["statistics"]
    last = [r for r in rows_of(out) if r["split"] == "test" and r["statistics"] == saved]
    mine = [r for r in result["rows"] if r["split"] == "test" and r["statistics"] == saved]
    assert [row["statistics"] for row in mine] == [row["statistics"] for row in last]
    for row, expected in zip(mine, last, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert row["bpc"] == pytest.approx(row["loss"] / math.log(2))

    text.write_text("w1 w3 w9 w12 w7 w2 w1\nw2 w5 w6\n")
    said = cli("score", out, text)
    model: Any = load(out)
    assert model.vocabulary is not None
    ids = torch.cat([torch.tensor([model.vocabulary.eos]), _ids(text, [*model.vocabulary.symbols])])
    with torch.no_grad():
        parts = [model(ids[at : at + 20][: len(ids) - 1 - at, None])[0][:, 0] for at in (0, 20)]
    nats = F.cross_entropy(torch.cat(parts), ids[1:]).item()
    assert f"{len(ids) - 1} tokens" in said
    assert f"loss {nats:.4f} nats, {nats / math.log(2):.4f} bits per character" in said

    drawn = cli("sample", out, "--tokens", "50", "--seed", "2", "--prompt", "w1")
    assert drawn.startswith("w1")
    assert len(drawn.removesuffix("\n")) == 2 + 50
    # What follows a blank can be asked for: it is in the prompt, not drawn.
    drawn = cli("sample", out, "--tokens", "1", "--seed", "2", "--prompt", "w1 ")
    assert drawn.startswith("w1 ")
    assert len(drawn.removesuffix("\n")) == 3 + 1


@pytest.mark.parametrize(("carried", "read"), [(True, (1, 2)), (False, (3, 4))])
def test_sampling_reads_the_window_again(carried: bool, read: tuple[int, ...]) -> None:
    """With statistics per position; windows from zero state begin with half of the one before."""
    model = LanguageModel(9, 6, 1, norm="hidden", time_steps=4)
    model(torch.randint(0, 9, (4, 6)))
    seen: list[int] = []
    model.rnn.register_forward_pre_hook(lambda _m, inputs: seen.append(len(inputs[0])))
    Reader(model, 4, carried, overlap=True).draw([1], 6, torch.Generator().manual_seed(0))
    assert seen == [1, 2, 3, 4, *read]
