"""Host and disk tiers for masters and parameters."""
