"""The main job: LoRA fine-tuning of a LLaMA-style model inside a device memory budget."""
