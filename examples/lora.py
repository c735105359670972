"""LoRA (pip install transformers): clients with digits upside down train adapters."""

from dataclasses import replace

from torch import nn, optim, randn, zeros
from transformers import ViTConfig, ViTForImageClassification

import dure


class LoRA(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.a = layer, nn.Parameter(randn(layer.in_features, 4) / 4)
        self.b = nn.Parameter(zeros(4, layer.out_features))

    def forward(self, x):
        return self.layer(x) + x @ self.a @ self.b


def vision(learned=None):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    picture = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    model = ViTForImageClassification(ViTConfig(**sizes, **picture, intermediate_size=128))
    model.register_forward_hook(lambda model, inputs, outputs: outputs.logits)
    if learned:
        model.load_state_dict(learned)
        model.vit.requires_grad_(False)
        for heads in [layer.attention for layer in model.vit.layers]:
            heads.q_proj, heads.v_proj = LoRA(heads.q_proj), LoRA(heads.v_proj)
    return model


task = replace(dure.load_task("digits"), model=vision, optimizer=lambda w: optim.Adam(w, 0.005))
base = dure.train(task, dure.SingleWorker(batch_size=32), stop=dure.Stop(epochs=8)).model
turned = [dure.Examples(part.inputs.flip(2, 3), part.targets) for part in (task.train, task.test)]
task = replace(task, model=lambda: vision(base.state_dict()), train=turned[0], test=turned[1])
end = dure.train(task, dure.FedAvg(partition="dirichlet:1"), stop=dure.Stop(rounds=8)).summary
print(f"test accuracy {end['test_accuracy']:.2f}; of {4 * base.num_parameters()} bytes of weights")
print(f"a client sends {end['bytes_sent_per_worker'] / 8:.0f} in a round")
