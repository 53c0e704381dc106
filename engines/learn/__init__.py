"""Learning: from rewarded rollouts to the next policy version.

```
Arrow table ──> rollouts ──> lessons ──> minibatch ──> packing ──> policy ──> losses ──> AdamW
                            (advantages) (rank shares)             (FSDP2)               │
checkpoints `global_step_N/` <── training_state <────────────────────────────────────────┤
rollout engines <── PolicyWeights (a file a node, with canaries) <── published <─────────┘
```

`learner.Learner` is one trainer process without Ray; `trainer.TrainerGroup` is what the driver
holds: it starts one actor per process, and only it waits (always with a bound). `advantages`,
`rollouts`, `lessons`, `refill`, `packing`, `footprint`, `model_dir`, `doubts`, `schedule` and
`checkpoint` decide and validate, and import no torch. `objective` puts the loss together,
`diagnostics` what a step tells of it.
"""
