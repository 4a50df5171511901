"""`python -m tandem.launch` is the `tandem` command."""

from tandem.launch.cli import main

if __name__ == "__main__":
    main()
