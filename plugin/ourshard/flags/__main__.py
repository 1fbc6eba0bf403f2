"""`ourshard config` on rank 0 of a launcher: `accelerate launch --config_file config.yaml -m ourshard.flags show`."""

import os

from ourshard.flags.cli import app

if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    app(prog_name="ourshard config")
