"""`python -m tandem.launch` is the `tandem` command."""

from tandem.launch.cli.main import main

if __name__ == "__main__":
    main()
