"""Drafts from earlier rollouts: an index of each prompt's last rollout, and its use. Pure.

    workers.py ─► library.py ─► index.py, index_file.py ─mmap─► drafting.py ┐
    (actors)      (which files)   (one prompt's history)                    └─► drafter.py
                                                                                 (one engine)

drafter.py limits the length of a draft with window.py, estimates with acceptance.py how likely each
token is to be accepted, and chooses with gate.py what to verify. Step times come from step_times.py
or from a profile. replay.py runs the same code on known responses. siblings.py indexes texts that
still grow, for the n-gram drafter.
"""
