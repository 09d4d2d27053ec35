"""The workshop of dflash: training, learning, diagnosis and measuring, with their commands."""
