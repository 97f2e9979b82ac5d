"""The old place of `options.training_data`."""  # removed at the merge

from bert4rec.cli.options import training_data

__all__ = ["training_data"]
