"""Simulate rollouts on any cluster: engines in virtual time behind the real coordinator.

trace.py ─► cluster.py ─► Coordinator ─► VirtualEngine (engine.py)
                │             │                  └─► batching.py ─► costs.py, member.py
                │             └── runs unchanged on the virtual clock (clock.py)
                └─► schemas.simulate
"""
