"""The former names of `length_groups`."""  # removed at the merge

from bert4rec.data.length_groups import FOR_SCORING as FOR_SCORING
from bert4rec.data.length_groups import FOR_TRAINING as FOR_TRAINING
from bert4rec.data.length_groups import MicrobatchSize as Size
from bert4rec.data.length_groups import group_by_length as like_lengths

__all__ = ["FOR_SCORING", "FOR_TRAINING", "Size", "like_lengths"]
