"""Which prompts go to which engine, decided from the lengths of earlier epochs. Pure."""
