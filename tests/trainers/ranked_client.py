"""Program of a rank of a client: `torchrun … ranked_client.py URL FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from hugging_face_cases import causal, trainer

import dure

if __name__ == "__main__":
    url, folder = sys.argv[1], Path(sys.argv[2])
    made = trainer(
        folder,
        lambda: causal(torch.float64),
        n=24,
        optim="adamw_torch",
        per_device_train_batch_size=2,
    )
    assert made.args.world_size == 2
    print(dure.client.patch(made, url, name="site").train())
