"""Tables of the result pages as Markdown, and those that only these pages have."""

from collections.abc import Mapping, Sequence
from typing import Any

from normrnn.recipes import PAPER
from normrnn.reporting.groups import short
from normrnn.reporting.page import DASH, Table
from normrnn.reporting.study import RecordedStudy, arms_of, best, lines, settings_of, value_text

Record = dict[str, Any]
PAPER_SETTINGS = {
    "ptb-char": {
        "none": {"optimizer.lr": 0.42, "optimizer.momentum": 0.95, "train.batch": 32},
        "hidden": {"optimizer.lr": 3.71e-4, "optimizer.momentum": 0.995, "train.batch": 128},
    }
}
"""Recipe -> variant -> the settings of the paper's row, where the paper searched for them."""


def as_markdown(text: str) -> str:
    """Escape what Markdown would interpret."""
    text = " ".join(text.split())
    return "".join(f"\\{c}" if c in "\\`*_|<>[]" else c for c in text)


def rows_to_markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; cells may hold links."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def body(table: Table) -> str:
    """A table as Markdown, without title and note; numbers to the right."""
    lines = [table.head, ["---", *["---:"] * (len(table.head) - 1)], *table.rows]
    return "\n".join(f"| {' | '.join(map(as_markdown, row))} |" for row in lines)


def with_title(table: Table) -> list[str]:
    """Title, table and note."""
    return [f"**{table.title}**", body(table), table.note]


def study_summary(study: RecordedStudy) -> str:
    """What was chosen, the answer of the terminal, and the best settings."""
    best_settings = best_settings_table(study)
    answer = "\n".join(["```", *lines(study.trials), "```"])
    parts = [as_markdown(study.summary), answer, body(best_settings), best_settings.note]
    return "\n\n".join(part for part in parts if part)


def best_settings_table(study: RecordedStudy) -> Table:
    """The best setting of each variant, with the paper's rows where it searched for them."""
    names, rows = settings_of(study.trials), []
    searched = PAPER_SETTINGS.get(study.recipe, {})
    for arm in arms_of(study.trials):
        if (top := best(study.trials, arm)) is not None:
            figures = (top["arms"][arm]["train"], top["arms"][arm]["loss"])
            rows.append(_best_settings_row(arm, figures, top["settings"], names))
        if arm in searched:
            paper = PAPER[study.recipe]
            figures = paper.normalised if arm == paper.norm else paper.baseline
            rows.append(_best_settings_row(f"{arm}, paper", figures, searched[arm], names))
    head = ["variant", "train", "valid", *short(names)]
    note = "Cross entropy in nats; train is the running average of the last epoch."
    return Table("Best setting of each variant", head, rows, note)


def _best_settings_row(
    name: str, figures: tuple[float, float], settings: Mapping[str, Any], names: Sequence[str]
) -> list[str]:
    shown = [f"{figure:.3f}" for figure in figures]
    return [name, *shown, *(value_text(settings[n]) if n in settings else DASH for n in names)]


def gradients_table(records: Sequence[Record]) -> Table:
    """A row per network and layer of what `normrnn gradients` recorded."""
    rows = []
    for record in records:
        for name, found in record["layers"].items():
            ends = found["gradient_of_the_end"][-1], found["gradient_of_the_end"][0]
            last, first = ends[::-1] if name.endswith("_reverse") else ends
            factor, gamma = found["growth_per_step"], found.get("mean_gamma")
            spreads = (found.get("spread"), found.get("spread_before"))  # of older records
            rows.append(
                [
                    f"{record['label']}, {name}",
                    f"{record['loss']:.3f}",
                    DASH if factor is None else f"{factor:.3f}",
                    f"{last:.1e}",
                    f"{first:.1e}",
                    DASH if gamma is None else f"{gamma:.3f}",
                    *(f"{_spread(s[0])} … {_spread(s[-1])}" if s else DASH for s in spreads),
                ]
            )
    names = ["loss", "growth per step", "‖dL/dh‖ at the last step", "at the first", "mean γ"]
    names += ["spread of pre-activations", "before normalisation"]
    return Table(
        "A gradient of the last step's loss on its path back",
        ["network, layer", *names],
        rows,
        "Growth per step: the factor by which the norm changes with every step backwards. "
        "Spread: standard deviation at the first and at the last time step.",
    )


def _spread(value: float) -> str:
    return f"{value:.2f}" if value < 1e4 else f"{value:.1e}"
