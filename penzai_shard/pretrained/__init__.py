"""Pretrained models as Hugging Face has them: configurations, weights in safetensors files."""
