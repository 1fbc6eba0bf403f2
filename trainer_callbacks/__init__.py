"""Trainer callbacks of ourshard, one a file."""
