"""Forward passes of engines and drafters, timed."""
