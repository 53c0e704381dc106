"""Methods that refrain adds to vLLM's workers through `worker_extension_cls`."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from refrain.engines.inference.engine.kv_of_runner import KVOfRunner, kv_of
from refrain.engines.inference.engine.process import submitted_as
from refrain.engines.inference.engine.supported import check_runner
from refrain.engines.inference.kv.pages import release_pages
from refrain.schemas.config import EngineConfig
from refrain.schemas.engine import EngineSetup


class WorkerExtension:
    """Methods that the engine calls on all ranks with `collective_rpc`."""

    model_runner: Any
    use_v2_model_runner: bool
    rank: int
    finish_weight_update: Callable[[], None]
    weight_transfer_engine: Any
    step_experts: Any
    """See `gpu_worker.RecordingWorker`."""
    _weight_update_active: bool
    _kv: KVOfRunner

    @property
    def _drafts(self) -> bool:
        """Whether this rank drafts: on the V1 runner, vLLM sends the drafts of the first rank to
        all. V2 has `drafting.device_drafter`."""
        return self.rank == 0 and not self.use_v2_model_runner

    def install_exact_sampling(self) -> None:
        """Replace the runner's samplers. Call once, before the first request."""
        check_runner(self.model_runner, self.use_v2_model_runner)
        samplers = "samplers_v2" if self.use_v2_model_runner else "samplers"
        import_module(f"refrain.engines.inference.sampling.{samplers}").install(self.model_runner)

    def install_drafting(self, config_json: str, setup_json: str, engine: int) -> None:
        """Replace the runner's speculator. Call once, before the first request."""
        if self.use_v2_model_runner:
            from refrain.engines.inference.drafting import device_drafter

            config = EngineConfig.model_validate_json(config_json)
            device_drafter.install(self.model_runner, config)
            return
        self._sample_without_drafts()
        self.begin_drafting(config_json, setup_json, engine)

    def begin_drafting(self, config_json: str, setup_json: str, engine: int) -> None:
        """Draft with a new proposer. Call between two stages."""
        config = EngineConfig.model_validate_json(config_json)
        if self._drafts:
            from refrain.engines.inference.drafting.proposer import Proposer

            setup = EngineSetup.model_validate_json(setup_json)
            self.model_runner.drafter = Proposer(self.model_runner, config, setup, engine)
        elif (head := config.specactor.head) is not None:
            from refrain.engines.inference.drafting.head_drafter import HeadFollower

            self.model_runner.drafter = HeadFollower(self.model_runner, head)

    def _sample_without_drafts(self) -> None:
        """Run steps that verify no drafts as on an engine without speculation.

        Otherwise vLLM would prepare, check and filter empty drafts in each such step. This leaves
        out models with inner state: their layers must know every row that could have drafts.
        """
        runner = self.model_runner
        if runner.model_config.has_inner_state:
            return
        prepare = runner._prepare_inputs

        def plainly(scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
            if scheduler_output.scheduled_spec_decode_tokens:
                return prepare(scheduler_output, num_scheduled_tokens)
            speculative, runner.speculative_config = runner.speculative_config, None
            try:
                return prepare(scheduler_output, num_scheduled_tokens)
            finally:
                runner.speculative_config = speculative

        runner._prepare_inputs = plainly

    def install_expert_recording(self) -> None:
        """Record the experts of each token. Call once, before the first request.

        Raise ValueError if vLLM cannot tell them for this model.
        """
        from refrain.engines.inference.engine.expert_recorder import ExpertRecorder, StepExperts

        if self.rank == 0:  # The scheduler reads the output of this rank alone.
            on_cpu = self.model_runner.device.type == "cpu"
            step = StepExperts(self.model_runner) if on_cpu else self.step_experts
            ExpertRecorder(self.model_runner, step)

    def install_kv_saving(self) -> None:
        """Track which requests have keys and values. Call once, before the first request."""
        forget = self._kv_connector.forget
        self._kv = kv_of(self.model_runner, self.use_v2_model_runner, forget)

    def release_kv_cache(self) -> None:
        """Return the memory of the KV cache to the host. All keys and values become zero."""
        for tensor in self.model_runner.kv_caches:
            release_pages(tensor)

    def abandon_weight_update(self) -> None:
        """End an interrupted weight update, so that another one can begin."""
        # A worker in which the update failed has marked it as ended. Finish it there too, or the
        # weights received so far would count for the next update.
        self._weight_update_active = True
        self.finish_weight_update()

    def stale_layers(self) -> list[str]:
        """Return the layers that took no new weights in the last update."""
        return sorted(self.weight_transfer_engine.stale_layers)

    def connect_drafters(self, addresses: dict[str, str]) -> None:
        """Connect to draft models. `addresses`: name -> address."""
        if self._drafts:
            self.model_runner.drafter.connect(addresses)

    def load_draft_head(self, directory: str) -> None:
        """Draft with the head in this directory from now on."""
        self._draft_head.load(Path(directory))

    def follow_weights(self) -> None:
        """Let a draft head follow the policy's weights, which have changed."""
        self._draft_head.copy_output_layer()

    @property
    def _draft_head(self) -> Any:
        if self.use_v2_model_runner:
            return self.model_runner.speculator.head
        drafter = self.model_runner.drafter
        return drafter.head if self._drafts else drafter

    def expect_requests(self, prompt_keys: list[str]) -> None:
        """Prepare for requests for these prompts, which are on their way."""
        if self.use_v2_model_runner:
            self.model_runner.speculator.expect(prompt_keys)
        elif self._drafts:
            self.model_runner.drafter.expect(prompt_keys)

    def redraft(self, settings: dict[str, tuple[str, int, bool]]) -> None:
        """Change the draft settings of requests, by the names they were submitted with."""
        if self._drafts:
            self.model_runner.drafter.redraft(settings)

    def draft_progress(self) -> dict[str, tuple[int, int, int]]:
        """Return what `Proposer.progress` does on the rank that drafts."""
        return self.model_runner.drafter.progress() if self._drafts else {}

    def take_drafting_counts(self) -> dict[str, Any]:
        """Return the fields of `schemas.counts.DraftingCounts` since the last call."""
        if self.use_v2_model_runner:
            return self.model_runner.speculator.take_counts()
        return self.model_runner.drafter.take_counts() if self._drafts else {}

    def save_kv_ahead(self, directory: str, num_tokens: dict[str, int], policy_version: int) -> str:
        """Start to save the full blocks of requests that go on generating (pre-copy).

        `num_tokens`: tokens to save, by the name that a request was submitted with. Requests with
        fewer tokens here are left out.

        Return the path of the file, which appears when all is saved; "" if there is nothing to
        save.
        """
        blocks, num_of, _ = self._blocks_of(num_tokens)
        path = self._kv_connector.save_ahead(Path(directory), blocks, num_of, policy_version)
        return str(path or "")

    def save_kv(
        self, directory: str, num_tokens: dict[str, int], policy_version: int, with_ahead: bool
    ) -> tuple[list[str], int, str]:
        """Save the keys and values of requests while the engine is paused.

        `num_tokens`: see `save_kv_ahead`. `with_ahead`: use blocks that were saved ahead instead of
        writing them again.

        Return the names of the saved requests, the bytes written, and an error message or "".
        """
        blocks, num_of, names = self._blocks_of(num_tokens)
        try:
            num_bytes = self._kv_connector.save(
                Path(directory), blocks, num_of, policy_version, names, with_ahead
            )
        except OSError as error:
            return [], 0, str(error)
        return list(names.values()), num_bytes, ""

    def expect_kv(self, saved: list[tuple[str, int]], policy_version: int) -> None:
        """Map keys and values that another engine has saved ahead.

        `saved`: (directory, TP degree of the engine that saved them).
        """
        for directory, tp_degree in saved:
            self._kv_connector.expect(Path(directory), tp_degree, policy_version)

    def take_kv_loads(self) -> tuple[int, float]:
        """Return (bytes of keys and values, seconds) loaded by this rank since the last call."""
        return self._kv_connector.take_loads()

    @property
    def _kv_connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def _blocks_of(
        self, num_tokens: dict[str, int]
    ) -> tuple[dict[str, list[int]], dict[str, int], dict[str, str]]:
        """Return blocks, tokens to save and submitted names of requests, each by vLLM's name.

        Leave out requests that have fewer tokens than `num_tokens` here.
        """
        blocks, num_of, names = {}, {}, {}
        for id, (num, own) in self._kv.held().items():
            if num >= num_tokens.get(name := submitted_as(id), sys.maxsize):
                blocks[id], num_of[id], names[id] = own, num_tokens[name], name
        return blocks, num_of, names
