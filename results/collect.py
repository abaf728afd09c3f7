"""Copies what is committed of finished or running runs: settings and metrics, no weights.

    python results/collect.py RUN...

Each run directory becomes results/RECIPE-NORM-SEED/ with `config.json`, in which the path of the
data is replaced by its name (its sha256 is there already), and `metrics.jsonl` without a torn line.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent


def collect(run: Path) -> Path:
    config = json.loads((run / "config.json").read_text())
    config["data"] = Path(config["data"]).name
    target = HERE / f"{config['recipe']}-{config['norm']}-{config['seed']}"
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    whole = [
        line for line in (run / "metrics.jsonl").read_text().splitlines(True) if line[-1] == "\n"
    ]
    (target / "metrics.jsonl").write_text("".join(whole))
    return target


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(collect(Path(argument)))
