"""The old place of `console.print_next`."""  # removed at the merge

from bert4rec.cli.console import print_next as next_commands

__all__ = ["next_commands"]
