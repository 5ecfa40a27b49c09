"""The same model in torch with accelerate's CPU offload (and peft's LoRA), in a process of its own.

    python -m benchmarks.gpu.torch_baseline '{"kind": "prefill", "batch": 1, "length": 1024, ...}'

Prints JSON: seconds a step and the most memory that torch took. On an H100 prefill ran;
LoRA did not fit in 8 GB.
"""

import json
import sys
import time
from typing import Any


def measure(
    kind: str, batch: int, length: int, budget: int, rounds: int, shape: dict[str, Any]
) -> dict[str, Any]:
    """Seconds of a step, the rest of the model in host memory.

    Args:
      budget: bytes of device memory for weights and activations together.
      shape: as `jaxoffload.finetune.model.Config`.
    """
    import accelerate
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["width"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        intermediate_size=shape["ffn_width"],
        use_cache=False,
    )
    model: Any
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():  # drawn on the GPU: 7e9 numbers take a CPU a minute
        drawn = torch.randn(parameter.shape, dtype=torch.bfloat16, device="cuda:0")
        parameter.data.copy_(drawn * parameter.shape[-1] ** -0.5)
    for buffer in model.buffers():  # frequencies of positions; time does not depend on them
        buffer.fill_(0.01)
    del drawn, parameter, buffer
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if kind == "lora":
        import peft

        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=names)
        )
    model = accelerate.cpu_offload(model, execution_device=torch.device("cuda:0"))
    tokens = torch.randint(0, config.vocab_size, (batch, length), device="cuda:0")
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, budget / torch.cuda.get_device_properties(0).total_memory)
    )

    def step() -> None:
        if kind == "prefill":
            with torch.no_grad():
                model(tokens, logits_to_keep=1)
        else:
            model(tokens, labels=tokens).loss.backward()
            model.zero_grad()
        torch.cuda.synchronize()

    step()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    versions = {m.__name__: m.__version__ for m in (torch, transformers, accelerate)}
    peak = torch.cuda.max_memory_allocated()
    return {"seconds": sorted(seconds)[len(seconds) // 2], "peak_bytes": peak, **versions}


if __name__ == "__main__":
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
