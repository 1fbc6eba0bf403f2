"""Put the import hook of ourshard in place. torch calls `install` through the `torch.backends` entry point."""


def install() -> None:
    """Do nothing yet."""
