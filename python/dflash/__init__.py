"""Lossless speculative decoding with DFlash block-diffusion drafters."""
