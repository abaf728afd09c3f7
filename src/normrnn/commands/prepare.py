"""`normrnn prepare`: check or make the data of a recipe."""

import hashlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from normrnn.commands.options import Directory, parse
from normrnn.errors import UsageError, UserError
from normrnn.files import ROWS, read_regular, utf8_name
from normrnn.processes import usable_cores

if TYPE_CHECKING:
    from normrnn.speech.prepare.job import Job
    from normrnn.speech.prepare.preparation import Report

Required = Annotated[Path, arg(metavar="DIR")]
File = Annotated[Path | None, arg(metavar="FILE")]
PTB_SOURCE = (
    "Mikolov's preparation is free for research: simple-examples.tgz at"
    " http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz holds the three files in"
    " simple-examples/data"
)
PTB_SHA256 = {
    "ptb.train.txt": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "ptb.valid.txt": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "ptb.test.txt": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}
_SECONDS = 5.0
"""Between lines of progress."""


def prepare(arguments: list[str]) -> int:
    """Check or make the data of a recipe."""
    kinds = {"ptb": ptb, "librispeech": librispeech, "kaldi": kaldi}
    usage = f"usage: normrnn prepare {{{','.join(kinds)}}} ..."
    if arguments and arguments[0] in ("-h", "--help"):
        firsts = ((kind, (made.__doc__ or "").splitlines()[0]) for kind, made in kinds.items())
        listed = "\n".join(f"  {kind:<12} {first}" for kind, first in firsts)
        print(f"{usage}\n\n{listed}\n\nnormrnn prepare NAME --help lists the options.")
        return 0
    if not arguments or arguments[0] not in kinds:
        raise UsageError(f"prepare needs one of {', '.join(kinds)}; {usage}")
    kind, *rest = arguments
    return parse(kinds[kind], f"prepare {kind}", rest)


def ptb(directory: Annotated[Positional[Path], arg(metavar="DIR")]) -> int:
    """Check that DIR holds the three files of Penn Treebank, whole and unchanged.

    Args:
        directory: Where ptb.train.txt, ptb.valid.txt and ptb.test.txt are.
    """
    for name, sha256 in PTB_SHA256.items():
        file = directory / name
        if not file.is_file():
            raise UserError(f"{directory} has no {name}. {PTB_SOURCE}")
        raw = read_regular(file, ROWS)
        count = len(raw.split()) + raw.count(b"\n")
        if hashlib.sha256(raw).hexdigest() != sha256:
            raise UserError(
                f"{file}, of {count:,} tokens, is not the file the paper used. {PTB_SOURCE}"
            )
        print(f"{name}: {count:,} tokens, intact")
    print(f"ready: normrnn train ptb-small --data {directory}")
    return 0


def librispeech(
    directory: Annotated[Positional[Path], arg(metavar="DIR")],
    out: Required,
    targets: Literal["senone", "phone"] = "senone",
    lexicon: File = None,
    dev_speakers: File = None,
    dev_fraction: float = 0.1,
    processes: int = 0,
) -> int:
    """Align a folder in LibriSpeech's layout: features and frame labels.

    The same command resumes. Sound must be FLAC at 16 kHz: other files are
    skipped, several channels are averaged.

    Args:
        directory: Holds LibriSpeech/, is it, or is one of its subsets.
        out: Where the prepared data goes: train, dev, statistics and a summary.
        targets: Clustered triphone states, or context-independent phone states.
        lexicon: More pronunciations: lines of a word and its phones.
        dev_speakers: Speakers for development, one per line.
        dev_fraction: Without --dev-speakers, this share of the speakers.
        processes: Working processes; 0: one for each core.
    """
    from normrnn.speech.prepare.librispeech import librispeech_job

    job = librispeech_job(directory, targets, lexicon, dev_speakers, dev_fraction)
    return _prepare(job, out, processes)


def kaldi(
    data: Required,
    ali: Required,
    out: Required,
    dev_data: Directory = None,
    dev_ali: Directory = None,
    deltas: Annotated[bool, FlagCreatePairsOff] = False,
    classes: int | None = None,
    dev_speakers: File = None,
    dev_fraction: float = 0.1,
    processes: int = 0,
) -> int:
    """Take features and pdf-level alignments from Kaldi's directories.

    The same command resumes.

    Args:
        data: Kaldi data directory to train on, with feats.scp.
        ali: Its alignments: archives of int vectors as ali-to-pdf writes them.
        out: Where the prepared data goes: train, dev, statistics and a summary.
        dev_data: Kaldi data directory for development; without it, speakers of --data are split.
        dev_ali: Its alignments.
        deltas: Add deltas and delta-deltas to the features.
        classes: Number of pdfs; without it, that of final.mdl beside the alignments.
        dev_speakers: Speakers for development, one per line.
        dev_fraction: Without --dev-speakers, this share of the speakers.
        processes: Working processes; 0: one for each core.
    """
    from normrnn.speech.prepare.kaldi import kaldi_job

    job = kaldi_job(data, ali, dev_data, dev_ali, deltas, classes, dev_speakers, dev_fraction)
    return _prepare(job, out, processes)


def _prepare(job: "Job", out: Path, processes: int) -> int:
    from normrnn.speech.prepare.preparation import SKIPPED, finished, prepare

    utf8_name(out, "--out")
    if processes < 0:
        raise UsageError(f"--processes must be at least 1, or 0 for all cores, not {processes}")
    summary = finished(out, job.settings)
    if summary is not None:
        print(f"{out} is finished: nothing to do")
    else:
        try:
            summary = prepare(job, out, processes or usable_cores(), _progress())
        except KeyboardInterrupt:
            print(f"\nstopped; {out} keeps what is done, the same command resumes", file=sys.stderr)
            return 130
    for name in ("train", "dev"):
        s = summary[name]
        print(
            f"{name:<6}{s['hours']:.2f} hours, {s['utterances']:,} utterances, {s['frames']:,}"
            f" frames, {s['speakers']:,} speakers, {s['classes_seen']:,} of"
            f" {summary['classes']:,} classes seen"
        )
    skipped = summary["skipped"]
    where = f": {out / SKIPPED}" if skipped["utterances"] else ""
    print(f"skipped {skipped['utterances']:,} utterances ({skipped['share']:.1%}){where}")
    return 0


def _progress() -> "Report":
    """Return a function that shows progress on standard error, now and then."""
    shown = -_SECONDS

    def show(done: int, total: int, skipped: int) -> None:
        nonlocal shown
        if done == total or time.monotonic() > shown + _SECONDS:
            shown = time.monotonic()
            print(f"{done:,} of {total:,} utterances, {skipped:,} skipped", file=sys.stderr)

    return show
