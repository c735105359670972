"""Three sites train one classifier, each by its own lightning.Trainer (dure[lightning]).

The trainers are simulated one after another; `dure.client.patch` makes each a client of a
server."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import dure

digits = dure.load_task("digits")


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU()]
        self.net = torch.nn.Sequential(*layers, torch.nn.Linear(32, 10))

    def training_step(self, batch: tuple, number: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def make_trainer(site: int) -> tuple:
    mine = slice(site, None, 3)
    data = TensorDataset(digits.train.inputs[mine], digits.train.targets[mine])
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(accelerator="cpu", enable_model_summary=False, **quiet)
    return trainer, Classifier(), DataLoader(data, batch_size=20)


run = dure.simulate(make_trainer, clients=3, stop=dure.Stop(rounds=5))
with torch.no_grad():
    right = run.model.net(digits.test.inputs).argmax(1) == digits.test.targets
print(f"test accuracy {right.float().mean():.2f} after five rounds of three sites")
