"""Generate a step's rollouts on several engines. Pure: no vLLM, Ray or PyTorch.

Coordinator (coordinator.py)     reads one inbox: stages, events, deaths
  ├── GenerationStage (stage.py)     the requests of one step, with their Races (races.py)
  ├── Storing (storing.py)           stores the rollouts of several engines together
  ├── Reassigner (reassign.py)       moves the requests of dead engines to others
  ├── Mover, Reshaper                make the moves that policies decide on (moves.py)
  │     └── Preparations             moves that engines prepare meanwhile (preparations.py)
  └── Fleet (fleet.py)               gives orders (orders.py) to the engines, restarts dead ones
        └── TrackedEngine            record of one Engine (interface.py), real or simulated
"""
