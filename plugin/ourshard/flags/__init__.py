"""FSDP and DeepSpeed flags to `ShardConfig` and back."""
