"""The compiled kernels inside the wheel: every variant, so that a machine without a compiler has
the one for its CPU.

Nothing is linked but libc and libm: the OpenMP runtime is the one that torch brings. An sdist, an
editable install and a machine that builds without a compiler have none; then the source is compiled
on first use.
"""

import importlib.util
import platform
import re
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OPS = Path("src", "normrnn", "ops")
OLDEST_GLIBC = 17  # of manylinux


class Kernels(BuildHookInterface):
    """Compiles them into a scratch folder and puts them into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = module(Path(self.root, OPS, "build.py"))
        variants = module(Path(self.root, OPS, "variants.py"))
        compiler = build.found_compiler()
        if version == "editable" or compiler is None:
            self.app.display_warning("no compiled kernels in here: they are made on first use")
            return
        scratch = Path(tempfile.mkdtemp())
        names = variants.VARIANTS if variants.is_x86() else ["baseline"]
        built = []
        for name in names:
            self.app.display_info(f"compiling kernels: {name}")
            path = scratch / variants.packaged(name).name
            source = build.Source(variants.SOURCE, variants.flags(name))
            build.compile_to(path, compiler, [source], [*variants.FLAGS, "-s"], seconds=1800)
            build_data["force_include"][str(path)] = f"normrnn/ops/kernels/{path.name}"
            built.append(path)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(built)}"  # C behind ctypes knows no Python


def module(path: Path) -> ModuleType:
    """A file of the package alone: the package itself wants torch."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def platform_tag(libraries: list[Path]) -> str:
    """This platform; on Linux, with the oldest glibc that has all they ask for (PEP 600)."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return re.sub(r"[-.]", "_", sysconfig.get_platform())
    asked = [OLDEST_GLIBC]
    for path in libraries:
        asked += [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
    return f"manylinux_2_{max(asked)}_{platform.machine()}"
