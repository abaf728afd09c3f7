"""Print the commands of the runs that the studies still lack, in order, one per line.

    python studies/runs.py DATA | nice xargs -P 2 -d '\\n' -n 1 sh -c

DATA holds ptb/, mnist/ and librispeech-prepared/. Runs go to runs/STUDY/; a command that is
started again resumes its run. `python -m tools.collect runs/STUDY/SUFFIX-* --suffix SUFFIX --folder
studies/STUDY` copies what is committed, and `make results` writes the pages.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
SEEDS = range(1, 6)
Run = tuple[str, str, str, str, int, str]
"""Study, suffix (may be empty), recipe, norm, seed, options."""


def compressed_schedule() -> Iterator[Run]:
    """The learning-rate drop after 2, 3 and 4 epochs, and one epoch after it."""
    for seed in SEEDS:
        for drop in (2, 3, 4):
            options = f"--data DATA/ptb --epochs {drop + 1} --optimizer.decay-after {drop}"
            for norm in ("none", "frame"):
                yield "compressed-schedule", f"drop{drop}", "ptb-small-authors", norm, seed, options


def regularised_converged() -> Iterator[Run]:
    """Three times the epochs of `quickstart`, with one regulariser at a time."""
    regularisers = {
        "locked": "--model.dropout 0.3 --model.dropout-kind locked",
        "zoneout": "--model.zoneout-h 0.1 --model.zoneout-c 0.1",
        "drop": "--model.weight-drop 0.3",
    }
    for seed in SEEDS:
        for norm in ("none", "frame"):
            for suffix, options in regularisers.items():
                options = f"--epochs 18 --optimizer.decay-after 12 {options}"
                yield "regularised-converged", suffix, "quickstart", norm, seed, options


def permuted_mnist() -> Iterator[Run]:
    """Which norm learns it, and how fast; "recurrent" with two initial values of gamma."""
    arms = [
        ("", "none"),
        ("", "sequence"),
        ("", "layer"),
        ("", "recurrent"),
        ("gamma1", "recurrent"),
    ]
    for seed in SEEDS:
        for suffix, norm in arms:
            options = "--data DATA/mnist" + (" --model.gamma 1.0" if suffix else "")
            yield "permuted-mnist", suffix, "permuted-mnist", norm, seed, options


def depth() -> Iterator[Run]:
    """1, 3, 5 and 7 layers on speech."""
    for seed in SEEDS[:3]:
        for layers in (1, 3, 5, 7):
            options = f"--data DATA/librispeech-prepared --model.layers {layers}"
            for norm in ("none", "sequence"):
                yield "depth", f"{layers}layers", "librispeech-mini-depth", norm, seed, options


def large_scaled_down() -> Iterator[Run]:
    """The large network with 400 cells on a sixth of the text."""
    size = "--model.hidden 400 --train.epoch-tokens 154931"
    options = f"--data DATA/ptb {size} --evaluation.train-tokens 10000"
    for seed in SEEDS[:3]:
        for norm in ("none", "frame"):
            yield "large-scaled-down", "", "ptb-large", norm, seed, options


def mini_batches() -> Iterator[Run]:
    """Other mini-batches in every epoch. Those with the same ones are the five epochs of
    `compressed-schedule`."""
    options = "--data DATA/ptb --train.shift-streams"
    for seed in SEEDS[:3]:
        for norm in ("none", "frame"):
            yield "mini-batches", "", "ptb-small-authors", norm, seed, options


def main(data: str) -> None:
    studies = (
        compressed_schedule,
        regularised_converged,
        permuted_mnist,
        depth,
        large_scaled_down,
        mini_batches,
    )
    for study in studies:
        for name, suffix, recipe, norm, seed, options in study():
            kept = "-".join(part for part in (recipe, norm, str(seed), suffix) if part)
            if (HERE / name / kept / "config.json").exists():
                continue
            out = "-".join(part for part in (suffix, norm, str(seed)) if part)
            options = options.replace("DATA", data)
            print(
                f"normrnn train {recipe} --norm {norm} --seed {seed} {options} --threads 1"
                f" --out runs/{name}/{out}"
            )


if __name__ == "__main__":
    main(sys.argv[1])
