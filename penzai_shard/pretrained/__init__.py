"""Pretrained models as Hugging Face has them: configurations, weights in safetensors files."""

from penzai_shard.pretrained.models import model_of_config

__all__ = ["model_of_config"]
