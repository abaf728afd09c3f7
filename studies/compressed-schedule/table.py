"""Compare all schedules with the longest baseline, and draw them.

    python studies/compressed-schedule/table.py

Prints a Markdown table and writes schedules.svg beside this file. The test value is that of the
best validation; intervals are simultaneous over the five comparisons.
"""

import json
import math
from pathlib import Path
from statistics import mean

import normrnn

HERE = Path(__file__).parent
BASELINE = ("none", 5)


def read() -> dict[tuple[str, int], dict[int, list[dict]]]:
    """Norm and number of epochs -> seed -> rows, of seeds that have all six runs."""
    runs: dict[tuple[str, int], dict[int, list[dict]]] = {}
    for path in sorted(HERE.glob("*/config.json")):
        config = json.loads(path.read_text())
        lines = (path.parent / "metrics.jsonl").read_text().splitlines()
        key = (config["norm"], config["epochs"])
        runs.setdefault(key, {})[config["seed"]] = [json.loads(line) for line in lines]
    complete = set.intersection(*(set(seeds) for seeds in runs.values()))
    return {key: {s: seeds[s] for s in sorted(complete)} for key, seeds in runs.items()}


def perplexities(rows: list[dict], split: str, statistics: str = "running") -> list[dict]:
    """Steps and perplexities of one split with one kind of statistics."""
    return [
        {"step": row["updates"], "split": split, "value": math.exp(row["loss"])}
        for row in rows
        if row["split"] == split and row["statistics"] == statistics and row.get("saved", True)
    ]


def main() -> None:
    runs = read()
    rows = [
        {"variant": f"{norm}, {epochs} epochs", "seed": seed, **point}
        for (norm, epochs), seeds in runs.items()
        for seed, points in seeds.items()
        for split in ("valid", "test")
        for point in perplexities(points, split)
    ]
    baseline = f"{BASELINE[0]}, {BASELINE[1]} epochs"
    variants = normrnn.verdict(rows, baseline=baseline, paired=True).to_dict()["variants"]
    print(f"| network | updates | test perplexity | against {baseline} | answer |")
    print("| --- | ---: | ---: | --- | --- |")
    final = {}
    for key, seeds in sorted(runs.items()):
        norm, epochs = key
        tests = [perplexities(points, "test")[-1] for points in seeds.values()]
        final[key] = (tests[0]["step"], [test["value"] for test in tests])
        shown = f"| {norm}, {epochs} epochs | {tests[0]['step']:,} | {mean(final[key][1]):.1f} |"
        quality = variants.get(f"{norm}, {epochs} epochs", {}).get("quality")
        if quality is None:
            print(shown, "– | baseline |")
            continue
        low, high = quality["interval"] or (math.nan, math.nan)
        change = f"{quality['estimate']:+.1f} ({low:+.1f}, {high:+.1f})"
        print(shown, f"{change} | {quality['answer']} |")
    print(f"\n{len(runs[BASELINE])} seeds: {', '.join(map(str, runs[BASELINE]))}.")
    draw(final)


def draw(final: dict[tuple[str, int], tuple[int, list[float]]]) -> None:
    """Test perplexity against the updates of a whole run."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for norm, colour in (("none", "#1f5fbf"), ("frame", "#c62828")):
        points = sorted(final[key] for key in final if key[0] == norm)
        axes.plot([x for x, _ in points], [mean(y) for _, y in points], color=colour, label=norm)
        for x, values in points:
            axes.plot([x] * len(values), values, "o", color=colour, markersize=3)
    axes.set_xlabel("updates of the whole run (3, 4 and 5 epochs)")
    axes.set_ylabel("test perplexity")
    axes.grid(alpha=0.3)
    axes.legend()
    mpl.rcParams["svg.hashsalt"] = "normrnn"
    figure.savefig(HERE / "schedules.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
