"""A wheel tried where nothing else is: `python -m tools.acceptance dist/normrnn-*.whl`.

Makes an empty environment with what the wheel depends on and nothing more, linked from this one so
that nothing is downloaded, installs the wheel there, and runs `tools/accepted.py` in it: no
compiler on the PATH, an empty cache, no extras.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

CHECKS = Path(__file__).with_name("accepted.py")


def needed(requirements: list[str], found: dict[str, Path] | None = None) -> dict[str, Path]:
    """Top-level names -> where they are here, of these distributions and all that they need."""
    found = {} if found is None else found
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        here = distribution(requirement.name)
        names = {file.parts[0] for file in here.files or () if file.parts[0] not in _NOT_NAMES}
        if names <= found.keys():
            continue
        found |= {name: Path(str(here.locate_file(name))) for name in names}
        needed(here.requires or [], found)
    return found


_NOT_NAMES = ("..", "__pycache__")


def main(wheel: Path) -> int:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        about = Parser().parsestr(archive.read(metadata).decode())
    bundled = [name for name in names if re.match(r"lib\w*omp", Path(name).name)]
    assert not bundled, f"a second OpenMP runtime: {bundled}"
    with tempfile.TemporaryDirectory() as scratch:
        environment, place = Path(scratch) / "env", Path(scratch) / "work"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        (site,) = environment.glob("lib/python*/site-packages")
        for name, path in needed(about.get_all("Requires-Dist") or []).items():
            (site / name).symlink_to(path)
        python = environment / "bin" / "python"
        install = ["pip", "--python", str(python), "install", "--no-index", "--no-deps", wheel]
        subprocess.run([sys.executable, "-m", *install, "-q"], check=True)
        place.mkdir()
        clean = {"PATH": str(environment / "bin"), "HOME": scratch, "LANG": "C.UTF-8"}
        clean["XDG_CACHE_HOME"] = str(Path(scratch) / "cache")
        clean |= {"TERM": os.environ.get("TERM", "dumb")}
        return subprocess.run([python, "-I", CHECKS], cwd=place, env=clean, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
