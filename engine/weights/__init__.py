"""Weights from safetensors, quantized ones too, or random ones, as fused tensors."""
