"""Trials: every normalisation trained with each of several settings.

`normrnn search` draws the settings from a space, `tune=` of a comparison tries a few values of one
setting. Settings follow from the seed and the number of the trial, so all commands that share a
directory draw the same ones; the locks of the run directories divide the work. A space is data,
dotted config fields with values or ranges:

{"optimizer.lr": {"low": 1e-4, "high": 1, "log": true}, "train.batch": [32, 64, 128]}
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from normrnn.config.base import LARGEST_FLOAT, Config, checked_norms
from normrnn.config.jsonio import differences, flat, to_dict
from normrnn.config.registry import full_name, with_settings
from normrnn.errors import UsageError, UserError
from normrnn.experiments.jobs import RunJob, Runner, check_counts, plan, say, write_result
from normrnn.experiments.training import default_directory
from normrnn.files import read_json
from normrnn.recipes import SPACES
from normrnn.reporting.result import REPORT, Group, group_verdict, report_line
from normrnn.reporting.runs import load
from normrnn.reporting.study import SUMMARY, TRIALS, RecordedStudy, best, lines, read_study, write
from normrnn.runs.records import CONFIG, epoch_averages

Space = Mapping[str, Any]  # dotted field -> a list of values, or {"low", "high"}, perhaps "log"
TUNING, CONFIRM = "tuning", "confirm"
SEED_OFFSET = 1_000_000  # of the seeds of tuning, from those of the comparison
_NOT_SHARED = ("data", "device", "threads", "norm")  # may differ where commands share a study
_NOT_VARIED = ("recipe", "data_sha256", "seed", "epochs", "train.epoch_tokens", *_NOT_SHARED)
Trial = tuple[dict[str, Any], list[RunJob]]  # a setting, and its runs, one per normalisation


def read_space(file: Path | None, config: Config) -> Space:
    """Return the space of a file, or the recipe's; UsageError if it cannot be searched."""
    if file is not None:
        space, _ = read_json(file)
    elif config.recipe in SPACES:
        space = SPACES[config.recipe]
    else:
        example = '{"optimizer.lr": {"low": 0.01, "high": 10, "log": true}, "train.batch": [20]}'
        text = f"{config.recipe} has no space of its own: pass --space FILE, a JSON object such as"
        raise UsageError(f"{text} {example}")
    check_space(space, config)
    return space


def check_space(space: Space, config: Config) -> None:
    """Check that the fields exist and may be varied, and that no list or range is empty."""
    if not space:
        raise UsageError("a space is a JSON object of at least one config field")
    fields = flat(to_dict(config))
    for name, values in space.items():
        if name not in fields:
            raise UsageError(f"the space has {name}, which is not a field of {config.recipe}")
        if name in _NOT_VARIED or name.startswith(config.measured):
            raise UsageError(
                f"the space has {name}: results under different values of it do not say which"
                " setting is better"
            )
        if not (isinstance(values, list) and values):
            _range(name, values, fields[name])


def _range(name: str, given: Any, now: Any) -> tuple[float, float, bool]:
    """Return low, high and whether to draw on a log scale; UsageError if that is no range.

    `now` is the value in the config: a range of whole numbers has whole ends.
    """
    limits = given if isinstance(given, Mapping) else {}
    low, high, log = limits.get("low"), limits.get("high"), limits.get("log") or False
    kinds = {int: {int}, float: {int, float}, type(None): {int, float}}.get(type(now), set())
    if not (
        limits.keys() <= {"low", "high", "log"}
        and {type(low), type(high)} <= kinds
        and (low > 0 if log else low >= -LARGEST_FLOAT)  # type: ignore[operator]
        and low < high <= LARGEST_FLOAT  # type: ignore[operator]
    ):
        raise UsageError(
            f"the space gives {name} as {given!r}: expected a list of values, or finite low < high,"
            " whole for a whole number, and above 0 with log"
        )
    return low, high, log  # type: ignore[return-value]


def grid(space: Space) -> list[dict[str, Any]]:
    """Return every setting of a space; UsageError for a range."""
    for name, values in space.items():
        if not isinstance(values, list):
            raise UsageError(f"the sampler bruteforce tries every value: give {name} as a list")
    return [dict(zip(space, drawn, strict=True)) for drawn in product(*space.values())]


def draw(space: Space, config: Config, number: int) -> dict[str, Any]:
    """Return the setting of a trial, drawn at random as those under results/ were."""
    from numpy.random import RandomState

    generator = RandomState((config.seed * 1_000_003 + number) % 2**32)
    fields, setting = flat(to_dict(config)), {}
    for name, values in space.items():
        if isinstance(values, list):
            setting[name] = values[generator.uniform(size=len(values)).argmax()]
            continue
        low, high, log = _range(name, values, fields[name])
        is_whole = type(fields[name]) is int
        half = 0.5 if is_whole else 0.0
        if log:
            drawn = math.exp(generator.uniform(math.log(low - half), math.log(high + half)))
        else:
            drawn = generator.uniform(low - half, high + half)
        drawn = min(max(drawn, low), high)
        setting[name] = round(drawn) if is_whole else drawn
    return setting


