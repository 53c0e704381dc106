"""Tables, pictures and figures of the studies."""
