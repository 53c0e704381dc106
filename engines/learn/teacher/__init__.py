"""A teacher on servers: each trainer rank asks for the log-probabilities of its own samples.

```
Learner (a rank) ── TeacherClient ── POST /completions ──► server 1, server 2, ...
                    several at once      prompt: token ids, prompt_logprobs: 0, temperature 1
```

A request that finds no answer goes to the next server after a pause. `start_check` compares names,
tokens and lengths before a run starts, and `answers` refuses an answer that is short or not finite.
"""
