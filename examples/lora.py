"""LoRA (pip install "dure[peft]" transformers): clients with digits upside down train adapters."""

from copy import deepcopy
from dataclasses import replace

from torch import optim
from transformers import ViTConfig, ViTForImageClassification

import dure


def vision():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    picture = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    model = ViTForImageClassification(ViTConfig(**sizes, **picture, intermediate_size=128))
    model.register_forward_hook(lambda model, inputs, outputs: outputs.logits)
    return model


task = replace(dure.load_task("digits"), model=vision, optimizer=lambda w: optim.Adam(w, 0.005))
worker = dure.SingleWorker(batch_size=32)
base = dure.train(task, worker, stop=dure.Stop(epochs=8)).model
turned = [dure.Examples(part.inputs.flip(2, 3), part.targets) for part in (task.train, task.test)]
lora = dure.LoRA(rank=4, targets="q_proj|v_proj", alpha=4, train="classifier")
task = replace(task, model=lambda: deepcopy(base), train=turned[0], test=turned[1], adapter=lora)
end = dure.train(task, dure.FedAvg(partition="dirichlet:1"), stop=dure.Stop(rounds=8)).summary
print(f"test accuracy {end['test_accuracy']:.2f}; of {4 * base.num_parameters()} bytes")
print(f"of weights a client sends {end['bytes_sent_per_worker'] / 8:.0f} in a round")
