"""The three papers on virtual engines: what `refrain simulate --paper` simulates."""
