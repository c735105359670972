"""Where there is no C compiler dure installs all the same, and does with torch what the C core
would do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dure.collectives.shared_memory import Options, SharedMemoryGroup, native

ROOT = Path(__file__).parents[3]


def alone(core: str) -> SharedMemoryGroup:
    return SharedMemoryGroup(dist.HashStore(), 0, 1, timedelta(seconds=5), [0], Options(core=core))  # type: ignore[arg-type]


def test_the_package_builds_without_a_compiler_and_works(tmp_path: Path) -> None:
    source, wheels, package = tmp_path / "source", tmp_path / "wheels", tmp_path / "package"
    shutil.copytree(
        ROOT / "src",
        source / "src",
        ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"),
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
    ]
    built = subprocess.run(
        [*pip, "--wheel-dir", str(wheels), str(source)],
        capture_output=True,
        text=True,
        env={**os.environ, "CC": "/bin/false", "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next(wheels.glob("dure-*.whl"))) as wheel:
        wheel.extractall(package)
    assert not list(package.rglob("*.so"))
    code = """
        import sys, pathlib
        from datetime import timedelta
        import torch, torch.distributed as dist
        import dure
        from dure.collectives.shared_memory import Options
        assert pathlib.Path(dure.__file__).is_relative_to(sys.argv[1]), dure.__file__
        dist.init_process_group("dure", store=dist.HashStore(), rank=0, world_size=1)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.eq(1).all()
        try:
            dist.new_group([0], pg_options=Options(core="c"))
        except ValueError as error:
            print(error)
        dist.destroy_process_group()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(package)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(package)},
        cwd=tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "the C core was not built: install dure again where there is a C compiler"
    )


def test_auto_is_torch_where_the_c_core_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    group = alone("auto")
    tensor = torch.ones(3)
    group.all_reduce(tensor)
    assert type(group._host).__name__ == "PortableHost"
    assert native.instructions() == "torch"
    group.shutdown()
    with pytest.raises(ValueError, match="the C core was not built: install dure again"):
        alone("c")


def test_a_core_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no core 'rust'; choose auto, c or torch"):
        alone("rust")
