"""Chooses how to draft for each request (SpecActor): drafter, window, coupled or decoupled. Pure.

planner.py                         before the rollout: GPUs to draft, GPUs to verify, window
health.py ─► ladder.py             the drafter of a step, from earlier steps' acceptance
             └► reconfigure.py     during it: new window and mode for requests that need one
             best_of_n.py          at the end: more drafters for the last requests
ngram.py                           a drafter that uses only the request's own text
streams.py                         both ends of a stream of drafts from a small model
"""
