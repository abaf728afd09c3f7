"""Copies what is committed of finished or running runs: settings and metrics, no weights.

    python -m tools.collect RUN... [--suffix NAME] [--study NAME | --folder DIR] [--epochs N]

Each run directory becomes results/RECIPE-NORM-SEED/ (with -NAME for a variant of the recipe) with
`config.json`, in which the path of the data is replaced by its name (its sha256 is there already),
`metrics.jsonl` without a torn line, `environment.json` and, where there is one, `diverged.txt`.
With --study the runs go to results/studies/NAME/RECIPE-NORM-SEED/ instead, with --folder to
DIR/RECIPE-NORM-SEED/. The output of
`normrnn search` may be among them: results/studies/NAME/ then has `study.json` and `trials.jsonl`,
with the rows of every run of a trial under "rows", by norm; they hold no paths. So may the JSON
files of `normrnn gradients`; a `NOTES.md` there is yours to write. With --epochs only the first N
epochs of a run are taken. `make results` then writes the rest.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from normrnn.reporting.runs import Row
from normrnn.reporting.study import ABOUT, TRIALS, read_study

HERE = Path(__file__).parent.parent / "results"
MAY_CHANGE = ("epochs", "data", "threads")


def collect(run: Path, suffix: str = "", here: Path = HERE, epochs: int | None = None) -> Path:
    """One run; SystemExit if another one is kept under its name."""
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    last = math.inf if epochs is None else epochs
    config["epochs"] = min(last, config["epochs"])
    if not config["data"].startswith("builtin:"):
        config["data"] = Path(config["data"]).name
    parts = [config["recipe"], config["norm"], str(config["seed"]), suffix]
    target = here / "-".join(part for part in parts if part)
    if (target / "config.json").exists():
        old = json.loads((target / "config.json").read_text(encoding="utf-8"))
        # A field that only one of them has is younger than the other.
        same = (config.keys() & old.keys()) - set(MAY_CHANGE)
        changed = sorted(key for key in same if _fits(old[key], config[key]) is False)
        if changed:
            raise SystemExit(f"{target} holds another run ({', '.join(changed)}): give a --suffix")
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    lines = whole_lines(run / "metrics.jsonl")
    whole = "".join(line for line in lines if json.loads(line)["epoch"] <= last)
    (target / "metrics.jsonl").write_text(whole, encoding="utf-8")
    for name in ("environment.json", "diverged.txt"):
        if (run / name).exists():
            shutil.copyfile(run / name, target / name)
    return target


def collect_study(found: Path, name: str, here: Path = HERE) -> Path:
    """The output of a search; SystemExit if another one is kept under this name."""
    study = read_study(found)
    if study.problem or not study.trials:
        raise SystemExit(study.problem or f"{found} has no trials")
    target = here / "studies" / name
    if (target / TRIALS).exists():
        # A study goes on; another one is about something else, or has other trials.
        old = read_study(target)
        about = [{**found.about, "trials": 0} for found in (old, study)]
        drawn = [{t["trial"]: t["settings"] for t in found.trials} for found in (old, study)]
        if about[0] != about[1] or any(drawn[1].get(k) != v for k, v in drawn[0].items()):
            raise SystemExit(f"{target} holds another study: give another --study")
    target.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({**t, "rows": _rows(found, t["trial"])}) + "\n" for t in study.trials]
    (target / TRIALS).write_text("".join(lines), encoding="utf-8")
    if (found / ABOUT).exists():
        shutil.copyfile(found / ABOUT, target / ABOUT)
    return target


def _rows(found: Path, trial: int) -> dict[str, list[Row]]:
    """The metrics of every run of a trial, by norm."""
    files = sorted(found.glob(f"trials/{trial:04d}/*/metrics.jsonl"))
    return {file.parent.name: [json.loads(line) for line in whole_lines(file)] for file in files}


def whole_lines(file: Path) -> list[str]:
    """Without a torn last one; none of a run that diverged in its first update."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(True)
    return [line for line in lines if line[-1] == "\n"]


def _fits(old: object, new: object) -> bool:
    if isinstance(old, dict) and isinstance(new, dict):
        return all(_fits(old[key], new[key]) for key in old.keys() & new.keys())
    return old == new


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Copy what is committed of runs.")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--suffix", default="", help="name of a variant of the recipe")
    parser.add_argument("--study", default="", help="collect into results/studies/NAME")
    parser.add_argument("--folder", type=Path, help="collect into this folder, as studies/NAME")
    parser.add_argument("--epochs", type=int, help="take no more than the first N")
    given = parser.parse_args(arguments)
    place = given.folder or (HERE / "studies" / given.study if given.study else HERE)
    for path in given.runs:
        if given.study and (path / TRIALS).exists():
            print(collect_study(path, given.study))
        elif given.study and path.suffix == ".json":
            place.mkdir(parents=True, exist_ok=True)
            print(shutil.copyfile(path, place / path.name))
        else:
            print(collect(path, given.suffix, place, given.epochs))
    print("now: make results", file=sys.stderr)


if __name__ == "__main__":
    main()
