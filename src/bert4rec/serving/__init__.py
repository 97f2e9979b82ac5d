"""The HTTP service: FastAPI on granian, stored histories and a web page."""
