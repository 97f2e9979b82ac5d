"""Recommendations behind an API: FastAPI on granian, a store of histories and a web page."""
