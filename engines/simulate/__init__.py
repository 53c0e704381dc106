"""Engines in virtual time behind the real coordinator: what a plan would cost on any cluster.

trace.py, generate.py ─► cluster.py ─► Coordinator ─► VirtualEngine (engine.py)
                             │             │                  └─► batching.py ─► costs.py, member.py
                             │             └── runs unchanged on the virtual clock of clock.py
                             └─► schemas.simulate, gantt.py

script.py ─► pipeline.py (steps that overlap) ─► the same Coordinator ─► engines, windows.py
                 └── rhymerl.py: the paper's parts one upon the other

drafters.py ─► specactor.py: likewise, on cluster.py, with the policies of engines.specactor
"""
