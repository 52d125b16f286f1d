"""Generation without a server: engine and model runner in one process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from llm_serving.admission.validation import (
    check_beam_search,
    check_priority,
    check_request,
    end_token_ids,
    stop_token_ids,
)
from llm_serving.config.schema import ServingConfig
from llm_serving.core.request import Request
from llm_serving.core.request_output import RequestOutput, join_pieces
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams
from llm_serving.core.step import Float32Array
from llm_serving.core.timings import monotonic
from llm_serving.engine.adapters import AdapterRegistry
from llm_serving.engine.replica import build_engine
from llm_serving.errors import ConfigError, RequestError, WorkerError
from llm_serving.executor.executor import LocalExecutor
from llm_serving.executor.supervisor import load_settings
from llm_serving.hub import download
from llm_serving.log import get_logger
from llm_serving.models.pooling import pooling_mode
from llm_serving.models.spec import ModelSpec
from llm_serving.observability.metrics import Metrics
from llm_serving.text.structured_output import ConstraintCompiler, Grammar, GrammarError, GrammarLimits, TokenConstraint
from llm_serving.text.tokenizer.tokenizer import Tokenizer, check_draft_vocabulary
from llm_serving.worker.loading import load_runner

logger = get_logger(__name__)

Prompt = str | list[int]


class LLM:
    """A model loaded into this process. Only the thread that created it may use it, as MindSpore requires.

    Example:
        llm = LLM(load_config(None, [], Path("demo")))
        print(llm.generate(["Add 17 and 25."], SamplingParams(temperature=0.0))[0].text)
    """

    def __init__(self, config: ServingConfig) -> None:
        """Load the model. Raise ConfigError if the configuration cannot be used. HTTP settings have no effect."""
        if config.cluster.tensor_parallel > 1:
            rule = "must be 1, because a single process computes"
            raise ConfigError(f"`cluster_config.tensor_parallel` {rule}. Given: {config.cluster.tensor_parallel}")
        if config.hub_model is not None:
            download(config.hub_model, logger.info)
        self.config = config
        self.model_spec = ModelSpec.from_folder(config.model.folder)
        self.tokenizer = Tokenizer.load(config.model.folder, config.model.tokenizer_path)
        if config.scheduler.draft_model_path is not None:
            check_draft_vocabulary(self.tokenizer, config.scheduler.draft_model_path)
        self.adapters = AdapterRegistry(config, self.model_spec)
        self.metrics = Metrics(config.model.model_name, config.request_classes)
        runner, _ = load_runner(load_settings(config, 0), logger.info)
        executor = LocalExecutor(runner, runner.draft_model, runner.adapters)
        for number, folder in self.adapters.folders.items():
            executor.set_adapter(number, folder)
        self.compute_fingerprint = runner.compute_fingerprint
        cache = runner.kv_tensors
        self.engine = build_engine(
            config,
            cache.num_blocks,
            executor,
            self.tokenizer,
            self.metrics,
            self._publish,
            num_swap_blocks=cache.num_swap_blocks,
            windows=runner.spec.layout.windows,
            whole_prompts=not self.model_spec.network.causal,
            pooling=pooling_mode(config.model.pooling, config.model.folder, self.model_spec),
            num_state_slots=config.num_state_slots(self.model_spec.state_bytes),
        )
        self.end_token_ids = end_token_ids(config.model, self.model_spec, self.tokenizer)
        serving = config.serving
        self.constraints = ConstraintCompiler(
            self.tokenizer,
            self.end_token_ids,
            self.model_spec.vocab_size,
            GrammarLimits(serving.max_grammar_bytes, serving.max_grammar_states, serving.grammar_cache_size),
        )
        self._counter = itertools.count()
        self._readers: dict[str, tuple[int, list[tuple[int, RequestOutput]]]] = {}
        """Id of an unfinished request -> (index of its prompt, list that gets its pieces)."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        priorities: Sequence[int] | None = None,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """Answer all prompts, as many at a time as the configuration allows. Return one whole output for each.

        Raise RequestError, before any request starts, if a request can never be served.

        Args:
            sampling: Sampling parameters for all prompts, or a sequence with those of each prompt.
            priorities: Priority of each prompt. Smaller numbers run first.
            adapter: Name of the adapter that answers. If it is empty, the base model answers.
        """
        pieces: list[list[RequestOutput]] = [[] for _ in prompts]
        for index, piece in self.stream(prompts, sampling, priorities=priorities, adapter=adapter):
            pieces[index].append(piece)
        return [join_pieces(each) for each in pieces]

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        priorities: Sequence[int] | None = None,
        adapter: str = "",
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Answer the prompts like `generate`. Yield (index of the prompt, piece of its answer) for each new piece."""
        _check_list(prompts)
        if isinstance(sampling, SamplingParams):
            sampling = [sampling] * len(prompts)
        if priorities is None:
            priorities = [0] * len(prompts)
        given = zip(prompts, sampling, priorities, strict=True)
        yield from self._run([self._request(*each, adapter=adapter) for each in given])

    def embed(self, prompts: Sequence[Prompt]) -> list[Float32Array]:
        """Return a float32 vector for each prompt: its embedding before normalization, [hidden size].

        A reranker returns the score before the sigmoid, [1]; a model without pooling returns the last token's hidden
        state. Raise RequestError, before any prompt starts, if one cannot be served, and WorkerError if the computation
        fails.
        """
        _check_list(prompts)
        requests = [self._request(prompt, SamplingParams(max_tokens=0), wants_vector=True) for prompt in prompts]
        vectors: dict[int, Float32Array] = {}
        for index, piece in self._run(requests):
            if piece.failed or piece.vector is None:
                raise WorkerError(piece.error or "the prompt could not be computed")
            vectors[index] = piece.vector
        return [vectors[index] for index in range(len(prompts))]

    def load_adapter(self, name: str, folder: Path) -> None:
        """Add an adapter to the configured ones (`lora_modules`). Raise ModelError if the model cannot use it."""
        adapter = self.adapters.read(name, folder)
        self.adapters.add(adapter)
        self.engine.set_adapter(adapter.number, str(folder))

    def beam_search(
        self, prompts: Sequence[Prompt], search: BeamSearchParams, sampling: SamplingParams, *, adapter: str = ""
    ) -> list[list[RequestOutput]]:
        """Return the best sequences of each prompt, best first. `sampling` gives `max_tokens`, `stop_token_ids`,
        `ignore_eos` and `logprobs`; it must be greedy and not change logits. Raise RequestError if it sets a parameter
        that beam search does not support.
        """
        _check_list(prompts)
        check_beam_search(self.config.model, sampling)
        requests = [self._request(prompt, sampling, beam_search=search, adapter=adapter) for prompt in prompts]
        pieces: list[list[RequestOutput]] = [[] for _ in prompts]
        for index, piece in self._run(requests):
            pieces[index].append(piece)
        return [list(join_pieces(each).beams) for each in pieces]

    def _run(self, requests: Sequence[Request]) -> Iterator[tuple[int, RequestOutput]]:
        pieces: list[tuple[int, RequestOutput]] = []
        num_left = len(requests)
        for index, request in enumerate(requests):
            self.engine.submit(request)
            self._readers[request.request_id] = index, pieces
        try:
            while num_left and self.engine.has_unfinished_requests:
                self.engine.step()
                for index, piece in pieces:  # grows if the caller runs other requests between pieces
                    num_left -= piece.finished
                    yield index, piece
                pieces.clear()
        finally:
            for request in requests:
                self._readers.pop(request.request_id, None)
                if not request.is_finished:
                    self.engine.abort(request.request_id)

    def _request(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        priority: int = 0,
        *,
        wants_vector: bool = False,
        beam_search: BeamSearchParams | None = None,
        adapter: str = "",
    ) -> Request:
        if adapter and adapter not in self.adapters.by_name:
            raise RequestError("adapter", "must be the name of a loaded adapter", adapter)
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        num_ids, blocks = self.model_spec.network.num_input_ids, self.engine.scheduler.blocks
        check_priority(priority)
        check_request(token_ids, sampling, num_ids, self.config.model, blocks, self.end_token_ids)
        return Request(
            request_id=f"offline-{next(self._counter)}",
            prompt_token_ids=token_ids,
            sampling=sampling,
            stop_token_ids=stop_token_ids(sampling, self.end_token_ids),
            wants_vector=wants_vector,
            beam_search=beam_search,
            adapter=self.adapters.by_name[adapter].number if adapter else 0,
            constraint=self._constraint(sampling),
            priority=priority,
            arrival_time=monotonic(),
        )

    def _constraint(self, sampling: SamplingParams) -> TokenConstraint | None:
        if sampling.constraint is None:
            return None
        try:
            return self.constraints.compiled(Grammar(sampling.constraint))
        except GrammarError as error:
            raise RequestError("constraint", str(error)) from None

    def _publish(self, pieces: list[RequestOutput]) -> None:
        for piece in pieces:
            if (reader := self._readers.get(piece.request_id)) is not None:
                index, waiting = reader
                waiting.append((index, piece))


def _check_list(prompts: Sequence[Prompt]) -> None:
    if isinstance(prompts, str):
        raise RequestError("prompts", "must be a list of prompts", prompts)
