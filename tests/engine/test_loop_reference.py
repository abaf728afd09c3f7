"""A whole run against a loop written out by hand."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from normrnn.engine.loop import Interrupted, Trainer
from normrnn.engine.model import derived_seed
from normrnn.engine.task import Models
from normrnn.experiments.training import evaluate
from normrnn.runs.store import RunDirectory
from normrnn.text.config import LanguageConfig
from normrnn.text.task import LanguageModel, LanguageTask
from tests.tiny_runs import note_of, rows_of, run_tiny, vocabulary_of


def _ids(path: Path, index: dict[str, int]) -> torch.Tensor:
    words = path.read_text().replace("\n", " <eos> ").split()
    return torch.tensor([index[w] for w in words])


def _by_hand(config: LanguageConfig, symbols: list[str]) -> tuple[LanguageModel, list[dict]]:
    """Windows cut by indexing, losses unfused, clipping and steps spelled out."""
    ids = _ids(Path(config.data) / "train.txt", {s: i for i, s in enumerate(symbols)})
    B, T = config.train.batch, config.train.steps
    torch.manual_seed(config.seed)
    m = config.model
    norm = None if config.norm == "none" else config.norm
    model = LanguageModel(
        len(symbols), m.hidden, m.layers, dropout=m.dropout, norm=norm, init=m.init
    )
    length, extra = divmod(len(ids) - 1, B)
    starts = [b * length + min(b, extra) for b in range(B)]
    windows = math.ceil(length / T)
    updates = []
    for epoch in range(config.epochs):
        lr = config.optimizer.lr / config.optimizer.decay ** max(0, epoch - 1)
        state = None
        for w in range(windows):
            if w in (0, windows // 2):
                state = None
            span = range(w * T, min((w + 1) * T, length))
            inputs = torch.stack([ids[[s + t for s in starts]] for t in span])
            targets = torch.stack([ids[[s + t + 1 for s in starts]] for t in span])
            torch.manual_seed(derived_seed(config.seed, len(updates), 0))
            logits, state = model(inputs, state)
            state = (state[0].detach(), state[1].detach())
            mean = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            model.zero_grad()
            (mean * len(span)).backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm_ = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads))
            scale = min(1.0, config.optimizer.clip_norm / (norm_ + 1e-6))  # torch's own guard
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= lr * scale * p.grad
            entry = {"epoch": epoch + 1, "loss": mean.item(), "count": targets.numel()}
            updates.append({**entry, "grad_norm": norm_, "lr": lr, "end": w + 1 == windows})
            updates[-1]["half"] = w + 1 == windows // 2
    return model, updates


@pytest.fixture
def _double() -> Iterator[None]:
    """Statistics over eight rows magnify rounding: float64 keeps two correct loops together."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("norm", ["none", "frame", "sequence"])
def test_rows_and_weights_are_those_of_the_hand_written_loop(
    tiny: LanguageConfig, tmp_path: Path, norm
) -> None:
    config = replace(tiny, norm=norm)
    out = tmp_path / "run"
    run_tiny(config, out)
    symbols = [*vocabulary_of(out).symbols]
    model, updates = _by_hand(config, symbols)

    rows = [row for row in rows_of(out) if row["split"] == "train"]
    assert sum(row["count"] for row in rows) == sum(u["count"] for u in updates)
    done = 0
    for row in rows:
        part = updates[done : row["updates"]]
        count = sum(u["count"] for u in part)
        assert row["count"] == count
        assert {u["epoch"] for u in part} == {row["epoch"]}
        assert {u["lr"] for u in part} == {row["lr"]}
        loss = sum(u["loss"] * u["count"] for u in part) / count
        assert row["loss"] == pytest.approx(loss, rel=1e-9)
        ppl = sum(math.exp(u["loss"]) for u in part) / len(part)
        assert row["batch_ppl"] == pytest.approx(ppl, rel=1e-9)
        norms = sum(u["grad_norm"] for u in part) / len(part)
        assert row["grad_norm"] == pytest.approx(norms, rel=1e-8)
        # A row ends every 7 updates of an epoch, or with a half of it.
        assert len(part) <= 7
        done = row["updates"]
    assert done == len(updates)

    checkpoint = torch.load(out / "checkpoint.pt", weights_only=True)
    expected = model.state_dict()
    assert checkpoint["model"].keys() == expected.keys()
    for name, value in checkpoint["model"].items():
        torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-9, msg=name)


