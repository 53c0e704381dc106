"""Chooses how to draft for each request (SpecActor): drafter, window, or no drafts. Pure.

planner.py                         before a run: GPUs to draft, GPUs to verify, window
health.py ─► ladder.py             the drafter of a step, from earlier steps' acceptance
             └► reconfigure.py     during it: new windows for requests that need one
contenders.py ─► best_of_n.py      at the end: more drafters for the last requests
ngram.py                           a drafter that uses only the request's own text
streams.py                         both ends of a stream of drafts from a small model
"""
