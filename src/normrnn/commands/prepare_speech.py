"""`normrnn prepare librispeech` and `normrnn prepare kaldi`."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from normrnn.errors import UsageError
from normrnn.files import utf8_name
from normrnn.processes import usable_cores

if TYPE_CHECKING:
    from normrnn.speech.prepare.job import Job
    from normrnn.speech.prepare.preparation import Report

_PLAIN_SECONDS = 15.0


def librispeech(
    directory: Annotated[Positional[Path], arg(metavar="DIR")],
    out: Annotated[Path, arg(metavar="DIR")],
    targets: Literal["senone", "phone"] = "senone",
    lexicon: Annotated[Path | None, arg(metavar="FILE")] = None,
    dev_speakers: Annotated[Path | None, arg(metavar="FILE")] = None,
    dev_fraction: float = 0.1,
    processes: int = 0,
) -> int:
    """Features and frame labels of a folder in LibriSpeech's layout, by forced alignment.

    The same command resumes. Sound must be at 16 kHz: other rates are
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
    data: Annotated[Path, arg(metavar="DIR")],
    ali: Annotated[Path, arg(metavar="DIR")],
    out: Annotated[Path, arg(metavar="DIR")],
    dev_data: Annotated[Path | None, arg(metavar="DIR")] = None,
    dev_ali: Annotated[Path | None, arg(metavar="DIR")] = None,
    deltas: Annotated[bool, FlagCreatePairsOff] = False,
    allow_pipes: Annotated[bool, FlagCreatePairsOff] = False,
    classes: int | None = None,
    sample_rate: int = 16_000,
    dev_speakers: Annotated[Path | None, arg(metavar="FILE")] = None,
    dev_fraction: float = 0.1,
    processes: int = 0,
) -> int:
    """Features and frame labels of Kaldi data directories with pdf-level alignments.

    feats.scp is taken as it is; without it, features are computed from wav.scp (and segments),
    with deltas. The same command resumes.

    Args:
        data: Kaldi data directory to train on.
        ali: Its alignments: archives of int vectors as ali-to-pdf writes them.
        out: Where the prepared data goes: train, dev, statistics and a summary.
        dev_data: Kaldi data directory for development; without it, speakers of --data are split.
        dev_ali: Its alignments.
        deltas: Add deltas and delta-deltas to the features of feats.scp.
        allow_pipes: Run the commands that feats.scp or wav.scp holds.
        classes: Number of pdfs; without it, from the alignment directory's num_pdfs or final.mdl,
            else the largest label plus one.
        sample_rate: Of the sound in wav.scp; other rates are skipped.
        dev_speakers: Speakers for development, one per line.
        dev_fraction: Without --dev-data and --dev-speakers, this share of the speakers.
        processes: Working processes; 0: one for each core.
    """
    from normrnn.speech.prepare.kaldi import Side, kaldi_job

    if (dev_data is None) != (dev_ali is None):
        raise UsageError("--dev-data and --dev-ali go together")
    dev = Side(dev_data, dev_ali) if dev_data and dev_ali else None
    if dev and dev_speakers:
        raise UsageError("--dev-speakers splits --data; with --dev-data there is nothing to split")
    job = kaldi_job(
        Side(data, ali),
        dev,
        deltas=deltas,
        allow_pipes=allow_pipes,
        classes=classes,
        sample_rate=sample_rate,
        dev_speakers=dev_speakers,
        dev_fraction=dev_fraction,
    )
    return _prepare(job, out, processes)


def _prepare(job: "Job", out: Path, processes: int) -> int:
    from normrnn.speech.prepare.preparation import finished, prepare

    utf8_name(out, "--out")
    if processes < 0:
        raise UsageError(f"--processes must be at least 1, or 0 for all cores, not {processes}")
    summary = finished(out, job.settings)
    if summary is not None:
        print(f"{out} is finished: nothing to do")
        _show(summary, out)
        return 0
    try:
        with _progress() as report:
            summary = prepare(job, out, processes or usable_cores(), report)
    except KeyboardInterrupt:
        print(f"stopped; {out} keeps what is done, the same command resumes", file=sys.stderr)
        return 130
    _show(summary, out)
    return 0


def _show(summary: dict[str, Any], out: Path) -> None:
    from normrnn.speech.prepare.pdfs import LARGEST_LABEL

    for name in ("train", "dev"):
        s = summary[name]
        print(
            f"{name:<6}{s['hours']:.2f} hours, {s['utterances']:,} utterances, {s['frames']:,}"
            f" frames, {s['speakers']:,} speakers, {s['classes_seen']:,} of"
            f" {summary['classes']:,} classes seen"
        )
    if summary["settings"].get("classes_from") == LARGEST_LABEL:
        print(
            f"{summary['classes']:,} classes, as the largest label has it: if the alignment's model"
            " has more states, --classes says so"
        )
    skipped = summary["skipped"]
    where = f": {out / 'skipped.tsv'}" if skipped["utterances"] else ""
    print(f"skipped {skipped['utterances']:,} utterances ({skipped['share']:.1%}){where}")
    if summary["channels_averaged"]:
        print(f"several channels averaged in {summary['channels_averaged']:,} utterances")


@contextlib.contextmanager
def _progress() -> Iterator["Report"]:
    """A progress bar on a terminal, now and then a line elsewhere."""
    if not sys.stderr.isatty():
        yield _plain()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    from normrnn.console import PlainConsole

    skipped = TextColumn("{task.fields[skipped]} skipped")
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), skipped, Remaining())
    with Progress(*columns, console=PlainConsole(stderr=True)) as bar:
        task = bar.add_task("", total=None, skipped=0)
        yield lambda done, total, skipped: bar.update(
            task, completed=done, total=total, skipped=skipped
        )


def _plain() -> "Report":
    last = time.monotonic() - _PLAIN_SECONDS

    def report(done: int, total: int, skipped: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last >= _PLAIN_SECONDS:
            last = now
            print(f"{done:,} of {total:,} utterances, {skipped:,} skipped", file=sys.stderr)

    return report
