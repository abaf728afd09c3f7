"""`python -m normrnn`, and so `torchrun -m normrnn`: the command line."""

from normrnn.cli import main

if __name__ == "__main__":
    main()
