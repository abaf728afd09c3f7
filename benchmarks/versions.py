"""The appendix's network beside another checkout of this library: training steps, in turns.

    git worktree add ../before 237a601
    python -m benchmarks.versions ../before

`norm="hidden"`, an RNN of 250 units over 100 steps, as in the character models. Each version runs
in processes of its own, which take turns; the best step of all its processes counts.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

BATCHES = (32, 64, 128)
STEP = """
import json, time, torch
from normrnn import RNN
torch.set_num_threads({threads})
best = {{}}
for B in {batches}:
    torch.manual_seed(0)
    layer = RNN(50, 250, norm="hidden", time_steps=100)
    x, gradient = torch.randn(100, B, 50), torch.randn(100, B, 250)
    best[B] = 1e9
    for _ in range({steps}):
        layer.zero_grad()
        start = time.perf_counter()
        layer(x)[0].backward(gradient)
        best[B] = min(best[B], time.perf_counter() - start)
print(json.dumps(best))
"""


def measured(checkout: Path, threads: int, steps: int) -> dict[str, float]:
    code = STEP.format(threads=threads, batches=BATCHES, steps=steps)
    known = dict(os.environ, PYTHONPATH=str(checkout / "src"))
    done = subprocess.run([sys.executable, "-c", code], env=known, capture_output=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description="Two versions of this library, step by step.")
    parser.add_argument("other", type=Path, help="a checkout of another version")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()
    checkouts = Path(__file__).parent.parent, args.other
    best = [dict.fromkeys(map(str, BATCHES), 1e9) for _ in checkouts]
    for _ in range(args.rounds):
        for known, checkout in zip(best, checkouts, strict=True):
            for batch, seconds in measured(checkout, args.threads, args.steps).items():
                known[batch] = min(known[batch], seconds)
    for batch in map(str, BATCHES):
        ours, others = best[0][batch], best[1][batch]
        print(
            f"hidden RNN, B{batch} T100 H250, {args.threads} thread(s): {1e3 * ours:.1f} ms,"
            f" {others / ours:.2f} × as fast as the other version"
        )


if __name__ == "__main__":
    main()
