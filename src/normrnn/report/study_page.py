"""A study's part of the report."""

from collections.abc import Sequence
from html import escape
from typing import Any

from normrnn.report.pictures import can_draw, themed
from normrnn.report.study import RecordedStudy
from normrnn.report.tables import DASH, Table
from normrnn.report.trials import Trial, arm_name, arms_of, draw, sentences, table, trials_table


def section(study: RecordedStudy, anchor: str) -> str:
    """The result in words, Table 3, losses against learning rates, every trial, the space."""
    trials = study.trials
    lines = [
        f'<section aria-labelledby="{anchor}">',
        f'<h2 id="{anchor}">{escape(title(study))}</h2>',
        f'<p class="quiet">{escape(_budget(study))}</p>',
        f"<p>{escape(study.said)}</p>" if study.said else "",
    ]
    if trials:
        said = "".join(f"<p>{escape(sentence)}.</p>" for sentence in sentences(trials))
        lines += [
            f'<div class="verdict">{said}</div>',
            table(trials, paper=study.paper).html(),
            _picture(study, anchor),
            "<h3>Trials</h3>",
            f'<div class="tall">{trials_table(trials).html()}</div>',
        ]
    lines += [_space(study), "</section>"]
    return "\n".join(line for line in lines if line)


def title(study: RecordedStudy) -> str:
    """The study by name."""
    return f"Study {study.name}" + (f" of {study.recipe}" if study.recipe else "")


def state(study: RecordedStudy) -> str:
    """What is not as it should be, in words."""
    parts = []
    if study.problem:
        also = "; the trials before that are shown" if study.trials else ""
        parts.append(f"{study.problem}{also}")
    elif not study.trials:
        parts.append("has no finished trials yet")
    asked = study.about.get("trials")
    if isinstance(asked, int) and 0 < len(study.trials) < asked:
        parts.append(f"has not finished: {len(study.trials)} of {asked} trials are done")
    return "; it ".join(parts)


def _picture(study: RecordedStudy, anchor: str) -> str:
    if not study.drawable or not can_draw():
        return ""
    name = "Validation loss against learning rate"
    words = "A point per run, a thin line per pair with the same settings; crosses on the top edge"
    words += " are runs that diverged."

    picture = themed(
        lambda axes, colours, ink, grid: draw(axes, study.trials, colours, ink, grid),
        f"{anchor}-loss",
        name,
        words,
    )
    return (
        f'<h3>{name}</h3>{_legend(study.trials)}<div class="pictures"><figure>{picture}'
        f"<figcaption>{words}</figcaption></figure></div>"
    )


def _legend(trials: Sequence[Trial]) -> str:
    marks = {"": "M9 4a3 3 0 1 0 6 0a3 3 0 1 0-6 0z", ", diverged": "M9 1l6 6m0-6l-6 6"}
    items = [
        f'<li><svg viewBox="0 0 24 8" aria-hidden="true"><path d="{path}" stroke-width="1.5"'
        f' stroke="var(--arm{i % 5})" fill="var(--arm{i % 5})"/></svg>'
        f"{escape(arm_name(arm))}{what}</li>"
        for i, arm in enumerate(arms_of(trials))
        for what, path in marks.items()
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _budget(study: RecordedStudy) -> str:
    """How much was tried, as far as it was recorded."""
    trials, about = study.trials, study.about
    arms = [found for t in trials for found in t["arms"].values()]
    said = f"{len(trials)} settings tried, {len(arms)} runs"
    for key, words in (("updates", "updates"), ("seconds", "seconds in updates")):
        if total := sum(v for found in arms if type(v := found.get(key)) in (int, float)):
            said += f", {total:,.0f} {words}"
    if any(found.get("loss") is None for found in arms):
        said += " (without those of runs that broke off)"
    if pruned := sum(t["state"] == "pruned" for t in trials):
        said += f"; {pruned} of the settings pruned, what they had trained not counted"
    parts = [said]
    if about:
        pruner = about.get("pruner", "none")
        said = f"Settings drawn by the {about.get('sampler', 'unknown')} sampler"
        parts.append(said + (f", pruner {pruner}" if pruner != "none" else ", none pruned"))
        train = about["config"].get("train")
        tokens = train.get("epoch_tokens") if isinstance(train, dict) else None
        each = f" of {tokens:,} tokens each" if isinstance(tokens, int) and tokens else ""
        parts.append(f"Epochs of a run: {about['config'].get('epochs', 'unknown')}{each}")
    else:
        parts.append("The plan of the study (study.json) is not there")
    return ". ".join(parts) + "."


def _space(study: RecordedStudy) -> str:
    """What was searched, beside what was drawn."""
    space = study.about.get("space")
    space = space if isinstance(space, dict) else {}
    drawn: dict[str, list[Any]] = {name: [] for name in space}
    for trial in study.trials:
        for name, value in trial["settings"].items():
            drawn.setdefault(name, []).append(value)
    if not drawn:
        return ""
    rows = [
        [name, _searched(space[name]) if name in space else DASH, _drawn(values)]
        for name, values in drawn.items()
    ]
    return (
        "<h3>Space</h3>" + Table("The space", [("", ["setting", "searched", "drawn"])], rows).html()
    )


def _searched(values: Any) -> str:
    if not isinstance(values, dict):
        return ", ".join(map(str, values)) if isinstance(values, list) else str(values)
    spacing = " log-uniform" if values.get("log") else ""
    step = f" in steps of {values['step']}" if values.get("step") else ""
    return f"{values.get('low')} to {values.get('high')}{spacing}{step}"


def _drawn(values: Sequence[Any]) -> str:
    different = list(dict.fromkeys(map(str, values)))
    if all(type(v) in (int, float) for v in values) and len(different) > 6:
        return f"{min(values):.3g} to {max(values):.3g}"
    return ", ".join(sorted(different)) or DASH
