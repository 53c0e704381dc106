"""The last epoch drafts this one: per-prompt history indexes and what is made of them. Pure.

index.py: one prompt's responses as flat arrays   drafting.py: one compiled call drafts a batch
index_file.py: an index on disk, memory-mapped
"""
