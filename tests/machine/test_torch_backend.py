"""`import dure` tells torch.distributed of the backend, and changes nothing else of it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch.distributed as dist
from torch.distributed import Backend

from dure.machine import torch_backend as registration


def test_the_backend_is_known_for_the_cpu_and_gloo_stays_the_usual_one() -> None:
    assert "dure" in Backend.backend_list
    assert Backend.backend_capability["dure"] == ["cpu"]
    assert Backend.default_device_backend_map["cpu"] == "gloo"


def test_to_register_again_changes_nothing() -> None:
    before = (
        list(Backend.backend_list),
        dict(Backend.default_device_backend_map),
        Backend._plugins["DURE"],
    )
    registration.register("nowhere")
    registration.register_when_imported("nowhere")
    assert (
        list(Backend.backend_list),
        dict(Backend.default_device_backend_map),
        Backend._plugins["DURE"],
    ) == before


@pytest.mark.parametrize("first", ["import dure", "import torch.distributed"])
def test_whichever_is_imported_first(first: str) -> None:
    code = f"""
        {first}
        import sys
        assert ("torch" in sys.modules) == ("torch" in {first!r})
        import dure, torch.distributed as dist
        from dure.machine import torch_backend as registration
        assert "dure" in dist.Backend.backend_list
        assert not any(isinstance(finder, registration._Finder) for finder in sys.meta_path)
        import inspect
        assert "def init_process_group" in inspect.getsource(dist.distributed_c10d)
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        import torch
        group = dist.group.WORLD
        assert "gloo" in type(group._get_backend(torch.device("cpu"))).__name__.lower()
        dist.destroy_process_group()
        assert "dure.collectives.shared_memory.backend" not in sys.modules, "nobody asked for it"
        dist.init_process_group("dure", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.get_backend() == "dure"
        dist.destroy_process_group()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_group_of_the_backend_knows_its_name() -> None:
    assert dist.Backend("dure") == "dure"
