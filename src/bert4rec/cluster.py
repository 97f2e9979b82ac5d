"""The old place of `bert4rec.distributed.cluster`."""  # removed at the merge

from bert4rec.distributed.cluster import connect

__all__ = ["connect"]
