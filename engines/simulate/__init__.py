"""Engines in virtual time behind the real coordinator: what a plan would cost on any cluster.

trace.py ─► cluster.py ─► Coordinator ─► VirtualEngine (engine.py)
                │             │                  └─► batching.py ─► costs.py, member.py
                │             └── runs unchanged on the virtual clock of clock.py
                └─► schemas.simulate
"""
