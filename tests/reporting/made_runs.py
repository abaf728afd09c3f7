"""Run directories made up by formula, for tests of reports."""

import json
import math
from pathlib import Path
from typing import Any

from normrnn.reporting.runs import Run

FASTER = {"none": 1.0, "frame": 1.6, "sequence": 1.8, "hidden": 0.8}


def rows(
    norm: str, seed: int, kind: str, epochs: int, segments: int, until: int | None
) -> list[dict[str, Any]]:
    """Losses that fall with updates, faster for a normalised network, with a gap that grows."""
    start, floor = {"word": (6.5, 3.6), "char": (3.0, 1.1), "speech": (8.0, 0.9)}[kind]
    found: list[dict[str, Any]] = []
    per_segment, gaps = 4, {"running": 0.02}
    if norm != "none":
        gaps |= {"recalibrated": 0.0} | ({"batch": 0.05} if kind == "word" else {})
    for update in range(1, epochs * segments * per_segment + 1):
        segment, inside = divmod(update - 1, per_segment)
        epoch, at = segment // segments + 1, update * 50
        x = at * FASTER.get(norm, 1.2) / 400
        loss = floor + (start - floor) * math.exp(-x) + 0.02 * math.sin(update * 3 + seed)
        common = {"updates": at, "epoch": epoch, "seconds": round(at * 0.4 + seed, 3)}
        row = {**common, "split": "train", "loss": loss, "count": 1000, "lr": 0.5**epoch}
        row |= {"grad_norm": 5 + math.sin(update + seed), "batch_ppl": math.exp(loss) * 1.02}
        found.append(row | ({"fer": 1 - math.exp(-loss / 3)} if kind == "speech" else {}))
        if inside == per_segment - 1:
            for statistics, more in gaps.items():
                held = loss + 0.15 + 0.1 * x + more
                valid = {**common, "split": "valid", "statistics": statistics, "loss": held}
                valid |= {"count": 700, "batch_ppl": math.exp(held) * 1.02}
                found.append(valid | ({"fer": 1 - math.exp(-held / 3)} if kind == "speech" else {}))
        if until is not None and at >= until:
            return found
    if kind != "speech":
        found.append({**found[-1], "split": "test"})
    return found


def make_run(
    parent: Path,
    recipe: str = "ptb-small",
    norm: str = "none",
    seed: int = 1,
    *,
    kind: str = "word",
    epochs: int = 5,
    segments: int = 1,
    until: int | None = None,
    name: str | None = None,
    **settings: Any,
) -> Path:
    """A run directory that stopped at an update, or finished."""
    path = parent / (name or f"{recipe}-{norm}-{seed}")
    path.mkdir(parents=True)
    config: dict[str, Any] = {"recipe": recipe, "norm": norm, "seed": seed, "epochs": epochs}
    config |= {"data": "/home/someone/texts/mine", "data_sha256": "ab" * 32}
    config |= {"train": {"batch": 32, "segments": segments}, **settings}
    if kind != "speech":
        config["text"] = {"level": kind}
    (path / "config.json").write_text(json.dumps(config))
    lines = [json.dumps(row) for row in rows(norm, seed, kind, epochs, segments, until)]
    (path / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    return path


def train_row(updates: int, epoch: int, loss: float, count: int = 10) -> dict[str, Any]:
    """A row of training at two updates a second."""
    row = {"updates": updates, "epoch": epoch, "split": "train", "loss": loss, "count": count}
    return {**row, "seconds": updates / 2, "lr": 1.0, "grad_norm": 1.0, "batch_ppl": 2.0}


def short_run(norm: str, losses: list[float], seed: int = 1, **settings: Any) -> Run:
    """Two train rows of ten tokens an epoch, the validation half a nat above."""
    rows = []
    for i, loss in enumerate(losses):
        rows.append(train_row(5 * (i + 1), i // 2 + 1, loss))
        if i % 2:
            kinds = ("running",) if norm == "none" else ("running", "recalibrated", "batch")
            for kind in kinds:
                row = {**rows[-1], "split": "valid", "statistics": kind, "loss": loss + 0.5}
                rows.append(row)
    config = {"norm": norm, "seed": seed, "epochs": len(losses) // 2, **settings}
    return Run(Path(norm), settings.get("recipe", ""), norm, seed, config, rows)
