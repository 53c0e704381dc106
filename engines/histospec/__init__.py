"""The last epoch drafts this one: per-prompt history indexes and what is made of them. Pure.

    workers.py ─► library.py ─► index.py, index_file.py ─mmap─► drafting.py ┐
    (actors)      (which files)   (one prompt's history)      siblings.py ──┴─► drafter.py
                                                    (samples still running)      (one engine)

drafter.py asks window.py how far to draft, acceptance.py what a token is worth, gate.py what to
verify, by the times of step_times.py or of a profile. replay.py does it to known responses.
"""
