"""Fail the build if a page loads anything from another host."""

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

_REMOTE = re.compile(
    r"<(?:script|img|iframe|source|video|audio)\b[^>]*\bsrc=\"(?:https?:)?//[^\"]*"
    r"|<link\b(?![^>]*rel=\"(?:canonical|search|next|prev|index)\")[^>]*href=\"(?:https?:)?//[^\"]*"
    r"|@import\s+[^;]*//[^;]*|url\(\s*['\"]?(?:https?:)?//[^)]*"
)


def remote_resources(text: str) -> list[str]:
    """Return what a page or a style sheet would load from another host."""
    return _REMOTE.findall(text)


def _check(app: Sphinx, exception: Exception | None) -> None:
    if exception is not None or app.builder.name != "html":
        return
    files = [f for f in Path(app.outdir).rglob("*") if f.suffix in (".html", ".css")]
    bad = {f.name: found for f in files if (found := remote_resources(f.read_text("utf-8")))}
    if bad:
        raise SphinxError(f"loaded from other hosts: {bad}")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the check."""
    app.connect("build-finished", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
