"""Program of a rank of a client: `torchrun … ranked_client.py URL FOLDER DIVISION`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from hugging_face_cases import causal, trainer
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import dure


def divided(folder: Path) -> nn.Module:
    """The model, divided over the ranks by FSDP2."""
    if not dist.get_rank():
        causal(torch.float64).save_pretrained(folder / "model")
    dist.barrier()
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder / "model", distributed_config=config, dtype=torch.float64
    )
    assert all(isinstance(one, DTensor) for one in model.parameters())
    return model


def hugging_face(url: str, folder: Path, division: str) -> str:
    """Take part with a transformers.Trainer."""
    made = trainer(
        folder,
        lambda: divided(folder) if division == "fsdp2" else causal(torch.float64),
        n=22,
        optim="adamw_torch",
        per_device_train_batch_size=2,
    )
    assert made.args.world_size == 2
    reason: str = dure.client.patch(made, url, name="site").train()
    return reason


def going_on(url: str, folder: Path, division: str) -> str:
    """Take part with a transformers.Trainer whose optimizer goes on over the rounds."""
    stage = {"stage": 3, "stage3_param_persistence_threshold": 100}
    config = {"zero_optimization": stage, "zero_allow_untested_optimizer": True}
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    made = trainer(
        folder,
        n=24,
        optim="adamw_torch",
        per_device_train_batch_size=2,
        num_train_epochs=3,
        deepspeed={**config, **sizes} if division == "deepspeed" else None,
    )
    dure.client.patch(made, url, between_rounds="keep", name="site")
    reason: str = made.train()
    parts = [hasattr(one, "ds_tensor") for one in made.model.parameters()]
    assert all(parts) == (division == "deepspeed")
    return reason


def lightning(url: str) -> str:
    """Take part with a lightning.Trainer."""
    import test_lightning

    made = test_lightning.trainer(devices=2, strategy="ddp", use_distributed_sampler=False)
    assert made.world_size == 2
    dure.client.patch(made, url, name="site")
    reason: str = made.fit(*test_lightning.in_float64(batch_size=2))
    return reason


if __name__ == "__main__":
    url, folder, division = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if division == "lightning":
        print(lightning(url))
    elif division in ("keep", "deepspeed"):
        print(going_on(url, folder, division))
    else:
        print(hugging_face(url, folder, division))
