"""A small head that drafts from the policy's hidden states: its definition, its files."""
