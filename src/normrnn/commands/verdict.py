"""`normrnn verdict PATH...`."""

import json
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from normrnn.errors import UsageError


def verdict(
    paths: Annotated[Positional[list[Path]], arg(metavar="PATH...")],
    baseline: str | None = None,
    paired: bool = False,
    higher_is_better: bool = False,
    target: float | None = None,
    margin: float = 0.01,
    details: bool = False,
    json_: Annotated[bool, arg(name="json")] = False,
) -> None:
    """Compare every variant with the baseline, with intervals over the seeds.

    Args:
        paths: Run directories, directories that hold some, or one CSV file with the columns
            variant, seed, step, split, value and optionally seconds and lr.
        baseline: Name of the variant to compare with; by default none, else the first.
        paired: Runs of one seed share initial weights and the order of data (CSV only; run
            directories say so themselves).
        higher_is_better: Larger values are better (CSV only).
        target: A validation value to reach, instead of one that every run reaches.
        margin: Differences below this share of the baseline's value count as equivalent.
        details: Print the secondary figures too.
        json_: Print everything as JSON.
    """
    from normrnn.reporting.result import verdicts
    from normrnn.verdicts.verdict import Settings

    if not paths:
        raise UsageError("verdict needs run directories or a CSV file")
    settings = Settings(baseline, paired, higher_is_better, target, margin)
    found = verdicts(paths if len(paths) > 1 else paths[0], settings)
    if json_:
        values = [one.to_dict() for one in found]
        print(json.dumps(values[0] if len(values) == 1 else values, indent=2))
    else:
        print("\n\n".join(one.details() if details else str(one) for one in found))
