"""The old place of `options.DATA_HELP`."""  # removed at the merge

from bert4rec.cli.options import DATA_HELP

__all__ = ["DATA_HELP"]
