"""Steps on a GPU at fixed acceptance, against peers and against the time to read the bytes. See ``__main__.py``."""
