"""Studies of the three papers on virtual engines: what `refrain simulate --paper` shows."""
