"""Writes tiny seeded models with the states that transformers gives them, one folder each.

usage: make.py OUT_DIR      needs: torch, transformers, safetensors
Made with transformers 5.x in float32; the folders are committed, so that `cargo test` needs none of this.
"""

import pathlib
import sys

import torch
from safetensors.torch import save_file
from transformers import (
    LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
    Qwen3ForCausalLM,
)

SHAPE = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, rms_norm_eps=1e-5, tie_word_embeddings=False,
)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32, rope_theta=10000.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=10000.0)
MODELS = {
    "llama3-rope": (LlamaConfig, LlamaForCausalLM, dict(rope_parameters=LLAMA3)),
    "llama-yarn-tied": (LlamaConfig, LlamaForCausalLM, dict(rope_parameters=YARN, tie_word_embeddings=True)),
    "mistral": (MistralConfig, MistralForCausalLM, dict(sliding_window=None)),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
}


def main(out: str) -> None:
    for name, (config_class, model_class, extra) in MODELS.items():
        torch.manual_seed(7)
        config = config_class(**{**SHAPE, **extra})
        model = model_class(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # Gains and biases too: at their defaults they would hide a mistake.
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            for key, parameter in model.named_parameters():
                if "norm" in key:
                    parameter.add_(1.0)
            ids = torch.randint(0, 64, (1, 70))
            captured = []
            model.model.layers[-1].register_forward_hook(
                lambda module, args, output: captured.append(output[0] if isinstance(output, tuple) else output))
            result = model(ids, output_hidden_states=True)
        last = captured[0].reshape(1, 70, 32)
        states = torch.stack([result.hidden_states[1][0], result.hidden_states[2][0], last[0]], dim=1)
        folder = pathlib.Path(out) / name
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        save_file({"token_ids": ids[0].contiguous(), "hidden_states": states.contiguous(),
                   "logits": result.logits[0].contiguous()}, folder / "expected.safetensors")
        print(name, sorted(p.name for p in folder.iterdir()))


main(sys.argv[1])
