"""Fine-grained low-precision training for Megatron-style models."""
