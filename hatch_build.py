"""Put the compiled kernels into the wheel, all variants, for machines without a compiler.

Only libc and libm are linked: torch brings the OpenMP runtime. An sdist, an editable install and a
build without a compiler have no kernels; they are then compiled on first use.
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

NATIVE = Path("src", "normrnn", "ops", "native")
OLDEST_GLIBC = 17  # of manylinux


class Kernels(BuildHookInterface):
    """Compile the kernels into a temporary directory and add them to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = module(Path(self.root, NATIVE, "build.py"))
        compiler = build.found_compiler()
        if version == "editable" or compiler is None:
            self.app.display_warning(
                "no compiled kernels in this package: they are built on first use"
            )
            return
        scratch = Path(tempfile.mkdtemp())
        names = build.VARIANTS if build.is_x86() else ["baseline"]
        built = []
        for name in names:
            self.app.display_info(f"compiling kernels: {name}")
            path = scratch / build.packaged(name).name
            source = build.Source(build.SOURCE, build.variant_flags(name))
            build.compile_to(path, compiler, [source], [*build.FLAGS, "-s"], seconds=1800)
            build_data["force_include"][str(path)] = f"normrnn/ops/native/{path.name}"
            built.append(path)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(built)}"  # loaded by ctypes, for any Python


def module(path: Path) -> ModuleType:
    """Import one file of the package; the package itself imports torch."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def platform_tag(libraries: list[Path]) -> str:
    """Return the platform tag; on Linux with the oldest glibc that suffices (PEP 600)."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return re.sub(r"[-.]", "_", sysconfig.get_platform())
    asked = [OLDEST_GLIBC]
    for path in libraries:
        asked += [int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
    return f"manylinux_2_{max(asked)}_{platform.machine()}"
