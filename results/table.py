"""Writes RESULTS.md from the metrics under results/.

python results/table.py
"""

import math
from pathlib import Path

from normrnn.report import compare
from normrnn.report.runs import Run, load

HERE = Path(__file__).parent
PAPER = {  # Table 2: train / valid
    ("ptb-small", "none"): (78.5, 119.2),
    ("ptb-small", "frame"): (62.5, 120.9),
    ("ptb-medium", "none"): (49.1, 89.0),
    ("ptb-medium", "frame"): (41.0, 90.6),
    ("ptb-large", "none"): (49.3, 81.8),
    ("ptb-large", "frame"): (35.0, 97.4),
}
TEXT = """# Results

Written by `python results/table.py` from the committed metrics under `results/`. A line per run;
the best epoch of each column. Perplexities:

- **train, corpus**: exponential of the mean loss over an epoch, in training mode, as it went;
- **valid, right protocol**: corpus perplexity over all 73,759 predicted tokens, state carried,
  with population statistics recalibrated over 100 training windows (the baseline has none);
- **authors'**: arithmetic mean of the mini-batches' perplexities; in validation with the
  mini-batch's own statistics, which is what the authors' code did (see below);
- **running**, **batch**: corpus perplexity on validation with running and batch statistics.

"""


def ppl(loss: float | None) -> str:
    return "" if loss is None else f"{math.exp(loss):.1f}"


def lowest(run: Run, split: str, statistics: str) -> float | None:
    row = compare.best(run, split, statistics)
    return None if row is None else row["loss"]


def authors_valid(run: Run) -> str:
    rows = run.split("valid", "running" if run.norm == "none" else "batch")
    return f"{min(row['batch_ppl'] for row in rows):.1f}" if rows else ""


def line(run: Run) -> list[str]:
    epochs = compare.epoch_averages(run)
    total = run.config["epochs"]
    ended = any(row["split"] == "test" for row in run.rows)
    done = max((row["epoch"] for row in run.split("valid")), default=0)
    right = "running" if run.norm == "none" else "recalibrated"
    paper = PAPER.get((run.config["recipe"].removesuffix("-authors"), run.norm))
    return [
        run.path.name,
        f"all {total}" if ended else f"{done} of {total}",
        ppl(min((e["loss"] for e in epochs[:done]), default=None)),
        ppl(lowest(run, "valid", right)),
        f"{min(e['batch_ppl'] for e in epochs[:done]):.1f}" if done else "",
        authors_valid(run),
        ppl(lowest(run, "valid", "running")),
        ppl(lowest(run, "valid", "batch")),
        "" if paper is None else f"{paper[0]}",
        "" if paper is None else f"{paper[1]}",
    ]


def table(runs: list[Run]) -> str:
    head = ["run", "epochs", "train, corpus", "valid, right protocol", "train, authors'"]
    head += ["valid, authors'", "valid, running", "valid, batch", "paper, train", "paper, valid"]
    rows = [head, ["---"] * len(head), *(line(run) for run in runs)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    runs = [load(path.parent) for path in sorted(HERE.glob("*/config.json"))]
    parts = [TEXT, "## Language modelling (paper: Table 2)\n\n", table(runs), "\n"]
    for recipe in dict.fromkeys(run.config["recipe"] for run in runs):
        same = [run for run in runs if run.config["recipe"] == recipe]
        parts += [f"\n**{recipe}.** {sentence}\n" for sentence in compare.verdict(same)]
    parts += ["\n", (HERE / "NOTES.md").read_text()]
    (HERE.parent / "RESULTS.md").write_text("".join(parts))


if __name__ == "__main__":
    main()
