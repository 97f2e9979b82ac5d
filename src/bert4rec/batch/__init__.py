"""Recommendations for many users: into one file, or into a directory of parts by many workers."""

from bert4rec.batch.directory import Scored, recommend_in_parts
from bert4rec.batch.one_file import FORMATS, recommend_users
from bert4rec.batch.stopping import Stopped

__all__ = ["FORMATS", "Scored", "Stopped", "recommend_in_parts", "recommend_users"]
