"""Reports and pictures as files."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path

from normrnn.errors import UserError
from normrnn.files import open_regular, write_whole
from normrnn.report.groups import groups
from normrnn.report.page import MARK, page
from normrnn.report.pictures import pictures, png, save
from normrnn.report.runs import RunOrProblem
from normrnn.report.study import PICTURE, RecordedStudy
from normrnn.report.trials import figure

LONGEST = 150
"""Bytes of a title in the name of a file."""


def write_report(
    found: Sequence[RunOrProblem],
    path: Path,
    title: str = "normrnn report",
    studies: Sequence[RecordedStudy] = (),
    target: float | None = None,
) -> None:
    """Write the report, over an older one if need be, but over nothing else."""
    refuse_other(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    write_whole(path, page(found, title, studies, target).encode(errors="backslashreplace"))


def refuse_other(path: Path) -> None:
    """UserError if what is there is no report."""
    if path.is_dir():
        raise UserError(f"{path} is a directory: name the file to write, as in {path}/report.html")
    if path.exists():
        with open_regular(path) as file:
            if file.read(len(MARK)) not in (MARK.encode(), b""):
                raise UserError(f"{path} is there and is no report: not overwriting it")


def write_pictures(
    found: Sequence[RunOrProblem], directory: Path, studies: Sequence[RecordedStudy] = ()
) -> list[Path]:
    """Every picture as DIRECTORY/RECIPE-NAME.png, or DIRECTORY/STUDY-NAME.png."""
    wanted: dict[Path, Callable[[Path], None]] = {}
    for study in (s for s in studies if s.drawable):
        path = directory / f"{safe(study.name)}-{PICTURE}"
        wanted[path] = lambda path, trials=study.trials: save(figure(trials), path)
    for group in groups([one.run for one in found if one.run is not None]):
        for picture in pictures(group):
            path = directory / f"{safe(group.title)}-{picture.name}.png"
            wanted[path] = partial(png, picture, group)
    for path, write in wanted.items():
        try:
            write(path)
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    return list(wanted)


def safe(title: str) -> str:
    """A title as the name of a file; a long one ends with a hash of all of it."""
    name = re.sub(r"[^\w.-]+", "-", title).strip("-") or "runs"
    if len(name.encode()) <= LONGEST:
        return name
    start = name.encode()[:LONGEST].decode(errors="ignore")
    return f"{start}-{sha256(title.encode()).hexdigest()[:8]}"
