"""Reports and pictures as files."""

import re
from collections.abc import Sequence
from pathlib import Path

from normrnn.errors import UserError
from normrnn.files import write_whole
from normrnn.report.groups import groups
from normrnn.report.page import MARK, page
from normrnn.report.pictures import pictures, png
from normrnn.report.runs import Found


def write_report(found: Sequence[Found], path: Path, title: str = "normrnn report") -> None:
    """Write the report, over an older one if need be, but over nothing else."""
    if path.is_dir():
        raise UserError(f"{path} is a directory: name the file to write, as in {path}/report.html")
    if path.exists():
        with path.open("rb") as file:
            if file.read(len(MARK)) not in (MARK.encode(), b""):
                raise UserError(f"{path} is there and is no report: not overwriting it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    write_whole(path, page(found, title).encode())


def write_pictures(found: Sequence[Found], directory: Path) -> list[Path]:
    """Every picture as DIRECTORY/RECIPE-NAME.png."""
    written = []
    for group in groups([one.run for one in found if one.run is not None]):
        safe = re.sub(r"[^\w.-]+", "-", group.title).strip("-") or "runs"
        for picture in pictures(group):
            path = directory / f"{safe}-{picture.name}.png"
            try:
                png(picture, group, path)
            except OSError as error:
                raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
            written.append(path)
    return written