def test_rows_of_a_run(tiny_frame: LanguageConfig, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_tiny(tiny_frame, out)
    rows = rows_of(out)
    keys = {"updates", "epoch", "split", "loss", "count"}
    for row in rows:
        more = {"lr", "grad_norm", "batch_ppl"} if row["split"] == "train" else {"statistics"}
        assert keys | more <= row.keys()
    valid = [row for row in rows if row["split"] == "valid"]
    # Two segments an epoch, three kinds of statistics.
    assert [row["epoch"] for row in valid] == [e for e in (1, 2, 3) for _ in range(6)]
    kinds = ["running", "recalibrated", "batch"]
    assert [row["statistics"] for row in valid] == kinds * 6
    tokens = len((Path(tiny_frame.data) / "valid.txt").read_text().replace("\n", " <eos> ").split())
    assert {row["count"] for row in valid} == {tokens - 1}
    fixed = [row for row in rows if row["split"] == "train_eval"]
    assert {row["count"] for row in fixed} == {300}
    assert {row["statistics"] for row in fixed} == {"running"}
    test = [row for row in rows if row["split"] == "test"]
    assert rows[-3:] == test
    assert [(row["epoch"], row["statistics"]) for row in test] == [(3, kind) for kind in kinds]
    assert rows[-1]["updates"] == max(row["updates"] for row in rows)


@pytest.mark.parametrize("better", ["running", "recalibrated"])
def test_best_model_is_saved_with_the_better_statistics(
    tiny_frame: LanguageConfig, tmp_path: Path, better: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selected by running statistics, saved with those that are better on validation data."""
    if better == "running":
        monkeypatch.setattr(LanguageTask, "population", _poor_population)
    else:  # running statistics hardly learn
        model = replace(tiny_frame.model, momentum=0.001)
        tiny_frame = replace(tiny_frame, model=model)
    out = tmp_path / "run"
    run_tiny(tiny_frame, out)
    rows = rows_of(out)
    running = [r for r in rows if r["split"] == "valid" and r["statistics"] == "running"]
    selected = min(running, key=lambda row: row["loss"])
    note = note_of(out)
    assert (note.best_loss, note.best_updates) == (selected["loss"], selected["updates"])
    kinds = {r["statistics"]: r for r in rows if r["split"] == "best_valid"}
    assert kinds["running"]["loss"] == pytest.approx(selected["loss"], rel=1e-6)
    assert min(kinds["running"], kinds["recalibrated"], key=lambda r: r["loss"]) is kinds[better]
    for split in ("best_valid", "test"):
        saved = {r["statistics"]: r["saved"] for r in rows if r["split"] == split}
        assert saved == {k: k == better for k in ("running", "recalibrated", "batch")}
    # The file holds these statistics, and says so; what it scores is the row that was marked.
    result = {(r["split"], r["statistics"]): r["loss"] for r in evaluate(out)["rows"]}
    assert result["valid", better] == pytest.approx(kinds[better]["loss"], rel=1e-6)
    assert ("valid", "running") in result or better == "recalibrated"
    assert RunDirectory(out).model_metadata["statistics"] == better
    # Stopped while the file is written and resumed, or extended, the same rows come out.
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_write", _stop_at_test_rows)
        with pytest.raises(Interrupted):
            run_tiny(tiny_frame, tmp_path / "stopped")
    run_tiny(tiny_frame, tmp_path / "stopped")
    assert rows_of(tmp_path / "stopped") == rows
    run_tiny(replace(tiny_frame, epochs=4), tmp_path / "stopped")
    run_tiny(replace(tiny_frame, epochs=4), tmp_path / "longer")
    assert rows_of(tmp_path / "stopped") == rows_of(tmp_path / "longer")


_write, _population = Trainer._write, LanguageTask.population


def _poor_population(*arguments: Any) -> Models:
    models = _population(*arguments)
    for name, buffer in models["recalibrated"].named_buffers():
        buffer.mul_(9 if "var" in name else 1)
    return models


def _stop_at_test_rows(trainer: Trainer, row: dict[str, Any], epoch: int | None = None) -> None:
    if row["split"] == "test":
        raise Interrupted
    _write(trainer, row, epoch)
