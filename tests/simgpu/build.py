"""Build the libraries of the simulated cards with gcc, and the environment of a process that finds them.

`python -m tests.simgpu.build COMMAND…` runs a command in this environment.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = {"libsimcudart.so": ("cudart.c", []), "libcuda.so.1": ("cuda.c", ["-Wl,-soname,libcuda.so.1"])}


def missing_part() -> str | None:
    """Return what this machine lacks for a simulation, in words; None if nothing is missing."""
    import torch

    if sys.platform != "linux":
        return "Linux, whose loader takes another CUDA runtime (LD_PRELOAD)"
    if torch.version.cuda is None:
        return "a build of torch with CUDA"
    if shutil.which("gcc") is None:
        return "gcc"
    if _headers() is None:
        return "the headers of CUDA, which come with the package triton"
    return None


def _headers() -> Path | None:
    found = importlib.util.find_spec("triton")
    folder = None if found is None or found.origin is None else Path(found.origin).parent / "backends/nvidia/include"
    return folder if folder is not None and (folder / "cuda_runtime_api.h").is_file() else None


def built_libraries() -> Path:
    """Build the libraries if their code has changed; return their folder."""
    digest = hashlib.sha256(b"".join((HERE / source).read_bytes() for source, _ in LIBRARIES.values())).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"zoo-simgpu-{os.getuid()}-{digest[:12]}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            for library, (source, options) in LIBRARIES.items():
                command = ["gcc", "-O2", "-w", "-shared", "-fPIC", f"-I{_headers()}", *options]
                subprocess.run([*command, "-o", f"{temporary}/{library}", str(HERE / source), "-lpthread"], check=True)
            shutil.copytree(temporary, folder, dirs_exist_ok=True)
    return folder


def environment(devices: int = 1) -> dict[str, str]:
    """Return the environment of a process whose torch sees simulated cards.

    Args:
        devices: number of cards.
    """
    libraries = built_libraries()
    paths = {"LD_LIBRARY_PATH": [str(libraries)], "PYTHONPATH": [str(HERE / "startup"), str(HERE.parent.parent)]}
    joined = {name: os.pathsep.join([*added, *filter(None, [os.environ.get(name)])]) for name, added in paths.items()}
    own = {
        "LD_PRELOAD": str(libraries / "libsimcudart.so"), "SIM_DEVICES": str(devices), "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",  # Compiled code has kernels of its own, which nothing simulates.
    }  # fmt: skip
    return {**os.environ, **joined, **own}


if __name__ == "__main__":
    raise SystemExit(subprocess.run(sys.argv[1:], env=environment(int(os.environ.get("SIM_DEVICES", "1")))).returncode)
