"""The server of dflash. Imports nothing: ``dflash serve`` takes its port before it imports torch."""
