"""Build the native core where there is a C compiler; without one the wheel is pure Python, and plans take longer.

python hatch_build.py      # in a checkout: into the package's folder
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parent / "flashinfer_cascade"
SOURCE, NAME = PACKAGE / "core.c", "_core.so"
# Fused operations would round differently from Python: plans must be the same with and without the core.
FLAGS = ("-O2", "-fPIC", "-shared", "-ffp-contract=off")


def build(library: Path) -> str | None:
    """Compile; why not, or None if it went well."""
    if sys.platform != "linux":
        return "it is built on Linux only"
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    command = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS, f'-DFIC_SOURCE="{digest}"']
    try:
        subprocess.run([*command, "-o", library, SOURCE, "-lm"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"{error} {getattr(error, 'stderr', '')}"
    return None


if __name__ == "__main__":
    sys.exit(build(PACKAGE / NAME))
else:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    class NativeCore(BuildHookInterface):
        def initialize(self, version, build_data):
            self.folder = tempfile.TemporaryDirectory()
            editable = version == "editable"  # runs from the checkout
            library = PACKAGE / NAME if editable else Path(self.folder.name, NAME)
            problem = build(library)
            if problem is not None:
                self.app.display_warning(f"the native core was not built, planning will be slower: {problem}")
                return
            if not editable:
                build_data["force_include"][str(library)] = f"{PACKAGE.name}/{NAME}"
            # It is loaded with ctypes: one wheel for all versions of Python, but for this platform alone.
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

        def finalize(self, version, build_data, artifact_path):
            self.folder.cleanup()
