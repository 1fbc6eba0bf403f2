"""Sharded and consolidated checkpoints, and the formats of others."""
