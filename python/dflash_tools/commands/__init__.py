"""The workshop's commands, which ``dflash`` finds by entry points."""
