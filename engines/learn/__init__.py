"""Learning: from rewarded rollouts to the next policy version.

```
Arrow table ──> rollouts ──> lessons ──> minibatch ──> packing ──> policy ──> losses ──> AdamW
                            (advantages) (rank shares)             (FSDP2)               │
checkpoints `global_step_N/` <── training_state <────────────────────────────────────────┤
rollout engines <── PolicyWeights (a file a node, with canaries) <── published <─────────┘
```

`learner.Learner` is one trainer process without Ray. The driver holds a `trainer.TrainerGroup`,
which starts one actor per process. Only the group waits, and each of its waits has a time limit.
`objective` computes the loss, and `diagnostics` computes a step's metrics.

These modules decide or validate, and import no torch: `advantages`, `rollouts`, `lessons`,
`refill`, `packing`, `footprint`, `model_dir`, `doubts`, `schedule` and `checkpoint`.
"""
