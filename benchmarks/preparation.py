"""What preparing speech costs on one core, in multiples of the length of the sound.

    python -m benchmarks.preparation DIR [--utterances 40]

DIR is in LibriSpeech's layout. Processor time of utterances spread over it, reading from disk
included. Asked for: features at most 0.02, alignment at most 0.06.
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import process_time

from benchmarks.machine import describe
from normrnn.cli import guarded
from normrnn.errors import UserError
from normrnn.speech.archive import Unusable
from normrnn.speech.prepare.features import SAMPLE_RATE, add_deltas, fbank, read_sound
from normrnn.speech.prepare.librispeech import align, find_utterances


def costs(directory: Path, wanted: int) -> Iterator[tuple[float, float, float]]:
    """Seconds of sound, features and alignment, of utterances from all over the directory that can
    be aligned without a lexicon."""
    found = find_utterances(directory)
    step = max(len(found) // wanted, 1)
    for item in (item for first in range(step) for item in found[first::step]):
        if item.problem:
            continue
        start = process_time()
        try:
            samples = read_sound(item.path)
            features = add_deltas(fbank(samples))
            middle = process_time()
            align(samples, item.text, "senone", {}, len(features))
        except Unusable:  # most often a word without a pronunciation
            continue
        yield len(samples) / SAMPLE_RATE, middle - start, process_time() - middle


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--utterances", type=int, default=40)
    args = parser.parse_args(arguments)
    if args.utterances < 1:
        parser.error("--utterances must be at least 1")
    results = list(islice(costs(args.directory, args.utterances), args.utterances))
    if not results:
        raise UserError(f"no utterance of {args.directory} could be aligned")
    sound, features, alignment = (sum(column) for column in zip(*results, strict=True))
    parts = {"features": (features, 0.02), "alignment": (alignment, 0.06)}
    print(describe())
    print(f"{len(results)} utterances, {sound:.0f} s of sound, one core; × real time:")
    for name, (cost, asked) in parts.items():
        print(f"  {name:<10} {cost / sound:.4f}   (asked: at most {asked})")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main, sys.argv[1:]))