def _result(job: RunJob) -> dict[str, Any]:
    run = load(job.out)
    row = run.best()
    spent = {"updates": run.updates, "seconds": run.seconds}
    if job.code or row is None:
        return {"diverged": True, "loss": None, "reason": job.failure_reason(), **spent}
    train = epoch_averages(run.rows)[-1]["loss"]
    return {"diverged": False, "loss": row["loss"], "train": train, **spent}


def plan_trials(
    settings: Sequence[dict[str, Any]], config: Config, norms: Sequence[str], out: Path
) -> list[Trial]:
    """Return a trial per setting, its runs in `out`/NUMBER/NORM; UsageError for a setting that the
    config does not take with every norm."""
    trials = []
    for number, setting in enumerate(settings):
        jobs = []
        for norm in norms:
            try:
                chosen = with_settings(config, {**setting, "norm": norm})
            except UserError as error:
                text = ", ".join(f"{name} {value!r}" for name, value in setting.items())
                raise UsageError(f"the space has {text}: with norm {norm}, {error}") from None
            run = out / f"{number:04d}" / norm
            jobs.append(RunJob(run, chosen, label=f"{norm}, trial {number}"))
        trials.append((setting, jobs))
    return trials


def _rows(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Return the rows of the trials whose runs have all ended, for trials.jsonl."""
    rows: list[dict[str, Any]] = []
    for number, (setting, jobs) in enumerate(trials):
        if all(job.has_ended for job in jobs):
            arms = {job.config.norm: _result(job) for job in jobs}
            losses = [found["loss"] for found in arms.values() if not found["diverged"]]
            row = {"trial": number, "state": "complete", "value": min(losses, default=None)}
            rows.append({**row, "settings": setting, "arms": arms})
    return rows


def _about(
    name: str, config: Config, space: Space, norms: Sequence[str], sampler: str
) -> dict[str, Any]:
    """Return the plan of a study, for study.json."""
    settings = {k: v for k, v in to_dict(config).items() if k not in _NOT_SHARED}
    about = {"study": name, "norms": norms, "sampler": sampler, "space": space}
    return json.loads(json.dumps({**about, "config": settings}))


def search(
    config: Config,
    space: Path | None,
    norms: str | Sequence[str | None],
    out: Path | None,
    trials: int,
    sampler: Literal["random", "bruteforce"] = "random",
    workers: int = 1,
    processes: int = 1,
    confirm: int = 0,
) -> None:
    """Run a study to its end, or join the commands that run it, and write its report."""
    check_counts(trials=trials, workers=workers, processes=processes)
    if confirm < 0 or confirm == 1:
        raise UsageError(f"--confirm needs at least 2 seeds, not {confirm}")
    norms = checked_norms(norms, "--norms")
    values = read_space(space, config)
    every = grid(values) if sampler == "bruteforce" else []
    runner = Runner(config, workers, processes)
    config = runner.data.completed(config)
    about = _about(config.recipe, config, values, norms, sampler)
    study = _open_study(out or default_directory(config.recipe, "search"), about)
    count = about["trials"] = max(min(trials, len(every) or trials), len(study.trials))
    settings = every[:count] or [draw(values, config, number) for number in range(count)]
    drawn = plan_trials(settings, config, norms, study.path / "trials")
    write(study)
    try:
        runner.train([job for _, jobs in drawn for job in jobs])
    finally:
        study = replace(study, trials=_rows(drawn) or study.trials)
        write(study)
        if study.trials:
            say("\n".join(lines(study.trials)))
            _report(study)
        say(f"{len(study.trials)} of {count} trials are done")
    if confirm:
        _confirm(study, config, norms, confirm, runner)
        _report(study)


def _open_study(out: Path, about: dict[str, Any]) -> RecordedStudy:
    """Return the study in `out`, or a new one; UsageError if another one is there."""
    study = read_study(out)
    if study.problem and (out / TRIALS).exists():
        raise UserError(f"{study.problem}: remove that, or use another --out")
    if study.about:
        before = {name: value for name, value in study.about.items() if name != "trials"}
        changed = differences(before, about)
        if first := changed.get("config.recipe") or ", ".join(changed.values()):
            raise UsageError(
                f"{out} holds a study with other settings ({first}): use another --out"
            )
    return RecordedStudy(out, study.trials, about)


def _report(study: RecordedStudy) -> None:
    runs = study.runs()
    write_result(runs, f"normrnn search {study.recipe}", study.path, [study])
    say(report_line(study.path / REPORT))


def _confirm(
    study: RecordedStudy, config: Config, norms: Sequence[str], seeds: int, runner: Runner
) -> None:
    """Train the best setting of each variant with fresh seeds, and print the verdict on them."""
    jobs: list[RunJob] = []
    for norm in norms:
        top = best(study.trials, norm)
        if top is None:
            raise UserError(f"nothing to confirm: no setting trained with norm {norm}")
        chosen = replace(with_settings(config, top["settings"]), seed=config.seed + 1)
        jobs += plan(chosen, (norm,), seeds, study.path / CONFIRM)
    say(f"confirming with {seeds} fresh seeds: {len(jobs)} runs")
    runner.train(jobs)
    say(str(group_verdict(Group(config.recipe, "", [load(job.out) for job in jobs]))))


def plan_tuning(config: Config, tune: str | Mapping[str, Any]) -> tuple[Config, Space]:
    """Return the config and the space of the tuning that the user asked for: a setting, or
    {setting: values, "epochs": N}; UsageError if that cannot be tried.

    Values may be given as text. Without values a number above 0 is tried at a third, at itself and
    at three times itself.
    """
    given: dict[str, Any] = {tune: ()} if isinstance(tune, str) else dict(tune)
    epochs = given.pop("epochs", 0) or config.epochs
    if len(given) != 1:
        raise UsageError(f"tune names one setting, not {', '.join(given) or 'none'}")
    ((field, values),) = given.items()
    fields = flat(to_dict(config))
    field = full_name(field, fields, config.recipe)
    now = fields[field]
    tried = []
    for value in values or [now]:
        with suppress(ValueError, TypeError):  # not text, or not JSON
            value = json.loads(value)
        tried.append(value)
    if not values and type(now) is float:
        tried = [float(f"{now * factor:.3g}") for factor in (1 / 3, 1, 3)]
    check_space({field: tried}, config)
    # 1 and 1.0 are the same rate.
    typed = [flat(to_dict(with_settings(config, {field: v})))[field] for v in tried]
    if len(set(typed)) < 2:
        raise UsageError(f"--tune {field} needs --tune-values with at least 2 values: {now},…")
    config = replace(config, seed=config.seed + SEED_OFFSET, epochs=epochs)
    return config, {field: list(dict.fromkeys(typed))}


def tune_setting(
    config: Config, space: Space, compared: Sequence[RunJob], runner: Runner
) -> tuple[dict[str, dict[str, Any]], RecordedStudy]:
    """Return the best setting of each norm, and all that was tried, also written as a study.

    `config` and `space` are those of `plan_tuning`. UsageError, before anything is tuned, if a run
    to compare was begun without this tuning.
    """
    (field,), out = space, compared[0].out.parent
    norms = list(dict.fromkeys(job.config.norm for job in compared))
    begun = [job.out for job in compared if (job.out / CONFIG).exists()]
    before = read_study(out / TUNING).about.get("space")
    if begun and not (isinstance(before, dict) and field in before):
        raise UsageError(
            f"{begun[0]} was begun before {field} was tuned, and may not have the value that is"
            " chosen: use another --out"
        )
    trials = plan_trials(grid(space), config, norms, out / TUNING / "runs")
    say(f"tuning {field}: {len(norms) * len(trials)} runs, epochs: {config.epochs}")
    runner.train([job for _, jobs in trials for job in jobs])
    about = _about(TUNING, trials[0][1][0].config, space, norms, "grid")
    study = RecordedStudy(out / TUNING, _rows(trials), {**about, "trials": len(trials)})
    chosen = {}
    for norm in norms:
        top = best(study.trials, norm)
        if top is None:
            write(study)
            raise UserError(f"no value of {field} trained with norm {norm}: see {study.path}")
        chosen[norm] = top["settings"]
    study.about[SUMMARY] = summarise(study, chosen, config.epochs, compared[0].config.epochs)
    write(study)
    say(study.summary)
    return chosen, study


def summarise(
    study: RecordedStudy, chosen: Mapping[str, Mapping[str, Any]], tried: int, compared: int
) -> str:
    """Return in words what was tried, what that cost, and what was chosen; `tried` and `compared`
    are the epochs of each."""
    ((field, values),) = study.about["space"].items()
    ends = (min(values), max(values)) if {*map(type, values)} <= {int, float} else ()
    edge = " (at the edge of what was tried)"
    picked = ", ".join(f"{n} {s[field]}{edge * (s[field] in ends)}" for n, s in chosen.items())
    early = (
        f" Chosen after {tried} of {compared} epochs: a value that leads early, as a high learning"
        " rate often does, may not lead at the end."
    )
    return (
        f"{field} was tuned for each norm on validation data, with one seed that is not compared:"
        f" values {', '.join(map(str, values))}; epochs: {tried}; {study.budget}. Chosen: {picked}."
        f"{early * (tried < compared)}"
    )
