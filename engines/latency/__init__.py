"""How long steps, batches and requests take: asked by every decision. Pure.

analytic.py, fitted.py, measured.py   seconds of a step: from a data sheet, a profile, a run
    └─► drafting_pace.py              tokens and seconds of a step by draft setting
            └─► forecast.py           end of each request of an engine, and of the engine
"""
