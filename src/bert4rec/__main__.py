"""`python -m bert4rec`, which is also how torchrun starts it."""

from bert4rec.cli import main

if __name__ == "__main__":
    main()
