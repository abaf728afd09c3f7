"""Tables as plain data, in the paper's form; for a terminal, as Markdown and as HTML."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import mean

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from normrnn.config.measure import Measure, bits
from normrnn.report.comparison import LONG_ENOUGH, NO_GAP, Comparison, same_surroundings
from normrnn.report.curves import Point, best, rate, spread, validations, whole_epochs
from normrnn.report.groups import Arm, Group
from normrnn.report.paired import MOST_SEEDS, Difference, mean_interval
from normrnn.report.runs import Row, Run

DASH = "–"
_TERMINAL = {"difference": "diff."}
"""Shorter heads for a terminal, which is narrow."""


@dataclass(frozen=True)
class Table:
    """Columns come in groups, named or not; the first column names the row."""

    title: str
    columns: list[tuple[str, list[str]]]
    rows: list[list[str]]
    note: str = ""

    @property
    def head(self) -> list[str]:
        """The columns with the names of their groups."""
        return [f"{g} {c}".strip() for g, names in self.columns for c in names]

    def markdown(self) -> str:
        """As Markdown, without title and note."""
        cells = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        return "\n".join(f"| {' | '.join(map(as_markdown, row))} |" for row in cells)

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """For a terminal: columns of dashes alone are left out, and where there is no room for
        whole words, the last column, too, or else there is a line per row."""
        filled = [
            i
            for i, column in enumerate(zip(*self.rows, strict=True))
            if not i or set(column) != {DASH}
        ]
        for kept in (filled, [i for i in filled if i < len(self.head) - 1]):
            columns = [[_TERMINAL.get(self.head[i], self.head[i])] for i in kept]
            for i, column in zip(kept, columns, strict=True):
                column += [row[i] for row in self.rows]
            if widths := _widths(columns, options.max_width):
                yield self._in_columns(columns, widths)
                yield Text()
                return
        yield Text(self.title)
        for row in self.rows:
            told = "; ".join(f"{self.head[i]} {row[i]}" for i in filled[1:])
            yield Text(f"- {row[0]}: {told}")
        yield Text(self.note)

    def _in_columns(self, columns: Sequence[Sequence[str]], widths: Sequence[int]) -> RichTable:
        result = RichTable(
            title=self.title,
            caption=self.note,
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=0,
            show_edge=False,
        )
        for i, (column, width) in enumerate(zip(columns, widths, strict=True)):
            result.add_column(column[0], justify="right" if i else "left", width=width)
        for row in zip(*(column[1:] for column in columns), strict=True):
            result.add_row(*row)
        return result

    def html(self) -> str:
        """For the report."""
        title = escape(self.title)
        named = any(name for name, _ in self.columns)
        groups = [
            f'<th scope="colgroup" colspan="{len(names)}">{escape(name)}</th>'
            if name
            else f'<td colspan="{len(names)}"></td>'
            for name, names in self.columns
        ]
        lines = [
            f'<p class="caption" aria-hidden="true">{title}</p>',
            f'<div class="scroll" role="region" tabindex="0" aria-label="{title}">',
            f'<table aria-label="{title}"><thead>',
            f"<tr>{''.join(groups)}</tr>" if named else "",
            "<tr>",
            *(f'<th scope="col">{escape(c)}</th>' for _, names in self.columns for c in names),
            "</tr></thead><tbody>",
        ]
        for first, *rest in self.rows:
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
            lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
        lines.append("</tbody></table></div>")
        lines += [f'<p class="note">{escape(self.note)}</p>'] if self.note else []
        return "\n".join(line for line in lines if line)


def _widths(columns: Sequence[Sequence[str]], room: int) -> list[int]:
    """Return widths of columns that break at blanks alone; none if there is no room for them."""
    widths = [max(map(cell_len, column)) for column in columns]
    least = [_longest(column) for column in columns]
    while sum(widths) + len(widths) - 1 > room:
        wide = [i for i, width in enumerate(widths) if width > least[i]]
        if not wide:
            return []
        # The names of rows last: they would make every row two lines.
        widths[max(wide, key=lambda i: (i > 0, widths[i]))] -= 1
    return widths


def _longest(cells: Sequence[str]) -> int:
    """The width of their longest word."""
    return max((cell_len(word) for cell in cells for word in cell.split()), default=0)


def as_markdown(text: str) -> str:
    """Plain text, whatever is in it."""
    text = " ".join(text.split())
    return "".join(f"\\{c}" if c in "\\`*_|<>[]" else c for c in text)


Figure = Callable[[Run], float | None]


def _train(key: str) -> Figure:
    def figure(run: Run) -> float | None:
        rows = [] if run.looks_ahead else whole_epochs(run)
        return min((row[key] for row in rows if key in row), default=None)

    return figure


def _held_out(key: str, statistics: str | None = None) -> Figure:
    def figure(run: Run) -> float | None:
        row = best(run, "valid", statistics or run.serving, key)
        return None if row is None else row[key]

    return figure


def _authors_valid(run: Run) -> float | None:
    """Mean of the mini-batches' perplexities, under the mini-batch's own statistics."""
    return _held_out("batch_ppl", "batch" if run.normalisation.keeps_statistics else "running")(run)


def _of(figure: Figure, convert: Callable[[float], float]) -> Figure:
    def converted(run: Run) -> float | None:
        value = figure(run)
        return None if value is None else convert(value)

    return converted


def paper_table(group: Group, *, beside: bool = True) -> Table:
    """A row per arm in the paper's form, ``beside`` the paper's own figures where it has some."""
    shown, paper = group.measure, group.paper
    train, held_out = _of(_train("loss"), shown.of), _of(_held_out("loss"), shown.of)
    place = shown.held_out.capitalize()
    here: list[tuple[str, list[tuple[str, Figure, int]]]]
    if shown.held_out == "dev":
        here = [
            ("here, train", [("FCE", train, 2), ("FER", _train("fer"), 2)]),
            ("here, dev", [("FCE", held_out, 2), ("FER", _held_out("fer"), 2)]),
        ]
        names = [("paper, train", ["FCE", "FER"]), ("paper, dev", ["FCE", "FER"])]
    else:
        here = [("here", [("Train", train, shown.digits), (place, held_out, shown.digits)])]
        names = [("paper", ["Train", place])]
    if shown.name == "cross entropy":
        figures = [("Train", _of(_train("loss"), bits), 3), (place, _of(held_out, bits), 3)]
        here.append(("here, bits", figures))
    if paper and shown.mean_of_batches:
        figures = [("Train", _train("batch_ppl"), 1), (place, _authors_valid, 1)]
        here.append(("here, authors' protocol", figures))
    rows = []
    for arm in group.arms:
        # A mean over runs that got differently far says nothing.
        most = max(run.epochs_done for run in arm.runs)
        alike = [run for run in arm.runs if run.epochs_done == most]
        some = f" ({len(alike)} of {len(arm.runs)} seeds)" if len(alike) < len(arm.runs) else ""
        far = alike[0].progress_in_recipe if paper else alike[0].progress
        row = [_model(group, arm), far + some]
        for _, columns in here:
            row += [_cell([figure(run) for run in alike], digits) for _, figure, digits in columns]
        if paper and beside:
            figures = paper.of(arm.norm)
            flat = [x for part in figures for x in part] if figures else []
            row += [f"{x:.{paper.digits}f}" for x in flat]
            row += [DASH] * (sum(len(c) for _, c in names) - len(flat))
        rows.append(row)
    columns = [("", ["Model", "epochs"]), *((name, [c for c, _, _ in cs]) for name, cs in here)]
    title = f"Best {shown.long}"
    title += f", in the form of the paper's {paper.table}" if paper else ""
    note = _paper_note(group)
    if paper and beside:
        columns += names
        note += f" {paper.remark}" if paper.remark else ""
    return Table(title, columns, rows, note)


def _model(group: Group, arm: Arm) -> str:
    model, kind = group.paper.model if group.paper else "", arm.runs[0].normalisation
    if not model:
        return arm.name
    special = arm.name.removeprefix(kind.label).strip(" ()")
    papers = group.paper and arm.norm == group.paper.norm
    words = [("BN" if papers else kind.label) if kind.normalises else "", special]
    inside = ", ".join(word for word in words if word)
    return f"{model} ({inside})" if inside else model


def _cell(values: Sequence[float | None], digits: int) -> str:
    found = [value for value in values if value is not None]
    return spread(found, digits) if found else DASH


def _paper_note(group: Group) -> str:
    shown = group.measure
    parts = ["Train: the best epoch's running average in training mode."]
    if any(run.looks_ahead for run in group.runs):
        parts.append(
            "A language model whose statistics look ahead has no train figure: while it trains,"
            " they see the words that it is to predict."
        )
    kept = {r.serving for r in group.runs if r.normalisation.keeps_statistics}
    if kept:
        kinds = " or ".join(sorted(kept))
        parts.append(
            f"Held-out figures of normalised networks: {kinds} statistics, which the best model is"
            " chosen and saved with."
        )
    if group.paper and shown.mean_of_batches:
        parts.append(
            "The authors' protocol: arithmetic mean of the mini-batches' perplexities, the"
            " normalised network validated with the mini-batch's own statistics."
        )
    seeds = max((len(arm.runs) for arm in group.arms), default=0)
    parts += ["± is the standard deviation over the seeds."] if seeds > 1 else []
    return " ".join(parts)


def _of_gaps(found: Difference) -> str:
    sides = {"better": "smaller", "worse": "larger"}
    hardly = found.answer in sides and abs(found.mean) <= NO_GAP
    return "hardly any" if hardly else sides.get(found.answer, found.answer)


def differences_table(found: Comparison) -> Table:
    """What a verdict rests on: a row per figure, paired by seed."""
    digits, rows = found.measure.digits, []
    names = {
        "best_training": (f"best {found.measure.name} in training", digits),
        "best_validation": (f"best {found.measure.name}", digits),
        "final_validation": (f"last {found.measure.name}", digits),
        "best_frame_error_rate": ("best FER", 3),
        "best_with_running_statistics": ("best, running statistics", digits),
        "best_with_recalibrated_statistics": ("best, recalibrated statistics", digits),
        "best_with_batch_statistics": ("best, batch statistics", digits),
        "gap": ("gap to training, nats", 3),
        "updates_to_target": ("updates to the target", 0),
        "seconds_to_target": ("seconds to the target", 0),
    }
    for name, figure in found.figures.items():
        words, places = names[name]
        shown = "+.1%" if figure.relative else f"+,.{places}f"
        several = figure.interval is not None
        interval = " to ".join(f"{end:{shown}}" for end in figure.interval or ())
        answer = _of_gaps(figure) if name == "gap" else figure.answer
        needed = figure.seeds_needed if figure.answer == "no difference seen" else None
        rows.append(
            [
                words,
                spread(figure.baseline, places),
                spread(figure.other, places),
                f"{figure.mean:{shown}}{' or more' if figure.at_least and figure.mean < 0 else ''}",
                interval or DASH,
                f"{figure.agreeing} of {figure.compared}",
                f"{figure.probability_of_improvement:.2f}" if several else DASH,
                answer,
                DASH
                if needed is None
                else f"> {MOST_SEEDS}"
                if needed > MOST_SEEDS
                else f"{needed}",
            ]
        )
    columns = ["lower is better", found.baseline.name, found.other.name, "difference"]
    columns += ["95% interval", "agree", "P(better)", "answer"]
    note = "Differences are paired by seed; the interval is Student's t. Agree: seeds whose"
    note += " difference has the sign of the mean. P(better): the probability of improvement, the"
    note += " share of all pairings of a run with a baseline run that it wins. Seeds needed: to see"
    note += " a difference of this mean and spread in four experiments of five."
    title = f"{found.other.name} against {found.baseline.name}"
    return Table(title, [("", [*columns, "seeds needed"])], rows, note)


def target_table(group: Group, target: float) -> Table:
    """When each arm first came to a figure on validation."""
    shown, rows = group.measure, []
    alike = same_surroundings(group.runs) and all(run.environments for run in group.runs)
    for arm in group.arms:
        looks = [_until(target, validations(run), shown) for run in arm.runs]
        there = [seen for seen in looks if seen]
        long = all(run.seconds >= LONG_ENOUGH for run in arm.runs)
        rows.append(
            [
                arm.name,
                f"{len(there)} of {len(looks)}",
                _with_interval([[p.updates for p in seen] for seen in looks]),
                _with_interval([[p.seconds for p in seen] for seen in looks])
                if alike and long
                else DASH,
            ]
        )
    title = f"To reach a {shown.name} of {target:,g}, {shown.held_out}"
    note = "Mean with its 95% t interval over the seeds, of every run as far as it went, judged at"
    note += " validations, and wider by what lies between two of them; the earliest alone where not"
    note += " all reached it, since a mean of those that did would flatter."
    return Table(title, [("", ["arm", "runs that reached it", "updates", "seconds"])], rows, note)


def _until(target: float, points: Sequence[Point], shown: Measure) -> Sequence[Point]:
    """Up to the first that is there; none if none is."""
    first = next((i for i, p in enumerate(points) if shown.of(p.loss) <= target), None)
    return [] if first is None else points[: first + 1]


def _with_interval(looks: Sequence[Sequence[float]]) -> str:
    """Of the last look in each run, which came after those before it; empty where it never came."""
    times = [seen[-1] for seen in looks if seen]
    if len(times) < len(looks):
        return f"{min(times):,.0f} at the earliest" if times else DASH
    at_once = " or fewer" if all(len(seen) == 1 for seen in looks) else ""
    ends = mean_interval(times, mean(seen[-1] - ([0, *seen])[-2] for seen in looks))
    text = f"{mean(times):,.0f}{at_once}"
    return text if ends is None else f"{text} ({max(ends[0], 0):,.0f} to {ends[1]:,.0f})"


KINDS = ("recalibrated", "running", "batch")


def runs_table(group: Group, *, authors: bool = True, in_recipe: bool = False) -> Table:
    """A row per run: how far, best figures under all statistics, speed.

    `authors`: their protocol too, where the paper has figures to compare. `in_recipe`: how far
    against the epochs of the recipe, not those asked for.
    """
    shown = group.measure
    kinds = [k for k in KINDS if any(run.split("valid", k) for run in group.runs)]
    tests = any(run.split("test") for run in group.runs)
    errors = shown.held_out == "dev"
    authors = authors and bool(group.paper) and shown.mean_of_batches
    train = ["corpus", "authors'"] if authors else ["train"]
    columns: list[tuple[str, list[str]]] = [("", ["run", "epochs"])]
    columns += [("train" if authors else "", train)]
    kept = any(run.normalisation.keeps_statistics for run in group.runs)
    names = kinds if kept else ["corpus" if authors else "best"]
    columns += [(shown.held_out, [*names, *(["authors'"] if authors else [])])] if kinds else []
    columns += [("FER", ["train", "dev"])] if errors else []
    columns += [("", [*(["test"] if tests else []), f"{shown.unit}/s", "seconds"])]
    rows = []
    for name, run in ((a.name, run) for a in group.arms for run in a.runs):
        far = run.progress_in_recipe if in_recipe else run.progress
        row = [f"{name}, seed {run.seed}", far + (", running" if run.training else "")]
        row += [shown.text(_train("loss")(run))]
        row += [_number(_train("batch_ppl")(run), 1)] if authors else []
        row += [shown.text(_held_out("loss", kind)(run)) for kind in kinds]
        row += [_number(_authors_valid(run), 1)] if authors and kinds else []
        row += [_number(f(run), 3) for f in (_train("fer"), _held_out("fer")) if errors]
        row += [shown.text(_test(run))] if tests else []
        row += [_number(rate(run), 0), f"{run.seconds:,.0f}"]
        rows.append(row)
    note = "Test: with the statistics that the best model is saved with." if tests else ""
    return Table(f"Every run: {shown.long}", columns, rows, note)


def _test(run: Run) -> float | None:
    rows: list[Row] = run.split("test", run.serving) or run.split("test")
    return rows[0]["loss"] if rows else None


def _number(value: float | None, digits: int) -> str:
    return DASH if value is None else f"{value:,.{digits}f}"
