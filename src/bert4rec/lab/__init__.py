"""The lab: many models under one protocol, within one budget, and one report about them."""
