"""Three sites train adapters of a language model, each by its trl.SFTTrainer (dure[trl,peft]).

The trainers are simulated one after another; `dure.client.patch` makes each a client."""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import dure

LINES = [f"the {who} sat on a {what}" for who in ("cat", "dog") for what in ("mat", "log")]
codes = {"the": 0, "cat": 1, "dog": 2, "sat": 3, "on": 4, "a": 5, "mat": 6, "log": 7, "<end>": 8}
words = Tokenizer(models.WordLevel(codes, unk_token="<end>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<end>", eos_token="<end>")


def make_trainer(site: int) -> SFTTrainer:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=9, num_attention_heads=2, **sizes))
    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    sft = SFTConfig(folder, per_device_train_batch_size=8, learning_rate=0.01, bf16=False, **quiet)
    data = Dataset.from_dict({"text": LINES[site:] * 20})
    adapter = LoraConfig(r=4, target_modules="all-linear")
    return SFTTrainer(model, sft, None, data, None, tokenizer, peft_config=adapter)


with tempfile.TemporaryDirectory() as folder:
    more = {"strategy": dure.FedAvg(local_epochs=3), "stop": dure.Stop(rounds=6)}
    run = dure.simulate(make_trainer, clients=3, **more)
rows = tokenizer(LINES, return_tensors="pt").input_ids
with torch.no_grad():
    right = run.model(rows).logits[:, :-1].argmax(-1) == rows[:, 1:]
print(f"{right.float().mean():.2f} of the next words are right; 0.8 is possible")
