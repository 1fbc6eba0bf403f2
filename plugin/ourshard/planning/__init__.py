"""Memory and communication model, probes, advice."""
