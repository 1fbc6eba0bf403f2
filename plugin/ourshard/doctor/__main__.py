"""One rank of `ourshard doctor` under a launcher: `accelerate launch -m ourshard.doctor`."""

from ourshard.doctor.cli import app

if __name__ == "__main__":
    app(prog_name="ourshard doctor")
