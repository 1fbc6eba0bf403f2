"""`python -m ourshard` is the command `ourshard`."""

from ourshard.cli import main

if __name__ == "__main__":
    main()
