"""Generation of a step's rollouts on several engines: what is asked of an engine, which moves there
are, and who makes them. Pure: no vLLM, Ray or PyTorch.

    Coordinator (coordinator.py)     serves one inbox: stages, requests, deaths
      ├── GenerationStage (stage.py)     one step's requests, with their Races (races.py)
      ├── Rescuer (rescue.py)            finds engines for the requests of those that die
      ├── Mover, Reshaper                make the moves that policies decide on (moves.py)
      └── Fleet (fleet.py)               orders to the engines, restarts
            └── TrackedEngine            one Engine (interface.py), real or in virtual time
"""
