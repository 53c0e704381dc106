"""Methods that refrain adds to a vLLM worker process, through `worker_extension_cls`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.inference.engine.process import submitted_as
from engines.inference.engine.supported import check_runner
from engines.inference.kv.pages import release_pages
from engines.inference.sampling.samplers import ExactRejectionSampler, ExactSampler
from schemas.config import EngineConfig


class WorkerExtension:
    """Methods called with `collective_rpc`."""

    model_runner: Any
    rank: int
    finish_weight_update: Callable[[], None]
    weight_transfer_engine: Any
    _weight_update_active: bool
    _left_out: dict[str, tuple[int, list[int]]]
    """Requests left out by a step that took nobody, in the form of `_with_kv`."""

    @property
    def _drafts(self) -> bool:
        """vLLM takes the drafts of the first rank, and hands them to all."""
        return self.rank == 0

    def install_exact_sampling(self) -> None:
        """Replace the runner's samplers. Call once, before the first request."""
        runner = self.model_runner
        check_runner(runner)
        runner.sampler = ExactSampler(runner.sampler, runner)
        if hasattr(runner, "rejection_sampler"):
            runner.rejection_sampler = ExactRejectionSampler(runner.sampler)
        runner.sampler.warm()

    def install_drafting(self, config_json: str, engine: int) -> None:
        """Replace the runner's speculator. Call once, before the first request."""
        self._sample_without_drafts()
        self.begin_drafting(config_json, engine)

    def begin_drafting(self, config_json: str, engine: int) -> None:
        """Draft with a proposer that has learnt nothing yet, between two stages."""
        if self._drafts:
            from engines.inference.drafting.proposer import Proposer

            config = EngineConfig.model_validate_json(config_json)
            self.model_runner.drafter = Proposer(self.model_runner, config, engine)

    def _sample_without_drafts(self) -> None:
        """A step that verifies no drafts is one of an engine that cannot: vLLM would prepare, check
        and sort out none of them, in each step.

        Models whose layers have a state must be told of every row that could have had drafts.
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

    def install_kv_saving(self) -> None:
        """Remember what a step that takes nobody leaves out, and who has lost blocks. Call once,
        before the first request.

        Such a step tells of requests that have ended, while the engine is paused too.
        """
        runner, self._left_out = self.model_runner, {}
        update, connector = runner._update_states, self._kv_connector

        def remember(scheduler_output: Any) -> Any:
            connector.forget(scheduler_output.finished_req_ids)
            connector.forget(scheduler_output.preempted_req_ids or ())
            connector.forget(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
            if scheduler_output.total_num_scheduled_tokens:
                self._left_out = {}
            elif runner.input_batch.req_id_to_index:
                self._left_out = self._with_kv()
            return update(scheduler_output)

        runner._update_states = remember

    def release_kv_cache(self) -> None:
        """Give the memory of keys and values back to the host: they are zero from here on."""
        for tensor in self.model_runner.kv_caches:
            release_pages(tensor)

    def abandon_weight_update(self) -> None:
        """End an update that was broken off, whatever came of it, so that another may begin."""
        # Over already in a worker where it failed, and what came would count as the next one's.
        self._weight_update_active = True
        self.finish_weight_update()

    def stale_layers(self) -> list[str]:
        """Return the layers that kept their weights of the version before in the last update."""
        return sorted(self.weight_transfer_engine.stale_layers)

    def connect_drafters(self, addresses: dict[str, str]) -> None:
        """Reach the draft models there: name -> address."""
        if self._drafts:
            self.model_runner.drafter.connect(addresses)

    def expect_requests(self, prompt_keys: list[str]) -> None:
        """Requests for these prompts are about to come."""
        if self._drafts:
            self.model_runner.drafter.expect(prompt_keys)

    def redraft(self, settings: dict[str, tuple[str, int, bool]]) -> None:
        """Draft so for these requests, by the names they were submitted with."""
        if self._drafts:
            self.model_runner.drafter.redraft(settings)

    def draft_progress(self) -> dict[str, tuple[int, int, int]]:
        """(drafted, accepted) tokens of each request under its present setting."""
        return self.model_runner.drafter.progress() if self._drafts else {}

    def take_drafting_counts(self) -> dict[str, Any]:
        """The fields of `schemas.counts.DraftingCounts` since the last call."""
        return self.model_runner.drafter.take_counts() if self._drafts else {}

    def save_kv_ahead(self, directory: str, num_tokens: dict[str, int], policy_version: int) -> str:
        """Begin to save the full blocks of requests that have so many tokens', by the names they
        were submitted with, while they go on.

        Returns the file that there will be once it is over; "" when there will be none.
        """
        blocks, num_of, _ = self._blocks_of(num_tokens)
        path = self._kv_connector.save_ahead(Path(directory), blocks, num_of, policy_version)
        return str(path or "")

    def save_kv(
        self, directory: str, num_tokens: dict[str, int], policy_version: int, with_ahead: bool
    ) -> tuple[list[str], int, str]:
        """Save the keys and values of requests, likewise, while no step is taken. `with_ahead`:
        those that were saved ahead stay where they are.

        Returns those that have so many tokens' here, the bytes written, and what went wrong.
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
        """Make ready what was saved ahead in these directories, by ranks of this TP degree."""
        for directory, tp_degree in saved:
            self._kv_connector.expect(Path(directory), tp_degree, policy_version)

    def take_kv_loads(self) -> tuple[int, float]:
        """Bytes of keys and values that came to this rank since the last call, and the seconds that
        it took."""
        return self._kv_connector.take_loads()

    @property
    def _kv_connector(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def _blocks_of(
        self, num_tokens: dict[str, int]
    ) -> tuple[dict[str, list[int]], dict[str, int], dict[str, str]]:
        """Blocks, tokens and given names, by vLLM's, of the requests that have so many tokens'
        here."""
        blocks, num_of, names = {}, {}, {}
        for id, (num, own) in self._savable().items():
            if num >= num_tokens.get(name := submitted_as(id), sys.maxsize):
                blocks[id], num_of[id], names[id] = own, num_tokens[name], name
        return blocks, num_of, names

    def _savable(self) -> dict[str, tuple[int, list[int]]]:
        return self._with_kv() or self._left_out

    def _with_kv(self) -> dict[str, tuple[int, list[int]]]:
        """Tokens with keys and values, and their blocks, of each request of the last step, by
        vLLM's names. Those that it left out were preempted, and have none."""
        runner = self.model_runner
        batch, starts = runner.input_batch, runner.query_start_loc.np
        computed = batch.num_computed_tokens_cpu
        return {
            id: (
                int(computed[row] + starts[row + 1] - starts[row]),
                list(runner.requests[id].block_ids[0]),
            )
            for id, row in batch.req_id_to_index.items()
        }
