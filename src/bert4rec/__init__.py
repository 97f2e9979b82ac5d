"""BERT4Rec: recommend the next item from what a person did so far."""

__version__ = "0.1.0"
