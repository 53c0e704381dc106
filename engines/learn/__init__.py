"""Learning: from rewarded rollouts to the next policy version.

```
Arrow table ──> rollouts ──> training_samples ──> minibatch ──> packing ──> policy ──> objectives
                             (advantages)         (rank shares)             (FSDP2)      │
                                                                                         v
checkpoints `global_step_N/` <── training_state <───────────────────────────────────── AdamW
rollout engines <── PolicyWeights (a file a node, with canaries) <── publishing <────────┘
```

`learner.Learner` is one trainer process without Ray. The driver holds a `trainer.TrainerGroup`,
which starts one actor per process. Only the group waits, and each of its waits has a time limit.
With `trainer.context_parallel`, ranks share each row of tokens (`context`). `objective` computes
the loss by one of the `objectives`, and `diagnostics` a step's metrics.

These modules decide or validate, and import no torch: `advantages`, `rollouts`, `refill`,
`training_samples`, `packing`, `footprint`, `model_dir`, `setting_warnings`, `schedule` and
`checkpoint`.
"""
