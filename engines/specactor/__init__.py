"""Better drafting for every request (SpecActor): which drafter, how far, ahead or in turn. Pure.

expectation.py ─► planner.py       before the rollout: GPUs to draft, GPUs to verify, window
               └► reconfigure.py   during it: window and mode of requests that are misguessed
health.py ─► ladder.py             the drafter of a step, from the acceptance of those before
             best_of_n.py          at the end: more drafters for the last requests
ngram.py                           a drafter that needs nothing but the text
streams.py                         both ends of the drafts of a small model
"""
