"""`python -m bayplan`: the command line, where its script is not on PATH."""

from bayplan.cli import main

if __name__ == "__main__":
    main()
