"""Generate a step's rollouts on several engines. Pure: no vLLM, Ray or PyTorch.

Coordinator (coordinator.py)     reads one inbox: stages, events, deaths
  ├── GenerationStage (stage.py)     the requests of one step, with their Races (races.py)
  ├── Storing (storing.py)           stores the rollouts of several engines together
  ├── reassign.py                    moves the requests of dead engines to others
  ├── mover.py                       makes the moves that policies decide on (moves.py)
  │     └── Preparations             moves that engines prepare meanwhile (preparations.py)
  ├── Reshaper (reshape.py)          owns the layouts of GPUs, and switches them
  └── Fleet (fleet.py)               gives orders (orders.py) to the engines, restarts dead ones
        └── TrackedEngine            record of one Engine (interface.py), real or simulated
"""
