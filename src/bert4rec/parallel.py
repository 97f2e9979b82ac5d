"""The old name of `bert4rec.threads`."""  # removed at the merge

from bert4rec.threads import MOST_WORKERS, default_workers
from bert4rec.threads import WorkerThreads as Workers

__all__ = ["MOST_WORKERS", "Workers", "default_workers"]
