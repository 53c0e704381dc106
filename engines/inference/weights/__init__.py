"""Load new weights into a running engine, and check them with canaries."""
